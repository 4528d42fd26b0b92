"""What humans reach beside a robot trained on many maps: there, and on maps it has never seen.

    python -m experiments.train --config=configs/empo_layouts.py --workdir=runs/layouts
    python -m experiments.empo_layouts --workdir=runs/layouts --out=docs/results/empo_layouts.csv

Robots: the learned one, a random and a frozen one; on maps held out of training also the helper,
which knows what every human wants and makes its ways as short as they can be: each such map is
listed and solved for it (`mbx.power.solve_assistance`). A map's own number is its mean over
episodes; standard errors are over maps, so that they say what other maps would give.
"""

from __future__ import annotations

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
from mbx.envs.empo.multigrid.layout import Layout
from mbx.envs.empo.multigrid.many import Choice, choose
from mbx.envs.empo.multigrid.paths import make_paths
from mbx.envs.empo.multigrid.state import unpack
from mbx.power import Assistance, World, solve_assistance
from mbx.power.worlds import dense_successors
from mbx.training import environments, run

from .results import write_rows

WORKDIR = flags.DEFINE_string("workdir", None, "Run directory.", required=True)
WHICH = flags.DEFINE_string("which", "latest", "latest, best, or the step of a checkpoint.")
EPISODES = flags.DEFINE_integer("episodes", 128, "Episodes a robot on a held-out map.")
TRAINED = flags.DEFINE_integer("trained", 2_048, "Episodes a robot over all maps trained on.")
LENGTH = flags.DEFINE_integer("length", 50, "Steps of an episode.")
STATES = flags.DEFINE_integer("states", 400_000, "Most states of a map that is solved.")
HELPER = flags.DEFINE_bool("helper", True, "Solve held-out maps for the helper.")
OUT = flags.DEFINE_string("out", None, "CSV file for the rows.")


class Listed(NamedTuple):
    """A map's world as arrays, of S states: for a program that serves every map."""

    following: Any  # [S, J, K]
    prob: Any
    achieved: Any  # [S, H, G]
    policy: Any  # [S, H, G, A]
    best: Any  # [C, M, S, R]


def list_map(layout: Layout, beta: float, nu_h: float, gamma: float) -> tuple[Listed, Any]:
    """A map's world and the best help in it; and the goals of each combination, `[C, H]`."""
    table, flat = export(make_grid(layout), limit=STATES.value, batch=4_096)
    every = unpack(jnp.asarray(flat), make_grid(layout).initial)
    paths = jax.jit(jax.vmap(make_paths(layout, beta)))
    parts = [
        jax.tree.map(lambda x, i=i: x[i : i + 4_096], every) for i in range(0, len(flat), 4_096)
    ]
    policy = np.concatenate([np.asarray(paths(_padded(p, 4_096)))[: len(p.time)] for p in parts])
    policy = (1.0 - nu_h) * policy + nu_h / layout.num_actions
    best = solve_assistance(table, np.moveaxis(policy, 0, 2), gamma, tol=1e-3)
    following, prob = dense_successors(table)
    achieved = np.moveaxis(np.asarray(table.achieved, bool), -1, 0)
    listed = Listed(following, prob.astype(np.float32), achieved, policy, np.asarray(best.q))
    return listed, best.goals


def _padded(states: Any, num: int) -> Any:
    """States `[n, ...]` with the last one again until there are `num`."""
    return jax.tree.map(lambda x: jnp.concatenate([x, jnp.repeat(x[-1:], num - len(x), 0)]), states)


def helped(world: World, maps: list[Listed], goals: Any, gamma: float, key: Any) -> np.ndarray:
    """What humans reach beside the helper on each map, `[maps]`."""
    most = max(len(one.achieved) for one in maps)
    slots = max(one.prob.shape[-1] for one in maps)
    base = world.num_actions ** jnp.arange(world.num_humans + world.num_robots)

    @jax.jit
    def play(one: Listed, key: Any) -> Any:
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
        robot = assisting(listed, Assistance(one.best, goals, jnp.float32(0)))
        sizes = dict(episodes=EPISODES.value, length=LENGTH.value)
        return empo_evaluation.play(listed, robot, key, gamma=gamma, **sizes).reached

    def alike(one: Listed) -> Listed:
        more = most - len(one.achieved)
        pad = lambda x: np.pad(x, ((0, more), *[(0, 0)] * (x.ndim - 1)))  # noqa: E731
        slot = lambda x: np.pad(x, ((0, 0), (0, 0), (0, slots - x.shape[-1])))  # noqa: E731
        best = np.pad(one.best, ((0, 0), (0, 0), (0, more), (0, 0)))
        return Listed(
            pad(slot(one.following)), pad(slot(one.prob)), pad(one.achieved), pad(one.policy), best
        )

    return np.array([np.asarray(play(alike(one), key)).mean() for one in maps])


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
    family, _, people = choose(env.name.removeprefix("empo:maps/"), choice)
    words = [np.asarray(x).reshape(len(family.layouts), -1) for x in family.places]
    words, num = np.concatenate(words, axis=1), env.held_out
    robots = {
        "learned": empo_evaluation.learned_policy(problem, train),
        "random": empo_evaluation.random_policy(found.world),
        "frozen": empo_evaluation.frozen_policy,
    }
    rows, each = [], {}
    for maps, world, own, episodes in (
        ("held out", found.held_out, words[:num], EPISODES.value * num),
        ("trained on", found.world, words[num:], TRAINED.value),
    ):
        for robot, policy in robots.items():
            each[robot] = reached_by_map(world, policy, own, episodes, gamma, jax.random.key(1))
            rows.append(row(maps, robot, each[robot], each["learned"]))
            print(rows[-1], flush=True)
        if world is found.held_out and HELPER.value:
            beta = (people or settings.humans).beta
            listed = []
            for number in range(num):
                listed.append(list_map(family.layouts[number], beta, problem.params.nu_h, gamma))
                print(f"map {number + 1}: {len(listed[-1][0].achieved)} states", flush=True)
            best = helped(world, [one for one, _ in listed], listed[0][1], gamma, jax.random.key(2))
            rows.append(row(maps, "helper", best, each["learned"]))
            print(rows[-1])
            gain = {k: np.nanmean(x) for k, x in each.items()}
            share = (gain["learned"] - gain["random"]) / (best.mean() - gain["random"])
            print(f"from random to the helper: {share:.3f} of the way")
    return rows


def main(_: list[str]) -> None:
    logging.set_verbosity(logging.WARNING)
    try:
        rows = compare(WORKDIR.value)
    except (ValueError, OSError, ImportError) as error:
        sys.exit(f"error: {error}")
    if OUT.value:
        write_rows(OUT.value, rows)


if __name__ == "__main__":
    app.run(main)
