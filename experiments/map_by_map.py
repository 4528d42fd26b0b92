"""What humans reach on the maps of a family one by one, beside any robot and those that know them.

    known = known_by_map(world, family, "doors", 16, params, Sizes(), "runs/layouts_maps.csv")
    known["exact"]      # [16], what humans reach beside the exact robot; nan where there is none

For robots that know it a map is listed, through the family's own successors and humans, with its
number of states rounded up to a power of 2, so that one program serves many maps.
`python -m experiments.empo_layouts` uses it.
"""

from __future__ import annotations

import functools
import os
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mbx.commands.results import read_rows, write_rows
from mbx.empo.agent import evaluation as empo_evaluation
from mbx.empo.agent.robots import assisting
from mbx.empo.multigrid import make_grid
from mbx.empo.multigrid.export import export
from mbx.empo.multigrid.family import Family, Situation
from mbx.empo.multigrid.layout import Layout
from mbx.empo.multigrid.state import pack, unpack
from mbx.empo.power.worlds import dense_successors
from mbx.power import Assistance, PowerParams, World, profiles, solve, solve_assistance


class Sizes(NamedTuple):
    """How large maps may be, and how long they are played on.

    Attributes:
        episodes: of a robot on a map.
        length: steps of an episode, at most.
        states: most of a map that is listed.
        exact_states: most of a map, rounded up to a power of 2, that has an exact robot.
        batch: states whose successors are listed at once.
    """

    episodes: int = 128
    length: int = 50
    states: int = 400_000
    exact_states: int = 40_000
    batch: int = 4_096


class Listed(NamedTuple):
    """A map's world as arrays, of S states: for a program that serves every map."""

    following: Any  # [S, J, K]
    prob: Any
    achieved: Any  # [S, H, G]
    policy: Any  # [S, H, G, A]
    best: Any  # [C, M, S, R], of the helper
    pi_r: Any  # [S, R], exact; all nan on a map that is too large for it
    over: Any  # [S] bool


def list_map(
    family: Family, number: int, programs: tuple[Any, Any], params: PowerParams, sizes: Sizes
) -> tuple[Listed, Any]:
    """A map's world and the robots that know it; and the goals of each combination, `[C, H]`.

    Args:
        family: the maps.
        number: which of them.
        programs: of `make_programs`.
        params: of the exact robot; the helper has its gamma_h.
        sizes: see there.

    Raises:
        TooManyStates: for a map of more than `sizes.states`.
        ValueError: where no exact robot was found.
    """
    expand, paths = programs
    place, start = (jax.tree.map(lambda x: x[number], t) for t in (family.places, family.starts))
    grid, batch = make_grid(family.layouts[number])._replace(initial=start), sizes.batch
    table, flat = export(
        grid, expand=lambda rows: expand(place, rows), limit=sizes.states, batch=batch
    )
    every = unpack(jnp.asarray(flat), start)
    parts = [
        jax.tree.map(lambda x, i=i: x[i : i + batch], every) for i in range(0, len(flat), batch)
    ]
    policy = [np.asarray(paths(place, _padded(p, batch)))[: len(p.time)] for p in parts]
    policy = np.moveaxis(np.concatenate(policy), 0, 2)
    # A round number of states, for few programs: those that are not there are over.
    more = 2 ** int(np.ceil(np.log2(len(flat)))) - len(flat)
    widen = lambda x, axis: np.pad(  # noqa: E731
        x, [(0, more) if i == axis else (0, 0) for i in range(np.ndim(x))], mode="edge"
    )
    table = table._replace(
        num_states=len(flat) + more,
        terminal=np.concatenate([table.terminal, np.ones(more, bool)]),
        achieved=widen(table.achieved, 2),
    )
    policy = widen(policy, 2)
    best = solve_assistance(table, policy, float(params.gamma_h), tol=1e-3)
    pi_r = np.full((table.num_states, best.q.shape[-1]), np.nan)
    if table.num_states <= sizes.exact_states:
        solution = solve(table, params, tol=1e-4, human_policy=policy)
        if not bool(solution.converged):
            raise ValueError(f"the exact robot has a residual of {float(solution.residual):.2g}")
        pi_r = np.asarray(solution.pi_r)
    following, prob = dense_successors(table)
    achieved = np.moveaxis(np.asarray(table.achieved, bool), -1, 0)
    policy = np.moveaxis(policy, 2, 0)
    over = np.asarray(table.terminal)
    one = Listed(following, prob.astype(np.float32), achieved, policy, best.q, pi_r, over)
    return one, best.goals


def make_programs(world: World, template: Layout) -> tuple[Any, Any]:
    """What lists any map of a family: all successors of flat states, and what humans do there."""
    num = world.num_humans + world.num_robots
    joint = jnp.asarray(profiles(num, world.num_actions), jnp.int32)
    example = world.example_state.now

    @jax.jit
    def expand(place: Any, rows: Any) -> tuple[Any, Any]:
        def one(row: Any) -> tuple[Any, Any]:
            situation = Situation(place, unpack(row, example))
            after, prob, _ = jax.vmap(lambda j: world.successors(situation, j))(joint)
            return jax.vmap(jax.vmap(pack))(after.now), prob

        return jax.vmap(one)(rows)

    @jax.jit
    def paths(place: Any, states: Any) -> Any:
        return jax.vmap(lambda state: world.human_policy(Situation(place, state)))(states)

    return expand, paths


def _padded(states: Any, num: int) -> Any:
    """States `[n, ...]` with the last one again until there are `num`."""
    return jax.tree.map(lambda x: jnp.concatenate([x, jnp.repeat(x[-1:], num - len(x), 0)]), states)


