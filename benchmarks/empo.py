"""EMPO's tables: errors against exact solutions, what humans reach, what networks need.

    python -m benchmarks.empo errors --out=docs/results/empo_errors.csv
    python -m benchmarks.empo networks --out=docs/results/empo_networks.csv
    python -m benchmarks.empo robots --workdir=runs/mine           # what humans reach with a run
    python -m benchmarks.empo robots --worlds=grid_rock_1h1r,multigrid/door --out=robots.csv
    python -m benchmarks.empo layouts --workdir=runs/layouts_0,runs/layouts_1 --out=layouts.csv
    python -m benchmarks.empo prior --config=empo_layouts --set=env.maps=96 \
        --set=humans.max_states=40000 --out=prior.npz   # for humans.network

`errors` over updates, of what the replay holds; `networks` with one part of the learner left out;
`robots`: shares of goals reached; `layouts`: the same on maps held out of runs; `locked_in`: key,
door and way out in the paper's 4.2; `prior`: human priors learned from exact ones. Times are of the
processor, without compilation.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from absl import app, flags, logging

from mbx import envs
from mbx.commands.jobs import write_rows
from mbx.config import load
from mbx.empo import TIME_LIMIT, multigrid, named_world
from mbx.empo.agent import evaluation, make_agent, resolve
from mbx.empo.agent.acting import policy_of
from mbx.empo.agent.settings import Settings
from mbx.empo.multigrid.family import make_family
from mbx.empo.multigrid.generate import generate
from mbx.empo.multigrid.layout import OPEN
from mbx.empo.multigrid.state import CARRIED
from mbx.empo.power.codec import make_codec
from mbx.empo.power.named import HumanModel
from mbx.fast import allocator
from mbx.power import PowerParams
from mbx.settings import from_dict
from mbx.training import build, loop, run
from mbx.training.devices import ONE_DEVICE
from mbx.training.state import Schedule, init_state

from . import empo_prior

Rows = list[dict[str, Any]]
ERROR_WORLDS = ("grid_rock_1h1r", "grid_corridor_2h1r")
CASES = ("tables-exact", "tables-fresh", "tables-rollout", "networks-exact", "networks-fresh")
# What differs from `all`: sections of settings, and of the run.
VARIANTS: dict[str, dict[str, Any]] = {
    "all": {},
    "without dueling head": {"model": {"q_head": "exp"}},
    "without advantage loss": {"loss": {"advantage_coef": 0.0}},
    "with neither": {"model": {"q_head": "exp"}, "loss": {"advantage_coef": 0.0}},
    "without varied starts": {"run": {"varied_starts": 0.0}},
    "with drawn human actions": {"loss": {"human_expectation": "fresh", "human_samples": 4}},
}


def show(row: dict[str, Any]) -> dict[str, Any]:
    """The row, printed."""
    print(row, flush=True)
    return row


def settings_of(updates: int, **sections: dict[str, Any]) -> Settings:
    """A tenth of the updates each for V_h^e, Q_r and the rise of beta_r, then everything."""
    part = updates // 10
    curriculum = {name: part for name in ("v_h_e_steps", "q_r_steps", "ramp_steps")}
    sections["curriculum"] = (
        curriculum | {"epsilon_steps": updates // 2} | sections.get("curriculum", {})
    )
    return from_dict(Settings(), {"eval": {"review_episodes": 0}, **sections})


def trained(
    world: str,
    settings: Settings,
    seed: int,
    *,
    points: int,
    seeded: int,
    rows: int,
    **options: Any,
) -> Iterator[tuple[Any, Any, Any, float, dict[str, Any]]]:
    """World, problem, state, processor seconds and means of metrics, `points` times in a run."""
    updates, num_envs = flags.FLAGS.updates, 32
    environment = envs.make(f"empo:{world}", num_envs, **options)
    agent = make_agent(settings, environment.spec)
    schedule = Schedule(seeded * num_envs, 0, 1 / num_envs, 0, 0)
    start = jax.jit(lambda key: init_state(agent, environment, key=key, capacity=rows))
    state, seconds = start(jax.random.key(seed)), 0.0
    interval = loop.make_interval(
        agent, environment, schedule, length=updates // points, partition=ONE_DEVICE
    )
    compiled = interval.lower(state).compile()
    problem = resolve(settings, environment.spec)
    for _ in range(points):
        began = time.process_time()
        state, metrics = jax.block_until_ready(compiled(state))
        seconds += time.process_time() - began
        yield environment.spec.world, problem, state, seconds, loop.summarise(metrics)


def reached(found: Any, policy: Any, gamma: float, key: int = 0) -> dict[str, Any]:
    """What humans reach in episodes from a world's starts."""
    sizes = dict(episodes=flags.FLAGS.episodes, length=flags.FLAGS.length)
    return evaluation.goal_reaching(found.world, policy, jax.random.key(key), gamma=gamma, **sizes)


