"""What a replay holds, as a file: written by one run, learned from by another without acting.

A `.npz` archive with the rows of all environments, their ring positions and a JSON header. Planner
targets are not kept: they belong to the model that made them, and reanalyze makes them again.
"""

from __future__ import annotations

import io
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mbx import replay
from mbx.agents.base import Agent
from mbx.files import atomic_write

FORMAT_VERSION = 1


def save(path: str, state: replay.ReplayState, *, task: str) -> None:
    """Write the rows of `state`, atomically; task: the environment's name, checked on loading."""
    size = np.asarray(state.size)
    rows = max(int(size.max()), 2)
    data = {name: np.asarray(leaf)[:, :rows] for name, leaf in state.data.items()}
    header = dict(version=FORMAT_VERSION, task=task)
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


def shape(path: str) -> tuple[int, int]:
    """Environments and rows an environment that the file at `path` has room for."""
    first = _read(path)["row/is_first"]
    return first.shape[0], first.shape[1]


def load(path: str, agent: Agent, *, task: str) -> replay.ReplayState:
    """The replay in the file at `path`, with room for the agent's targets, none of them valid.

    Raises ValueError naming the file and the field where it is no dataset, is another version's, is
    of another task, or has rows that the agent cannot read.
    """
    arrays = _read(path)
    header = json.loads(arrays["header"].tobytes())
    if header["version"] != FORMAT_VERSION:
        raise ValueError(
            f"train.dataset={path} has format {header['version']}, this program reads "
            f"{FORMAT_VERSION}: write it again"
        )
    if header["task"] != task:
        raise ValueError(
            f"train.dataset={path} was recorded on {header['task']}: set --config.env.name="
            f"{header['task']}, not {task}"
        )
    example = agent.example_row()
    num_envs, capacity = arrays["row/is_first"].shape
    for name, want in example.items():
        found = arrays.get(f"row/{name}")
        if found is None or found.shape[2:] != want.shape:
            raise ValueError(
                f"train.dataset={path}: field '{name}' is "
                f"{'missing' if found is None else list(found.shape[2:])}, the agent reads "
                f"{list(want.shape)}: record the dataset with this agent and task"
            )
    spec = agent.store.spec if agent.store else None
    empty = replay.init(example, num_envs=num_envs, capacity=capacity, target_spec=spec)
    rows = {n: jnp.asarray(arrays[f"row/{n}"], leaf.dtype) for n, leaf in empty.data.items()}
    return empty.replace(
        data=rows,
        **{n: jnp.asarray(arrays[n], jnp.int32) for n in ("size", "position", "transitions")},
    )


def _read(path: str) -> dict[str, Any]:
    try:
        with np.load(path) as file:
            arrays = {name: file[name] for name in file.files}
    except (OSError, ValueError) as error:
        raise ValueError(
            f"train.dataset={path!r} cannot be read ({error}): give a dataset.npz that a run with "
            "--config.replay.save=True wrote"
        ) from error
    missing = {"header", "size", "position", "transitions", "row/is_first"} - set(arrays)
    if missing:
        raise ValueError(
            f"train.dataset={path!r} lacks {sorted(missing)}: it is no dataset of ours"
        )
    return jax.tree.map(np.asarray, arrays)
