"""What `benchmarks.reproduce` can run: suites of tasks, and the gates that results must pass.

A gate measures one number from the runs of a suite and compares it with a bar.
"""

from __future__ import annotations

import csv
import math
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from mbx.analysis.curves import Curve, value_at

PUBLISHED = pathlib.Path(__file__).resolve().parents[1] / "docs/results/published.csv"


class Task(NamedTuple):
    """A task of a suite: env.name, environment steps, and seeds (0: the suite's number).

    low, high: returns that count as 0 and 1 in statistics over tasks. overrides: settings of this
    task alone; config, metric: others than the suite's.
    """

    name: str
    steps: int
    seeds: int = 0
    low: float = 0.0
    high: float = 1000.0
    overrides: tuple[str, ...] = ()
    config: str = ""
    metric: str = ""


class Gate(NamedTuple):
    """A bar to reach: `measure` says what is compared with `bar`, see `MEASURES`.

    step: where, or from where on, in environment steps. tasks: () for all of the suite. agent:
    whose published values. share: of the seeds that must hold.
    """

    measure: str
    bar: float
    step: int = 0
    tasks: tuple[str, ...] = ()
    agent: str = ""
    share: float = 1.0


class Run(NamedTuple):
    """One seed's curve and the processor hours it took."""

    seed: int
    curve: Curve
    hours: float = 0.0


class Suite(NamedTuple):
    """Tasks that are run with one configuration. at: steps whose returns the table shows."""

    help: str
    config: str
    tasks: tuple[Task, ...]
    seeds: int
    at: tuple[int, ...]
    overrides: tuple[str, ...] = ()
    gates: tuple[Gate, ...] = ()
    metric: str = "eval/return_mean"


class Verdict(NamedTuple):
    """Outcome of a gate; measured is NaN where runs for it are missing."""

    what: str
    measured: float
    passed: bool


Runs = Mapping[str, Sequence[Run]]
Published = Mapping[tuple[str, str], Mapping[int, tuple[float, float, float]]]


def load_published(path: pathlib.Path = PUBLISHED) -> Published:
    """(task, agent) -> step -> (mean, low, high), from a CSV with those columns."""
    found: dict[tuple[str, str], dict[int, tuple[float, float, float]]] = {}
    with open(path, newline="") as file:
        for row in csv.DictReader(file):
            point = tuple(float(row[name]) for name in ("mean", "low", "high"))
            found.setdefault((row["task"], row["agent"]), {})[int(row["step"])] = point
    return found


def _mean(gate: Gate, runs: Runs, published: Published) -> float:
    """Mean over tasks of the mean over seeds, at a step."""
    each = [[value_at(run.curve, gate.step) for run in own] for own in runs.values()]
    return float(np.mean([np.mean(x) if x else math.nan for x in each]))


def _median(gate: Gate, runs: Runs, published: Published) -> float:
    """The median over seeds at a step, of the task where it is least."""
    each = [[value_at(run.curve, gate.step) for run in own] for own in runs.values()]
    return float(np.min([np.median(x) if x else math.nan for x in each]))


def _median_held(gate: Gate, runs: Runs, published: Published) -> float:
    """The least median over seeds of all evaluations from a step on."""
    least = math.inf
    for own in runs.values():
        late = [run.curve.values[run.curve.steps >= 0.98 * gate.step] for run in own]
        if not late or len({x.size for x in late}) > 1 or not late[0].size:
            return math.nan
        least = min(least, float(np.median(late, axis=0).min()))
    return least


def _held(gate: Gate, runs: Runs, published: Published) -> float:
    """What `share` of the seeds reach at every evaluation from a step on, on every task."""
    least = math.inf
    for own in runs.values():
        worst = [run.curve.values[run.curve.steps >= 0.98 * gate.step] for run in own]
        if not worst or not all(x.size for x in worst):
            return math.nan
        ordered = np.sort([x.min() for x in worst])[::-1]
        least = min(least, float(ordered[math.ceil(gate.share * len(own)) - 1]))
    return least


