"""EMPO against the exact solution: learning curves, and what humans reach beside each robot.

    python -m experiments.empo_curves --out=docs/results/empo    # empo_errors.csv, empo_robots.csv
    python -m experiments.empo_curves --worlds=grid_rock_1h1r --cases=tables-exact --seeds=0,1,2

Every curve is a mean absolute error at the states that the replay holds at that moment, over
learner updates; times are processor seconds with compilation left out.
"""

from __future__ import annotations

import time
from typing import Any

import jax
from absl import app, flags, logging

from mbx import envs
from mbx.commands.results import write_rows
from mbx.empo import suite as empo_envs
from mbx.empo.agent import Problem, make_agent, resolve
from mbx.empo.agent import evaluation as empo_evaluation
from mbx.empo.agent.settings import Settings
from mbx.settings import from_dict
from mbx.training import loop, memory
from mbx.training.state import Schedule, init_state

OUT = flags.DEFINE_string("out", "docs/results/empo", "How the names of both files begin.")
WORLDS = flags.DEFINE_list("worlds", ["grid_rock_1h1r", "grid_corridor_2h1r"], "Worlds.")
CASES = flags.DEFINE_list(
    "cases",
    ["tables-exact", "tables-fresh", "tables-rollout", "networks-exact", "networks-fresh"],
    "KIND-HUMANS.",
)
SEEDS = flags.DEFINE_list("seeds", ["0"], "Seeds.")
UPDATES = flags.DEFINE_integer("updates", 6_000, "Learner updates a run.")
HIDDEN = flags.DEFINE_integer("hidden", 64, "Width of networks.")
EPISODES = flags.DEFINE_integer("episodes", 20_000, "Episodes of the robots' comparison.")
MIN_RATE = flags.DEFINE_float("min_rate", 0.01, "Least rate of tables with drawn human actions.")
ROWS = flags.DEFINE_integer("rows", 2048, "Rows of the replay.")
POINTS = 20


def settings_of(case: str, updates: int) -> Settings:
    """A tenth of the updates each for V_h^e, Q_r and the rise of beta_r, then everything."""
    kind, humans = case.split("-")
    part, drawn = updates // 10, humans != "exact"
    tables = {"kind": kind, "table_min_rate": MIN_RATE.value if drawn else 1.0}
    loss = {"human_expectation": humans, "room": 0.0}
    return from_dict(
        Settings(),
        {
            "model": tables if kind == "tables" else {"hidden": HIDDEN.value},
            "loss": loss | ({"human_samples": 4} if humans == "fresh" else {}),
            "eval": {"review_episodes": 0},
            "curriculum": {
                "v_h_e_steps": part,
                "q_r_steps": part,
                "ramp_steps": part,
                "epsilon_steps": updates // 2,
            }
            | ({"steps": updates} if kind == "networks" else {}),
        },
    )


def learn(name: str, case: str, seed: int) -> tuple[list[dict[str, Any]], Any, Problem]:
    """One run: errors at POINTS moments, the last train state, the problem it is about."""
    environment = envs.make(f"empo:{name}", 32)
    found, settings = environment.spec.world, settings_of(case, UPDATES.value)
    problem = resolve(settings, environment.spec)
    agent = make_agent(settings, environment.spec)
    schedule = Schedule(
        seed_steps=320,
        pretrain_updates=0,
        utd_ratio=1 / 32,
        reanalyze_interval=0,
        reanalyze_min_step=0,
    )
    start = jax.jit(lambda key: init_state(agent, environment, key=key, capacity=ROWS.value))
    state = start(jax.random.key(seed))
    interval = loop.make_interval(agent, environment, schedule, length=UPDATES.value // POINTS)
    compiled = interval.lower(state).compile()
    curve, seconds = [], 0.0
    for _ in range(POINTS):
        began = time.process_time()
        state, metrics = compiled(state)
        jax.block_until_ready(state)
        seconds += time.process_time() - began
        visited = empo_evaluation.visited_states(found.world, state.replay)
        errors = empo_evaluation.exact_errors(problem, found.solution, state.train, visited)
        means = loop.summarise(metrics)
        curve.append(
            {
                "world": name,
                "case": case,
                "seed": seed,
                "updates": int(state.train.step),
                "seconds": round(seconds, 2),
                "visited": len(visited),
                **errors,
                "overflow": means.get("overflow", 0.0),
                "mass_error": means.get("mass_error", 0.0),
            }
        )
    print({k: round(v, 4) if isinstance(v, float) else v for k, v in curve[-1].items()}, flush=True)
    return curve, state.train, problem


def robots(name: str, train: Any, problem: Problem) -> list[dict[str, Any]]:
    """What humans reach beside the learned, the exact, a random and a frozen robot."""
    found = empo_envs.named_world(name)
    policies = {
        "learned": empo_evaluation.learned_policy(problem, train),
        "exact": empo_evaluation.exact_policy(found.solution),
        "random": empo_evaluation.random_policy(found.world),
        "frozen": empo_evaluation.frozen_policy,
    }
    rows = []
    for robot, policy in policies.items():
        result = empo_evaluation.goal_reaching(
            found.world,
            policy,
            jax.random.key(7),
            episodes=EPISODES.value,
            length=empo_envs.TIME_LIMIT,
            gamma=float(problem.params.gamma_h),
        )
        rows.append({"world": name, "robot": robot, **result})
        print({k: round(v, 4) if isinstance(v, float) else v for k, v in rows[-1].items()})
    return rows


def main(_: list[str]) -> None:
    logging.set_verbosity(logging.WARNING)
    memory.dispatch_inline()
    curves, comparison = [], []
    for name in WORLDS.value:
        for case in CASES.value:
            for seed in SEEDS.value:
                curve, train, problem = learn(name, case, int(seed))
                curves += curve
            if case == CASES.value[0]:
                comparison += robots(name, train, problem)
    write_rows(f"{OUT.value}_errors.csv", curves)
    write_rows(f"{OUT.value}_robots.csv", comparison)


if __name__ == "__main__":
    app.run(main)
