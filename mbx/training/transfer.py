"""Starting from another run: its parameters for a new task, or its rows without acting.

`train.init_from=RUN` begins with the best parameters of RUN (fine-tuning), for agents that have
`Agent.start_from`. A run of several tasks (`multi:...`) may be fine-tuned on others: they are
padded to the sizes of RUN. `train.dataset=FILE` learns from the replay buffer that another run
saved: a `.npz` archive with the rows of all environments, their ring positions and a JSON header;
or from a data set of another package (`mbx.training.datasets`). With `train.online` the run acts,
too. Planner targets belong to the model that made them; they are left out and refreshed.
"""

from __future__ import annotations

import dataclasses
import io
import json
import os
import re
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mbx import envs, replay
from mbx.agents.base import Agent
from mbx.agents.settings import Env, RunSettings
from mbx.training import build, datasets, hub, rundir
from mbx.training.build import environment_spec
from mbx.training.checkpoint import Checkpointer
from mbx.training.files import atomic_write, parse_json
from mbx.training.rundir import load_settings
from mbx.types import EnvSpec


def located(settings: RunSettings) -> RunSettings:
    """The settings with absolute paths: environments may go to another directory when made.

    Raises FileNotFoundError where the file of a custom environment does not exist.
    """
    env = dataclasses.replace(settings.env, name=envs.custom.located(settings.env.name))
    start, (reader, place) = settings.train.init_from, datasets.split(settings.train.dataset)
    if place and (not reader or os.path.isdir(place)):
        place = os.path.abspath(place)
    dataset = f"{reader}:{place}" if reader else place
    start = os.path.abspath(start) if start and not hub.is_remote(start) else start
    train = dataclasses.replace(settings.train, init_from=start, dataset=dataset)
    return dataclasses.replace(settings, env=env, train=train)


def resolve(settings: RunSettings) -> RunSettings:
    """`settings`, `located`, with values from another run or a dataset filled in.
    Raises ValueError for several seeds, which cannot start from another run.
    """
    settings = located(settings)
    train, env, rows = settings.train, settings.env, settings.replay
    for field, value in (("init_from", train.init_from), ("dataset", train.dataset)):
        if value and settings.num_seeds > 1:
            raise ValueError(
                f"train.{field}={value!r} with num_seeds={settings.num_seeds}: start one run a seed"
            )
    if train.init_from and settings.several_tasks:
        spec = environment_spec(_settings(train.init_from))
        pad_to = (spec.obs_shape[0] - len(spec.tasks), spec.action_dim)
        env = dataclasses.replace(env, pad_to=pad_to)
    if train.dataset:
        named = datasets.split(train.dataset)[0]
        if not named:
            num_envs, length = read_arrays(train.dataset)["row/is_first"].shape
        else:
            num_envs, length = datasets.size(train.dataset, env.num_envs)
        if not (named and train.online):
            env = dataclasses.replace(env, num_envs=num_envs)
        if train.online and rows.capacity < env.num_envs * length:
            raise ValueError(
                f"replay.capacity={rows.capacity} with train.dataset={train.dataset!r}: give room "
                f"for its rows, {env.num_envs * length}, and those of the run"
            )
        if not train.online:
            rows = dataclasses.replace(rows, capacity=num_envs * length)
    return dataclasses.replace(settings, env=env, replay=rows)


def _settings(source: str) -> RunSettings:
    """The settings of another run, whose sizes the environment will have."""
    source = hub.local(source)
    settings = load_settings(source)
    rundir.check_trusted(settings.env.name, source, False)
    return settings


def check(settings: RunSettings, agent: Agent) -> None:
    """Raise ValueError where the agent cannot start from another run."""
    if settings.train.init_from and agent.start_from is None:
        raise ValueError(
            f"train.init_from={settings.train.init_from!r}: agent {settings.agent!r} cannot start "
            "from another run, leave it empty"
        )


