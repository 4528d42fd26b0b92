r"""Sweep one setting over several seeds, draw one figure, write one table.

    python -m experiments.ablate --sweep=rounds --seeds=3 --out=runs/rounds
    python -m experiments.ablate --sweep=reanalyze --seeds=3 --workers=2 --steps=6000
    python -m experiments.ablate --sweep=replay_loss --config=configs/dreamer.py \
        --set=env.name=gymnax:Catch-bsuite --steps=10000

Every run is a `python -m experiments.train` of its own in OUT/SWEEP-VARIANT-sSEED; complete runs
are not repeated and the others go on where they were. OUT/SWEEP.png and OUT/SWEEP.md come last, and
with --keep=FOLDER the curves and what made them: FOLDER/SWEEP.csv, FOLDER/SWEEP.json.
"""

from __future__ import annotations

import os
import sys

from absl import app, flags

from mbx.analysis import compare, groups, tables
from mbx.analysis.curves import plot_runs
from mbx.commands import jobs as processes
from mbx.commands import results
from mbx.commands.jobs import Job
from mbx.training.checkpoint import load_config

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
KEEP = flags.DEFINE_string("keep", "", "Folder for the data to track.")
EXTRA = flags.DEFINE_multi_string("set", [], "Further overrides for all runs: env.name=...")


def make_jobs() -> list[Job]:
    """All runs of the sweep that the flags describe."""
    found = []
    for seed in range(SEEDS.value):
        for variant, overrides in SWEEPS[SWEEP.value].items():
            name = f"{SWEEP.value}-{variant}-s{seed}"
            for character in "= ,'":
                name = name.replace(character, "")
            job = processes.make_job(
                variant,
                seed,
                os.path.join(OUT.value, name),
                config=CONFIG.value,
                steps=STEPS.value,
                overrides=(
                    f"eval.interval={EVAL_INTERVAL.value}",
                    f"eval.episodes={EPISODES.value}",
                    *overrides,
                    *EXTRA.value,
                ),
            )
            found.append(job)
    return found


def main(_: list[str]) -> None:
    os.makedirs(OUT.value, exist_ok=True)
    jobs = make_jobs()
    problems = processes.run_all(jobs, workers=WORKERS.value)
    done = [j for j in jobs if j.curve().steps.size]
    base = os.path.join(OUT.value, SWEEP.value)
    if done:
        plot_runs(
            [j.workdir for j in done],
            base + ".png",
            labels=[j.label for j in done],
            title=f"{SWEEP.value}, {STEPS.value} steps",
        )
        found = groups.labelled([j.workdir for j in done], [j.label for j in done])
        table = compare.scores(found, step=STEPS.value)
        tables.write(base + ".md", table)
        print(tables.render(table, "md"))
    if KEEP.value:
        tasks = [load_config(j.workdir)["env"]["name"] for j in done]
        series = [
            results.Series(task, j.label, j.seed, j.curve())
            for task, j in zip(tasks, done, strict=True)
        ]
        results.write_curves(os.path.join(KEEP.value, f"{SWEEP.value}.csv"), series)
        results.write_manifest(os.path.join(KEEP.value, f"{SWEEP.value}.json"), jobs)
    if problems:
        sys.exit("failed runs:\n" + "\n".join(problems))


if __name__ == "__main__":
    app.run(main)
