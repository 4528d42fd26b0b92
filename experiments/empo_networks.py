"""What makes a network robot help: one part of the learner left out at a time.

    python -m experiments.empo_networks --out=docs/results/empo_networks.csv
    python -m experiments.empo_networks --variants=all --seeds=0,1,2 --out=runs/networks.csv

Every run is the training loop with its replay, in a listed world; at POINTS moments of it, what the
human reaches beside the robot so far (episodes from the start) and how far V_h^e and pi_r are from
the exact solution, at all states. Rows are added to the file as runs end; a run that is there
already is not made again.
"""

from __future__ import annotations

import os
import time
from typing import Any

import jax
import numpy as np
from absl import app, flags, logging

from mbx import envs
from mbx.commands.results import read_rows, write_rows
from mbx.empo import TIME_LIMIT
from mbx.empo.agent import evaluation as empo_evaluation
from mbx.empo.agent import make_agent, resolve
from mbx.empo.agent.settings import Settings
from mbx.settings import from_dict
from mbx.training import loop, memory
from mbx.training.state import Schedule, init_state

OUT = flags.DEFINE_string("out", "runs/empo_networks.csv", "CSV file.")
WORLD = flags.DEFINE_string("world", "multigrid/rock_loop", "A listed world.")
SEEDS = flags.DEFINE_list("seeds", ["0"], "Seeds.")
UPDATES = flags.DEFINE_integer("updates", 10_000, "Learner updates a run.")
EPISODES = flags.DEFINE_integer("episodes", 20_000, "Episodes of a comparison.")
POINTS = 5

# What differs from `all`: sections of settings, and of the run.
VARIANTS: dict[str, dict[str, Any]] = {
    "all": {},
    "without dueling head": {"model": {"q_head": "exp"}},
    "without advantage loss": {"loss": {"advantage_coef": 0.0}},
    "with neither": {"model": {"q_head": "exp"}, "loss": {"advantage_coef": 0.0}},
    "without varied starts": {"run": {"varied_starts": 0.0}},
    "with 2048 rows": {"run": {"rows": 2_048}},
    "with 4 candidates": {"loss": {"candidates": 4}},
    "with batches of 128": {"loss": {"batch_size": 128}},
    "with drawn human actions": {"loss": {"human_expectation": "fresh", "human_samples": 4}},
}
CHOSEN = flags.DEFINE_list("variants", [*VARIANTS], "Which.")


def settings_of(variant: str, updates: int) -> Settings:
    """A tenth of the updates each for V_h^e, Q_r and the rise of beta_r, then everything."""
    part, changes = updates // 10, VARIANTS[variant]
    values: dict[str, dict[str, Any]] = {
        "model": {"hidden": 64, "q_head": "dueling"},
        "loss": {"human_expectation": "exact", "room": 0.0, "advantage_coef": 1.0},
        "eval": {"review_episodes": 0},
        "curriculum": {
            "v_h_e_steps": part,
            "q_r_steps": part,
            "ramp_steps": part,
            "epsilon_steps": updates // 2,
            "steps": updates,
        },
    }
    sections = {name: own | changes.get(name, {}) for name, own in values.items()}
    return from_dict(Settings(), sections)


def learn(variant: str, seed: int) -> list[dict[str, Any]]:
    """One run: a row at each of POINTS moments."""
    options = {"varied_starts": 0.5, "rows": 65_536} | VARIANTS[variant].get("run", {})
    num_envs, rows = 32, options.pop("rows")
    environment = envs.make(f"empo:{WORLD.value}", num_envs, **options)
    found, settings = environment.spec.world, settings_of(variant, UPDATES.value)
    problem = resolve(settings, environment.spec)
    agent = make_agent(settings, environment.spec)
    schedule = Schedule(
        seed_steps=20 * num_envs,
        pretrain_updates=0,
        utd_ratio=1 / num_envs,
        reanalyze_interval=0,
        reanalyze_min_step=0,
    )
    start = jax.jit(lambda key: init_state(agent, environment, key=key, capacity=rows))
    state = start(jax.random.key(seed))
    interval = loop.make_interval(agent, environment, schedule, length=UPDATES.value // POINTS)
    compiled = interval.lower(state).compile()

    @jax.jit
    def play(train: Any, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        played = empo_evaluation.play(
            found.world,
            empo_evaluation.learned_policy(problem, train),
            key,
            episodes=EPISODES.value,
            length=TIME_LIMIT,
            gamma=float(problem.params.gamma_h),
        )
        return played.reached, played.value

    everywhere = np.flatnonzero(~np.asarray(found.table.terminal))
    result, seconds = [], 0.0
    for _ in range(POINTS):
        began = time.process_time()
        state, _ = compiled(state)
        jax.block_until_ready(state)
        seconds += time.process_time() - began
        reached = empo_evaluation.summarise(*play(state.train, jax.random.key(7)))
        errors = empo_evaluation.exact_errors(problem, found.solution, state.train, everywhere)
        result.append(
            {
                "world": WORLD.value,
                "variant": variant,
                "seed": seed,
                "updates": int(state.train.step),
                "seconds": round(seconds, 2),
                "visited": len(empo_evaluation.visited_states(found.world, state.replay)),
                "reached": reached["reached"],
                "reached_error": reached["reached_error"],
                "v_h_e_positive": errors["v_h_e_positive"],
                "pi_r_tv": errors["pi_r_tv"],
            }
        )
        print({k: round(v, 4) if isinstance(v, float) else v for k, v in result[-1].items()})
    return result


def main(_: list[str]) -> None:
    logging.set_verbosity(logging.WARNING)
    memory.dispatch_inline()
    rows: list[dict[str, Any]] = list(read_rows(OUT.value)) if os.path.exists(OUT.value) else []
    for variant in CHOSEN.value:
        if variant not in VARIANTS:
            raise SystemExit(f"error: --variants={variant!r}: choose among {[*VARIANTS]}")
    for variant in CHOSEN.value:
        for seed in SEEDS.value:
            known = ("world", "variant", "seed")
            if [WORLD.value, variant, seed] in [[str(row[k]) for k in known] for row in rows]:
                continue
            rows += learn(variant, int(seed))
            write_rows(OUT.value, rows)


if __name__ == "__main__":
    app.run(main)
