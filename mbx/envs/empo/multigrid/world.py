"""A grid as the `World` that EMPO's agent trains on, with a prior for its humans.

"exact": all states are listed and phase 1 is solved; for small maps, and with tables. "boltzmann":
every human prefers steps that shorten its way to the goal on the bare map (walls and lava only),
for maps with too many states to list. "uniform": any action.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mbx.envs.empo.multigrid import layout as maps
from mbx.envs.empo.multigrid.dynamics import Grid, make_grid
from mbx.envs.empo.multigrid.export import export
from mbx.envs.empo.multigrid.layout import DIRECTIONS, Layout, load_map
from mbx.envs.empo.multigrid.render import make_render
from mbx.envs.empo.multigrid.state import CARRIED, INSIDE, State, unpack
from mbx.power.equations import PowerParams
from mbx.power.named import NamedWorld
from mbx.power.solver import solve
from mbx.power.worlds import Views, World, tabular_world

Array = jax.Array

LONG = 64  # steps of an episode beyond which its time is one number among the features
PRIORS = ("exact", "boltzmann", "uniform")


def make_world(
    source: str | Layout,
    human_policy: str = "auto",
    *,
    params: PowerParams | None = None,
    beta: float = 3.0,
    limit: int = 5_000,
) -> NamedWorld:
    """The world of a map (a name or path for `load_map`, or a layout).

    human_policy: one of `PRIORS`, or "auto": exact where the map has at most `limit` states and few
    joint actions, else boltzmann with inverse temperature `beta` a step. params: of the exact
    solution. Raises ValueError for an unknown prior, or an exact one of too many states.
    """
    layout = source if isinstance(source, Layout) else load_map(source)
    grid = make_grid(layout)
    if human_policy == "auto":
        small = layout.num_actions ** len(layout.agents) <= 64
        human_policy = "exact" if small else "boltzmann"
    if human_policy not in PRIORS:
        raise ValueError(f"human_policy={human_policy!r}: choose one of {('auto', *PRIORS)}")
    if human_policy != "exact":
        return NamedWorld(open_world(grid, beta if human_policy == "boltzmann" else 0.0), params)
    params = PowerParams() if params is None else params
    table, flat = export(grid, limit=limit)
    solution = solve(table, params)
    looks = jax.jit(jax.vmap(make_features(grid)))(unpack(jnp.asarray(flat), grid.initial))
    views, every = make_views(layout), unpack(jnp.asarray(flat), grid.initial)
    place = lambda number: jax.tree.map(lambda x: x[number], every)  # noqa: E731
    views = views._replace(
        render=lambda number, goals: make_render(layout)(place(number), goals),
        positions=lambda number, look=views.positions: look(place(number)),
    )
    world = tabular_world(table, solution, features=np.asarray(looks), start=0, views=views)
    return NamedWorld(world, params, table, solution)


def make_features(grid: Grid) -> Any:
    """`features(state) -> [D]`: one-hot places, directions and doors, flags, the share of time."""
    height, width = grid.layout.wall.shape

    def places(cells: Array) -> Array:
        cells = cells.astype(jnp.int32)
        return jnp.concatenate(
            [
                jax.nn.one_hot(cells[:, 0], width).ravel(),
                jax.nn.one_hot(cells[:, 1], height).ravel(),
            ]
        )

    num, horizon = len(grid.layout.agents), grid.layout.horizon

    def clock(time: Array) -> Array:
        # One-hot: near the end every step changes the robot's value by a factor.
        if horizon > LONG:
            return (time / horizon)[None].astype(jnp.float32)
        return jax.nn.one_hot(time, horizon + 1) if horizon else jnp.zeros(0)

    def bearers(items: Array) -> Array:
        carried = items[:, :1] == CARRIED
        held = jnp.where(carried, jax.nn.one_hot(items[:, 1], num), 0.0)
        return jnp.concatenate([held, (items[:, :1] == INSIDE).astype(jnp.float32)], axis=1).ravel()

    def buttons(states: Array) -> Array:
        learned = [jax.nn.one_hot(states[:, 2], grid.layout.num_actions + 1)]
        learned.append(jax.nn.one_hot(states[:, 3], num + 1))
        parts = [states[:, :2].astype(jnp.float32), *learned]
        return jnp.concatenate(parts, axis=1).ravel()

    def features(state: State) -> Array:
        return jnp.concatenate(
            [
                places(state.agents[:, :2]),
                jax.nn.one_hot(state.agents[:, 2], 4).ravel(),
                places(state.movable),
                places(state.items),
                bearers(state.items),
                jax.nn.one_hot(state.doors, 3).ravel(),
                buttons(state.buttons),
                jax.nn.one_hot(state.forced, grid.layout.num_actions + 1).ravel(),
                state.alive.astype(jnp.float32),
                state.solid.astype(jnp.float32),
                clock(state.time),
            ]
        )

    return features


def make_views(layout: Layout) -> Views:
    """Pictures of a grid's states, and where its humans stand."""
    humans = jnp.asarray(layout.humans)
    return Views(
        render=make_render(layout),
        positions=lambda state: state.agents[humans, :2],
        size=layout.wall.shape[::-1],
        blocked=layout.wall,
    )