def reached_beside(
    world: World, one: Listed, goals: Any, gamma: float, key: Any, sizes: Sizes
) -> tuple[float, float]:
    """What humans reach beside the helper and the exact robot (nan: none) on a listed map.

    Args:
        world: of the family; its numbers of agents, actions and goals are read.
        one: the map.
        goals: `[C, H]`, of `list_map`.
        gamma: the humans' discount.
        key: of the episodes.
        sizes: see there.
    """
    base = world.num_actions ** jnp.arange(world.num_humans + world.num_robots)

    @functools.partial(jax.jit, static_argnums=2)
    def play(one: Listed, key: Any, exact: bool) -> Any:
        listed = world._replace(
            example_state=jnp.int32(0),
            init=lambda key: jnp.int32(0),
            successors=lambda s, joint: (
                one.following[s, jnp.sum(joint * base)],
                one.prob[s, jnp.sum(joint * base)],
                jnp.bool_(False),
            ),
            terminal=lambda s: one.over[s],
            achieved=lambda s: one.achieved[s],
            human_policy=lambda s: one.policy[s],
            index=lambda s: s,
        )
        robot: Any = assisting(listed, Assistance(one.best, goals, jnp.float32(0)))
        if exact:
            robot = lambda s, key: jax.random.categorical(key, jnp.log(one.pi_r[s]))  # noqa: E731
        many = dict(episodes=sizes.episodes, length=sizes.length)
        return empo_evaluation.play(listed, robot, key, gamma=gamma, **many).reached

    helper = float(np.asarray(play(one, key, False)).mean())
    if np.isnan(one.pi_r).any():
        return helper, np.nan
    return helper, float(np.asarray(play(one, key, True)).mean())


def in_words(params: PowerParams, **more: str) -> str:
    """What numbers beside the exact robot depend on: its parameters, and `more` by name."""
    names = ("gamma_h", "gamma_r", "beta_r", "zeta", "xi", "eta")
    own = {name: f"{getattr(params, name):g}" for name in names}
    if params.nu_h:
        own["nu_h"] = f"{params.nu_h:g}"
    if params.reduce != PowerParams().reduce:
        own["reduce"] = params.reduce
    return " ".join(f"{name}={value}" for name, value in (own | more).items())


def known_by_map(
    world: World,
    family: Family,
    name: str,
    num: int,
    params: PowerParams,
    sizes: Sizes,
    path: str | None = None,
    **more: str,
) -> dict[str, np.ndarray]:
    """What humans reach on the first maps of a family, `[num]` beside "helper" and "exact".

    Args:
        world: of the family.
        family: the maps.
        name: what they are called in the file.
        num: how many of them.
        params: of the exact robot; the helper has its gamma_h.
        sizes: see there.
        path: a CSV file with a row a map: what it has is taken from there, what it lacks put in.
        **more: what else numbers depend on, see `in_words`.

    Raises:
        ValueError: as `list_map`.
    """
    rows = read_rows(path) if path and os.path.exists(path) else []
    programs, power = make_programs(world, family.template), in_words(params, **more)
    for number in range(num):
        known = {"world": name, "map": str(number + 1), "power": power}
        if any(known == {k: row.get(k) for k in known} for row in rows):
            continue
        one, goals = list_map(family, number, programs, params, sizes)
        gamma, key = float(params.gamma_h), jax.random.key(2)
        found = reached_beside(world, one, goals, gamma, key, sizes)
        values = dict(zip(("helper", "exact"), (f"{value:.6g}" for value in found), strict=True))
        rows.append(known | {"states": str(len(one.achieved))} | values)
        print(rows[-1], flush=True)
        if path:
            write_rows(path, rows)
    each = {row["map"]: row for row in rows if row["world"] == name and row["power"] == power}
    return {
        robot: np.array([float(each[str(number + 1)][robot]) for number in range(num)])
        for robot in ("helper", "exact")
    }


def reached_by_map(
    world: World, policy: Any, grids: np.ndarray, key: Any, *, episodes: int, length: int
) -> np.ndarray:
    """What humans reach beside a robot on each map, `[maps]`; nan on one that was not drawn.

    Args:
        world: whose episodes begin on these maps.
        policy: the robot's.
        grids: `[maps, words]`, each map's grid and its goals in a row.
        key: of the episodes.
        episodes: over all maps.
        length: steps of an episode, at most.
    """

    @jax.jit
    def play(key: Any) -> Any:
        played = empo_evaluation.play(world, policy, key, episodes=episodes, length=length)
        place = jax.tree.map(lambda x: x[:, 0], played.states.place)
        return played.reached, place.grid, place.goals

    reached, grid, goals = (np.asarray(x) for x in play(key))
    words = np.concatenate([x.reshape(episodes, -1) for x in (grid, goals)], axis=1)
    number = np.argmax((words[:, None] == grids[None]).all(axis=-1), axis=1)
    count = np.bincount(number, minlength=len(grids))
    total = np.bincount(number, reached.mean(axis=1), len(grids))
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)


def row(maps: str, robot: str, each: np.ndarray, learned: np.ndarray) -> dict[str, Any]:
    """A robot's mean over maps, its standard error, and how far the learned one is above it."""

    def of(x: np.ndarray) -> tuple[float, float]:
        x = x[~np.isnan(x)]
        return float(x.mean()), float(x.std(ddof=1) / np.sqrt(len(x)))

    mean, error = of(each)
    gain, gain_error = of(learned - each)
    return {
        "maps": maps,
        "number": int((~np.isnan(each)).sum()),
        "robot": robot,
        "reached": mean,
        "reached_error": error,
        "learned_above": gain,
        "learned_above_error": gain_error,
    }
