"""How a world's states, and their successors, lie in a replay: as flat int32 words, exactly.

EMPO's replay needs states only, successors are recomputed; records are for worlds whose
successors cost more to enumerate than to store."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from mbx.empo.power.worlds import World, draw_actions, draw_goals, profiles


class Codec(NamedTuple):
    """An observation of a world: its state, the humans' goals and their last actions, one array."""

    size: int  # int32 words W
    pack: Callable[[Any, Array, Array], Array]  # (state, goals `[H]`, actions `[H]`) -> obs `[W]`
    unpack: Callable[[Array], tuple[Any, Array, Array]]  # its inverse; ignores further words


class Record(NamedTuple):
    """Successors of a state for one draw of goals and human actions, all joint robot actions."""

    goals: Array  # `[H]`
    actions: Array  # `[H]`
    states: Any  # `[R, K, ...]`
    prob: Array  # `[R, K]`, 0 in unused slots


class Records(NamedTuple):
    """How records are drawn, (state, key) -> Record, and packed into `size` words and back."""

    size: int
    draw: Callable[[Any, Array], Record]
    pack: Callable[[Record], Array]
    unpack: Callable[[Array], Record]


def make_codec(world: World) -> Codec:
    """The observation layout of a world, one int32 for every element of the state.
    Raises ValueError for elements of more than 32 bits and for typed random keys.
    """
    nobody = jnp.zeros(world.num_humans, jnp.int32)
    size, pack, unpack = layout((world.example_state, nobody, nobody))
    return Codec(size, lambda *observed: pack(observed), unpack)


def make_records(world: World) -> Records:
    """The layout of stored successors: each slot its state's words and its probability's bits."""
    robots = jnp.asarray(profiles(world.num_robots, world.num_actions), jnp.int32)
    slots = (len(robots), world.max_successors)
    words, pack_state, unpack_state = layout(world.example_state)
    pack_states, unpack_states = (jax.vmap(jax.vmap(f)) for f in (pack_state, unpack_state))
    nobody, listed = jnp.zeros(world.num_humans, jnp.int32), jnp.zeros((*slots, words), jnp.int32)
    size, pack, unpack = layout(Record(nobody, nobody, listed, jnp.zeros(slots, jnp.float32)))
    known = world._replace(epsilon=0.0)  # what is learned from is the prior

    def draw(state: Any, key: Array) -> Record:
        goal_key, action_key = jax.random.split(key)
        goals = draw_goals(world, goal_key)
        actions = draw_actions(known, state, goals, action_key)
        following, prob, _ = jax.vmap(
            lambda r: world.successors(state, jnp.concatenate([actions, r]))
        )(robots)
        return Record(goals, actions, following, prob)

    def packed(record: Record) -> Array:
        return pack(record._replace(states=pack_states(record.states)))

    def unpacked(words: Array) -> Record:
        record = unpack(words)
        return record._replace(states=unpack_states(record.states))

    return Records(size, draw, packed, unpacked)


def layout(example: Any) -> tuple[int, Callable[[Any], Array], Callable[[Array], Any]]:
    """Words of a tree of arrays like `example`, and the functions that pack and unpack them."""
    leaves, structure = jax.tree.flatten(jax.tree.map(jnp.asarray, example))
    for leaf in leaves:
        if not jnp.issubdtype(leaf.dtype, jnp.number) and leaf.dtype != bool:
            raise ValueError(f"example_state has an element of type {leaf.dtype}: only numbers")
        if leaf.dtype.itemsize > 4:
            raise ValueError(f"example_state has an element of type {leaf.dtype}: at most 32 bits")
    bounds = np.cumsum([leaf.size for leaf in leaves])

    def pack(tree: Any) -> Array:
        return jnp.concatenate([_encode(x) for x in jax.tree.leaves(tree)])

    def unpack(words: Array) -> Any:
        parts = jnp.split(words, bounds)  # the last one: further words
        return structure.unflatten([_decode(w, x) for w, x in zip(parts, leaves, strict=False)])

    return int(bounds[-1]), pack, unpack


def _encode(leaf: Array) -> Array:
    flat = jnp.asarray(leaf).reshape(-1)
    if jnp.issubdtype(flat.dtype, jnp.floating):
        return jax.lax.bitcast_convert_type(flat.astype(jnp.float32), jnp.int32)
    return flat.astype(jnp.int32)  # unsigned numbers, too, keep their bits


def _decode(words: Array, like: Array) -> Array:
    if jnp.issubdtype(like.dtype, jnp.floating):
        words = jax.lax.bitcast_convert_type(words, jnp.float32)
    return words.astype(like.dtype).reshape(like.shape)
