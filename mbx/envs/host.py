"""Host environments stepped one after the other, with our own episodes, repeats and resets."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from mbx import observations
from mbx.envs import snapshot as snapshots
from mbx.envs.base import HostEnvironment, Timestep, in_units, is_finite, plan
from mbx.envs.custom import close
from mbx.envs.images import Images, see
from mbx.envs.render import NoRenderer


class Task(Protocol):
    """One host task, not vectorized; obs_shape and obs_dtype may be dictionaries.
    It may have further fields of `EnvSpec` (`reward_range`, `choices`, `action_shape`,
    `action_dtype`), and `info`, the last step's dictionary of numbers (`env.metrics`).
    """

    num_actions: int  # 0 for continuous actions
    action_low: np.ndarray  # in the task's units; the number of the first discrete action
    action_high: np.ndarray
    obs_shape: tuple[int, ...] | Mapping[str, tuple[int, ...]]
    obs_dtype: Any
    time_limit: int | None  # environment steps of an episode
    ends_at: int | None  # steps after which the simulator itself ends an episode
    can_terminate: bool  # episodes may end before their time limit

    def reset(self, seed: int | None) -> Any:
        """Start an episode; None continues the task's own generator."""

    def step(self, action: np.ndarray | int) -> tuple[Any, float, bool, bool]:
        """Observation, reward, terminated, and truncated (only by the simulator itself)."""

    def get_state(self) -> bytes | None:
        """A snapshot that any instance of the task continues from exactly, or None."""

    def set_state(self, snapshot: bytes) -> None:
        """Continue from a snapshot."""

    def close(self) -> None:
        """Free resources."""


