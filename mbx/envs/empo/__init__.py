"""EMPO's worlds as environments: `empo:grid_rock_1h1r`, `empo:grid_corridor_2h1r`, your own.

The robots are the agent; the humans live inside the environment and act by their prior towards
goals of their own. A goal is drawn anew when it is achieved, and now and then. The observation is
the whole state, the goals and the humans' last actions (`mbx.power.worlds.Codec`); the action is a
one-hot joint robot action (little-endian). The reward, the share of humans that reached their goal
in the step, is for reporting only: the agent's own reward is human power. `register_world` adds
worlds; `empo:NAME@stored` also puts the state's successors into the observation, and so into the
replay (`mbx.power.codec`).
"""

from __future__ import annotations

import functools
import importlib
import importlib.resources
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mbx.envs.base import JaxEnvironment, RawEnvironment, episodic
from mbx.envs.render import Renderer
from mbx.power.codec import make_codec, make_records
from mbx.power.equations import PowerParams
from mbx.power.named import NamedWorld
from mbx.power.solver import solve
from mbx.power.worlds import (
    TabularWorld,
    World,
    draw_actions,
    draw_goals,
    tabular_world,
)

Array = jax.Array

RESAMPLE_PROBABILITY = 0.01
TIME_LIMIT = 50
STEP_SECONDS = 0.25  # of a video; the worlds have no clock
_PACKAGED = ("grid_rock_1h1r", "grid_corridor_2h1r")


_WORLDS: dict[str, Callable[[], NamedWorld]] = {}


def register_world(name: str, build: Callable[[], NamedWorld | World]) -> None:
    """Add a world: `empo:NAME` is then `build()`, called once a process."""
    _WORLDS[name] = build
    named_world.cache_clear()


@functools.cache
def named_world(name: str) -> NamedWorld:
    """The world called `name`, or `multigrid/NAME` from `mbx.envs.empo.multigrid`.

    Raises ValueError for an unknown one.
    """
    if name in _PACKAGED:
        return packaged_world(name)
    suite, slash, task = name.partition("/")
    if name in _WORLDS:
        found = _WORLDS[name]()
    elif slash and suite == "multigrid":
        found = importlib.import_module("mbx.envs.empo.multigrid").make_world(task)
    else:
        known = (*_PACKAGED, *_WORLDS)
        raise ValueError(f"env.name='empo:{name}' is unknown: choose one of {known}")
    return NamedWorld(found) if isinstance(found, World) else found


def packaged_world(name: str) -> NamedWorld:
    """A small gridworld that comes with the package, its humans' prior solved exactly (phase 1).

    Features are one-hot positions, directions and the time.
    """
    path = importlib.resources.files("mbx.envs.empo") / "worlds" / f"{name}.npz"
    with path.open("rb") as file:
        data = dict(np.load(file))
    table = TabularWorld(**{field: data[field] for field in TabularWorld._fields})
    table = table._replace(num_actions=int(table.num_actions), num_states=int(table.num_states))
    params = PowerParams(
        **{k.removeprefix("param_"): float(v) for k, v in data.items() if k.startswith("param_")}
    )
    columns = [data[k].reshape(table.num_states, -1) for k in ("agent_state", "mobile_xy")]
    columns = np.concatenate([*columns, data["step_count"][:, None]], axis=1)
    features = np.concatenate(
        [np.eye(column.max() + 1, dtype=np.float32)[column] for column in columns.T], axis=1
    )
    return solved_world(table, params, features=features)


def raw_environment(
    name: str,
    world: World,
    *,
    resample_probability: float = RESAMPLE_PROBABILITY,
    stored: bool = False,
) -> RawEnvironment:
    """One world with its humans inside, un-batched. time_limit: 50 steps.

    stored: observations end with the successors of the state for drawn human actions.
    """
    codec, records = make_codec(world), make_records(world)
    size = codec.size + (records.size if stored else 0)
    joint_actions = world.num_actions**world.num_robots
    base = world.num_actions ** jnp.arange(world.num_robots)

    def observe(state: tuple, key: Array) -> Array:
        obs = codec.pack(*state)
        if not stored:
            return obs
        return jnp.concatenate([obs, records.pack(records.draw(state[0], key))])

    def reset(key: Array) -> tuple[tuple, Array]:
        world_key, goal_key, record_key = jax.random.split(key, 3)
        goals = draw_goals(world, goal_key)
        state = (world.init(world_key), goals, jnp.zeros_like(goals))
        return state, observe(state, record_key)

    def step(key: Array, state: tuple, action: Array) -> tuple[tuple, Array, Array, Array]:
        place, goals, _ = state
        human_key, chance_key, goal_key, resample_key, record_key = jax.random.split(key, 5)
        humans = draw_actions(world, place, goals, human_key)
        robots = jnp.argmax(action) // base % world.num_actions
        following, prob, _ = world.successors(
            place, jnp.concatenate([humans, robots.astype(jnp.int32)])
        )
        chosen = jax.random.categorical(chance_key, jnp.log(prob))
        place = jax.tree.map(lambda x: x[chosen], following)
        reached = jnp.take_along_axis(world.achieved(place), goals[:, None], axis=1)[:, 0]
        tired = jax.random.bernoulli(resample_key, resample_probability, goals.shape)
        goals = jnp.where(reached | tired, draw_goals(world, goal_key), goals)
        state = (place, goals, humans)
        reward = jnp.mean(reached.astype(jnp.float32))
        return state, observe(state, record_key), reward, world.terminal(place)

    return RawEnvironment(
        name, (size,), jnp.int32, joint_actions, TIME_LIMIT, reset, step, discrete=True
    )


def make(
    task: str,
    num_envs: int,
    *,
    action_repeat: int | None = None,
    episode_length: int | None = None,
    seed: int = 0,
) -> JaxEnvironment:
    """The world `task`, batched. Raises ValueError for an unknown one or an action repeat."""
    if action_repeat not in (None, 1):
        raise ValueError(f"env.action_repeat={action_repeat} for empo:{task}: must be 1")
    name, at, option = task.partition("@")
    if at and option != "stored":
        raise ValueError(f"env.name='empo:{task}': the only option after @ is stored")
    found = named_world(name)
    raw = raw_environment(f"empo:{task}", found.world, stored=bool(at))
    environment = episodic(raw, num_envs, episode_length=episode_length)
    return environment._replace(spec=environment.spec._replace(world=found))


def make_renderer(task: str) -> Renderer:
    """Pictures of the world and its humans' goals. Raises ValueError for a world without any."""
    world = named_world(task.partition("@")[0]).world
    if world.views is None:
        raise ValueError(f"env.name='empo:{task}': this world has no pictures of its states")
    return Renderer(lambda state: world.views.render(state[0], state[1]), np.asarray, STEP_SECONDS)


def solved_world(table: TabularWorld, params: PowerParams, **options: Any) -> NamedWorld:
    """A listed world, solved: its humans follow the exact prior. For `register_world`.

    Args:
        table: its transitions.
        params: of the equations; the world brings them.
        **options: of `mbx.power.tabular_world`.
    """
    solution = solve(table, params)
    return NamedWorld(tabular_world(table, solution, **options), params, table, solution)
