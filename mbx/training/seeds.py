"""Several seeds of one configuration in one compiled program: `--config.num_seeds=8`.

Every seed is the run that it would be alone, with the same keys. What differs lies along a leading
axis `[S]` of every leaf, and is divided among the devices there are (the command makes every
processor core one). An accelerator batches its seeds with `vmap`; a processor core, which has
nothing left over for a batch, takes its seeds one after another inside the same program.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from mbx.agents.base import Agent
from mbx.envs.base import JaxEnvironment
from mbx.fast import compiler
from mbx.training import learning, loop
from mbx.training.evaluation import Evaluation, as_evaluation, make_episodes
from mbx.training.sharding import available_cores
from mbx.training.state import LoopState, Schedule

Array = jax.Array

# Progress, which all seeds share: under `vmap` it must not be batched, or every branch that depends
# on it would be taken both ways.
_PROGRESS = ("steps", "update_debt", "updates")
_AXIS = "devices"


def device_count_for(num_seeds: int, available: int) -> int:
    """The largest number of devices, at most `available`, that divides the seeds evenly."""
    return max(n for n in range(1, max(available, 1) + 1) if num_seeds % n == 0)


def use_all_cores(num_seeds: int) -> None:
    """Make every processor core a device, as far as the seeds can be divided among them.

    Small models keep one core busy and no more. Only before anything has run on a device, and only
    of use without an accelerator.
    """
    jax.config.update("jax_num_cpu_devices", device_count_for(num_seeds, available_cores()))


def device_mesh(num_seeds: int) -> jax.sharding.Mesh | None:
    """The devices that the seeds are divided among; None for a single one."""
    devices = jax.local_devices()
    num = device_count_for(num_seeds, len(devices))
    return jax.sharding.Mesh(np.array(devices[:num]), (_AXIS,)) if num > 1 else None


def place(tree: Any, mesh: jax.sharding.Mesh | None) -> Any:
    """A tree with leaves `[S, ...]`, divided among the devices of `mesh` (None: left alone)."""
    if mesh is None:
        return tree
    return jax.device_put(tree, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(_AXIS)))


def pick(tree: Any, index: int) -> Any:
    """One seed's share of a tree with leaves `[S, ...]`."""
    return jax.tree.map(lambda x: x[index], tree)


def make_seeds_interval(
    agent: Agent,
    environment: JaxEnvironment,
    schedule: Schedule,
    *,
    length: int,
    mesh: jax.sharding.Mesh | None = None,
    batched: bool | None = None,
    quick: bool = False,
) -> Callable[[LoopState], tuple[LoopState, dict[str, Array]]]:
    """`loop.make_interval` for several seeds: leaves and metrics lead with `[S]`.

    Args:
        mesh: devices among which the seeds are divided evenly.
        batched: whether a device takes its seeds together or one after another (None: together
            unless it is a processor).
        quick: about compiling, on GPUs (`codegen`).
    """
    batched = _batches() if batched is None else batched
    axis = "seeds" if batched else None
    step = loop.make_step(agent, environment, schedule, axis)
    interval = learning.repeated(step, length, schedule)

    def together(state: LoopState) -> tuple[LoopState, dict[str, Array]]:
        shared = {name: getattr(state, name)[0] for name in _PROGRESS}
        return jax.vmap(lambda one: interval(one.replace(**shared)), axis_name=axis)(state)

    def in_turn(state: LoopState) -> tuple[LoopState, dict[str, Array]]:
        return jax.lax.map(interval, state)

    divided = _divided(together if batched else in_turn, mesh)

    def train_interval(state: LoopState) -> tuple[LoopState, dict[str, Array]]:
        return divided(state)

    options = compiler.for_training(jax.default_backend(), quick)
    return jax.jit(train_interval, donate_argnums=0, compiler_options=options)


def make_seeds_evaluate(
    act: Callable,
    init_actor: Callable,
    environment: JaxEnvironment,
    *,
    mesh: jax.sharding.Mesh | None = None,
    record: bool = False,
) -> Callable[[Any, Array], list[Evaluation]]:
    """`evaluate(train, keys)` of several seeds at once: train states `[S, ...]`, keys `[S]`.

    record: as `evaluation.make_evaluate`.
    """
    episodes = make_episodes(act, init_actor, environment, record=record)

    def all_seeds(inputs: tuple[Any, Array]) -> tuple:
        if _batches():
            return jax.vmap(episodes)(*inputs)
        return jax.lax.map(lambda one: episodes(*one), inputs)

    divided = _divided(all_seeds, mesh)

    @functools.partial(jax.jit, compiler_options=compiler.for_once(jax.default_backend()))
    def evaluation(train: Any, keys: Array) -> tuple:
        return divided((train, keys))

    def evaluate(train: Any, keys: Array) -> list[Evaluation]:
        found = jax.device_get(evaluation(train, place(keys, mesh)))
        return [as_evaluation(pick(found, i), environment) for i in range(len(found[0]))]

    return evaluate


def _batches() -> bool:
    return jax.default_backend() != "cpu"


def _divided(function: Callable[[Any], Any], mesh: jax.sharding.Mesh | None) -> Callable:
    """`function` of leaves `[S, ...]`, each device of `mesh` with its share of them."""
    if mesh is None:
        return function
    split = jax.sharding.PartitionSpec(_AXIS)
    return jax.shard_map(function, mesh=mesh, in_specs=split, out_specs=split, check_vma=False)
