"""EMPO's worlds as environments: `empo:grid_rock_1h1r`, `empo:multigrid/MAP`, registered ones.

The robots are the agent; the humans live inside the environment and act by their prior towards
goals, drawn again when achieved, and now and then. The observation is the whole state, the goals
and the humans' last actions (`mbx.power.Codec`), with @stored also successors; the action is a
one-hot joint robot action. The reward, the share of humans that arrive, is for reporting only."""

from __future__ import annotations

import dataclasses
import functools
import importlib.resources
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mbx.empo import multigrid
from mbx.empo.multigrid import family
from mbx.empo.power.codec import make_codec, make_records
from mbx.empo.power.equations import PowerParams, check_params
from mbx.empo.power.named import HumanModel, NamedWorld
from mbx.empo.power.solver import solve
from mbx.empo.power.worlds import (
    TabularWorld,
    World,
    draw_actions,
    draw_goals,
    make_varied_start,
    reached,
    robot_actions,
    tabular_world,
)
from mbx.envs.base import JaxEnvironment, RawEnvironment, Suite, episodic
from mbx.envs.render import Renderer

Array = jax.Array

RESAMPLE_PROBABILITY = 0.01
TIME_LIMIT = 50
WALK = 64  # most random steps to a varied start, where states are not listed
STEP_SECONDS = 0.25  # of a video; the worlds have no clock
_PACKAGED = ("grid_rock_1h1r", "grid_corridor_2h1r")
_WORLDS: dict[str, Callable[[], NamedWorld]] = {}


def register_world(name: str, build: Callable[[], NamedWorld | World]) -> None:
    """Add a world: `empo:NAME` is then `build()`, called once a process."""
    _WORLDS[name] = build
    named_world.cache_clear()


@functools.cache
def named_world(
    name: str,
    params: PowerParams | None = None,
    humans: HumanModel | None = None,
    default: PowerParams | None = None,
    maps: tuple[int, int, int] = (64, 16, 0),
) -> NamedWorld:
    """A world by its name, with its humans and, where it is small enough, its exact solution.
    name: of a packaged or registered world, multigrid/MAP or maps/SOURCE. params, humans: None: the
    world's own. default: parameters for a world that has none. maps: of `maps/SOURCE`: how many to
    train on, how many held out, and the seed of the choice.
    Raises ValueError for an unknown name, and for humans that the world cannot have.
    """
    suite, _, task = name.partition("/")
    if name in _PACKAGED:
        return _adapted(packaged_world(name), params, humans)
    if name in _WORLDS:
        found = _WORLDS[name]()
        found = NamedWorld(found) if isinstance(found, World) else found
        return _adapted(found, params or found.params or default, humans)
    if task and suite == "multigrid":
        params = params or multigrid.load_world(task)[1] or default
        return multigrid.make_world(task, humans, params=params)
    if task and suite == "maps":
        return family.make_many(task, family.Choice(*maps), humans, params=params, default=default)
    known = (*_PACKAGED, *_WORLDS)
    raise ValueError(
        f"env.name='empo:{name}' is unknown: choose one of {known}, multigrid/MAP or maps/SOURCE"
    )


def _adapted(
    found: NamedWorld, params: PowerParams | None, humans: HumanModel | None
) -> NamedWorld:
    """The world with other parameters or other humans, solved again."""
    own = humans is None and found.prior in ("uniform", "paths")
    params, humans = params or found.params, humans or HumanModel()
    if humans.model == "auto" and (found.table is None or params == found.params):
        return dataclasses.replace(found, params=params)
    if humans.model in ("paths", "learned") or (humans.model == "exact" and found.table is None):
        raise ValueError(
            f"humans.model={humans.model!r}: this world has no such humans, choose auto or uniform"
        )
    if humans.habit != "uniform":
        raise ValueError(f"humans.habit={humans.habit!r}: this world has no such habit")
    world, given, whose = found.world, None, "exact" if humans.model == "auto" else humans.model
    if own and found.solution is not None:
        given, whose = found.solution.pi_h, found.prior  # they do not reckon with parameters
    elif humans.model == "uniform":
        shape = (world.num_humans, world.num_goals, world.num_actions)
        if found.table is None:
            even = jnp.full(shape, 1.0 / world.num_actions)
            world = world._replace(human_policy=lambda state: even)
            return NamedWorld(world, params, prior="uniform")
        given = np.full((*shape[:2], world.num_states, shape[2]), 1.0 / world.num_actions)
    solution = solve(found.table, params, human_policy=given, goal_prob=world.goal_prob)
    prior = jnp.moveaxis(jnp.asarray(solution.pi_h, jnp.float32), 2, 0)
    world = world._replace(human_policy=lambda state: prior[world.index(state)])
    return NamedWorld(world, params, found.table, solution, prior=whose)