def distances(layout: Layout, rectangle: np.ndarray) -> np.ndarray:
    """Actions a lone agent needs to enter a rectangle, `[height, width, 4]`; inf where never."""
    height, width = layout.wall.shape
    closed = layout.wall | layout.lava
    far = np.full((height, width, 4), np.inf)
    x1, y1, x2, y2 = rectangle
    queue: deque[tuple[int, int, int]] = deque()
    for y, x in np.argwhere(~closed):
        if x1 <= x <= x2 and y1 <= y <= y2:
            far[y, x] = 0.0
            queue.extend((int(y), int(x), d) for d in range(4))
    while queue:
        y, x, d = queue.popleft()
        dx, dy = DIRECTIONS[d]
        before = [(y, x, (d + 1) % 4), (y, x, (d - 1) % 4), (y - dy, x - dx, d)]
        for yy, xx, dd in before:
            if not closed[yy, xx] and not np.isfinite(far[yy, xx, dd]):
                far[yy, xx, dd] = far[y, x, d] + 1.0
                queue.append((yy, xx, dd))
    return far


def approach_logits(layout: Layout, beta: float) -> np.ndarray:
    """Boltzmann preferences `[H, G, height, width, 4, A]`: -beta times the way left after each."""
    humans, num_goals = layout.goals.shape[:2]
    height, width = layout.wall.shape
    closed = layout.wall | layout.lava
    ways = np.stack([[distances(layout, r) for r in rows] for rows in layout.goals])
    ways = np.minimum(ways, 4.0 * height * width)
    logits = np.zeros((humans, num_goals, height, width, 4, layout.num_actions))
    for y, x in np.argwhere(~closed):
        for d, (dx, dy) in enumerate(DIRECTIONS):
            ahead = (y, x, d) if closed[y + dy, x + dx] else (y + dy, x + dx, d)
            results = [(y, x, d), (y, x, (d - 1) % 4), (y, x, (d + 1) % 4), ahead]
            for action in range(layout.num_actions):
                after = results[action] if action <= maps.FORWARD else (y, x, d)
                logits[:, :, y, x, d, action] = -beta * ways[(slice(None), slice(None), *after)]
    return logits


def open_world(grid: Grid, beta: float) -> World:
    """A world whose states are not listed: states are `State`s, humans follow Boltzmann priors."""
    layout = grid.layout
    order = np.concatenate([layout.humans, layout.robots])
    back = jnp.asarray(np.argsort(order))
    humans = jnp.asarray(layout.humans)
    logits = jnp.asarray(approach_logits(layout, beta), jnp.float32)
    num_humans, num_goals = layout.goals.shape[:2]
    size = np.array([layout.wall.shape[1], layout.wall.shape[0]] * 2, np.float32)
    features = make_features(grid)

    def successors(state: State, joint: Array) -> tuple[State, Array, Array]:
        states, prob = grid.outcomes(state, joint[back])
        return states, prob, jnp.bool_(False)

    def human_policy(state: State) -> Array:
        x, y, d = (state.agents[humans, c].astype(jnp.int32) for c in range(3))
        return jax.nn.softmax(logits[jnp.arange(num_humans), :, y, x, d], axis=-1)

    return World(
        num_humans=num_humans,
        num_robots=len(layout.robots),
        num_actions=layout.num_actions,
        num_goals=num_goals,
        max_successors=grid.num_outcomes,
        num_states=None,
        example_state=grid.initial,
        init=lambda key: grid.initial,
        successors=successors,
        terminal=grid.terminal,
        achieved=grid.achieved,
        human_policy=human_policy,
        features=features,
        index=lambda state: jnp.int32(0),
        goal_features=jnp.asarray(layout.goals / size, jnp.float32),
        goal_weight=jnp.asarray(layout.goal_weight, jnp.float32),
        views=make_views(layout),
    )
