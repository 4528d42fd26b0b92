"""What a pod would do: programs compiled for its chips, which need not be there.

With `libtpu` (`pip install -e '.[tpu-compile]'` in an environment of its own) for a TPU, else for
eight virtual CPU devices.

    python -m pytest -n 0 -m slow -s tests/training/test_compiled_for_pods.py
"""

from __future__ import annotations

import importlib.util
import json
import pathlib
import re
import subprocess
import sys

import jax
import pytest

from mbx.training import build, job
from tests.training.divided import config_of

ROOT = pathlib.Path(__file__).parents[2]
TPU = pytest.param(
    "v5e:4x4",
    marks=pytest.mark.skipif(
        importlib.util.find_spec("libtpu") is None,
        reason="needs the TPU compiler: pip install -e '.[tpu-compile]' in its own environment",
    ),
)
SMALL = {
    "tdmpc": {
        "planner.num_samples": 32,
        "planner.num_elites": 8,
        "planner.iterations": 2,
        "training_planner.num_samples": 16,
        "training_planner.num_elites": 4,
        "training_planner.iterations": 2,
        "loss.batch_size": 32,
        "reanalyze.batch_size": 32,
    },
    "dreamer": {
        "env.name": "gymnax:CartPole-v1",
        "model.num_bins": 21,
        "loss.batch_size": 16,
        "loss.batch_length": 8,
        "imagination.horizon": 3,
    },
    "empo": {"env.name": "empo:grid_rock_1h1r", "model.hidden": 8, "loss.batch_size": 16},
}
# Exchanges of an update, those of gradients among them and the least bytes of these. The others:
# counts of rows, or for Dreamer the returns whose percentiles its actor's loss is scaled by.
EXCHANGES = {"tdmpc": (2, 1, 400_000), "dreamer": (3, 2, 400_000), "empo": (2, 1, 4000)}


def compiled(topology, agent, folder, **more):
    """What `experiments.compile_for` tells of a train interval."""
    settings = {**SMALL[agent], "env.num_envs": 16, "replay.capacity": 4000, **more}
    settings |= {"train.seed_steps": 1000, "train.log_interval": 160}
    told = folder / "told.json"
    command = [
        *(sys.executable, "-m", "experiments.compile_for", f"--topology={topology}"),
        *(f"--config=configs/{agent}.py", "--programs=interval", f"--json={told}"),
        *(f"--config.{name}={value}" for name, value in settings.items()),
    ]
    subprocess.run(command, cwd=ROOT, check=True)
    return json.loads(told.read_text())["programs"]["interval"]


@pytest.mark.slow
@pytest.mark.parametrize("agent", list(SMALL))
@pytest.mark.parametrize("topology", ["cpu:8", TPU])
def test_devices_speak_once_a_gradient_and_rows_stay_where_they_are(topology, agent, tmp_path):
    found = compiled(topology, agent, tmp_path)
    inside = [x for x in found["collectives"] if x["times"] >= found["steps"] and not x["branch"]]
    in_updates = [x for x in inside if any("learning.py" in loop for loop in x["loops"])]
    passes = [x for x in in_updates if x["source"] and x["bytes"] == 20]  # five sums of a pass
    updates = [x for x in in_updates if x not in passes]
    number, gradients, least = EXCHANGES[agent]
    large = [x for x in updates if x["bytes"] >= least]
    assert len(updates) == number and len(large) == gradients  # each of them one array
    assert {x["kind"] for x in large} == {"all-reduce"}  # a TPU gathers small arrays as sums, too
    assert all(x["bytes"] < 10_000 for x in updates if x not in large)
    assert len(passes) == (agent == "tdmpc")
    assert [x for x in inside if x not in in_updates] == []  # acting, stepping and storing
    # Whatever else there is runs once an interval: a log row's numbers of each environment.
    assert all(x["bytes"] < 10_000 for x in found["collectives"] if x not in in_updates)
    assert found["replay_not_aliased"] == []
    memory = found["memory"]
    assert memory["aliased"] > 0.99 * memory["arguments"]
    assert memory["temporaries"] < 100e6


@pytest.mark.slow
@pytest.mark.parametrize("topology", ["cpu:8", TPU])
def test_divided_kernels_are_gathered_by_the_layers_that_use_them(topology, tmp_path):
    """Model and batch are divided along the same devices: no activation travels for that."""
    divided = {"distributed.fsdp": True, "model.size": "5"}
    found = compiled(topology, "tdmpc", tmp_path, **divided)
    large = [x for x in found["collectives"] if x["bytes"] >= 100_000]
    gathers = [x for x in large if x["kind"] == "all-gather"]
    assert {x["kind"] for x in large} <= {"all-gather", "all-reduce", "reduce-scatter"}
    for x in gathers:  # [512, 512], [518, 512] or several heads of one
        sides = [int(n) for n in re.findall(r"\d+", x["shape"].split("[")[1].split("]")[0])]
        assert sorted(sides)[-2] >= 512, x
    acting = [x for x in gathers if not any("learning.py" in loop for loop in x["loops"])]
    assert acting and all(x["times"] <= found["steps"] for x in acting)  # before a planner's loops
    assert found["replay_not_aliased"] == []


@pytest.mark.slow
@pytest.mark.parametrize("agent", ["tdmpc", "dreamer", "empo"])
def test_programs_lower_for_gpus_and_tpus(agent):
    settings = build.read(config_of(agent) | {"num_seeds": 1})
    work = job.prepare(settings)
    state = jax.eval_shape(
        lambda: job.fresh_state(work.agent, work.environment, settings, jax.random.key(0))
    )
    lowered = work.interval.trace(state).lower(lowering_platforms=("cuda", "tpu"))
    assert "stablehlo.while" in lowered.as_text()
