"""Data sets of other packages as replay rows: `minari:NAME`, `lerobot:NAME`, or their folders.

Episodes are read in Gymnasium's spaces, compared with the task by name, and observed as the task
is: parts, one-hot choices, images. They are divided over the environments, whole. A Minari episode
holds its final observation. LeRobot records none: the last one stands for it, as in LeRobot's own
buffer. There, `next.done` before the task's time limit is a termination.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, Space

from mbx import observations
from mbx.agents.settings import Env
from mbx.envs import base, checks
from mbx.envs import gymnasium as suite
from mbx.envs.images import DRAWN_SIZE, Images
from mbx.training.logging import say
from mbx.types import EnvSpec

# Of an episode of T steps: observations [T+1] (or their leaves), actions, rewards, terminated.
Episode = tuple[Any, np.ndarray, np.ndarray, bool]


class _Minari:
    """Opened: `lengths` of its episodes, `repeat`, environment steps of a step."""

    def __init__(self, name: str) -> None:
        minari = importlib.import_module("minari")
        place = next((x for x in (f"{name}/data", name) if os.path.isdir(x)), "")
        self._data = minari.MinariDataset(place) if place else minari.load_dataset(name)
        storage = self._data.storage
        own = storage.get_episode_metadata(self._data.episode_indices)
        self.lengths = np.array([int(one["total_steps"]) for one in own], int)
        self.repeat = int(storage.metadata.get("action_repeat", 1))

    def spaces(self, spec: EnvSpec) -> tuple[Space, Space]:
        return self._data.observation_space, self._data.action_space

    def episodes(self, spec: EnvSpec) -> Iterator[Episode]:
        for one in self._data:
            if np.any(one.terminations[:-1]):
                raise ValueError(f"episode {one.id} continues after it terminates, split it there")
            yield one.observations, one.actions, one.rewards, bool(one.terminations[-1])


class _LeRobot:
    repeat = 1

    def __init__(self, name: str) -> None:
        found = importlib.import_module("lerobot.datasets.lerobot_dataset")
        here = dict(root=name) if os.path.isdir(name) else {}
        self._data = found.LeRobotDataset(os.path.basename(name) if here else name, **here)
        self._features: Mapping[str, Any] = self._data.meta.features
        self.lengths = np.array(self._data.meta.episodes["length"], int)

    def _drawn(self, name: str) -> bool:
        return self._features[name]["dtype"] in ("image", "video")

    def _names(self, spec: EnvSpec) -> dict[str, str]:
        """The feature of each part of an observation ("" where it is alone), by LeRobot's names."""
        usual = {"": "image" if len(spec.obs_shape) == 3 else "state", "agent_pos": "state"}
        usual["pixels"], found = "image", {}
        for part in [part.name for part in spec.parts] or [""]:
            own = part.replace("pixels/", "images/").replace("/", ".")
            found[part] = f"observation.{own}"
            if found[part] not in self._features:
                found[part] = f"observation.{usual.get(part, own)}"
        if missing := {*found.values(), "action", "next.reward"} - self._features.keys():
            has = ", ".join(sorted(self._features))
            raise ValueError(f"it lacks {min(missing)} and has {has}, record that too")
        return found

    def spaces(self, spec: EnvSpec) -> tuple[Space, Space]:
        found = {}
        for part, name in self._names(spec).items():
            shape = tuple(self._features[name]["shape"])
            found[part] = Box(-np.inf, np.inf, shape, np.float32)
            if self._drawn(name):  # described with its channels first or last
                shape = (*shape[1:], shape[0]) if shape[0] in (1, 3) else shape
                found[part] = Box(0, 255, shape, np.uint8)
        observed = Dict(found) if spec.parts else found[""]
        low, high = bounds(spec)
        acted = self._features["action"]
        if spec.discrete and "int" in acted["dtype"]:
            return observed, Discrete(spec.action_dim, start=low[0])
        number = int(np.prod(acted["shape"]))
        if spec.discrete or number != spec.action_dim:
            return observed, Box(-1.0, 1.0, (number,))
        return observed, Box(low, high, dtype=np.float32)  # no bounds are recorded: the task's

    def episodes(self, spec: EnvSpec) -> Iterator[Episode]:
        names, stop = self._names(spec), 0
        numbers, never = self._data.hf_dataset.with_format("numpy"), [False]
        for length in self.lengths.tolist():
            start, stop = stop, stop + length
            rows, found = numbers[start:stop], {}
            for part, name in names.items():
                if self._drawn(name):
                    frames = [self._data[i][name].numpy() for i in range(start, stop)]
                    x = np.rint(255 * np.moveaxis(np.stack(frames), 1, -1))
                else:
                    x = np.reshape(rows[name], (length, *self._features[name]["shape"]))
                found[part] = np.concatenate([x, x[-1:]])
            done, cut = (np.ravel(rows.get(f"next.{x}", never))[-1] for x in ("done", "truncated"))
            ended = done and not cut and spec.can_terminate and length < spec.episode_length
            obs = found if spec.parts else found[""]
            yield obs, rows["action"], np.ravel(rows["next.reward"]), bool(ended)


