"""Processor seconds of training on small tasks: mbx next to SAC of Stable-Baselines3.

    python benchmarks/peer_sac.py sac --task=tanks --seed=0 --out=sac.jsonl
    python -m benchmarks.peer_sac mbx --task=tanks --seed=0 --out=mbx.jsonl  # settings may follow
    python -m benchmarks.peer_sac table sac.jsonl mbx.jsonl > table.csv

The first needs stable-baselines3 and nothing of mbx. Both write a line for every evaluation, with
the user and system time of the process since its start: imports, training and evaluations. Train
mbx once before, so that its programs are in the compilation cache.
"""

import argparse
import csv
import json
import os
import pathlib
import statistics
import sys

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Dict, Discrete


class TwoTanks(gymnasium.Env):
    """Two coupled tanks: keep the second one's level at a set point with a pump and a valve."""

    max_episode_steps = 200
    action_space = Box(np.array([0.0, -0.2], np.float32), np.array([2.5, 1.0], np.float32))
    observation_space = Dict(levels=Box(0, 3, (2,)), set_point=Box(0, 2, (1,)), alarm=Discrete(2))

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.levels = self.np_random.uniform(0.4, 1.2, 2)
        self.set_point = self.np_random.uniform(0.5, 1.5)
        return self._observe(), {}

    def step(self, action):
        pump, valve = np.clip(action, self.action_space.low, self.action_space.high).tolist()
        first, second = self.levels
        between = 1.2 * np.sign(first - second) * np.sqrt(abs(first - second))
        outflow = (0.1 + max(valve, 0.0)) * np.sqrt(second)  # closed below 0, but for a leak
        self.levels = self.levels + 0.1 * np.array([pump - between, between - outflow])
        failed = bool(self.levels.min() < 0.05 or self.levels.max() > 2.0)
        self.levels = self.levels.clip(0.0, 3.0)
        error = abs(self.levels[1] - self.set_point)
        reward = -20.0 if failed else 2.0 - min(4.0 * error, 2.0) - 0.02 * pump
        return self._observe(), reward, failed, False, {"error": error}

    def _observe(self):
        alarm = int(self.levels.min() < 0.2 or self.levels.max() > 1.8)
        levels, set_point = self.levels.astype(np.float32), np.float32([self.set_point])
        return {"levels": levels, "set_point": set_point, "alarm": alarm}


class Stand(gymnasium.Env):
    """dm_control's walker-stand, every action made twice."""

    max_episode_steps = 500
    action_space, observation_space = Box(-1, 1, (6,)), Box(-np.inf, np.inf, (24,))

    def reset(self, *, seed=None, options=None):
        from dm_control import suite

        if seed is not None or not hasattr(self, "env"):
            self.env = suite.load("walker", "stand", {"random": seed})
        return self._observe(self.env.reset()), {}

    def step(self, action):
        now = [self.env.step(action) for _ in range(2)]
        return self._observe(now[1]), sum(x.reward for x in now), False, False, {}

    def _observe(self, now):
        return np.hstack(list(now.observation.values())).astype(np.float32)


# What makes the task, or its id; steps; steps between evaluations.
TASKS = {
    "pendulum": ("Pendulum-v1", 3_000, 500),
    "tanks": (TwoTanks, 3_000, 500),
    "stand": (Stand, 3_000, 500),
    "cheetah": ("HalfCheetah-v5", 10_000, 2_500),
}


def train_sac(given, _, write):
    """Train Stable-Baselines3's SAC with its defaults, on one thread."""
    import torch
    from stable_baselines3 import SAC
    from stable_baselines3.common.evaluation import evaluate_policy
    from stable_baselines3.common.monitor import Monitor

    torch.set_num_threads(1)
    make, steps, every = TASKS[given.task]

    made = [gymnasium.make(make) if isinstance(make, str) else make() for _ in range(2)]
    if not isinstance(make, str):
        made = [gymnasium.wrappers.TimeLimit(env, make.max_episode_steps) for env in made]
    env, tests = map(Monitor, made)
    tests.reset(seed=given.seed + 1)
    policy = "MultiInputPolicy" if isinstance(env.observation_space, Dict) else "MlpPolicy"
    agent = SAC(policy, env, seed=given.seed)
    for step in range(every, steps + 1, every):
        agent.learn(every, reset_num_timesteps=False)
        write(step, evaluate_policy(agent, tests, given.episodes)[0])


def train_mbx(given, rest, write):
    """Train configs/tdmpc.py, changed by `rest` as by the command line of `mbx train`."""
    from mbx import config
    from mbx.training import run

    class Logger(run.RunLogger):
        def log(self, kind, step, values):
            super().log(kind, step, values)
            if kind == "eval":
                write(step, values["return_mean"])

    run.RunLogger = Logger
    make, steps, every = TASKS[given.task]
    name = make if isinstance(make, str) else f"{os.path.abspath(__file__)}:{make.__name__}"
    own = f"env.name=gym:{name} train.steps={steps} train.log_interval={every} seed={given.seed}"
    own += f" eval.interval={every} eval.episodes={given.episodes}"
    own = [f"--config.{flag}" for flag in own.split()]
    run.train(config.load(["--config=tdmpc", *own, *rest]), given.workdir)


def table(sac, **others):
    """Head and rows: SAC's budget, return and seconds; mbx's to that return, by its settings."""
    head = [name for one in others for name in (f"steps of {one}", f"s of {one}")]
    yield ["task", "steps of SAC", "its return", "s of SAC", *head]
    for task, (_, steps, _) in TASKS.items():
        if not (last := [x for x in sac if (x["task"], x["step"]) == (task, steps)]):
            continue
        goal, cells = statistics.mean(x["return"] for x in last), []
        for rows in others.values():
            own = [x for x in rows if x["task"] == task]
            first = {x["seed"]: x for x in reversed(own) if x["return"] >= goal}
            found = [first.get(seed) for seed in sorted({x["seed"] for x in own})]
            cells.append(", ".join(f"{x['step']:,}" if x else "never" for x in found))
            cells.append(", ".join(f"{x['seconds']:.0f}" if x else "-" for x in found))
        seconds = ", ".join(f"{x['seconds']:.0f}" for x in last)
        yield [task, f"{steps:,}", f"{goal:.0f}", seconds, *cells]


def flags():
    flags = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    flags.add_argument("side", choices=("sac", "mbx", "table"))
    flags.add_argument("files", nargs="*", help="table: sac.jsonl, and mbx's of every setting")
    flags.add_argument("--task", choices=TASKS, default="tanks")
    flags.add_argument("--seed", type=int, default=0)
    flags.add_argument("--episodes", type=int, default=5, help="episodes of an evaluation")
    flags.add_argument("--until", type=float, default=np.inf, help="a return that ends the run")
    flags.add_argument("--workdir", default="runs/peer_sac", help="mbx: the run directory")
    flags.add_argument("--out", default="peer_sac.jsonl")
    return flags


def main():
    given, rest = flags().parse_known_args()

    def write(step, value):
        row = {"task": given.task, "seed": given.seed, "step": int(step), "return": float(value)}
        with open(given.out, "a") as file:
            print(json.dumps(row | {"seconds": round(sum(os.times()[:4]), 1)}), file=file)
        if value >= given.until:
            sys.exit()

    if given.side == "table":
        read = {pathlib.Path(x).stem: list(map(json.loads, open(x))) for x in given.files}
        csv.writer(sys.stdout, lineterminator="\n").writerows(table(**read))
    else:
        {"sac": train_sac, "mbx": train_mbx}[given.side](given, rest, write)


if __name__ == "__main__":
    main()