class SteppedEnvironment(HostEnvironment):
    """E tasks as one `HostEnvironment`: action rescaling and repeat, time limit, random resets.
    `first` is the number of the first task, `options` are those of `mbx.envs.base.plan`. Tasks are
    closed where the constructor fails.
    """

    def __init__(
        self,
        name: str,
        tasks: Sequence[Task],
        *,
        seed: int | None = 0,
        metrics: Sequence[str] = (),
        images: Images = Images(),  # noqa: B008
        first: int = 0,
        **options: Any,
    ) -> None:
        task, size = tasks[0], images.drawn_size
        options |= dict(name=name, metrics=metrics, discrete=task.num_actions > 0)
        options["action_dim"] = task.num_actions or task.action_low.size
        options |= dict(action_high=()) if task.num_actions else {}
        self._drawn, self._images = images.pixels, images
        if self._drawn:
            options |= dict(obs_shape=(size, size, 3), obs_dtype=np.uint8)
            self._images = Images(size=size, grey=images.grey, stack=images.stack)
        self.num_envs = len(tasks)
        numbers = range(first, first + self.num_envs)
        found = plan(task, numbers, images=self._images, **options)
        self.spec, self._parts, self._stack, self._last, self._enough = found
        self._missed: set[str] = set()  # metrics that an episode ended without
        self._tasks = list(tasks)
        # What a snapshot holds of each environment's episode, `[E, ...]`.
        self._length = np.zeros(self.num_envs, np.int32)
        self._return = np.zeros(self.num_envs, np.float32)
        self._solved = np.zeros(self.num_envs, np.int32)  # steps in a row, as of `Solved`
        self._episode = dict(length=self._length, total=self._return, solved=self._solved)
        # Sum, count and newest value, `[E, 3]`.
        self._metrics = {name: np.zeros((self.num_envs, 3), np.float32) for name in metrics}
        self._episode |= {f"metrics/{name}": values for name, values in self._metrics.items()}
        if self._stack is not None:
            frames = (self.num_envs, self._stack.count, *self._stack.image_shape)
            self._episode["frames"] = np.zeros(frames, self.spec.obs_dtype)
        if seed is not None:
            self.reset(seed)

    def reset(self, seed: int) -> np.ndarray:
        return self.reset_each(np.random.SeedSequence(seed).generate_state(self.num_envs))

    def reset_each(self, seeds: Sequence[int]) -> np.ndarray:
        """Start new episodes, each environment with its own seed: observations `[E, ...]`."""
        for values in self._episode.values():
            values[:] = 0
        begun = (task.reset(int(s)) for task, s in zip(self._tasks, seeds, strict=True))
        return np.stack([self._seen(i, obs, first=True) for i, obs in enumerate(begun)])

    def step(self, action: np.ndarray) -> Timestep:
        actions = in_units(self.spec, np.asarray(action))
        results = [self._step(i, one) for i, one in enumerate(actions)]
        final_obs = np.stack([r[0] for r in results])
        reward = np.array([r[1] for r in results], np.float32)
        fault = ~is_finite(observations.numbers(self.spec.parts, final_obs), reward)
        reward = np.where(fault, np.float32(0.0), reward)
        terminated = np.array([r[2] for r in results], bool) & ~fault
        self._length += 1
        self._return += reward
        length, total = self._length.copy(), self._return.copy()
        cut = np.array([r[3] for r in results], bool)
        if self._enough is not None:
            self._solved[:] = self._enough.so_far(self._solved, reward)
            cut |= self._solved >= self._enough.after
        truncated = ((length >= self.spec.episode_length) | cut | fault) & ~terminated
        done = terminated | truncated
        metrics = self._episode_metrics(done)
        obs = final_obs.copy()
        for i in np.flatnonzero(done):
            obs[i] = self._seen(i, self._tasks[i].reset(None), first=True)
            self._length[i], self._return[i], self._solved[i] = 0, 0.0, 0
        return Timestep(
            obs, final_obs, reward, terminated, truncated, total, length, fault, metrics
        )

    def _note_metrics(self, i: int) -> None:
        """Add the last environment step's `info`; None counts as missing."""
        for name, values in self._metrics.items():
            value = self._tasks[i].info.get(name)
            if value is None:
                continue
            try:
                number = float(value)
            except (TypeError, ValueError) as error:
                raise ValueError(
                    f"env.metrics={tuple(self._metrics)}: info[{name!r}] of {self.spec.name} is "
                    f"{value!r}: let it be a number, or leave it out"
                ) from error
            values[i] = values[i, 0] + number, values[i, 1] + 1, number

    def _episode_metrics(self, done: np.ndarray) -> dict[str, np.ndarray]:
        """`Timestep.metrics`: episode means and newest values; NaN of an episode without them."""
        found = {}
        for name, values in self._metrics.items():
            total, count, newest = values.T
            without = done & (count == 0)
            if without.any() and name not in self._missed:
                self._missed.add(name)
                there = sorted(map(str, self._tasks[np.flatnonzero(without)[0]].info))
                warnings.warn(
                    f"env.metrics={tuple(self._metrics)}: an episode of {self.spec.name} ended and "
                    f"no step's info had {name!r} (the last one has {there}): such episodes do not "
                    "count; correct the name if it is misspelt",
                    stacklevel=2,
                )
            found[name] = np.where(without, np.nan, total / np.maximum(count, 1))
            found[f"{name}_last"] = np.where(without, np.nan, newest)
            values[done] = 0.0
        return found

    def _step(self, i: int, action: Any) -> tuple[np.ndarray, float, bool, bool]:
        task, total = self._tasks[i], 0.0
        is_last = self._length[i] == self.spec.episode_length - 1
        for _ in range(self._last if is_last else self.spec.action_repeat):
            # The environment may write into its array.
            obs, reward, terminated, truncated = task.step(action.copy())
            total += reward
            if self._metrics:
                self._note_metrics(i)
            if terminated or truncated:
                break
        return self._seen(i, obs), total, terminated, truncated

    def _seen(self, i: int, obs: Any, first: bool = False) -> np.ndarray:
        """The agent's observation of task i as one array; `first` of an episode."""
        if self._drawn:
            obs = _picture(self.spec.name, self._tasks[i].picture)
        obs = see(self._images, obs)
        obs = observations.join(self._parts, obs) if self._parts else obs
        if self._stack is None:
            return obs
        frames = self._episode["frames"]
        frames[i] = self._stack.begin(obs) if first else self._stack.push(frames[i], obs)
        return self._stack.join(frames[i], obs)

    def get_state(self) -> bytes | None:
        tasks = [task.get_state() for task in self._tasks]
        if None in tasks:
            return None
        own = [{name: x[i] for name, x in self._episode.items()} for i in range(self.num_envs)]
        return snapshots.encode(list(zip(tasks, own, strict=True)))

    def set_state(self, snapshot: bytes) -> None:
        what = f"a snapshot of another version or environment than {self.spec.name}"
        with snapshots.understood(what):
            saved = zip(self._tasks, snapshots.decode(snapshot), strict=True)
            for i, (task, (state, own)) in enumerate(saved):
                task.set_state(state)
                for name, values in self._episode.items():
                    values[i] = own[name]

    def render(self) -> np.ndarray:
        """A picture of the first task, uint8 `[height, width, 3]`.
        Raises NoRenderer where there is none; tasks must be made with `film`.
        """
        return _picture(self.spec.name, self._tasks[0].render)

    @property
    def seconds(self) -> float:
        """Simulated time of an environment step."""
        return float(self._tasks[0].seconds)

    def close(self) -> None:
        while self._tasks:
            close(self.spec.name, self._tasks.pop())


def _picture(name: str, draw: Callable[[], Any]) -> np.ndarray:
    """Picture from `draw()`, uint8 `[height, width, 3]`; raises NoRenderer for anything else."""
    try:
        picture = np.asarray(draw())
    except NoRenderer:
        raise
    except Exception as error:  # every way to fail has a type of its own
        raise NoRenderer(f"{name} cannot be drawn ({type(error).__name__}: {error})") from error
    if picture.ndim != 3 or picture.shape[-1] != 3 or picture.dtype != np.uint8:
        raise NoRenderer(
            f"{name}: render() gave {picture.dtype}{list(picture.shape)}: let it give uint8 "
            "[height, width, 3]"
        )
    return picture
