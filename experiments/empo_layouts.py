"""What humans reach beside a robot trained on many maps: there, and on maps it has never seen.

    python -m experiments.train --config=configs/empo_layouts.py --workdir=runs/layouts
    python -m experiments.empo_layouts --workdir=runs/layouts --out=docs/results/empo_layouts

Robots: the learned one, a random and a frozen one; on maps held out of training also the exact one
of the run's parameters (`mbx.power.solve`; on maps of at most --exact_states states), and the
helper, which knows what every human wants and makes its ways as short as they can be
(`mbx.power.solve_assistance`): each such map is listed and solved for them, which takes a minute or
more and is kept in OUT_maps.csv. A map's own number is its mean over episodes; standard errors are
over maps, so that they say what other maps would give.
"""

from __future__ import annotations

import functools
import os
import sys
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags, logging

from mbx.agents.empo import evaluation as empo_evaluation
from mbx.agents.empo import resolve
from mbx.agents.empo.robots import assisting
from mbx.envs.empo.multigrid import make_grid
from mbx.envs.empo.multigrid.export import export
from mbx.envs.empo.multigrid.family import Family, Situation
from mbx.envs.empo.multigrid.layout import Layout
from mbx.envs.empo.multigrid.many import Choice, choose
from mbx.envs.empo.multigrid.state import pack, unpack
from mbx.power import Assistance, PowerParams, World, profiles, solve, solve_assistance
from mbx.power.worlds import dense_successors
from mbx.training import environments, run

from .results import read_rows, write_rows

WORKDIR = flags.DEFINE_string("workdir", None, "Run directory.", required=True)
WHICH = flags.DEFINE_string("which", "latest", "latest, best, or the step of a checkpoint.")
EPISODES = flags.DEFINE_integer("episodes", 128, "Episodes a robot on a held-out map.")
TRAINED = flags.DEFINE_integer("trained", 2_048, "Episodes a robot over all maps trained on.")
LENGTH = flags.DEFINE_integer("length", 50, "Steps of an episode.")
STATES = flags.DEFINE_integer("states", 400_000, "Most states of a map that is solved.")
EXACT_STATES = flags.DEFINE_integer(
    "exact_states",
    40_000,
    "Most states of a map, rounded up to a power of 2, with an exact robot.",
)
OUT = flags.DEFINE_string("out", None, "How the names of both CSV files begin.")
BATCH = 4_096


class Listed(NamedTuple):
    """A map's world as arrays, of S states: for a program that serves every map."""

    following: Any  # [S, J, K]
    prob: Any
    achieved: Any  # [S, H, G]
    policy: Any  # [S, H, G, A]
    best: Any  # [C, M, S, R], of the helper
    pi_r: Any  # [S, R], exact; all nan on a map that is too large for it


def list_map(
    layout: Layout, start: Any, programs: tuple[Any, Any], place: Any, params: PowerParams
) -> tuple[Listed, Any]:
    """A map's world and the robots that know it; and the goals of each combination, `[C, H]`."""
    expand, paths = programs
    grid = make_grid(layout)._replace(initial=start)
    sizes = dict(limit=STATES.value, batch=BATCH)
    table, flat = export(grid, expand=lambda rows: expand(place, rows), **sizes)
    every = unpack(jnp.asarray(flat), start)
    parts = [
        jax.tree.map(lambda x, i=i: x[i : i + BATCH], every) for i in range(0, len(flat), BATCH)
    ]
    policy = [np.asarray(paths(place, _padded(p, BATCH)))[: len(p.time)] for p in parts]
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
    if table.num_states <= EXACT_STATES.value:
        solution = solve(table, params, tol=1e-4, human_policy=policy)
        if not bool(solution.converged):
            raise ValueError(f"the exact robot has a residual of {float(solution.residual):.2g}")
        pi_r = np.asarray(solution.pi_r)
    following, prob = dense_successors(table)
    achieved = np.moveaxis(np.asarray(table.achieved, bool), -1, 0)
    policy = np.moveaxis(policy, 2, 0)
    return Listed(following, prob.astype(np.float32), achieved, policy, best.q, pi_r), best.goals


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
    world: World, one: Listed, goals: Any, gamma: float, key: Any
) -> tuple[float, float]:
    """What humans reach beside the helper and the exact robot (nan: none) on a listed map."""
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
            terminal=lambda s: jnp.bool_(False),
            achieved=lambda s: one.achieved[s],
            human_policy=lambda s: one.policy[s],
            index=lambda s: s,
        )
        robot: Any = assisting(listed, Assistance(one.best, goals, jnp.float32(0)))
        if exact:
            robot = lambda s, key: jax.random.categorical(key, jnp.log(one.pi_r[s]))  # noqa: E731
        sizes = dict(episodes=EPISODES.value, length=LENGTH.value)
        return empo_evaluation.play(listed, robot, key, gamma=gamma, **sizes).reached

    helper = float(np.asarray(play(one, key, False)).mean())
    if np.isnan(one.pi_r).any():
        return helper, np.nan
    return helper, float(np.asarray(play(one, key, True)).mean())