_FLAGS = ("is_first", "is_last", "terminated")
_READERS: dict[str, Any] = {"minari": _Minari, "lerobot": _LeRobot}


def split(name: str) -> tuple[str, str]:
    """The package that reads a data set ("" for a file of ours) and what it is called there."""
    reader, _, place = name.partition(":")
    return (reader, place) if place and reader in _READERS else ("", name)


@contextlib.contextmanager
def _told(name: str, fault: str) -> Iterator[None]:
    """Every error, whatever the package raises, as one line that names the data set."""
    try:
        yield
    except Exception as error:
        reader, given = split(name)[0], f"train.dataset={name!r}"
        if isinstance(error, ImportError):
            raise ImportError(
                f"{given} needs {reader}: pip install 'mbx-rl[{reader}]' ({error})"
            ) from error
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise ValueError(f"{given} {fault}: {reason}") from error


def opened(name: str) -> Any:
    """The data set. Raises ImportError without its package, ValueError where it cannot be read."""
    reader, place = split(name)
    with _told(name, "cannot be read, give the name or folder of a complete one"):
        found = _READERS[reader](place)
        if not found.lengths.size or found.lengths.min() < 1:
            raise ValueError("it has no episodes, or empty ones")
    return found


def places(lengths: np.ndarray, num_envs: int) -> tuple[np.ndarray, np.ndarray]:
    """Environment and first row of each episode: one row more than steps, where most room is."""
    filled, found = np.zeros(num_envs, int), []
    for length in lengths:
        env = int(filled.argmin())
        found.append((env, filled[env]))
        filled[env] += length + 1
    env, start = np.array(found).T
    return env, start


def size(name: str, num_envs: int) -> tuple[int, int]:
    """Environments that get rows, and the most rows of one."""
    lengths = opened(name).lengths
    env, start = places(lengths, num_envs)
    return int(env.max()) + 1, int((start + lengths + 1).max())


def read(name: str, spec: EnvSpec, env: Env) -> dict[str, np.ndarray]:
    """The arrays of a `dataset.npz`, with the rows of all episodes.
    env: its `num_envs` share them; its image settings apply. Raises ValueError, naming the part,
    where the data set does not fit the task.
    """
    recording = opened(name)
    with _told(name, f"does not fit {spec.name}"):
        plan, task = _plan(name, recording, spec, env)
    lengths, (envs, starts) = recording.lengths, places(recording.lengths, env.num_envs)
    shape, totals = (env.num_envs, int((starts + lengths + 1).max())), []
    rows: dict[str, np.ndarray] = {name: np.zeros(shape, bool) for name in _FLAGS}
    rows |= {"obs": np.zeros((*shape, *spec.obs_shape), spec.obs_dtype)}
    rows |= {"action": np.zeros((*shape, spec.action_dim), np.float32)}
    rows |= {"reward": np.zeros(shape, np.float32)}
    with _told(name, "cannot be read"):
        episodes = zip(recording.episodes(spec), envs, starts, starts + lengths, strict=True)
        for (obs, actions, rewards, terminated), e, start, end in episodes:
            rows["obs"][e, start : end + 1] = _observations(plan, task, obs, int(end - start) + 1)
            rows["action"][e, start:end] = _actions(spec, actions)
            rows["reward"][e, start + 1 : end + 1] = rewards
            rows["is_first"][e, start] = rows["is_last"][e, end] = True
            rows["terminated"][e, end] = terminated
            totals.append(float(np.sum(rewards)))
        if rows["terminated"].any() and not spec.can_terminate:
            raise ValueError(f"an episode terminates, {spec.name} only ends by its time limit")
    say(
        f"{name}: {len(totals):,} episodes, {lengths.sum():,} steps, return "
        f"{np.mean(totals):.4g} (from {min(totals):.4g} to {max(totals):.4g})"
    )
    count, size = np.bincount(envs, lengths, shape[0]), np.bincount(envs, lengths + 1, shape[0])
    counts = dict(size=size, position=size % shape[1], transitions=count)
    arrays = {f"row/{field}": x for field, x in rows.items()}
    return arrays | {field: x.astype(np.int32) for field, x in counts.items()}


