"""A grid as the `World` that EMPO's agent trains on, with a prior for its humans.

Small maps are listed: their states are numbers, for tables and the exact solution, whatever their
humans do. Larger ones stay functions, and their humans take shortest ways or act at random.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mbx.empo.multigrid.dynamics import Grid, make_grid
from mbx.empo.multigrid.export import TooManyStates, export
from mbx.empo.multigrid.layout import Layout, load_world
from mbx.empo.multigrid.paths import make_paths
from mbx.empo.multigrid.render import make_render
from mbx.empo.multigrid.state import CARRIED, INSIDE, State, unpack
from mbx.empo.multigrid.text import ACTIONS, make_text
from mbx.empo.power.equations import PowerParams
from mbx.empo.power.named import HumanModel, NamedWorld
from mbx.empo.power.solver import solve
from mbx.empo.power.worlds import TabularWorld, Views, World, tabular_world
from mbx.types import Array

MAX_JOINT = 64  # joint actions up to which states are listed, unless "exact" asks for it
LONG = 64  # steps of an episode beyond which its time is one number among the features


def make_world(
    source: str | Layout,
    humans: HumanModel | str | None = None,
    *,
    params: PowerParams | None = None,
) -> NamedWorld:
    """The world of a map.

    Args:
        source: a name or path for `load_world`, or a layout.
        humans: who lives there, or only the name of the model; None: as the map's file says.
        params: of the equations; None: as the map's file says, else the theory's defaults where
            the map is listed.

    Raises:
        ValueError: for an exact prior of too many states, a table of a world that is not listed.
    """
    layout, own, people = source, None, None
    if not isinstance(source, Layout):
        layout, own, people = load_world(source)
    if isinstance(humans, str):
        humans = HumanModel(humans)
    humans = humans or people or HumanModel()
    params = params or own
    automatic = humans.model == "auto"
    grid = make_grid(layout)
    listed = _listed(grid, humans, layout if isinstance(source, Layout) else source)
    if listed is None:
        if humans.model == "file":
            raise ValueError(f"humans.file={humans.file!r}: tables are for worlds that are listed")
        world = open_world(grid, _policy(layout, humans, params))
        return NamedWorld(world, params, prior="paths" if automatic else humans.model)
    table, flat = listed
    params = params or PowerParams()
    every = unpack(jnp.asarray(flat), grid.initial)
    solution = solve(table, params, human_policy=_tabulated(layout, humans, params, every))
    place = lambda number: jax.tree.map(lambda x: x[number], every)  # noqa: E731
    views = make_views(layout)
    views = views._replace(
        render=lambda number, goals: make_render(layout)(place(number), goals),
        positions=lambda number, look=views.positions: look(place(number)),
        robots=lambda number, look=views.robots: look(place(number)),
        text=lambda number, goals, draw=views.text: draw(place(number), goals),
    )
    looks = jax.jit(jax.vmap(make_features(grid)))(every)
    world = tabular_world(table, solution, features=np.asarray(looks), start=0, views=views)
    prior = "exact" if automatic else humans.model
    return NamedWorld(world, params, table, solution, prior=prior)


def _listed(
    grid: Grid, humans: HumanModel, source: str | Layout
) -> tuple[TabularWorld, np.ndarray] | None:
    """The map's states and transitions; None, and a line that says why, where they are too many."""
    layout = grid.layout
    joint = layout.num_actions ** len(layout.agents)
    why = f"{joint} joint actions, more than {MAX_JOINT}"
    if humans.model == "exact" or joint <= MAX_JOINT:
        try:
            return _export(grid, humans.max_states)
        except TooManyStates:
            if humans.model == "exact":
                raise
            why = f"more than humans.max_states={humans.max_states} states"
    if humans.model == "auto":
        name = source if isinstance(source, str) else "the map"
        print(f"{name}: {why}; states are not listed, humans take shortest ways")
    return None


_EXPORTED: dict[Any, Any] = {}


def _export(grid: Grid, limit: int) -> tuple[TabularWorld, np.ndarray]:
    """`export`, made once for a map that is asked for with several parameters or humans."""
    parts = (x.tobytes() if isinstance(x, np.ndarray) else x for x in grid.layout)
    key = (*parts, grid.layout.wall.shape, grid.layout.goals.shape, limit)
    if key not in _EXPORTED:
        if len(_EXPORTED) >= 8:
            _EXPORTED.clear()
        _EXPORTED[key] = export(grid, limit=limit)
    return _EXPORTED[key]


def _policy(
    layout: Layout, humans: HumanModel, params: PowerParams | None
) -> Callable[[State], Array]:
    """The prior as a function of a state, with the share `nu_h` of uniform actions."""
    if humans.model == "uniform":
        shape = (*layout.goals.shape[:2], layout.num_actions)
        return lambda state: jnp.full(shape, 1.0 / layout.num_actions)
    paths, share = make_paths(layout, humans.beta), params.nu_h if params else 0.0
    return lambda state: (1.0 - share) * paths(state) + share / layout.num_actions


def _tabulated(
    layout: Layout, humans: HumanModel, params: PowerParams, every: State
) -> np.ndarray | None:
    """The prior [H, G, S, A] of all states; None: the exact one."""
    if humans.model in ("auto", "exact"):
        return None
    if humans.model == "file":
        return np.load(humans.file)
    policy = jax.jit(jax.vmap(_policy(layout, humans, params)))(every)
    return np.moveaxis(np.asarray(policy), 0, 2)


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
    """Pictures and text of a grid's states, and where its humans stand."""
    humans, robots = jnp.asarray(layout.humans), jnp.asarray(layout.robots)
    return Views(
        render=make_render(layout),
        positions=lambda state: state.agents[humans, :2],
        robots=lambda state: state.agents[robots, :2],
        size=layout.wall.shape[::-1],
        blocked=layout.wall,
        text=make_text(layout),
        actions=ACTIONS[: layout.num_actions],
    )


def open_world(grid: Grid, human_policy: Callable[[State], Array]) -> World:
    """A world whose states are not listed: they are `State`s."""
    layout = grid.layout
    order = np.concatenate([layout.humans, layout.robots])
    back = jnp.asarray(np.argsort(order))
    num_humans, num_goals = layout.goals.shape[:2]
    size = np.array([layout.wall.shape[1], layout.wall.shape[0]] * 2, np.float32)
    features = make_features(grid)

    def successors(state: State, joint: Array) -> tuple[State, Array, Array]:
        states, prob = grid.outcomes(state, joint[back])
        return states, prob, jnp.bool_(False)

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