def visited_states(world: Any, buffer: Any) -> np.ndarray:
    """Numbers of the non-terminal states that the replay holds, each once."""
    held = np.arange(buffer.data["is_last"].shape[1])[None] < np.asarray(buffer.size)[:, None]
    held = held & ~np.asarray(buffer.data["is_last"])
    codec = make_codec(world)
    obs = np.asarray(buffer.data["obs"])[held]
    return np.unique(jax.jit(jax.vmap(lambda o: world.index(codec.unpack(o)[0])))(obs))


def exact_errors(problem: Any, solution: Any, train: Any, states: np.ndarray) -> dict[str, float]:
    """Mean absolute errors at the given non-terminal states of a `tabular_world`.
    V_h^e: over all pairs, those whose goal is achieved in the state, those that are not but have an
    exact value above 0.001, and the rest. pi_r: mean absolute error and total variation. Only goals
    of positive weight count.
    """
    model, world = problem.model, problem.world
    latents = model.trunk(train.params, model.encode(states))
    v = np.clip(np.asarray(model.v_h_e(train.params, latents)), 0.0, 1.0)
    exact = np.moveaxis(np.asarray(solution.V_h_e)[:, :, states], -1, 0)
    achieved = np.asarray(jax.vmap(world.achieved)(states))
    present = np.broadcast_to(np.asarray(world.goal_weight) > 0, v.shape)
    positive = exact > 1e-3
    groups = {
        "v_h_e": present,
        "v_h_e_achieved": present & achieved,
        "v_h_e_positive": present & ~achieved & positive,
        "v_h_e_rest": present & ~achieved & ~positive,
    }
    error = np.abs(v - exact)
    result = {name: float(error[group].mean()) for name, group in groups.items() if group.any()}
    error = np.abs(np.asarray(policy_of(problem, train, states)) - solution.pi_r[states])
    tv = 0.5 * error.sum(axis=-1).mean()
    return result | {"pi_r": float(error.mean()), "pi_r_tv": float(tv)}


def errors(out: str) -> None:
    """Learning curves against the exact solution."""
    given, curves = flags.FLAGS, []
    for world in given.worlds or ERROR_WORLDS:
        for case in CASES:
            kind, humans = case.split("-")
            drawn = {"human_samples": 4} if humans == "fresh" else {}
            tables = {"kind": kind, "table_min_rate": 0.01 if humans != "exact" else 1.0}
            settings = settings_of(
                given.updates,
                model=tables if kind == "tables" else {"hidden": 64},
                loss={"human_expectation": humans, "room": 0.0} | drawn,
                curriculum={"steps": given.updates} if kind == "networks" else {},
            )
            for seed in map(int, given.seeds):
                moments = trained(world, settings, seed, points=20, seeded=10, rows=2_048)
                for found, problem, state, seconds, means in moments:
                    visited = visited_states(found.world, state.replay)
                    row = {"world": world, "case": case, "seed": seed, "visited": len(visited)}
                    row |= {"updates": int(state.train.step), "seconds": round(seconds, 2)}
                    row |= exact_errors(problem, found.solution, state.train, visited)
                    row |= {name: means.get(name, 0.0) for name in ("overflow", "mass_error")}
                    curves.append(row)
                show(curves[-1])
    write_rows(out, curves)


def networks(out: str) -> None:
    """What a network robot needs."""
    given = flags.FLAGS
    (world,) = given.worlds or ("multigrid/rock_loop",)
    rows: Rows = []
    for variant, changes in VARIANTS.items():
        sections: dict[str, dict[str, Any]] = {
            "model": {"hidden": 64, "q_head": "dueling"},
            "loss": {"human_expectation": "exact", "room": 0.0, "advantage_coef": 1.0},
            "curriculum": {"steps": given.updates},
        }
        sections = {name: own | changes.get(name, {}) for name, own in sections.items()}
        options = {"varied_starts": 0.5, "rows": 65_536} | changes.get("run", {})
        for seed in map(int, given.seeds):
            settings = settings_of(given.updates, **sections)
            moments = trained(world, settings, seed, points=5, seeded=20, **options)
            for found, problem, state, seconds, _ in moments:
                everywhere = np.flatnonzero(~np.asarray(found.table.terminal))
                policy = evaluation.learned_policy(problem, state.train)
                there = reached(found, policy, float(problem.params.gamma_h), key=7)
                off = exact_errors(problem, found.solution, state.train, everywhere)
                row = {"world": world, "variant": variant, "seed": seed}
                row |= {"updates": int(state.train.step), "seconds": round(seconds, 2)}
                row |= {"visited": len(visited_states(found.world, state.replay))}
                row |= {name: there[name] for name in ("reached", "reached_error")}
                row |= {name: off[name] for name in ("v_h_e_positive", "pi_r_tv")}
                rows.append(show(row))
            write_rows(out, rows)