def _against(gate: Gate, runs: Runs, published: Published) -> float:
    """Mean over seeds over the published mean at a step, of the task where that is least."""
    ratios = []
    for task, own in runs.items():
        values = [value_at(run.curve, gate.step) for run in own]
        theirs = published[task, gate.agent][gate.step][0]
        ratios.append(np.mean(values) / max(theirs, 1e-9) if values else math.nan)
    return float(np.min(ratios))


def _collapse(gate: Gate, runs: Runs, published: Published) -> float:
    """The least evaluation from a step on, as a share of the best before it, of all runs."""
    least = math.inf
    for own in runs.values():
        if not own:
            return math.nan
        for run in own:
            best = np.maximum.accumulate(run.curve.values)[:-1]
            late = run.curve.steps[1:] >= 0.98 * gate.step
            if not late.any():
                return math.nan
            share = run.curve.values[1:][late] / np.maximum(best[late], 1e-9)
            least = min(least, float(share.min()))
    return least


def _minutes(gate: Gate, runs: Runs, published: Published) -> float:
    """Processor minutes of the longest run, negative, so that less is better."""
    hours = [run.hours for own in runs.values() for run in own]
    return -60.0 * max(hours) if hours and all(hours) else math.nan


Measure = Callable[[Gate, Runs, Published], float]
MEASURES: dict[str, tuple[Measure, str]] = {
    "mean": (_mean, "mean over tasks at {step:,} steps"),
    "median": (_median, "median over seeds at {step:,} steps"),
    "median held": (_median_held, "median over seeds at every evaluation from {step:,} steps on"),
    "held": (_held, "every evaluation from {step:,} steps on, {share:.0%} of the seeds"),
    "published": (_against, "share of {agent}'s published mean at {step:,} steps, every task"),
    "collapse": (_collapse, "evaluation over the best before it, from {step:,} steps on"),
    "minutes": (_minutes, "processor minutes a run (negative)"),
}


def judge(gate: Gate, runs: Runs, published: Published) -> Verdict:
    """Compare a gate's measure with its bar; one that cannot be measured is not passed."""
    own = {task: found for task, found in runs.items() if not gate.tasks or task in gate.tasks}
    measure, text = MEASURES[gate.measure]
    measured = measure(gate, own, published) if own else math.nan
    what = text.format(**gate._asdict())
    tasks = f" ({', '.join(gate.tasks)})" if gate.tasks else ""
    return Verdict(f"{what}{tasks}: at least {gate.bar:g}", measured, measured >= gate.bar)


_DMC = ("eval.episodes=10",)
_SEEDED = ("dmc:walker-walk", "dmc:finger-spin", "dmc:cheetah-run", "dmc:reacher-hard")
_DMC15 = (
    "cartpole-swingup",
    "cartpole-balance",
    "reacher-easy",
    "reacher-hard",
    "walker-stand",
    "walker-walk",
    "walker-run",
    "cheetah-run",
    "finger-spin",
    "finger-turn-easy",
    "cup-catch",
    "pendulum-swingup",
    "hopper-hop",
    "acrobot-swingup",
    "quadruped-walk",
)
_HARD = ("dog-run", "dog-stand", "dog-trot", "dog-walk")
_HARD += ("humanoid-run", "humanoid-stand", "humanoid-walk")

