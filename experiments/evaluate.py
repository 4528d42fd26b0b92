"""Evaluate a trained agent: mean, spread and every episode's return, without exploration noise.

    python -m experiments.evaluate --workdir=runs/pendulum --episodes=20
    python -m experiments.evaluate --workdir=runs/pendulum --checkpoint=latest --random

The run directory says which agent and environment; --random adds a random policy for comparison.
"""

from __future__ import annotations

import json
import sys

import jax
import numpy as np
from absl import app, flags, logging

WORKDIR = flags.DEFINE_string("workdir", None, "Run directory.", required=True)
EPISODES = flags.DEFINE_integer("episodes", 20, "Episodes.", lower_bound=1)
CHECKPOINT = flags.DEFINE_string("checkpoint", "best", "best, latest, or a step.")
SEED = flags.DEFINE_integer("seed", 12345, "Seed of the evaluation's environments and planner.")
RANDOM = flags.DEFINE_bool("random", False, "Also evaluate uniformly random actions.")
JSON = flags.DEFINE_bool("json", False, "Print one JSON object instead of text.")


def main(_: list[str]) -> None:
    from mbx.training import environments, evaluation, run

    logging.set_verbosity(logging.WARNING)
    run.enable_compilation_cache()
    try:
        agent, train_state, config = run.load(WORKDIR.value, which=CHECKPOINT.value)
    except (ValueError, FileNotFoundError) as error:
        sys.exit(f"error: {error}")
    environment = environments.evaluation_environment(config, EPISODES.value, seed=SEED.value)
    key = jax.random.key(SEED.value)
    results = {CHECKPOINT.value: evaluation.make_evaluate(agent.act, agent.init_actor, environment)(
        train_state, key
    )}  # fmt: skip
    if RANDOM.value:
        results["random"] = evaluation.make_random(environment)(key)
    if JSON.value:
        print(json.dumps({k: {**r.summary(), "returns": r.returns.tolist()}
                          for k, r in results.items()}))  # fmt: skip
        return
    for name, result in results.items():
        s = result.summary()
        print(
            f"{config['env']['name']} {name}: {s['return_mean']:.1f} ± {s['return_std']:.1f} "
            f"(min {s['return_min']:.1f}, max {s['return_max']:.1f}) over {EPISODES.value} episodes"
        )
        for name, value in s.items():
            if name.startswith("return_mean/"):
                print(f"  {name.removeprefix('return_mean/')}: {value:.1f}")
        print("  " + " ".join(f"{x:.1f}" for x in np.sort(result.returns)))


if __name__ == "__main__":
    app.run(main)