def _shapes(params: Any) -> dict[str, tuple[int, ...]]:
    """The shape of each leaf by its path, as model/encoder/kernel."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return {jax.tree_util.keystr(p, simple=True, separator="/"): jnp.shape(x) for p, x in leaves}


def _chosen(pattern: str, old: Any, fresh: Any) -> Any:
    """The leaves of `old` whose paths the pattern is found in, else the fresh ones.
    Raises ValueError for a pattern that is none, or found in no path.
    """
    try:
        taken = {path: bool(re.search(pattern, path)) for path in _shapes(fresh)}
    except re.error as error:
        raise ValueError(
            f"train.init_parts={pattern!r} is no regular expression: {error}"
        ) from None
    if not any(taken.values()):
        raise ValueError(
            f"train.init_parts={pattern!r} is found in no parameter's path: {', '.join(taken)}"
        )
    known = dict(zip(_shapes(old), jax.tree.leaves(old), strict=True))
    leaves, structure = jax.tree.flatten(fresh)
    pairs = zip(taken.items(), leaves, strict=True)
    return structure.unflatten([known.get(path) if own else x for (path, own), x in pairs])


def start_from(source: str, settings: RunSettings, agent: Agent, train: Any) -> Any:
    """The fresh state `train` of a new run with the parameters of the run in `source`.
    Optimisers, scales and the update counter stay fresh. settings: the new run's, `for_task`.
    Raises ValueError, naming the component or setting, where the models' shapes or the meaning of
    parameters differ (`RunSettings.check_start`).
    """
    before = _settings(source)
    spec = environment_spec(before)
    for reason in settings.check_start(before.for_task(spec)):
        raise ValueError(reason)
    example = jax.eval_shape(build.build_agent(before, spec).init, jax.random.key(0))
    with Checkpointer(hub.local(source)) as checkpointer:
        old, _ = checkpointer.restore_best(example)
    started = agent.start_from(train, old, spec)
    if pattern := settings.train.init_parts:
        params = _chosen(pattern, started.params, train.params)
        started = agent.start_from(
            train, started.replace(params=params), environment_spec(settings)
        )
    have, want = (_shapes(state.params) for state in (started, train))
    for path in want | have:
        if have.get(path) != want.get(path):
            raise ValueError(
                f"train.init_from={source}: the component '{path}' has other shapes there "
                f"({have.get(path)}, here {want.get(path)}): use the same config.model, and a task "
                "with the same sizes or a multi:… one, or leave it out by train.init_parts"
            )
    return started


DATASET_VERSION = 1
_COUNTS = ("size", "position", "transitions")


def save_dataset(path: str, state: replay.ReplayState, *, task: str) -> None:
    """Write the rows of `state` atomically; task: the environment's name, checked on loading."""
    size = np.asarray(state.size)
    rows = max(int(size.max()), 2)
    data = {name: np.asarray(leaf)[:, :rows] for name, leaf in state.data.items()}
    header = dict(version=DATASET_VERSION, task=task)
    file = io.BytesIO()
    np.savez_compressed(
        file,
        header=np.frombuffer(json.dumps(header).encode(), np.uint8),
        size=size,
        position=np.asarray(state.position) % rows,
        transitions=np.asarray(state.transitions),
        **{f"row/{name}": leaf for name, leaf in data.items()},
    )
    atomic_write(path, file.getvalue())


