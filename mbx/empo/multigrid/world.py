"""Grids as the `World`s that EMPO's agent trains on, with a prior for their humans.

Small maps are listed: their states are numbers, for tables and the exact solution, whatever their
humans do. Larger ones stay functions, and their humans take shortest ways or act at random.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mbx.empo.multigrid import dynamics
from mbx.empo.multigrid.export import TooManyStates, export
from mbx.empo.multigrid.layout import Layout, load_world
from mbx.empo.multigrid.paths import make_paths
from mbx.empo.multigrid.render import ACTIONS, make_render, make_text
from mbx.empo.multigrid.state import CARRIED, INSIDE, State
from mbx.empo.power.equations import PowerParams
from mbx.empo.power.named import HumanModel, NamedWorld
from mbx.empo.power.solver import solve
from mbx.empo.power.worlds import TabularWorld, Views, World, tabular_world
from mbx.types import Array

MAX_JOINT = 64  # joint actions up to which states are listed, unless "exact" asks for it
LONG = 64  # steps of an episode beyond which its time is one number among the features

# From a world's state: the map it is on, and what happens there.
Read = Callable[[Any], tuple[Layout, State]]


def make_world(
    source: str | Layout,
    humans: HumanModel | str | None = None,
    *,
    params: PowerParams | None = None,
) -> NamedWorld:
    """The world of a map.
    source: a name or path for `load_world`, or a layout. humans: who lives there, or only the name
    of the model; None: as the map's file says. params: of the equations; None: as the map's file
    says, else the theory's defaults where the map is listed.
    Raises ValueError for an exact prior of too many states.
    """
    name, own, people = "the map", None, None
    if isinstance(source, str):
        name, (source, own, people) = source, load_world(source)
    layout = source
    if isinstance(humans, str):
        humans = HumanModel(humans)
    humans, params = humans or people or HumanModel(), params or own
    if humans.model == "learned":
        raise ValueError("humans.model='learned' is for empo:maps/SOURCE, also the file of one map")
    listed = _listed(layout, humans, name)
    on_map: Read = lambda state: (layout, state)  # noqa: E731
    if listed is None:
        prior = "paths" if humans.model == "auto" else humans.model
        return NamedWorld(_open_world(layout, on_map, humans, params), params, prior=prior)
    table, every = listed
    params = params or PowerParams()

    def listed_prior(humans: HumanModel, nu_h: float) -> np.ndarray:
        policy = jax.jit(jax.vmap(make_prior(layout, on_map, humans, nu_h)))(every)
        return np.moveaxis(np.asarray(policy), 0, 2)

    by_hand = humans.model in ("paths", "uniform")
    given = listed_prior(humans, params.nu_h) if by_hand else None
    ways = HumanModel("paths", beta=humans.beta)
    habit = listed_prior(ways, 0.0) if humans.habit == "paths" and not by_hand else None
    solution = solve(table, params, human_policy=given, habit=habit, goal_prob=layout.goal_prob)
    views = make_views(layout, lambda number: (layout, jax.tree.map(lambda x: x[number], every)))
    looks = np.asarray(jax.jit(jax.vmap(make_features(layout)))(every))
    more = {"features": looks, "start": 0, "views": views, "goal_prob": layout.goal_prob}
    world = tabular_world(table, solution, **more)
    prior = "exact" if humans.model == "auto" else humans.model
    return NamedWorld(world, params, table, solution, prior=prior)


def _listed(layout: Layout, humans: HumanModel, name: str) -> tuple[TabularWorld, State] | None:
    """The map's transitions and states; None, and a line that says why, where they are too many."""
    joint = layout.num_actions ** len(layout.agents)
    why = f"{joint} joint actions, more than {MAX_JOINT}"
    if humans.model == "exact" or joint <= MAX_JOINT:
        try:
            return _export(layout, humans.max_states)
        except TooManyStates:
            if humans.model == "exact":
                raise
            why = f"more than humans.max_states={humans.max_states} states"
    if humans.model == "auto":
        print(f"{name}: {why}; states are not listed, humans take shortest ways")
    return None


_EXPORTED: dict[Any, Any] = {}


def _export(layout: Layout, limit: int) -> tuple[TabularWorld, State]:
    """`export`, made once for a map that is asked for with several parameters or humans."""
    parts = (x.tobytes() if isinstance(x, np.ndarray) else x for x in layout)
    key = (*parts, layout.wall.shape, layout.goals.shape, limit)
    if key not in _EXPORTED:
        if len(_EXPORTED) >= 8:
            _EXPORTED.clear()
        _EXPORTED[key] = export(dynamics.make_grid(layout), limit=limit)
    return _EXPORTED[key]


