"""Cores that are a device each: what a run with them compiles, where it lies, how it goes on."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys

import pytest

from tests.helpers import FUSED, HOST

# Two devices, in a process of its own: their number is fixed once jax has started.
PROGRAM = """
import json, sys
import jax
jax.config.update("jax_num_cpu_devices", 2)
from mbx.fast import collectives
from mbx.training import run
from mbx.training.devices import Partition
from tests.faults.small import small_config
from tests.helpers import counting, programs_of
from tests.training.test_compile_once import resumed, short
agent, task, num_envs, programs, workdir = json.loads(sys.argv[1])
apart, candidates = collectives.shard_map, []
def counted(function, axes, *args, out=None):
    if out == 1 and axes[0] is None:  # as of the candidates' values, [B, N], by whole parameters
        candidates.append(jax.tree.leaves(args)[-1].shape)
    return apart(function, axes, *args, out=out)
collectives.shard_map = counted
divided, constraints = Partition.divided, []
def noted(self, tree):
    constraints.append(self.size)
    return divided(self, tree)
Partition.divided = noted
if agent == "small":
    config = small_config(num_seeds=1, train=dict(steps=60))
    config["checkpoint"]["interval"] = 60
else:
    config = short(task)
config["env"]["num_envs"] = num_envs
config["distributed"]["cores"] = 2
results = []
for told in (config, resumed(config)):
    with counting() as counter:
        results.append(run.train(told, workdir))
    # A trace that is found again is counted as one: what is lowered and compiled says it.
    made = {name: times for (how, name), times in programs_of(counter).items() if how == "compiled"}
    assert made == dict.fromkeys(programs, 1), programs_of(counter)
steps = [result.steps for result in results]
print(json.dumps([*steps, len(results[0].evaluations), constraints, candidates]))
"""


def told(*given):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(given)],
        cwd=pathlib.Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "on 2 CPU devices" in done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_a_run_of_two_cores_compiles_every_program_once_and_goes_on(tmp_path):
    # Each of the two evaluations that are compiled divides its episodes where they begin.
    assert told("small", "", 2, FUSED, str(tmp_path / "run")) == [60, 80, 2, [2, 2], []]


@pytest.mark.slow
@pytest.mark.parametrize("num_envs", [2, 1])
@pytest.mark.parametrize(
    ("task", "programs"), [("gymnax:Pendulum-v1", FUSED), ("gym:Pendulum-v1", HOST)]
)
def test_planners_on_two_cores(tmp_path, task, programs, num_envs):
    workdir = str(tmp_path / "run")
    *steps, evaluations, divided, candidates = told("tdmpc", task, num_envs, programs, workdir)
    assert (steps, evaluations) == ([60, 80], 2)
    # Of the host's programs what acts, and an evaluation's observations and what it makes of them.
    assert divided == [2] * (2 if programs == FUSED else 6)
    # One state is not divided: its candidates are, in the plans of acting too.
    assert bool(candidates) == (num_envs == 1)