def load_dataset(
    path: str,
    agent: Agent,
    spec: EnvSpec,
    env: Env = Env(),  # noqa: B008
    capacity: int = 0,
) -> replay.ReplayState:
    """The replay in a file of ours or a named data set, with room for the agent's targets, all
    invalid. env: settings of the environments; capacity: rows of each, if more than there are.
    Raises ValueError, naming the file and field, for other files, versions or tasks, and for rows
    that do not fit the agent.
    """
    if datasets.split(path)[0]:
        arrays = datasets.read(path, spec, env)
        _check(path, arrays)
    else:
        arrays = read_arrays(path)
        _check_header(path, arrays, spec.name)
    example = agent.example_row()
    num_envs, length = arrays["row/is_first"].shape
    for name, want in example.items():
        found = arrays.get(f"row/{name}")
        if found is None or found.shape[2:] != want.shape:
            raise ValueError(
                f"train.dataset={path}: field '{name}' is "
                f"{'missing' if found is None else list(found.shape[2:])}, the agent reads "
                f"{list(want.shape)}: record the dataset with this agent and task"
            )
    targets = agent.store.spec if agent.store else None
    most = max(capacity, length)
    empty = replay.init(example, num_envs=num_envs, capacity=most, target_spec=targets)
    # Oldest first, where there is more room behind the newest.
    oldest = (arrays["position"] - arrays["size"]) * (most > length)
    order = np.arange(num_envs)[:, None], (oldest[:, None] + np.arange(length)) % length
    rows = {n: leaf.at[:, :length].set(arrays[f"row/{n}"][order]) for n, leaf in empty.data.items()}
    counts = {name: jnp.asarray(arrays[name], jnp.int32) for name in _COUNTS}
    if most > length:
        counts["position"] = counts["size"] % most
    return empty.replace(data=rows, **counts)


def _check_header(path: str, arrays: dict[str, np.ndarray], task: str) -> None:
    """Raise ValueError for a file of another version or task."""
    header = parse_json(arrays["header"].tobytes(), f"train.dataset={path}: field 'header'")
    if header.get("version") != DATASET_VERSION:
        raise ValueError(
            f"train.dataset={path} has format {header.get('version')}, this program reads "
            f"{DATASET_VERSION}: write it again"
        )
    if header.get("task") != task:
        raise ValueError(
            f"train.dataset={path} was recorded on {header.get('task')}: set --config.env.name="
            f"{header.get('task')}, not {task}"
        )


def read_arrays(path: str) -> dict[str, np.ndarray]:
    """The arrays of a dataset. Raises ValueError, naming the field, where it is none of ours."""
    try:
        with open(path, "rb") as opened, np.load(opened) as file:
            arrays = {name: file[name] for name in file.files}
    except Exception as error:  # zip and npy files have many ways of being none
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise ValueError(
            f"train.dataset={path!r} cannot be read ({reason}): give a dataset.npz that a run with "
            "--config.replay.save=True wrote"
        ) from error
    arrays = {name: array for name, array in arrays.items() if isinstance(array, np.ndarray)}
    if missing := {"header", *_COUNTS, "row/is_first"} - set(arrays):
        raise ValueError(
            f"train.dataset={path!r} lacks {sorted(missing)}: it is no dataset of ours"
        )
    _check(path, arrays)
    return arrays


def _check(path: str, arrays: dict[str, np.ndarray]) -> None:
    for problem in _problems(arrays):
        raise ValueError(f"train.dataset={path!r}: field {problem}: record it again")


def _problems(arrays: dict[str, np.ndarray]) -> Iterator[str]:
    """The invalid fields of a dataset, with the reason."""
    first = arrays["row/is_first"]
    if first.ndim != 2 or min(first.shape) < 1:
        yield f"'row/is_first' has shape {list(first.shape)}, not environments and rows"
    num_envs, rows = first.shape
    most = {"size": rows, "position": rows - 1, "transitions": 2**31 - 1}
    for name, array in arrays.items():
        given = f"{name!r} is {array.dtype}{list(array.shape)}"
        if name.startswith("row/"):
            if array.shape[:2] != first.shape or array.dtype.kind not in "biuf":
                yield f"{given}, not {num_envs} by {rows} rows"
            elif array.dtype.kind == "f" and not np.isfinite(array).all():
                yield f"{name!r} has values that are not finite"
        elif name in most:
            if array.shape != (num_envs,) or array.dtype.kind not in "iu":
                yield f"{given}, not {num_envs} counts"
            elif array.min() < 0 or array.max() > most[name]:
                yield f"{name!r} has counts outside of 0 to {most[name]}"