SUITES: dict[str, Suite] = {
    "dmc15": Suite(
        "fifteen dm_control tasks to 100k steps beside the published curves, tiny model",
        "configs/tdmpc.py",
        tuple(
            Task(f"dmc:{name}", 100_000, seeds=3 if f"dmc:{name}" in _SEEDED else 1)
            for name in _DMC15
        ),
        seeds=1,
        at=(10_000, 30_000, 50_000, 100_000),
        overrides=(*_DMC, "eval.interval=5000", "checkpoint.interval=5000"),
        gates=(
            Gate("mean", 680, step=50_000),
            Gate("mean", 760, step=100_000),
            Gate("published", 1.0, step=100_000, agent="sac"),
            Gate("median", 940, step=30_000, tasks=_SEEDED[:2]),
            Gate("collapse", 0.5, step=40_000),
            Gate("minutes", -60),
        ),
    ),
    "dmc-hard": Suite(
        "dogs and humanoids of dm_control to 2M steps, 5M model (for GPUs)",
        "configs/tdmpc.py",
        tuple(Task(f"dmc:{name}", 2_000_000) for name in _HARD),
        seeds=1,
        at=(500_000, 1_000_000, 2_000_000),
        overrides=(
            *_DMC,
            "model.size=5",
            "loss.batch_size=256",
            "replay.capacity=1000000",
            "eval.interval=50000",
            "checkpoint.interval=50000",
        ),
        gates=(Gate("published", 1.0, step=1_000_000, agent="tdmpc2"),),
    ),
    "playground": Suite(
        "MuJoCo Playground's swing-up, simulated in JAX",
        "configs/tdmpc.py",
        (Task("playground:CartpoleSwingup", 100_000),),
        seeds=2,
        at=(50_000, 100_000),
        overrides=("train.utd_ratio=1", "planner.horizon=5", "eval.interval=10000"),
        gates=(Gate("median", 800, step=100_000),),
    ),
    "dreamer": Suite(
        "one set of defaults of configs/dreamer.py on five tasks",
        "configs/dreamer.py",
        (
            Task("gymnax:CartPole-v1", 120_000, low=20, high=500),
            Task("gymnax:Pendulum-v1", 30_000, low=-1300, high=-130),
            Task("playground:CartpoleSwingup", 150_000),
            Task("gymnax:Catch-bsuite", 40_000, low=-1, high=1),
            Task("gymnax:Breakout-MinAtar", 55_000, low=0, high=10),
        ),
        seeds=3,
        at=(30_000, 40_000, 55_000, 120_000, 150_000),
        gates=(
            Gate("median held", 500, step=65_000, tasks=("gymnax:CartPole-v1",)),
            Gate("median", -200, step=30_000, tasks=("gymnax:Pendulum-v1",)),
            Gate("median", 700, step=150_000, tasks=("playground:CartpoleSwingup",)),
            Gate("median", 0.9, step=40_000, tasks=("gymnax:Catch-bsuite",)),
            Gate("median", 6, step=55_000, tasks=("gymnax:Breakout-MinAtar",)),
        ),
    ),
    "empo": Suite(
        "share of their goals that humans reach beside the learned robots",
        "configs/empo.py",
        (Task("empo:multigrid/gates_2h2r", 160_000, high=1.0),),
        seeds=3,
        at=(64_000, 160_000),
        gates=(Gate("median", 0.6, step=160_000),),
        metric="eval/reached_learned",
    ),
    "pendulum": Suite(
        "the default on Pendulum: solved within 5,000 steps, and held",
        "configs/tdmpc.py",
        (Task("gymnax:Pendulum-v1", 30_000, low=-1300, high=-130),),
        seeds=5,
        at=(5_000, 15_000, 30_000),
        overrides=("eval.interval=2500", "train.log_interval=500"),
        gates=(
            Gate("median", -200, step=5_000),
            Gate("held", -200, step=5_000, share=0.8),
        ),
    ),
    "smoke": Suite(
        "two runs of minutes: a pendulum that swings up, a robot that clears the way",
        "configs/tdmpc.py",
        (
            Task(
                "gymnax:Pendulum-v1",
                4_000,
                low=-1300,
                high=-130,
                overrides=(
                    "train.utd_ratio=0.5",  # what five minutes have room for
                    "loss.policy_loss=awr",
                    "loss.value_target=lambda",
                    "eval.interval=2000",
                    "eval.episodes=10",
                ),
            ),
            Task(
                "empo:grid_rock_1h1r",
                32_000,
                high=0.411,  # beside the exact robot; 0.218 beside a random one
                config="configs/empo.py",
                metric="eval/reached_learned",
                overrides=(
                    "model.kind=tables",
                    "model.table_min_rate=1.0",
                    "loss.human_expectation=exact",
                    "env.episode_length=0",
                    "eval.interval=16000",
                    "curriculum.v_h_e_steps=200",
                    "curriculum.q_r_steps=200",
                    "curriculum.ramp_steps=400",
                    "curriculum.epsilon_steps=1000",
                ),
            ),
        ),
        seeds=1,
        at=(4_000, 32_000),
        gates=(
            Gate("median", -500, step=4_000, tasks=("gymnax:Pendulum-v1",)),
            Gate("median", 0.33, step=32_000, tasks=("empo:grid_rock_1h1r",)),
        ),
    ),
}