def make_features(layout: Layout) -> Callable[[State], Array]:
    """`features(state) -> [D]`: one-hot places, directions and doors, flags, the share of time."""
    height, width = layout.wall.shape
    num, horizon, actions = len(layout.agents), layout.horizon, layout.num_actions + 1

    def places(cells: Array) -> Array:
        x, y = cells.astype(jnp.int32).T
        return jnp.concatenate(
            [jax.nn.one_hot(x, width).ravel(), jax.nn.one_hot(y, height).ravel()]
        )

    def clock(time: Array) -> Array:
        # One-hot: near the end every step changes the robot's value by a factor.
        if horizon > LONG:
            return time / horizon
        return jax.nn.one_hot(time, horizon + 1) if horizon else jnp.zeros(0)

    def features(state: State) -> Array:
        where, what = state.items[:, :1], state.items[:, 1]
        bearer = jnp.where(where == CARRIED, jax.nn.one_hot(what, num), 0.0)
        learned = [jax.nn.one_hot(state.buttons[:, 2], actions)]
        learned.append(jax.nn.one_hot(state.buttons[:, 3], num + 1))
        parts = (
            places(state.agents[:, :2]),
            jax.nn.one_hot(state.agents[:, 2], 4),
            places(state.movable),
            places(state.items),
            jnp.concatenate([bearer, where == INSIDE], axis=1),
            jax.nn.one_hot(state.doors, 3),
            jnp.concatenate([state.buttons[:, :2], *learned], axis=1),
            jax.nn.one_hot(state.forced, actions),
            state.alive,
            state.solid,
            clock(state.time),
        )
        return jnp.concatenate([part.astype(jnp.float32).ravel() for part in parts])

    return features


def make_views(layout: Layout, read: Read) -> Views:
    """Pictures and text of states, and where agents stand; layout: any of those `read` gives."""
    humans = jnp.asarray(layout.humans)

    def of(make: Callable[[Layout], Any]) -> Callable[[Any, Any], Any]:
        def draw(state: Any, goals: Any = None) -> Any:
            own, now = read(state)
            return make(own)(now, goals)

        return draw

    return Views(
        render=of(make_render),
        positions=lambda state: read(state)[1].agents[humans, :2],
        size=layout.wall.shape[::-1],
        blocked=layout.wall,
        text=of(make_text),
        actions=ACTIONS[: layout.num_actions],
    )


def make_prior(
    layout: Layout, read: Read, humans: HumanModel, nu_h: float
) -> Callable[[Any], Array]:
    """`prior(state) -> [H, G, A]`: uniform, or by shortest ways with the share `nu_h` uniform."""
    actions = layout.num_actions
    if humans.model == "uniform":
        even = jnp.full((*layout.goals.shape[:2], actions), 1.0 / actions)
        return lambda state: even

    def prior(state: Any) -> Array:
        own, now = read(state)
        return (1.0 - nu_h) * make_paths(own, humans.beta)(now) + nu_h / actions

    return prior


def grid_world(layout: Layout, read: Read, prior: Callable[[Any], Array], **more: Any) -> World:
    """A world whose states are not listed, but for what depends on how many maps it has."""
    num_humans, num_goals = layout.goals.shape[:2]
    return World(
        num_humans=num_humans,
        num_robots=len(layout.robots),
        num_actions=layout.num_actions,
        num_goals=num_goals,
        max_successors=dynamics.make_bounds(layout).total,
        num_states=None,
        terminal=lambda state: dynamics.terminal(layout, read(state)[1]),
        achieved=lambda state: dynamics.achieved(*read(state)),
        human_policy=prior,
        index=lambda state: jnp.int32(0),
        goal_weight=jnp.asarray(layout.goal_weight, jnp.float32),
        goal_prob=layout.goal_prob,
        **more,
    )


def _open_world(
    layout: Layout, read: Read, humans: HumanModel, params: PowerParams | None
) -> World:
    """A world of one map whose states are `State`s."""
    grid = dynamics.make_grid(layout)
    back = jnp.asarray(np.argsort(np.concatenate([layout.humans, layout.robots])))
    size = np.array([*layout.wall.shape[::-1]] * 2, np.float32)
    return grid_world(
        layout,
        read,
        make_prior(layout, read, humans, params.nu_h if params else 0.0),
        example_state=grid.initial,
        init=lambda key: grid.initial,
        successors=lambda state, joint: (*grid.outcomes(state, joint[back]), jnp.bool_(False)),
        features=make_features(layout),
        goal_features=jnp.asarray(layout.goals / size, jnp.float32),
        views=make_views(layout, read),
    )