def compare_robots(out: str) -> None:
    """A row per robot: of a run, or of worlds with nobody learned."""
    given, rows = flags.FLAGS, []
    if bool(given.workdir) == bool(given.worlds):
        raise ValueError("give --workdir or --worlds")
    every: list[tuple[str, Any, float, Any, Any]] = []
    if given.workdir:
        _, train, settings = run.load(given.workdir, which=given.which)
        if settings.agent != "empo":
            raise ValueError(f"{given.workdir} is a run of agent {settings.agent!r}, not empo")
        spec = build.make_environment(settings, 1, seed=0).spec
        problem, name = resolve(settings, spec), settings.env.name.removeprefix("empo:")
        every.append((name, spec.world, float(problem.params.gamma_h), problem, train))
    for name in given.worlds:
        found = named_world(name, default=PowerParams())
        gamma = float((found.params or PowerParams()).gamma_h)
        every.append((name, found, gamma, None, None))
    for name, found, gamma, problem, train in every:
        solved = ["exact"] if found.solution is not None else []
        for robot in [*["learned"] * (train is not None), *solved, "random", "frozen"]:
            policy = evaluation.make_robot(robot, found, problem, train)
            rows.append(show({"world": name, "robot": robot, **reached(found, policy, gamma)}))
        if train is not None and found.solution is not None:
            everywhere = np.flatnonzero(~np.asarray(found.table.terminal))
            show(exact_errors(problem, found.solution, train, everywhere))
    if out:
        write_rows(out, rows)


def layouts(out: str) -> None:
    """Runs on a generator's maps, on those held out: what humans reach beside learned robots, by
    Q_r's network and a step ahead, and how much of the way from random to exact that is. Exact ones
    are of maps of at most --states states; errors are over maps, of the way by a jackknife."""
    given, reach = flags.FLAGS, {}
    for number, workdir in enumerate(given.workdir.split(",")):
        _, train, settings = run.load(workdir, which=given.which)
        spec = build.make_environment(settings, 1, seed=0).spec
        if spec.world is None or spec.world.held_out is None:
            raise ValueError(f"{workdir}: no maps are held out, give runs of empo_layouts.py")
        problem, world = resolve(settings, spec), spec.world.held_out
        kind, env = settings.env.name.removeprefix("empo:maps/"), settings.env
        drawn = generate(kind, env.held_out, seed=env.map_seed)
        each = {"random": evaluation.random_policy(world), "frozen": evaluation.frozen_policy}
        for name, ahead in {"network": False, "ahead": True}.items():
            look = dataclasses.replace(settings.eval, lookahead=ahead)
            own = dataclasses.replace(problem, settings=dataclasses.replace(settings, eval=look))
            each[f"{name} {number}"] = evaluation.learned_policy(own, train)
        for name in each.keys() - reach.keys():
            reach[name] = _by_map(world, each[name], make_family(drawn).places)
    exact = np.array([_beside_exact(one, settings, problem) for one in drawn])
    known, rows = ~np.isnan(exact), []
    low, high = reach["random"][known], exact[known]
    for robot, values in sorted(reach.items()):
        own = values[known]
        few = [_way(*(np.delete(x, i) for x in (own, low, high))) for i in range(len(own))]
        row = {"robot": robot, "reached": values.mean(), "exact_maps": len(own)}
        row |= {"reached_there": own.mean(), "exact": high.mean()}
        row |= {"below": (high - own).mean(), "below_error": _error(high - own)}
        row |= {"way": _way(own, low, high), "way_error": _error(np.array(few)) * (len(few) - 1)}
        rows.append(
            show({name: x if robot == x else round(float(x), 6) for name, x in row.items()})
        )
    if out:
        write_rows(out, rows)


def _error(x: np.ndarray) -> float:
    return float(x.std(ddof=1) / len(x) ** 0.5)


def _way(own: np.ndarray, low: np.ndarray, high: np.ndarray) -> float:
    return float((own - low).mean() / (high - low).mean())


def _by_map(world: Any, policy: Any, places: Any) -> np.ndarray:
    """What humans reach beside a robot on each map, known by its place `[L, ...]`."""
    sizes = dict(episodes=flags.FLAGS.episodes, length=flags.FLAGS.length)

    @jax.jit
    def play(key: Any) -> Any:
        played = evaluation.play(world, policy, key, **sizes)
        return played.reached, jax.tree.map(lambda x: x[:, 0], played.states.place)

    reached, at = jax.device_get(play(jax.random.key(1)))
    flat = lambda place: np.concatenate([x.reshape(len(x), -1) for x in place], axis=1)  # noqa: E731
    there = (flat(at)[:, None] == flat(jax.device_get(places))[None]).all(axis=2)
    return np.array([reached[own].mean() for own in there.T])