@functools.cache
def packaged_world(name: str) -> NamedWorld:
    """A packaged gridworld, solved; features are one-hot positions, directions and the time."""
    path = importlib.resources.files("mbx.empo") / "worlds" / f"{name}.npz"
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
    stored: bool = False,
    resample: float = RESAMPLE_PROBABILITY,
    varied_starts: float = 0.0,
) -> RawEnvironment:
    """One world with its humans inside, un-batched; its time limit is 50 steps.
    stored: observations end with successors for drawn human actions. resample: probability of
    another goal before one is reached. varied_starts: share of episodes that begin anywhere.
    """
    codec, records = make_codec(world), make_records(world)
    size = codec.size + (records.size if stored else 0)
    joint_actions = world.num_actions**world.num_robots
    start = make_varied_start(world, WALK) if varied_starts else None

    def observe(state: tuple, key: Array) -> Array:
        words = [records.pack(records.draw(state[0], key))] if stored else []
        return jnp.concatenate([codec.pack(*state), *words])

    def reset(key: Array) -> tuple[tuple, Array]:
        world_key, goal_key, record_key = jax.random.split(key, 3)
        goals = draw_goals(world, goal_key)
        place = world.init(world_key)
        if varied_starts:
            which_key, varied_key = jax.random.split(jax.random.fold_in(world_key, 1))
            varied = jax.random.bernoulli(which_key, varied_starts)
            other = start(varied_key)
            place = jax.tree.map(lambda x, y: jnp.where(varied, x, y), other, place)
        state = (place, goals, jnp.zeros_like(goals))
        return state, observe(state, record_key)

    def step(key: Array, state: tuple, action: Array) -> tuple[tuple, Array, Array, Array]:
        place, goals, _ = state
        human_key, chance_key, goal_key, resample_key, record_key = jax.random.split(key, 5)
        humans = draw_actions(world, place, goals, human_key)
        robots = robot_actions(world, jnp.argmax(action))
        following, prob, _ = world.successors(place, jnp.concatenate([humans, robots]))
        chosen = jax.random.categorical(chance_key, jnp.log(prob))
        place = jax.tree.map(lambda x: x[chosen], following)
        there = reached(world, place, goals)
        tired = jax.random.bernoulli(resample_key, resample, goals.shape)
        goals = jnp.where(there | tired, draw_goals(world, goal_key), goals)
        state = (place, goals, humans)
        # Observations are words, always finite: it is the reward that makes a fault of this.
        sound = jnp.all(jnp.stack([jnp.all(jnp.isfinite(x)) for x in jax.tree.leaves(place)]))
        sound = sound & jnp.all(jnp.isfinite(prob))
        reward = jnp.where(sound, jnp.mean(there.astype(jnp.float32)), jnp.nan)
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
    power: Mapping[str, Any] | None = None,
    humans: Mapping[str, Any] | None = None,
    varied_starts: float = 0.0,
    maps: tuple[int, int, int] = (64, 16, 0),
    on_held_out: bool = False,
) -> JaxEnvironment:
    """The world `task`, batched.
    task: a name for `named_world`, perhaps with `@stored`. episode_length: None: 50 agent steps, or
    until the world ends. seed: unused. power: parameters of the equations, and `source`. humans:
    fields of `HumanModel` (model "world": as the world says), `epsilon` and `resample`.
    varied_starts: see `raw_environment`. maps: see `named_world`. on_held_out: episodes begin on
    the maps held out of training, where there are such.
    Raises ValueError for an unknown world, an action repeat, impossible parameters or humans.
    """
    if action_repeat not in (None, 1):
        raise ValueError(f"env.action_repeat={action_repeat} for empo:{task}: must be 1")
    name, stored = _without_option(task)
    found, resample = _chosen_world(name, power, humans, maps)
    raw = raw_environment(
        f"empo:{task}",
        found.held_out if on_held_out and found.held_out else found.world,
        stored=stored,
        varied_starts=varied_starts,
        resample=resample,
    )
    environment = episodic(raw, num_envs, episode_length=episode_length)
    return environment._replace(spec=environment.spec._replace(world=found))


def _chosen_world(
    name: str,
    power: Mapping[str, Any] | None = None,
    humans: Mapping[str, Any] | None = None,
    maps: tuple[int, int, int] = (64, 16, 0),
) -> tuple[NamedWorld, float]:
    """The world with settings' parameters and humans, and how often these change their goals."""
    values, people = dict(power or {"source": "world"}), dict(humans or {"model": "world"})
    own = values.pop("source") == "world"
    params = PowerParams(**values) if values else None
    if params is not None:
        check_params(params)
    epsilon, resample = people.pop("epsilon", 0.0), people.pop("resample", RESAMPLE_PROBABILITY)
    model = None if people["model"] == "world" else HumanModel(**people)
    found = named_world(name, None if own else params, model, params, maps)
    if not epsilon:
        return found, resample
    world, held_out = (
        each and each._replace(epsilon=epsilon) for each in (found.world, found.held_out)
    )
    return dataclasses.replace(found, world=world, held_out=held_out), resample


def _without_option(task: str) -> tuple[str, bool]:
    """The world's name or map, and whether `@stored` follows it."""
    name = task.removesuffix("@stored")
    if "@" in name and not name.endswith(".yaml"):  # a path may have one
        raise ValueError(f"env.name='empo:{task}': the only option after @ is stored")
    return name, name != task


def make_renderer(task: str, *, on_held_out: bool = False, **options: Any) -> Renderer:
    """Pictures of the world and its humans' goals; arguments as of `make`.
    Raises ValueError for a world without any, and as `make`.
    """
    views = _chosen_world(_without_option(task)[0], **options)[0].world.views
    if views is None:
        raise ValueError(f"env.name='empo:{task}': this world has no pictures of its states")
    return Renderer(lambda state: views.render(*state[:2]), np.asarray, STEP_SECONDS)


def solved_world(table: TabularWorld, params: PowerParams, **options: Any) -> NamedWorld:
    """A listed world, solved: its humans follow the exact prior. For `register_world`.
    options: of `mbx.power.tabular_world`.
    """
    solution = solve(table, params)
    world = tabular_world(table, solution, **options)
    return NamedWorld(world, params, table, solution, prior="exact")


SUITE = Suite(whole=make, make_renderer=make_renderer)
