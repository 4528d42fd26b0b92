r"""Sweep one setting over several seeds, draw one figure, write one table.

    python -m benchmarks.ablate --sweep=rounds --seeds=3 --out=runs/rounds
    python -m benchmarks.ablate --sweep=reanalyze --seeds=3 --workers=2 --steps=6000
    python -m benchmarks.ablate --sweep=replay_loss --config=configs/dreamer.py \
        --set=env.name=gymnax:Catch-bsuite --steps=10000

Every run is one of `mbx train` in OUT/SWEEP-VARIANT-sSEED; complete runs are not repeated and the
others continue. OUT/SWEEP holds the figure, the table of scores, the curves and what made them.
"""

from __future__ import annotations

import os
import re
import sys
from typing import Any

from absl import app, flags

from mbx.commands import jobs, sweep
from mbx.commands.jobs import Job

Overrides = tuple[str, ...]

_TWO_HEADS = ("model.num_dynamics=2", "model.num_rewards=2")


def _optimism(coef: float) -> Overrides:
    """The same coefficient of the ensembles' std wherever there is one."""
    fields = (
        "planner.std_coef",
        "planner.evaluation_std_coef",
        "training_planner.std_coef",
        "loss.td_std_coef",
    )
    return tuple(f"{field}={coef}" for field in fields)


# Sweep -> variant -> settings on top of the configuration, one factor at a time.
SWEEPS: dict[str, dict[str, Overrides]] = {
    "rounds": {f"rounds={n}": (f"training_planner.iterations={n}",) for n in (1, 3, 6)},
    "samples": {f"samples={n}": (f"training_planner.num_samples={n}",) for n in (64, 128, 256)},
    "temperature": {
        f"temperature={t}": (
            f"training_planner.temperature={t}",
            "loss.policy_loss=awr",
            f"loss.awr_temperature={t}",
        )
        for t in (0.1, 0.5, 1.0)
    },
    "reanalyze": {
        "off": ("reanalyze.enabled=False",),
        **{f"every {n}": (f"reanalyze.interval={n}",) for n in (100, 500, 1000)},
    },
    "targets": {
        "stored": (),
        "legacy": ("training_planner.enabled=False",),
    },
    "value": {target: (f"loss.value_target={target}",) for target in ("planner", "lambda", "td")},
    "planner_targets": {  # where values come from, and what planner-made ones need
        "planner": (),
        "lambda, planner's values": ("loss.value_target=lambda",),
        "td": ("loss.value_target=td",),
        "rounds=1": ("training_planner.iterations=1",),
        "no reanalyze": ("reanalyze.enabled=False",),
        "rounds=6": ("training_planner.iterations=6",),
        "reanalyze every 100": ("reanalyze.interval=100",),
        "all, weighted": ("replay.keep_targets=0", "loss.value_weighting=weighted"),
        "legacy": ("training_planner.enabled=False",),  # these score 32 actions in every loss
        "lambda": ("loss.value_target=lambda", "training_planner.enabled=False"),
    },
    "keep": {
        "best 4 of 8": (),
        "all, weighted": (
            "replay.keep_targets=0",
            "loss.value_weighting=weighted",
        ),
    },
    "policy": {
        "awr": ("loss.policy_loss=awr",),
        "svg": ("loss.policy_loss=svg",),
        "svg, entropy in the unit of its loss": (
            "loss.policy_loss=svg",
            "loss.entropy_scale=none",
        ),
        "kl": ("loss.policy_loss=kl",),
    },
    "updates": {f"utd={n}": (f"train.utd_ratio={n}",) for n in (0.5, 1, 2, 4)},
    "options": {
        "default": (),
        "heads=2": _TWO_HEADS,
        "heads=2 std=-1": (*_TWO_HEADS, *_optimism(-1.0)),
        "heads=2 std=+1": (*_TWO_HEADS, *_optimism(1.0)),
        "policy=awr": ("loss.policy_loss=awr",),
        "policy=kl": ("loss.policy_loss=kl",),
        "value=td": ("loss.value_target=td",),
        "value=lambda": ("loss.value_target=lambda",),
    },
    "replay_loss": {  # of Dreamer's critic: --config=configs/dreamer.py
        how: (f"critic.replay_loss={how}",) for how in ("aligned", "none")
    },
    "continues": {  # of Dreamer's dreams
        how: (f"imagination.continues={how}",) for how in ("hard", "soft")
    },
    "termination": {how: (f"loss.termination={how}",) for how in ("hard", "soft")},
}


def make_jobs(given: Any) -> list[Job]:
    """All runs of the sweep that the flags describe, the first seed of every variant first."""
    shared = (f"eval.interval={given.eval_interval}", f"eval.episodes={given.episodes}")
    found = []
    for seed in range(given.seeds):
        for variant, overrides in SWEEPS[given.sweep].items():
            name = re.sub("[= ,']", "", f"{given.sweep}-{variant}-s{seed}")
            job = jobs.make_job(
                variant,
                seed,
                os.path.join(given.out, name),
                config=given.config,
                steps=given.steps,
                overrides=(*shared, *overrides, *given.set),
            )
            found.append(job)
    return found


def define_flags() -> None:
    """The flags of this command; tests import the module without them."""
    flags.DEFINE_string("config", "configs/tdmpc.py", "Configuration.")
    flags.DEFINE_enum("sweep", "rounds", list(SWEEPS), "Which setting to vary.")
    flags.DEFINE_integer("seeds", 3, "Seeds per variant.", lower_bound=1)
    flags.DEFINE_integer("steps", 6000, "Environment steps per run.", lower_bound=1)
    flags.DEFINE_integer("eval_interval", 1500, "Environment steps between evaluations.")
    flags.DEFINE_integer("episodes", 10, "Episodes per evaluation.", lower_bound=1)
    flags.DEFINE_integer("workers", 1, "Runs at a time.", lower_bound=1)
    flags.DEFINE_string("out", "runs/ablation", "Directory of the runs and of OUT/SWEEP.")
    flags.DEFINE_multi_string("set", [], "Further overrides for all runs: env.name=...")


def main(_: list[str]) -> None:
    given = flags.FLAGS
    found, folder = make_jobs(given), os.path.join(given.out, given.sweep)
    problems = jobs.run_all(found, workers=given.workers)
    os.makedirs(folder, exist_ok=True)
    sweep.report(found, folder, "eval/return_mean")
    if problems:
        sys.exit("failed runs:\n" + "\n".join(problems))


if __name__ == "__main__":
    define_flags()
    app.run(main)
