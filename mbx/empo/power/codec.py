"""How a world's states, and their successors, lie in a replay: as flat int32 words, exactly.

    codec = make_codec(world)            # state, goals, last human actions <-> one observation
    records = make_records(world)        # successors of a state for one draw of human actions

EMPO's replay needs states only, successors are recomputed; records are for worlds whose
successors cost more to enumerate than to store.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from mbx.empo.power.worlds import World, draw_actions, draw_goals, profiles


class Codec(NamedTuple):
    """An observation of a world: its state, the humans' goals and their last actions, one array.
    size: int32 words W. pack: (state, goals `[H]`, actions `[H]`) -> `[W]` int32. unpack: obs `[W]`
    -> (state, goals, actions), exactly what was packed; further words of obs are ignored.
    """

    size: int
    pack: Callable[[Any, Array, Array], Array]
    unpack: Callable[[Array], tuple[Any, Array, Array]]


class Record(NamedTuple):
    """Successors of a state for one draw of goals and human actions, all joint robot actions.
    goals, actions `[H]`. states `[R, K, ...]`, prob `[R, K]`, 0 in unused slots.
    """

    goals: Array
    actions: Array
    states: Any
    prob: Array


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
    leaves, structure = jax.tree.flatten(jax.tree.map(jnp.asarray, world.example_state))
    for leaf in leaves:
        if not jnp.issubdtype(leaf.dtype, jnp.number) and leaf.dtype != bool:
            raise ValueError(f"example_state has an element of type {leaf.dtype}: only numbers")
        if leaf.dtype.itemsize > 4:
            raise ValueError(f"example_state has an element of type {leaf.dtype}: at most 32 bits")
    bounds = np.cumsum([leaf.size for leaf in leaves] + [world.num_humans] * 2)

    def pack(state: Any, goals: Array, actions: Array) -> Array:
        return jnp.concatenate([_encode(x) for x in (*jax.tree.leaves(state), goals, actions)])

    def unpack(obs: Array) -> tuple[Any, Array, Array]:
        *words, goals, actions, _ = jnp.split(obs, bounds)
        state = [_decode(w, like) for w, like in zip(words, leaves, strict=True)]
        return jax.tree.unflatten(structure, state), goals, actions

    return Codec(int(bounds[-1]), pack, unpack)


def make_records(world: World) -> Records:
    """The layout of stored successors: each slot its state's words and its probability's bits."""
    robots = jnp.asarray(profiles(world.num_robots, world.num_actions), jnp.int32)
    codec, humans = make_codec(world), world.num_humans
    state_words = codec.size - 2 * humans
    slots = (len(robots), world.max_successors)
    nothing = jnp.zeros(humans, jnp.int32)

    known = world._replace(epsilon=0.0)  # what is learned from is the prior

    def draw(state: Any, key: Array) -> Record:
        goal_key, action_key = jax.random.split(key)
        goals = draw_goals(world, goal_key)
        actions = draw_actions(known, state, goals, action_key)
        following, prob, _ = jax.vmap(
            lambda r: world.successors(state, jnp.concatenate([actions, r]))
        )(robots)
        return Record(goals, actions, following, prob)

    def pack(record: Record) -> Array:
        words = jax.vmap(jax.vmap(lambda s: codec.pack(s, nothing, nothing)[:state_words]))
        parts = (record.goals, record.actions, words(record.states), record.prob)
        return jnp.concatenate([_encode(x) for x in parts])

    def unpack(words: Array) -> Record:
        bounds = np.cumsum([humans, humans, slots[0] * slots[1] * state_words])
        goals, actions, states, prob = jnp.split(words, bounds)
        states = states.reshape(*slots, state_words)
        padded = jnp.pad(states, ((0, 0), (0, 0), (0, 2 * humans)))
        decoded = jax.vmap(jax.vmap(lambda w: codec.unpack(w)[0]))(padded)
        return Record(goals, actions, decoded, _decode(prob, jnp.zeros(slots, jnp.float32)))

    size = 2 * humans + slots[0] * slots[1] * (state_words + 1)
    return Records(size, draw, pack, unpack)


def _encode(leaf: Array) -> Array:
    flat = jnp.asarray(leaf).reshape(-1)
    if jnp.issubdtype(flat.dtype, jnp.floating):
        flat = flat.astype(jnp.float32)
    if flat.dtype in (jnp.uint32, jnp.float32):
        return jax.lax.bitcast_convert_type(flat, jnp.int32)
    return flat.astype(jnp.int32)


def _decode(words: Array, like: Array) -> Array:
    floating = jnp.issubdtype(like.dtype, jnp.floating)
    if floating or like.dtype == jnp.uint32:
        words = jax.lax.bitcast_convert_type(words, jnp.float32 if floating else jnp.uint32)
    return words.astype(like.dtype).reshape(like.shape)