def bounds(spec: EnvSpec) -> tuple[np.ndarray, np.ndarray]:
    """The lowest and the highest action in the task's units; of discrete ones the numbers.
    Raises ValueError for actions of several parts.
    """
    if spec.action_parts:
        raise ValueError("actions are a single Box or Discrete space in data sets, and have parts")
    if spec.discrete:
        low = np.array([int((*spec.action_low, 0)[0])])
        return low, low + spec.action_dim - 1
    one = np.ones(spec.action_dim, np.float32)
    return tuple(np.array(x or n * one) for x, n in ((spec.action_low, -1), (spec.action_high, 1)))


def _form(spec: EnvSpec) -> str:
    """Observations and actions in words."""
    parts = ", ".join(f"{part.name} {list(part.shape)}" for part in spec.parts)
    obs = f"{parts or list(spec.obs_shape)} ({np.dtype(spec.obs_dtype)})"
    low, high = ([float(f"{x:.4g}") for x in bound] for bound in bounds(spec))
    kind = "discrete" if spec.discrete else "continuous"
    return f"observations {obs} and {spec.action_dim} {kind} actions from {low} to {high}"


def _plan(name: str, recording: Any, spec: EnvSpec, env: Env) -> tuple[base.Plan, Any]:
    """How recorded observations are seen. Raises ValueError where the task's are others."""
    if spec.tasks:
        raise ValueError("choose one task, as env.name=SUITE:TASK")
    if recording.repeat != spec.action_repeat:
        raise ValueError(f"set env.action_repeat={recording.repeat}, as it was recorded")
    observed, acted = recording.spaces(spec)
    made = SimpleNamespace(observation_space=observed, action_space=acted, metadata={})
    made.unwrapped = SimpleNamespace()
    checks.check_spaces(name, made)
    task: Any = suite.Task(made, name, lambda: spec.episode_length)
    if wanted := [part.name for part in spec.parts]:
        has = task.obs_shape if isinstance(task.obs_shape, dict) else {}
        if missing := [part for part in wanted if part not in has]:
            raise ValueError(f"its observations have no {missing[0]!r}, but {list(has)}")
        task.obs_shape = {part: has[part] for part in wanted}
    images = Images()
    if len(spec.obs_shape) == 3 or any(part.is_image for part in spec.parts):
        side = env.image_size or DRAWN_SIZE * env.pixels
        colour = any(shape[2:] == (3,) for shape in observations.flat(task.obs_shape).values())
        images = Images(size=side, grey=env.grey and colour, stack=env.frame_stack)
    fields = dict(name=name, discrete=task.num_actions > 0, action_repeat=spec.action_repeat)
    fields["action_dim"] = task.num_actions or task.action_low.size
    fields |= dict(action_high=()) if task.num_actions else {}
    plan = base.plan(task, range(1), images=images, episode_length=spec.episode_length, **fields)
    if (has := _form(plan.spec)) != (wants := _form(spec)):
        raise ValueError(f"it has {has}, the task {wants}")
    return plan, task


def _observations(plan: base.Plan, task: Any, given: Any, number: int) -> np.ndarray:
    """The task's observations `[T+1, ...]`."""

    def at(tree: Any, t: int) -> Any:
        if isinstance(tree, Mapping):
            return {name: at(x, t) for name, x in tree.items()}
        return tuple(at(x, t) for x in tree) if isinstance(tree, tuple) else tree[t]

    found, frames = [], None
    for t in range(number):
        one = plan.seen(task._observe(at(given, t)))
        frames, one = plan.stack.push(frames, one) if t else plan.stack.begin(one)
        found.append(one)
    return np.stack(found)


def _actions(spec: EnvSpec, actions: Any) -> np.ndarray:
    """Actions in the task's units as the agent's `[T, A]`: one-hot, or from -1 to 1."""
    low, high = bounds(spec)
    found = np.reshape(actions, (len(actions), -1))
    room = 0.001 * (high - low) * (not spec.discrete)
    if (found < low - room).any() or (found > high + room).any():
        raise ValueError(f"actions from {found.min():.4g} to {found.max():.4g} exceed their bounds")
    if spec.discrete:
        return np.eye(spec.action_dim, dtype=np.float32)[found[:, 0].astype(int) - low[0]]
    return np.clip(2.0 * (found - low) / (high - low) - 1.0, -1.0, 1.0).astype(np.float32)
