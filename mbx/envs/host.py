"""Host environments stepped one after the other, with our own episodes, repeats and resets."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import jax
import numpy as np

from mbx import observations
from mbx.envs import snapshot as snapshots
from mbx.envs.base import HostEnvironment, Timestep, in_units, plan, seeds_of
from mbx.envs.custom import close
from mbx.envs.images import Images
from mbx.envs.render import NoRenderer


class Task(Protocol):
    """One host task, not vectorized; obs_shape and obs_dtype may be dictionaries.
    It may have further fields of `EnvSpec` (`reward_range`, `choices`, `action_shape`,
    `action_dtype`, `action_parts`), and `info`, the last step's numbers (`env.metrics`).
    """

    num_actions: int  # 0 for continuous actions
    action_low: np.ndarray  # in the task's units; the number of the first discrete action
    action_high: np.ndarray
    obs_shape: tuple[int, ...] | Mapping[str, tuple[int, ...]]
    obs_dtype: Any
    time_limit: int | None  # environment steps of an episode
    ends_at: int | None  # steps after which the simulator itself ends an episode
    can_terminate: bool  # episodes may end before their time limit

    def reset(self, seed: int | None) -> Any: ...  # None continues the task's own generator
    # Observation, reward, terminated, and truncated (only by the simulator itself).
    def step(self, action: Any) -> tuple[Any, float, bool, bool]: ...
    # A snapshot that any instance of the task continues from exactly, or None.
    def get_state(self) -> bytes | None: ...
    def set_state(self, snapshot: bytes) -> None: ...
    def close(self) -> None: ...


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
        task, num, self._drawn = tasks[0], len(tasks), images.pixels
        metrics = [*metrics, *(one for one in getattr(task, "metrics", ()) if one not in metrics)]
        options |= dict(name=name, metrics=metrics, discrete=task.num_actions > 0)
        options["action_dim"] = task.num_actions or task.action_low.size
        options |= dict(action_high=()) if task.num_actions else {}
        if self._drawn:
            size = images.drawn_size
            options |= dict(obs_shape=(size, size, 3), obs_dtype=np.uint8)
            images = Images(size=size, grey=images.grey, stack=images.stack)
        self._plan = plan(task, range(first, first + num), images=images, **options)
        self.spec, self.num_envs, self._tasks = self._plan.spec, num, list(tasks)
        self._missed: set[str] = set()  # metrics that an episode ended without
        # What a snapshot holds of each environment's episode, `[E, ...]`.
        length, total = np.zeros(num, np.int32), np.zeros(num, np.float32)
        self._episode = dict(length=length, total=total, solved=np.zeros(num, np.int32))
        # Sum, count and newest value, `[E, 3]`.
        self._metrics = {name: np.zeros((num, 3), np.float32) for name in metrics}
        self._episode |= {f"metrics/{name}": values for name, values in self._metrics.items()}
        self._frames: Any = [None] * num
        if (stack := self._plan.stack).count > 1:
            shape = observations.joined(stack.parts)[0]
            self._frames, _ = stack.begin(np.zeros((num, *shape), self.spec.obs_dtype))
            self._episode["frames"] = self._frames
        if seed is not None:
            self.reset(seed)

    def reset(self, seed: int) -> np.ndarray:
        return self.reset_each(seeds_of(seed, self.num_envs))

    def reset_each(self, seeds: Sequence[int]) -> np.ndarray:
        """Start new episodes, each environment with its own seed: observations `[E, ...]`."""
        for values in self._episode.values():
            values[:] = 0
        begun = (task.reset(int(s)) for task, s in zip(self._tasks, seeds, strict=True))
        return np.stack([self._seen(i, obs, first=True) for i, obs in enumerate(begun)])

    def step(self, action: np.ndarray) -> Timestep:
        actions = in_units(self.spec, np.asarray(action))
        each = (jax.tree.map(lambda x: x[i], actions) for i in range(self.num_envs))  # noqa: B023
        results = [self._step(i, one) for i, one in enumerate(each)]
        final_obs, *judged = (np.stack(column) for column in zip(*results, strict=True))
        counts = [self._episode[name] for name in ("length", "total", "solved")]
        timestep, after = self._plan.count(tuple(counts), final_obs, *judged)
        for values, new in zip(counts, after, strict=True):
            values[:] = new
        done, obs = timestep.terminated | timestep.truncated, final_obs.copy()
        metrics = self._episode_metrics(done)
        for i in np.flatnonzero(done):
            obs[i] = self._seen(i, self._tasks[i].reset(None), first=True)
        return timestep._replace(obs=obs, metrics=metrics)

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

    def _step(self, i: int, action: Any) -> tuple[np.ndarray, np.float32, bool, bool]:
        task, total = self._tasks[i], 0.0
        is_last = self._episode["length"][i] == self.spec.episode_length - 1
        for _ in range(self._plan.last if is_last else self.spec.action_repeat):
            # The environment may write into its array.
            obs, reward, terminated, truncated = task.step(copy.deepcopy(action))
            total += reward
            if self._metrics:
                self._note_metrics(i)
            if terminated or truncated:
                break
        return self._seen(i, obs), np.float32(total), bool(terminated), bool(truncated)

    def _seen(self, i: int, obs: Any, first: bool = False) -> np.ndarray:
        """The agent's observation of task i as one array; `first` of an episode."""
        if self._drawn:
            obs = _picture(self.spec.name, self._tasks[i].picture)
        stack, frames, obs = self._plan.stack, self._frames, self._plan.seen(obs)
        frames[i], obs = stack.begin(obs) if first else stack.push(frames[i], obs)
        return obs

    def get_state(self) -> bytes | None:
        tasks = [task.get_state() for task in self._tasks]
        if None in tasks:
            return None
        own = [{name: x[i] for name, x in self._episode.items()} for i in range(self.num_envs)]
        return snapshots.encode(list(zip(tasks, own, strict=True)))

    def set_state(self, snapshot: bytes) -> None:
        with snapshots.fitting(self.spec.name):
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