def in_words(params: PowerParams) -> str:
    """The parameters that the exact robot depends on."""
    names = ("gamma_h", "gamma_r", "beta_r", "zeta", "xi", "eta")
    return " ".join(f"{name}={getattr(params, name):g}" for name in names)


def known_by_map(
    world: World, family: Family, name: str, num: int, params: PowerParams
) -> dict[str, np.ndarray]:
    """`[num]` beside "helper" and "exact"; what the file beside `--out` has of these maps already
    is taken from there."""
    path = f"{OUT.value}_maps.csv"
    rows = read_rows(path) if OUT.value and os.path.exists(path) else []
    programs = make_programs(world, family.template)
    power = in_words(params)
    for number in range(num):
        known = {"world": name, "map": str(number + 1), "power": power}
        if any(known == {k: row.get(k) for k in known} for row in rows):
            continue
        place, start = (
            jax.tree.map(lambda x, n=number: x[n], tree) for tree in (family.places, family.starts)
        )
        one, goals = list_map(family.layouts[number], start, programs, place, params)
        gamma = float(params.gamma_h)
        found = reached_beside(world, one, goals, gamma, jax.random.key(2))
        values = dict(zip(("helper", "exact"), (f"{value:.6g}" for value in found), strict=True))
        rows.append(known | {"states": str(len(one.achieved))} | values)
        print(rows[-1], flush=True)
        if OUT.value:
            write_rows(path, rows)
    each = {row["map"]: row for row in rows if row["world"] == name and row["power"] == power}
    return {
        robot: np.array([float(each[str(number + 1)][robot]) for number in range(num)])
        for robot in ("helper", "exact")
    }


def reached_by_map(
    world: World, policy: Any, grids: np.ndarray, episodes: int, gamma: float, key: Any
) -> np.ndarray:
    """What humans reach beside a robot on each map `[maps]`; nan on one that was not drawn."""

    @jax.jit
    def play(key: Any) -> Any:
        sizes = dict(episodes=episodes, length=LENGTH.value)
        played = empo_evaluation.play(world, policy, key, gamma=gamma, **sizes)
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


def compare(workdir: str) -> list[dict[str, Any]]:
    """The rows of a run. Raises ValueError for one that was not trained on many maps."""
    _, train, settings = run.load(workdir, which=WHICH.value)
    if settings.agent != "empo" or not settings.env.name.startswith("empo:maps/"):
        raise ValueError(f"{workdir} is no run on many maps: env.name={settings.env.name!r}")
    if not settings.env.held_out:
        raise ValueError(f"env.held_out=0 in {workdir}: there is no map that it was not trained on")
    spec = environments.make_environment(settings, 1, seed=0).spec
    problem, found = resolve(settings, spec), spec.world
    gamma, env = float(problem.params.gamma_h), settings.env
    choice = Choice(env.maps, env.held_out, env.map_seed)
    family, *_ = choose(env.name.removeprefix("empo:maps/"), choice)
    words = [np.asarray(x).reshape(len(family.layouts), -1) for x in family.places]
    words, num = np.concatenate(words, axis=1), env.held_out
    robots = {
        "learned": empo_evaluation.learned_policy(problem, train),
        "random": empo_evaluation.random_policy(found.world),
        "frozen": empo_evaluation.frozen_policy,
    }
    name = f"{env.name.removeprefix('empo:')} seed {env.map_seed}"
    solved = known_by_map(found.held_out, family, name, num, problem.params)
    rows = []
    for maps, world, own, episodes in (
        ("held out", found.held_out, words[:num], EPISODES.value * num),
        ("trained on", found.world, words[num:], TRAINED.value),
    ):
        each = {
            robot: reached_by_map(world, policy, own, episodes, gamma, jax.random.key(1))
            for robot, policy in robots.items()
        }
        if maps == "held out":
            each |= solved
        for robot, values in each.items():
            rows.append(row(maps, robot, values, each["learned"]))
            print(rows[-1], flush=True)
        if maps == "held out":
            for robot in solved:
                there = ~np.isnan(each[robot])
                mean = {name: float(values[there].mean()) for name, values in each.items()}
                share = (mean["learned"] - mean["random"]) / (mean[robot] - mean["random"])
                print(f"from random to {robot}: {share:.3f} of the way", flush=True)
    return rows


def main(_: list[str]) -> None:
    logging.set_verbosity(logging.WARNING)
    try:
        rows = compare(WORKDIR.value)
    except (ValueError, OSError, ImportError) as error:
        sys.exit(f"error: {error}")
    if OUT.value:
        write_rows(f"{OUT.value}.csv", rows)


if __name__ == "__main__":
    app.run(main)
