"""EMPO against the exact solution: learning curves, and what humans reach beside each robot.

    python -m experiments.empo_curves --out=docs/empo            # docs/empo.png, docs/empo.json
    python -m experiments.empo_curves --worlds=grid_rock_1h1r --cases=tables-exact --seeds=0,1,2

Every curve is a mean absolute error at the states that the replay holds at that moment, over
learner updates; times are processor seconds with compilation left out.
"""

from __future__ import annotations

import json
import time
from typing import Any

import jax
import matplotlib
import numpy as np
from absl import app, flags

from mbx import envs
from mbx.agents.empo import agent as empo
from mbx.agents.empo import evaluation as empo_evaluation
from mbx.envs import empo as empo_envs
from mbx.power import Curriculum
from mbx.training import loop
from mbx.training.state import Schedule, init_state

OUT = flags.DEFINE_string("out", "docs/empo", "Where the figure and the numbers go.")
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
POINTS = 20


def settings(found: empo_envs.NamedWorld, case: str, updates: int) -> empo.EmpoConfig:
    """A tenth of the updates each for V_h^e, Q_r and the rise of beta_r, then everything."""
    kind, humans = case.split("-")
    part = updates // 10
    curriculum = Curriculum(
        steps=updates,
        v_h_e_steps=part,
        x_h_steps=0,
        q_r_steps=part,
        ramp_steps=part,
        use_x_h=False,
        epsilon_steps=updates // 2,
        epsilon_end=0.1,
    )
    drawn = humans != "exact"
    return empo.EmpoConfig(
        found.params,
        curriculum,
        kind=kind,
        hidden=HIDDEN.value,
        human_expectation=humans,
        human_samples=4 if drawn else 1,
        table_min_rate=MIN_RATE.value if drawn else 1.0,
        target_interval=1 if kind == "tables" else 20,
        learning_rate_q=1e-3,
    )


def learn(name: str, case: str, seed: int) -> tuple[list[dict[str, Any]], Any, empo.EmpoConfig]:
    """One run: errors at POINTS moments, the last train state, the configuration."""
    found = empo_envs.named_world(name)
    config = settings(found, case, UPDATES.value)
    agent = empo.make_agent(config, found.world)
    environment = envs.make(f"empo:{name}", 32)
    schedule = Schedule(
        seed_steps=320,
        pretrain_updates=0,
        utd_ratio=1 / 32,
        reanalyze_interval=0,
        reanalyze_min_step=0,
    )
    rows = 2048
    state = jax.jit(lambda key: init_state(agent, environment, key=key, capacity=rows))(
        jax.random.key(seed)
    )
    interval = loop.make_interval(agent, environment, schedule, length=UPDATES.value // POINTS)
    compiled = interval.lower(state).compile()
    curve, seconds = [], 0.0
    for _ in range(POINTS):
        began = time.process_time()
        state, metrics = compiled(state)
        jax.block_until_ready(state)
        seconds += time.process_time() - began
        visited = empo_evaluation.visited_states(found.world, state.replay)
        errors = empo_evaluation.exact_errors(
            config, found.world, found.solution, state.train, visited
        )
        told = loop.summarise(metrics)
        curve.append(
            {
                "world": name,
                "case": case,
                "seed": seed,
                "updates": int(state.train.step),
                "seconds": round(seconds, 2),
                "visited": len(visited),
                **errors,
                "overflow": told.get("overflow", 0.0),
                "mass_error": told.get("mass_error", 0.0),
            }
        )
    print({k: round(v, 4) if isinstance(v, float) else v for k, v in curve[-1].items()}, flush=True)
    return curve, state.train, config


def robots(name: str, train: Any, config: empo.EmpoConfig) -> list[dict[str, Any]]:
    """What humans reach beside the learned, the exact, a random and a frozen robot."""
    found = empo_envs.named_world(name)
    solution = found.solution
    exact = empo.TrainState(
        {"q_r": solution.Q_r, "v_h_e": np.moveaxis(np.asarray(solution.V_h_e), -1, 0)},
        None,
        {},
        train.step,
    )
    tables = empo.EmpoConfig(
        found.params, config.curriculum, kind="tables", target_interval=1, table_min_rate=1.0
    )
    policies = {
        "learned": empo_evaluation.learned_policy(config, found.world, train),
        "exact": empo_evaluation.learned_policy(tables, found.world, exact),
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
            gamma=float(found.params.gamma_h),
        )
        rows.append({"world": name, "robot": robot, **result})
        print({k: round(v, 4) if isinstance(v, float) else v for k, v in rows[-1].items()})
    return rows


def draw(curves: list[dict[str, Any]], path: str) -> None:
    """V_h^e and pi_r errors over updates, a row a world, a line a case (mean over seeds)."""
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(
        len(WORLDS.value), 2, figsize=(10, 3.4 * len(WORLDS.value)), squeeze=False, sharex=True
    )
    bars = {"v_h_e": (0.01, 0.05), "pi_r": (0.01, None)}
    titles = {"v_h_e": "$V_h^e$", "pi_r": "$\\pi_r$"}
    for row, world in zip(axes, WORLDS.value, strict=True):
        for axis, key in zip(row, bars, strict=True):
            for case in CASES.value:
                own = [c for c in curves if (c["world"], c["case"]) == (world, case)]
                steps = sorted({c["updates"] for c in own})
                mean = [np.mean([c[key] for c in own if c["updates"] == s]) for s in steps]
                axis.plot(steps, np.maximum(mean, 1e-6), label=case, marker=".")
            for bar in bars[key]:
                if bar is not None:
                    axis.axhline(bar, color="grey", linestyle=":", linewidth=1)
            axis.set_yscale("log")
            axis.set_title(f"{world}: mean absolute error of {titles[key]}", fontsize=10)
            axis.set_xlabel("learner updates of 32 states")
    axes[0][0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main(_: list[str]) -> None:
    curves, comparison = [], []
    for name in WORLDS.value:
        for case in CASES.value:
            for seed in SEEDS.value:
                curve, train, config = learn(name, case, int(seed))
                curves += curve
            if case == CASES.value[0]:
                comparison += robots(name, train, config)
    draw(curves, f"{OUT.value}.png")
    with open(f"{OUT.value}.json", "w", encoding="utf-8") as file:
        json.dump({"curves": curves, "robots": comparison}, file, indent=0)


if __name__ == "__main__":
    app.run(main)
