"""What a joint action can lead to.

Agents act one after the other. Those that reach for the same cell contend for it: one of them,
each with the same probability, comes first, the others after everyone else. A cell that an agent
stood on when the step began stays closed to others for that step. Leaving unsteady ground, an agent
goes astray to its left or right with half the stumbling probability each. These rules reproduce the
transitions of the reference's multigrid (docs/sources.md#empo), where nobody pushes two things at
once. With physics "reference" a row of rocks and blocks is pushed as one, contention is for the
cell that its last one lands on, and what is toggled or dropped is not contended for.

An outcome is a number that is read digit by digit, each digit one event with its own number of
ways; one with something left over has probability 0. Axes: N agents, K outcomes of an action."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from mbx.empo.multigrid import effects
from mbx.empo.multigrid import layout as maps
from mbx.empo.multigrid.effects import Turn
from mbx.empo.multigrid.layout import Layout
from mbx.empo.multigrid.state import (
    UNSTEADY,
    Board,
    Scene,
    State,
    board_arrays,
    initial_state,
    to_scene,
    to_state,
)
from mbx.types import Array

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
    asks = layout.may_enter_magic & (~layout.bush).any() | layout.is_human & layout.bush.any()
    asking = min(int(asks.sum()), sides)
    ways = 3 if layout.magic_solidify else 2
    bounds = Bounds(max_winners(num), 3**shaky, ways**asking, ways)
    if bounds.total > MAX_OUTCOMES:
        raise ValueError(
            f"{num} agents, {shaky} of them on unsteady ground and {asking} at magic walls at once,"
            f" make up to {bounds.total} outcomes of a joint action, more than {MAX_OUTCOMES}: draw"
            " fewer agents, less unsteady ground or fewer magic walls"
        )
    return bounds


def make_outcomes(layout: Layout) -> Callable[[dict[str, Array], State, Array], Any]:
    """`outcomes(own, state, actions)` -> states and probabilities, see `Grid`.
    own: `board_arrays` of the state's own map, where maps differ; {} where all are of `layout`.
    layout: one that has as much of everything as any of the maps, of the same kinds.
    """
    total, example = make_bounds(layout).total, initial_state(layout)
    width, tick, shared = layout.wall.shape[1], int(layout.horizon > 0), board_arrays(layout)

    def batched(own: dict[str, Array], states: State, actions: Array) -> tuple[State, Array]:
        # Of things the numbers come first, as in a shared board; of the ground the scenes do.
        own = {name: x if name == "terrain" else x.T for name, x in own.items()}
        board = Board(layout, **(own or shared))
        # Always so; but the compiler cannot know, and leaves the stages alone.
        runs = states.time[0] >= 0
        start, moves = staged(runs, lambda: (to_scene(states, width), tuple(actions.T)))
        every = jnp.arange(total, dtype=jnp.int32)
        after, prob = staged(runs, lambda: jax.vmap(lambda k: _step(board, start, moves, k))(every))
        after = jax.tree.map(lambda x: jnp.broadcast_to(x, (total, len(states.time))), after)
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
    flat = jax.custom_batching.custom_vmap(lambda *arguments: function(*arguments))

    @flat.def_vmap
    def _(size: int, in_batched: Any, *arguments: Any) -> Any:
        wide = lambda x, is_in: x if is_in else jnp.broadcast_to(x, (size, *x.shape))  # noqa: E731
        arguments = jax.tree.map(wide, arguments, tuple(in_batched))
        inner = jax.tree.leaves(arguments)[0].shape[1]
        joined = jax.tree.map(lambda x: x.reshape(size * inner, *x.shape[2:]), arguments)
        split = lambda x: x.reshape(size, inner, *x.shape[1:])  # noqa: E731
        result = jax.tree.map(split, flat(*joined))
        return result, jax.tree.map(lambda x: True, result)

    def one(*arguments: Any) -> Any:
        result = flat(*jax.tree.map(lambda x: x[None], arguments))
        return jax.tree.map(lambda x: x[0], result)

    return one


def _step(board: Board, start: Scene, actions: Scalars, outcome: Array) -> tuple[Scene, Array]:
    """The `outcome`-th scene that a joint action can lead to, and its probability."""
    num, layout = len(actions), board.layout
    bounds, width = make_bounds(layout), layout.wall.shape[1]
    actions, scene = effects.commanded(layout, start, actions)
    steps = [(actions[i] == maps.FORWARD) & scene.alive[i] for i in range(num)]
    heading, prob, rest = scene.heading, jnp.float32(1.0), outcome
    if bounds.slips > 1:
        ground = [effects.terrain(board, cell) & UNSTEADY for cell in scene.cell]
        shaky = tuple(step & (g != 0) for step, g in zip(steps, ground, strict=True))
        stumble = jnp.float32(layout.stumble)
        shares = (1.0 - stumble, stumble / 2.0, stumble / 2.0)
        astray, prob, rest = draw(shaky, rest, shares)
        turned = (jnp.where(way == 2, 1, -way) for way in astray)  # 1 is left, 2 right
        heading = tuple((h + turn) & 3 for h, turn in zip(heading, turned, strict=True))
        scene = scene._replace(heading=heading)
    deltas = tuple(effects.delta(h, width) for h in heading)
    ahead = tuple(c + d for c, d in zip(scene.cell, deltas, strict=True))
    answer = (jnp.int32(0),) * num
    if bounds.magic > 1:
        who = layout.is_human, layout.may_enter_magic
        faced = zip(steps, ahead, heading, *who, strict=True)
        asking = tuple(
            step & effects.magic_ahead(board, scene.solid, *facing) for step, *facing in faced
        )
        entry, solidify = jnp.float32(layout.magic_entry), jnp.float32(layout.magic_solidify)
        refusals = ((1.0 - entry) * (1.0 - solidify), (1.0 - entry) * solidify)
        shares = (entry, *refusals)[: bounds.magic_ways]  # ENTER, REFUSED, PETRIFIED
        answer, chance, rest = draw(asking, rest, shares)
        prob = prob * chance
    reaches = [(actions[i] >= maps.FORWARD) & scene.alive[i] for i in range(num)]
    claims = tuple(jnp.where(reaches[i], ahead[i], -1 - i) for i in range(num))
    seen = (scene.cell, heading, ahead, deltas, layout.is_human, layout.may_push)
    seen = (*seen, layout.may_enter_magic, answer)
    if layout.physics == "reference":
        claims = tuple(
            _claim(board, scene, Turn(jnp.int32(i), *(x[i] for x in seen), start), actions[i])
            for i in range(num)
        )
    fits = rest < bounds.contests
    rest = jnp.minimum(rest, bounds.contests - 1)
    order, chance, rest = contend(claims, rest, bounds.contests)
    prob = jnp.where(fits & (rest == 0), prob * chance, 0.0)
    for agent in order:
        agent = effects.once(agent, num)
        turn = Turn(agent, *(effects.pick(values, agent) for values in seen), start)
        scene = effects.act(board, scene, turn, effects.pick(actions, agent))
    return effects.remembered(layout, start, scene, actions), prob


def _claim(board: Board, scene: Scene, turn: Turn, action: Array) -> Array:
    """What an agent contends for by the reference's rules: a cell, an item, or nothing of anyone's
    (a number of its own). Things are pushed to the cell where the last of a row lands.
    """
    nothing, alive = -1 - turn.agent, effects.pick(scene.alive, turn.agent)
    row, landing, stuck, _ = effects.push(board, scene, turn)
    pushed = jnp.where(stuck, nothing, landing)
    item = effects.among(scene.items, turn.ahead)
    taken = jnp.where(item, turn.ahead + board.layout.wall.size, nothing)
    claim = jnp.where(action == maps.PICK_UP, taken, nothing)
    claim = jnp.where(action == maps.FORWARD, pushed if row else turn.ahead, claim)
    return jnp.where(alive, claim, nothing)


def max_winners(num_agents: int) -> int:
    """Largest product of block sizes over the ways to split `num_agents` contenders into blocks."""
    best = [1] * (num_agents + 1)
    for n in range(1, num_agents + 1):
        best[n] = max(size * best[n - size] for size in range(1, n + 1))
    return best[num_agents]


def contend(claims: Scalars, outcome: Array, most: int) -> tuple[Scalars, Array, Array]:
    """Who comes first in the `outcome`-th way to settle all contests.
    claims: N numbers; equal ones contend. outcome: below the static bound `most`.
    Returns (order, N agent numbers: winners and all who contend with nobody, then the rest, each by
    number; probability of the way; what is left of `outcome`).
    """
    num, prob, first = len(claims), jnp.float32(1.0), []
    for i in range(num):
        same = [claims[i] == claims[j] for j in range(num)]
        size = sum(x.astype(jnp.int32) for x in same)
        rank = sum((x.astype(jnp.int32) for x in same[:i]), start=jnp.int32(0))
        leads = rank == 0
        radix = jnp.where(leads, size, 1)
        outcome, digit = divide(outcome, radix, most)
        prob = prob / radix
        # A block's leader draws for it; the others look up whom it drew.
        drawn = digit
        for j in range(i):
            drawn = jnp.where(same[j] & first[j][1], first[j][0], drawn)
        first.append((drawn, leads, rank))
    loses = [(rank != drawn).astype(jnp.int32) for drawn, _, rank in first]
    winners = num - sum(loses)
    place, lost = [], jnp.int32(0)
    for i in range(num):
        place.append(jnp.where(loses[i] > 0, winners + lost, i - lost))
        lost = lost + loses[i]
    order = tuple(
        sum((jnp.where(place[i] == p, i, 0) for i in range(1, num)), start=jnp.int32(0))
        for p in range(num)
    )
    return order, prob, outcome


def draw(affected: Scalars, outcome: Array, shares: Scalars) -> tuple[Scalars, Array, Array]:
    """What befalls each who is affected: (its digit, 0 for others; probability; rest of outcome).
    shares: the probability of each digit.
    """
    digits, prob, ways = [], jnp.float32(1.0), len(shares)
    for here in affected:
        digit = jnp.where(here, outcome % ways, 0)
        outcome = jnp.where(here, outcome // ways, outcome)
        chance = shares[0]
        for number, share in enumerate(shares[1:], start=1):
            chance = jnp.where(digit == number, share, chance)
        prob = prob * jnp.where(here, chance, 1.0)
        digits.append(digit)
    return tuple(digits), prob, outcome


def divide(number: Array, by: Array, most: int) -> tuple[Array, Array]:
    """Quotient and remainder of a number below `most`, by comparisons: these make vector code."""
    quotient = jnp.zeros_like(number)
    for multiple in range(1, most):
        quotient = quotient + (number >= multiple * by)
    return quotient, number - quotient * by


def achieved(layout: Layout, state: State) -> Array:
    """`[H, G]` bool: which goals hold in a state. The layout's goals may be traced."""
    rectangles, humans = jnp.asarray(layout.goals), jnp.asarray(layout.humans)
    x, y = (state.agents[humans, c].astype(jnp.int32)[:, None] for c in (0, 1))
    inside = (rectangles[..., 0] <= x) & (x <= rectangles[..., 2])
    inside &= (rectangles[..., 1] <= y) & (y <= rectangles[..., 3])
    return inside & (state.alive[humans] > 0)[:, None]


def terminal(layout: Layout, state: State) -> Array:
    """Whether the horizon is reached, where there is one."""
    return (state.time >= layout.horizon) & (layout.horizon > 0)


def make_grid(layout: Layout) -> Grid:
    """The layout's functions. Raises ValueError for far too many outcomes, see `make_bounds`."""
    return Grid(
        layout=layout,
        initial=initial_state(layout),
        outcomes=functools.partial(make_outcomes(layout), {}),
        terminal=functools.partial(terminal, layout),
        achieved=functools.partial(achieved, layout),
    )
