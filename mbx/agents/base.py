"""What an agent is: a NamedTuple of pure functions, as an optax optimiser is.

The loop (`mbx.training.loop`) knows agents only by this. `TrainState` and `ActorState` are the
agent's own pytrees; `obs` is `[E, ...]`, one observation an environment.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

Array = jax.Array
Metrics = dict[str, Array]


class Review(NamedTuple):
    """What an agent has to say for itself: numbers for the log, and files by name."""

    metrics: dict[str, float]
    files: dict[str, bytes]


class Agent(NamedTuple):
    """An agent.

    init(key) -> train state: parameters, targets, optimiser states, scales, the update counter.
    init_actor(num_envs) -> actor state, what acting carries between steps (a warm start).
    act(train, actor, obs, is_first `[E]`, key, evaluate) -> (action `[E, A]` in [-1, 1], actor);
        `evaluate` is a Python bool: without exploration noise.
    targets(train, actor, obs, key) -> `replay.Targets` to store with the rows, or None for an
        agent without stored targets; actor: as `act` returned it for these observations.
    update(train, replay, key) -> (train, metrics): one gradient step on a batch of the replay.
    refresh(train, replay, key, sweep) -> (replay, metrics): recompute some stored targets;
        `sweep` is the number of a chunk of a sweep over all rows, or -1: the agent chooses the
        rows. None for an agent without stored targets.
    example_row() -> one un-batched replay row (abstract), target_spec: what the replay stores.
    refresh_chunk: rows a `refresh` call handles.
    remember(actor) -> further fields `[E, ...]` of the row just acted on (latents); None for none.
    update_replay(train, replay, key) -> (train, replay, metrics): `update` for an agent that also
        writes into the replay; used in its place where not None.
    review(train, replay, key) -> Review, made with every evaluation; not compiled. None for none.
    """

    init: Callable[[Array], Any]
    init_actor: Callable[[int], Any]
    act: Callable[..., tuple[Array, Any]]
    targets: Callable[[Any, Any, Array, Array], Any]
    update: Callable[[Any, Any, Array], tuple[Any, Metrics]]
    refresh: Callable[..., tuple[Any, Metrics]] | None
    example_row: Callable[[], dict[str, Any]]
    target_spec: Any
    refresh_chunk: int
    remember: Callable[[Any], dict[str, Array]] | None = None
    update_replay: Callable[[Any, Any, Array], tuple[Any, Any, Metrics]] | None = None
    review: Callable[[Any, Any, Array], Review] | None = None
