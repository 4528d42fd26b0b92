"""What a joint action can lead to.

Agents act one after the other. Those that reach for the same cell contend for it: one of them,
each with the same probability, comes first, the others after everyone else (so they find it taken,
unless the first could not move). A cell that an agent stood on when the step began stays closed to
others for that step. Leaving unsteady ground, an agent goes astray to its left or right with half
the stumbling probability each. A magic wall lets an agent through from its magic side with a
probability, and may turn to stone when it does not. These rules reproduce the transitions of the
reference's multigrid (docs/sources.md#empo). Axes: N agents, K outcomes of a joint action.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from mbx.empo.multigrid import chances, effects
from mbx.empo.multigrid import layout as maps
from mbx.empo.multigrid.effects import Turn
from mbx.empo.multigrid.layout import Layout
from mbx.empo.multigrid.state import (
    UNSTEADY,
    Board,
    Scene,
    State,
    initial_state,
    make_board,
    to_scene,
    to_state,
)

Array = jax.Array
Scalars = tuple[Array, ...]

MAX_OUTCOMES = 4096


class Grid(NamedTuple):
    """A layout's pure functions of one un-batched state."""

    layout: Layout
    initial: State  # the state an episode starts in
    # (state, actions `[N]`) -> (states `[K, ...]`, prob `[K]`, 0 for unused ones)
    outcomes: Callable[[State, Array], tuple[State, Array]]
    terminal: Callable[[State], Array]  # state -> bool, the horizon is reached (never without one)
    achieved: Callable[[State], Array]  # state -> `[H, G]` bool
    num_outcomes: int  # K, which no joint action exceeds


class Bounds(NamedTuple):
    """Most ways of each kind of chance in one joint action, and the ways of one magic answer."""

    contests: int
    slips: int
    magic: int
    magic_ways: int

    @property
    def total(self) -> int:
        """K."""
        return self.contests * self.slips * self.magic


def make_bounds(layout: Layout) -> Bounds:
    """The bounds that follow from the layout.
    Raises ValueError where a joint action could have more than MAX_OUTCOMES outcomes.
    """
    num = len(layout.agents)
    shaky = min(num, int(layout.unsteady.sum())) if layout.stumble else 0
    sides = sum(4 if side == 4 else 1 for side in layout.magic_side.tolist())
    asking = min(int(layout.may_enter_magic.sum()), sides)
    ways = 3 if layout.magic_solidify else 2
    bounds = Bounds(chances.max_winners(num), 3**shaky, ways**asking, ways)
    if bounds.total > MAX_OUTCOMES:
        raise ValueError(
            f"{num} agents, {shaky} of them on unsteady ground and {asking} at magic walls at once,"
            f" make up to {bounds.total} outcomes of a joint action, more than {MAX_OUTCOMES}: draw"
            " fewer agents, less unsteady ground or fewer magic walls"
        )
    return bounds


# What of a board differs between maps of one family; the rest decides which rules there are.
OWN = (
    "terrain",
    "door_cell",
    "door_color",
    "item_color",
    "button_cell",
    "magic_cell",
    "magic_side",
)


def make_outcomes(layout: Layout) -> Callable[[dict[str, Array], State, Array], Any]:
    """`outcomes(own, state, actions)` -> states and probabilities, see `Grid`.

    own: fields of OWN of the state's own board, where boards differ; {} where all are of `layout`.
    layout: one that has as much of everything as any of the boards, of the same kinds.
    """
    bounds, example = make_bounds(layout), initial_state(layout)
    width, tick, shared = layout.wall.shape[1], int(layout.horizon > 0), make_board(layout)
    step = functools.partial(_step, layout, bounds, width)

    def batched(own: dict[str, Array], states: State, actions: Array) -> tuple[State, Array]:
        # Of things the numbers come first, as in a shared board; of the ground the scenes do.
        own = {name: x if name == "terrain" else x.T for name, x in own.items()}
        board = shared._replace(**own)
        # Always so; but the compiler cannot know, and leaves the stages alone.
        runs = states.time[0] >= 0
        start, moves = staged(runs, lambda: (to_scene(states, width), tuple(actions.T)))
        after, prob = staged(
            runs,
            lambda: jax.vmap(lambda outcome: step(board, start, moves, outcome))(
                jnp.arange(bounds.total, dtype=jnp.int32)
            ),
        )
        shape = (bounds.total, states.time.shape[0])
        after = jax.tree.map(lambda x: jnp.broadcast_to(x, shape), after)
        write = jax.vmap(lambda s: to_state(s, example, width, states.time + tick), out_axes=1)
        return staged(runs, lambda: write(after)), prob.T

    return flatten_vmaps(batched)


def staged(runs: Array, function: Callable[[], Any]) -> Any:
    """`function()` where `runs`, else zeros; what it returns is computed once.
    Compilers fuse cheap operations into whatever uses them and so compute them again for every use:
    across a whole step that is ten times the work. They do not reach into a branch.
    """
    shapes = jax.eval_shape(function)
    nothing = lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)  # noqa: E731
    return jax.lax.cond(runs, function, nothing)


