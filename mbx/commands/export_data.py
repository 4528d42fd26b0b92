"""Write the transitions of a run that had --config.replay.save=True as a Minari data set.

    mbx export_data runs/pendulum pendulum/mbx-v0
    mbx train --config.env.name=gym:Pendulum-v1 --config.train.dataset=minari:pendulum/mbx-v0

Needs Minari (`pip install 'mbx-rl[minari]'`), which keeps data sets by name.
Images are the newest ones without stacking; a step is an agent's, with its action repeat.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import tempfile
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, Space, Tuple

from mbx import observations
from mbx.commands.arguments import make_parser
from mbx.envs.base import in_units
from mbx.training import datasets, hub, rundir, transfer
from mbx.types import EnvSpec

_ROOT = "MINARI_DATASETS_PATH"


def main(arguments: list[str]) -> None:
    """Run `mbx export_data`. Raises ValueError or OSError for bad input; `mbx.cli` prints it."""
    parser = make_parser(__name__, __doc__)
    parser.add_argument("run", help="Directory of the run.")
    parser.add_argument("name", help="Name of the data set: (NAMESPACE/)NAME-vVERSION.")
    options = parser.parse_args(arguments)
    workdir = os.path.abspath(hub.local(options.run))
    print(f"{options.name}: {write(workdir, options.name):,} episodes for minari.load_dataset")


def write(workdir: str, name: str) -> int:
    """Write the rows of a run as the Minari data set `name`; returns the number of episodes.
    Raises ImportError without Minari, ValueError for a run without saved rows, one of several
    tasks, and a name that Minari does not take or has. The data set appears when it is whole.
    """
    try:
        from minari import create_dataset_from_buffers
        from minari.data_collector import EpisodeBuffer
        from minari.dataset.minari_dataset import parse_dataset_id
        from minari.storage.datasets_root_dir import get_dataset_path
    except ImportError as error:
        raise ImportError(
            "a data set is written by Minari: pip install 'mbx-rl[minari]'"
        ) from error
    arrays = transfer.read_arrays(os.path.join(workdir, "dataset.npz"))
    spec, settings = rundir.load_spec(workdir), rundir.load_settings(workdir)
    if spec is None:
        raise ValueError(
            f"{workdir} has no spec.json: a data set is of one task, export such a run"
        )
    low, high = datasets.bounds(spec)
    action: Space = Discrete(spec.action_dim, start=int(low[0]))
    if not spec.discrete:
        shape = (spec.action_dim,) if spec.action_shape is None else spec.action_shape
        low, high = (x.reshape(shape).astype(spec.action_dtype) for x in (low, high))
        action = Box(low, high, dtype=np.dtype(spec.action_dtype).type)
    buffers = [EpisodeBuffer(**one) for one in _episodes(arrays, spec, settings.env.frame_stack)]
    if not buffers:
        raise ValueError(f"{workdir}/dataset.npz has no transitions: train for longer")
    parse_dataset_id(name)
    root, path = get_dataset_path(), pathlib.PurePath(name)
    if (root / path).exists():
        raise ValueError(f"the Minari data set {name} already exists: choose another version")
    with tempfile.TemporaryDirectory(prefix=".", dir=root) as aside:  # Minari lists no hidden ones
        with _minari_root(aside), warnings.catch_warnings(action="ignore"):  # no optional metadata
            data = create_dataset_from_buffers(
                name,
                buffers,
                observation_space=_space(buffers[0].observations),
                action_space=action,
                algorithm_name=f"mbx {settings.agent}",
                description=spec.name,
                jpeg_encoding=False,
            )
        data.storage.update_metadata({"action_repeat": spec.action_repeat})
        whole = next(x for x in reversed([path, *path.parents]) if not (root / x).exists())
        os.rename(aside / whole, root / whole)
    return len(buffers)


@contextlib.contextmanager
def _minari_root(path: str) -> Iterator[None]:
    """Where Minari keeps data sets, meanwhile."""
    before = os.environ.get(_ROOT)
    os.environ[_ROOT] = path
    try:
        yield
    finally:
        os.environ.pop(_ROOT)
        os.environ.update({} if before is None else {_ROOT: before})


def _episodes(arrays: dict[str, np.ndarray], spec: EnvSpec, stack: int) -> Iterator[dict[str, Any]]:
    """Whole episodes and the pieces that a full ring left, as arguments of `EpisodeBuffer`."""
    position, size = arrays["position"], arrays["size"]
    for env, number in enumerate(size):
        oldest = position[env] - number + np.arange(number)
        rows = {n[4:]: x[env, oldest] for n, x in arrays.items() if n.startswith("row/")}
        after_last = np.concatenate([[True], rows["is_last"][:-1]])[:number]
        starts = np.flatnonzero(rows["is_first"] | after_last)
        for start, stop in zip(starts, [*starts[1:], number], strict=True):
            if stop - start < 2:
                continue
            one = {name: x[start:stop] for name, x in rows.items()}
            terminated = one["terminated"][1:]
            cut = ~terminated & (np.arange(1, stop - start) == stop - start - 1)
            yield dict(
                observations=_observations(one["obs"], spec, stack),
                actions=in_units(spec, one["action"][:-1]),
                rewards=one["reward"][1:],
                terminations=terminated,
                truncations=cut,
            )


def _observations(obs: np.ndarray, spec: EnvSpec, stack: int) -> Any:
    """Parts `[T+1, ...]` as nested dictionaries, or the array; of stacked images the newest."""
    parts = spec.parts
    values = observations.named(parts, observations.split(parts, obs)) if parts else {"": obs}
    newest = {n: x[..., -(x.shape[-1] // stack) :] if x.ndim == 4 else x for n, x in values.items()}
    return observations.nested(newest)


def _space(obs: Any) -> Space:
    if isinstance(obs, dict):
        return Dict({name: _space(x) for name, x in obs.items()})
    if isinstance(obs, tuple):
        return Tuple([_space(x) for x in obs])
    if obs.dtype == np.uint8:
        return Box(0, 255, obs.shape[1:], np.uint8)
    most = 1.0 if obs.ndim == 4 else np.inf  # images in floats
    return Box(-most * (most > 1.0), most, obs.shape[1:], np.float32)
