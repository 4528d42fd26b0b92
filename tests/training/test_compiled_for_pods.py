"""What a pod would do: programs compiled for its chips, which need not be there.

With `libtpu` (`pip install -e '.[tpu-compile]'` in an environment of its own) for a TPU, else for
eight virtual CPU devices.

    python -m pytest -n 0 -m slow -s tests/training/test_compiled_for_pods.py
"""

from __future__ import annotations

import importlib.util
import json
import pathlib
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
# Sums of an interval's program: of gradients, of counts (Dreamer's of returns, too), of log rows.
MOST = {"tdmpc": 10, "dreamer": 12, "empo": 10}


def compiled(topology, agent, folder, **more):
    """What `benchmarks.aot` says of a train interval."""
    settings = {**SMALL[agent], "env.num_envs": 16, "replay.capacity": 4000, **more}
    settings |= {"train.seed_steps": 1000, "train.log_interval": 160}
    told = folder / "told.json"
    command = [
        *(sys.executable, "-m", "benchmarks.aot", f"--topology={topology}"),
        *(f"--config={agent}", f"--json={told}"),
        *(f"--config.{name}={value}" for name, value in settings.items()),
    ]
    subprocess.run(command, cwd=ROOT, check=True)
    return json.loads(told.read_text())


@pytest.mark.slow
@pytest.mark.parametrize("agent", list(SMALL))
@pytest.mark.parametrize("topology", ["cpu:8", TPU])
def test_devices_exchange_few_arrays_and_transitions_stay_where_they_are(topology, agent, tmp_path):
    found = compiled(topology, agent, tmp_path)
    assert 1 <= found["collectives"]["all-reduce"] <= MOST[agent]
    assert set(found["collectives"]) <= {"all-reduce", "all-gather"}
    assert found["alias"] > 0.99 * found["argument"]  # the replay is written in place
    assert found["temp"] < 100e6


@pytest.mark.slow
@pytest.mark.parametrize("topology", ["cpu:8", TPU])
def test_divided_kernels_are_gathered(topology, tmp_path):
    """With `distributed.fsdp` every device holds its share of kernels and optimiser state."""
    sizes = {"model.size": "5"}
    whole = compiled(topology, "tdmpc", tmp_path, **sizes)
    shared = compiled(topology, "tdmpc", tmp_path, **sizes, **{"distributed.fsdp": True})
    assert shared["argument"] < 0.5 * whole["argument"]
    assert shared["collectives"]["all-gather"] > whole["collectives"].get("all-gather", 0)


@pytest.mark.slow
@pytest.mark.parametrize("agent", ["tdmpc", "dreamer", "empo"])
def test_programs_lower_for_gpus_and_tpus(agent):
    settings = build.read(config_of(agent) | {"num_seeds": 1})
    work = job.prepare(settings)
    state = jax.eval_shape(lambda: job.fresh_state(work, jax.random.key(0)))
    lowered = work.interval.trace(state).lower(lowering_platforms=("cuda", "tpu"))
    assert "stablehlo.while" in lowered.as_text()
