"""Sweep one setting over several seeds, draw one figure, write one table.

    python -m experiments.ablate --sweep=rounds --seeds=3 --out=runs/rounds
    python -m experiments.ablate --sweep=reanalyze --seeds=3 --workers=2 --steps=6000
    python -m experiments.ablate --sweep=replay_loss --config=configs/dreamer.py \\
        --set=env.name=gymnax:Catch-bsuite --steps=10000

Every run is a `python -m experiments.train` of its own in OUT/VARIANT-sSEED; runs that are complete
are not repeated, so a sweep that was stopped goes on. OUT/SWEEP.png and OUT/SWEEP.md come last.
"""

from __future__ import annotations

import concurrent.futures
import os
import shutil
import subprocess
import sys
from typing import NamedTuple

import numpy as np
from absl import app, flags

from mbx.training.curves import load_curve, plot_runs
from mbx.training.metrics import atomic_write, read_rows

Overrides = tuple[str, ...]

_TWO_HEADS = ("--config.model.num_dynamics=2", "--config.model.num_rewards=2")


def _optimism(coef: float) -> Overrides:
    """The same coefficient of the ensembles' std wherever there is one."""
    fields = (
        "planner.std_coef",
        "planner.evaluation_std_coef",
        "training_planner.std_coef",
        "loss.td_std_coef",
    )
    return tuple(f"--config.{field}={coef}" for field in fields)


# Sweep -> variant -> flags on top of the configuration: document 000, «Ablation Studies»; "options"
# are what document 001 adds, one at a time.
SWEEPS: dict[str, dict[str, Overrides]] = {
    "rounds": {f"rounds={n}": (f"--config.training_planner.iterations={n}",) for n in (1, 3, 6)},
    "samples": {
        f"samples={n}": (f"--config.training_planner.num_samples={n}",) for n in (64, 128, 256)
    },
    "temperature": {
        f"temperature={t}": (
            f"--config.training_planner.temperature={t}",
            f"--config.loss.awr_temperature={t}",
        )
        for t in (0.1, 0.5, 1.0)
    },
    "reanalyze": {
        "off": ("--config.reanalyze.enabled=False",),
        **{f"every {n}": (f"--config.reanalyze.interval={n}",) for n in (100, 500, 1000)},
    },
    "targets": {
        "stored": (),
        "legacy": ("--config.training_planner.enabled=False",),
    },
    "options": {
        "default": (),
        "heads=2": _TWO_HEADS,
        "heads=2 std=-1": (*_TWO_HEADS, *_optimism(-1.0)),
        "heads=2 std=+1": (*_TWO_HEADS, *_optimism(1.0)),
        "policy=svg": ("--config.loss.policy_loss=svg",),
        "policy=kl": ("--config.loss.policy_loss=kl",),
        "value=td": ("--config.loss.value_target=td",),
        "value=lambda": ("--config.loss.value_target=lambda",),
    },
    "replay_loss": {  # of Dreamer's critic, document 002: --config=configs/dreamer.py
        how: (f"--config.critic.replay_loss={how}",) for how in ("aligned", "literal", "none")
    },
    "continues": {  # of Dreamer's dreams
        how: (f"--config.imagination.continues={how}",) for how in ("hard", "soft")
    },
    "termination": {how: (f"--config.loss.termination={how}",) for how in ("hard", "soft")},
}

CONFIG = flags.DEFINE_string("config", "configs/tdmpc.py", "Configuration file.")
SWEEP = flags.DEFINE_enum("sweep", "rounds", list(SWEEPS), "Which setting to vary.")
SEEDS = flags.DEFINE_integer("seeds", 3, "Seeds a variant.", lower_bound=1)
STEPS = flags.DEFINE_integer("steps", 6000, "Environment steps of a run.", lower_bound=1)
EVAL_INTERVAL = flags.DEFINE_integer(
    "eval_interval", 1500, "Environment steps between evaluations."
)
EPISODES = flags.DEFINE_integer("episodes", 10, "Episodes of an evaluation.", lower_bound=1)
WORKERS = flags.DEFINE_integer("workers", 1, "Runs at a time.", lower_bound=1)
OUT = flags.DEFINE_string(
    "out", "runs/ablation", "Directory of the runs, the figure and the table."
)
EXTRA = flags.DEFINE_multi_string("set", [], "Further overrides for all runs: env.name=...")