def _beside_exact(layout: Any, settings: Settings, problem: Any) -> float:
    """What humans reach beside the exact robot of a map; nan on one of too many states."""
    humans = HumanModel("paths", beta=settings.humans.beta, max_states=flags.FLAGS.states)
    found = multigrid.make_world(layout, humans, params=problem.params)
    if found.solution is None:
        return float("nan")
    policy = evaluation.make_robot("exact", found)
    sizes = dict(episodes=512, length=flags.FLAGS.length)
    return evaluation.goal_reaching(found.world, policy, jax.random.key(2), **sizes)["reached"]


def locked_in(out: str) -> None:
    """The paper's experiment 4.2: shares of episodes in which robots get the key, open the door and
    are then out of its way. Learned ones do what is most likely in their policy."""
    rows, world, given = [], "multigrid/locked_in", flags.FLAGS
    states = multigrid.export(multigrid.make_grid(multigrid.load_map("locked_in")))[1]
    states = jax.device_get(states)
    tables = {"kind": "tables", "table_min_rate": 1.0}
    loss = {"human_expectation": "exact", "room": 0.0, "batch_size": 128}
    settings = settings_of(given.updates, model=tables, loss=loss)
    for seed in map(int, given.seeds):
        ((found, problem, state, seconds, _),) = trained(
            world, settings, seed, points=1, seeded=20, rows=65_536
        )
        ways = {
            "learned": lambda s, _, p=problem, t=state.train: policy_of(p, t, s[None])[0].argmax(),
            "random": evaluation.random_policy(found.world),
        }
        for robot, policy in ways.items():
            sizes = dict(episodes=given.episodes, length=given.length)
            played = evaluation.play(found.world, policy, jax.random.key(1), **sizes)
            at = np.asarray(played.states)
            opened, place = states.doors[at, 0] == OPEN, states.agents[at, 1]
            x, y = place[..., 0], place[..., 1]
            seen = {"key": states.items[at, 0, 0] == CARRIED, "door": opened}
            seen["aside"] = opened & ~((y == 1) & (x > 2) & (x < 5))  # the door and the cell before
            row = {"seed": seed, "robot": robot, "seconds": round(seconds, 1)}
            row |= {name: float(there.any(axis=1).mean()) for name, there in seen.items()}
            whole = evaluation.make_robot(robot, found, problem, state.train)
            rows.append(show(row | reached(found, whole, 0.95)))
    print(f"{sum(r['aside'] >= 0.95 for r in rows if r['robot'] == 'learned')} seeds in 95 %")
    if out:
        write_rows(out, rows)


def prior(out: str) -> None:
    """A human prior for maps that cannot be listed."""
    given = flags.FLAGS
    settings = load(given.config, ["humans.model=exact", *given.set])
    empo_prior.run(out, settings, [*map(int, given.seeds)], given.updates)


COMMANDS: dict[str, Callable[[str], None]] = {
    "errors": errors,
    "networks": networks,
    "robots": compare_robots,
    "layouts": layouts,
    "locked_in": locked_in,
    "prior": prior,
}


def define_flags() -> None:
    """The flags of this command; tests import the module without them."""
    flags.DEFINE_string("out", "", "CSV file.")
    flags.DEFINE_string("workdir", None, "Run directory of `robots`, or several of `layouts`.")
    flags.DEFINE_string("which", "latest", "Checkpoint: latest, best or a step.")
    flags.DEFINE_list("worlds", [], "Worlds (default: those of the table).")
    flags.DEFINE_string("config", "empo_layouts", "Configuration of `prior`: its maps and power.")
    flags.DEFINE_multi_string("set", [], "Further settings of it: humans.max_states=40000")
    flags.DEFINE_list("seeds", ["0"], "Seeds.")
    flags.DEFINE_integer("updates", 6_000, "Learner updates per run (10,000 in `networks`).")
    flags.DEFINE_integer("episodes", 20_000, "Episodes per robot.", lower_bound=2)
    flags.DEFINE_integer("states", 40_000, "Most states of a map with an exact robot.")
    flags.DEFINE_integer("length", TIME_LIMIT, "Steps per episode.", lower_bound=1)


def main(argv: list[str]) -> None:
    logging.set_verbosity(logging.WARNING)
    if len(argv) != 2 or argv[1] not in COMMANDS:
        sys.exit(f"error: python -m benchmarks.empo {'|'.join(COMMANDS)}")
    allocator.dispatch_inline()
    try:
        COMMANDS[argv[1]](flags.FLAGS.out)
    except (ValueError, OSError, ImportError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    define_flags()
    app.run(main)