def flatten_vmaps(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function(*arguments)` under any nest of `vmap`s as one call with one batch axis.
    One long axis becomes vector code; a nest of vmaps ends in axes of a few entries. The function
    takes and returns one leading axis everywhere.
    """

    def plain(*arguments: Any) -> Any:
        one = function(*jax.tree.map(lambda x: x[None], arguments))
        return jax.tree.map(lambda x: x[0], one)

    flat = jax.custom_batching.custom_vmap(lambda *arguments: function(*arguments))
    single = jax.custom_batching.custom_vmap(plain)

    def spread(size: int, batched: Any, arguments: Any) -> Any:
        wide = lambda x, is_in: x if is_in else jnp.broadcast_to(x, (size, *x.shape))  # noqa: E731
        return jax.tree.map(wide, arguments, tuple(batched))

    def batched(result: Any) -> Any:
        return result, jax.tree.map(lambda x: True, result)

    @single.def_vmap
    def _(size: int, in_batched: Any, *arguments: Any) -> Any:
        return batched(flat(*spread(size, in_batched, arguments)))

    @flat.def_vmap
    def _(size: int, in_batched: Any, *arguments: Any) -> Any:
        arguments = spread(size, in_batched, arguments)
        inner = jax.tree.leaves(arguments)[0].shape[1]
        joined = jax.tree.map(lambda x: x.reshape(size * inner, *x.shape[2:]), arguments)
        result = flat(*joined)
        return batched(jax.tree.map(lambda x: x.reshape(size, inner, *x.shape[1:]), result))

    return single


def _step(
    layout: Layout,
    bounds: Bounds,
    width: int,
    board: Board,
    scene: Scene,
    actions: Scalars,
    outcome: Array,
) -> tuple[Scene, Array]:
    """The `outcome`-th scene that a joint action can lead to, and its probability."""
    num, start = len(actions), scene
    actions, scene = effects.commanded(board, layout, scene, actions)
    steps = [(actions[i] == maps.FORWARD) & scene.alive[i] for i in range(num)]
    heading, prob, rest = scene.heading, jnp.float32(1.0), outcome
    if bounds.slips > 1:
        shaky = [
            steps[i] & ((effects.terrain(board, scene.cell[i]) & UNSTEADY) != 0) for i in range(num)
        ]
        turns, prob, rest = chances.stumbles(tuple(shaky), rest, board.stumble)
        heading = tuple((h + t) & 3 for h, t in zip(heading, turns, strict=True))
        scene = scene._replace(heading=heading)
    deltas = tuple(effects.delta(h, width) for h in heading)
    ahead = tuple(c + d for c, d in zip(scene.cell, deltas, strict=True))
    answer = (jnp.int32(0),) * num
    if bounds.magic > 1:
        asking = tuple(
            steps[i]
            & effects.magic_ahead(board, scene.solid, ahead[i], heading[i], board.may_enter[i])
            for i in range(num)
        )
        answer, chance, rest = chances.answers(
            asking, rest, board.magic_entry, board.magic_solidify, bounds.magic_ways
        )
        prob = prob * chance
    reaches = [(actions[i] >= maps.FORWARD) & scene.alive[i] for i in range(num)]
    claims = tuple(jnp.where(reaches[i], ahead[i], -1 - i) for i in range(num))
    fits = rest < bounds.contests
    rest = jnp.minimum(rest, bounds.contests - 1)
    order, chance, rest = chances.contend(claims, rest, bounds.contests)
    prob = jnp.where(fits & (rest == 0), prob * chance, 0.0)
    for agent in order:
        agent = effects.once(agent, num)
        turn = Turn(
            agent,
            *(effects.pick(v, agent) for v in (scene.cell, heading, ahead, deltas)),
            *(effects.pick(tuple(v), agent) for v in (board.is_human, board.may_enter)),
            effects.pick(answer, agent),
            start.cell,
            tuple(b[1] for b in start.buttons),
        )
        scene = effects.act(board, layout, scene, turn, effects.pick(actions, agent))
    return effects.remembered(layout, start, scene, actions), prob


def achieved(layout: Layout, state: State) -> Array:
    """`[H, G]` bool: which goals hold in a state. The layout's goals may be traced."""
    rectangles, humans = jnp.asarray(layout.goals), jnp.asarray(layout.humans)
    x, y = (state.agents[humans, c].astype(jnp.int32)[:, None] for c in (0, 1))
    inside = (rectangles[..., 0] <= x) & (x <= rectangles[..., 2])
    inside &= (rectangles[..., 1] <= y) & (y <= rectangles[..., 3])
    return inside & (state.alive[humans] > 0)[:, None]


def make_grid(layout: Layout) -> Grid:
    """The layout's functions. Raises ValueError for far too many outcomes, see `make_bounds`."""
    return Grid(
        layout=layout,
        initial=initial_state(layout),
        outcomes=functools.partial(make_outcomes(layout), {}),
        terminal=lambda state: (state.time >= layout.horizon) & (layout.horizon > 0),
        achieved=functools.partial(achieved, layout),
        num_outcomes=make_bounds(layout).total,
    )