class Job(NamedTuple):
    """One run of the sweep."""

    variant: str
    seed: int
    workdir: str
    command: list[str]


def make_jobs() -> list[Job]:
    """All runs of the sweep that the flags describe."""
    jobs = []
    for seed in range(SEEDS.value):
        for variant, overrides in SWEEPS[SWEEP.value].items():
            name = f"{SWEEP.value}-{variant}-s{seed}".replace("=", "").replace(" ", "")
            workdir = os.path.join(OUT.value, name)
            command = [
                sys.executable,
                "-m",
                "experiments.train",
                f"--config={CONFIG.value}",
                f"--workdir={workdir}",
                f"--config.seed={seed}",
                f"--config.train.steps={STEPS.value}",
                f"--config.eval.interval={EVAL_INTERVAL.value}",
                f"--config.eval.episodes={EPISODES.value}",
                "--config.checkpoint.interval=0",
                *overrides,
                *(f"--config.{x}" for x in EXTRA.value),
            ]
            jobs.append(Job(variant, seed, workdir, command))
    return jobs


def run(job: Job) -> str | None:
    """Run a job unless it is complete; returns what went wrong, or None."""
    if load_curve(job.workdir).steps.size and load_curve(job.workdir).steps[-1] >= STEPS.value:
        return None
    shutil.rmtree(job.workdir, ignore_errors=True)
    os.makedirs(job.workdir)
    with open(job.workdir + ".log", "w") as log:
        code = subprocess.call(job.command, stdout=log, stderr=subprocess.STDOUT)
    print(f"{job.variant} seed {job.seed}: {'done' if code == 0 else 'failed'}", flush=True)
    return None if code == 0 else f"{job.variant} seed {job.seed}: see {job.workdir}.log"


def table(jobs: list[Job]) -> str:
    """Markdown: per variant the last evaluation, the mean of all evaluations, and the time."""
    lines = [
        f"| {SWEEP.value} | last evaluation, each seed | mean | mean of all | s/run |",
        "|---|---|---|---|---|",
    ]
    for variant in SWEEPS[SWEEP.value]:
        own = [j for j in jobs if j.variant == variant and load_curve(j.workdir).steps.size]
        if not own:
            lines.append(f"| {variant} | no run | | | |")
            continue
        curves = [load_curve(j.workdir) for j in own]
        last = [c.values[-1] for c in curves]
        area = [c.values.mean() for c in curves]
        seconds = [read_rows(os.path.join(j.workdir, "metrics.jsonl"))[-1]["seconds"] for j in own]
        each = ", ".join(f"{x:.3g}" for x in last)
        lines.append(
            f"| {variant} | {each} | {np.mean(last):.3g} | {np.mean(area):.3g} "
            f"± {np.std(area):.2g} | {np.mean(seconds):.0f} |"
        )
    return "\n".join(lines) + "\n"


def main(_: list[str]) -> None:
    os.makedirs(OUT.value, exist_ok=True)
    jobs = make_jobs()
    with concurrent.futures.ThreadPoolExecutor(WORKERS.value) as pool:
        problems = [problem for problem in pool.map(run, jobs) if problem]
    done = [j for j in jobs if load_curve(j.workdir).steps.size]
    base = os.path.join(OUT.value, SWEEP.value)
    if done:
        plot_runs(
            [j.workdir for j in done],
            base + ".png",
            labels=[j.variant for j in done],
            title=f"{SWEEP.value}, {STEPS.value} steps",
        )
        text = table(jobs)
        atomic_write(base + ".md", text.encode())
        print(text)
    if problems:
        sys.exit("failed runs:\n" + "\n".join(problems))


if __name__ == "__main__":
    app.run(main)
