"""Several seeds in one program: each is the run it would be alone, and resumes as one."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from mbx.training import metrics, run, seeds
from tests.helpers import tiny_config

SEEDS = 3


def rows(path, kind):
    found = metrics.read_rows(os.path.join(path, "metrics.jsonl"))
    return [row for row in found if row["kind"] == kind]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The workdir of three seeds, and its result."""
    workdir = str(tmp_path_factory.mktemp("seeds") / "run")
    return workdir, run.train(tiny_config(seed=4, num_seeds=SEEDS), workdir)


def test_every_seed_keeps_its_own_log_and_reads_as_a_run(trained):
    workdir, result = trained
    assert result.steps == 80 and len(result.evaluations) == 2
    assert os.path.exists(os.path.join(workdir, "curve.png"))
    finals = []
    for seed in range(4, 4 + SEEDS):
        path = os.path.join(workdir, f"seed-{seed}")
        with open(os.path.join(path, "config.json")) as file:
            config = json.load(file)
        assert (config["seed"], config["num_seeds"]) == (seed, 1)
        finals.append(rows(path, "eval")[-1]["return_mean"])
        _, state, _ = run.load(path)
        assert np.isfinite(np.asarray(state.params["policy"]["out"]["bias"])).all()
    assert len(set(finals)) == SEEDS
    np.testing.assert_allclose(result.evaluations[-1][1], np.mean(finals), rtol=1e-6)


def test_a_seed_of_the_batch_is_that_seed_alone(tmp_path):
    # Without planner targets: those of an untrained model are ties, which rounding decides.
    plain = dict(
        model=dict(critic="q", policy="squashed"), train=dict(steps=60),
        loss=dict(value_target="td", policy_loss="svg"),
    )  # fmt: skip
    both, alone = str(tmp_path / "both"), str(tmp_path / "alone")
    # Two devices, a seed each, in a process of its own: their number is fixed once jax has started.
    program = (
        "import json, sys; from mbx.training import run, seeds; from tests import helpers\n"
        "settings = json.loads(sys.argv[1]); "
        "import jax; jax.config.update('jax_num_cpu_devices', 2)\n"
        "run.train(helpers.tiny_config(seed=4, num_seeds=2, **settings), sys.argv[2])\n"
        "assert seeds.device_mesh(2).size == 2"
    )
    command = [sys.executable, "-c", program, json.dumps(plain), both]
    subprocess.run(command, check=True, cwd=pathlib.Path(__file__).parents[2])
    run.train(tiny_config(seed=5, **plain), alone)
    ours, theirs = rows(os.path.join(both, "seed-5"), "train"), rows(alone, "train")
    assert len(ours) == 3
    for a, b in zip(ours, theirs, strict=True):
        for name in ("updates", "episodes", "step"):
            assert a[name] == b[name]
        # The same random numbers; sums are taken in another order, which the planner amplifies.
        for name in ("loss/consistency", "loss/reward", "loss/value", "loss/policy"):
            close = 1e-3 if a is ours[0] else 3e-2
            np.testing.assert_allclose(a[name], b[name], rtol=close, err_msg=name)


@pytest.mark.slow
def test_seeds_resume_bit_for_bit(trained, tmp_path):
    workdir, _ = trained
    half = str(tmp_path / "half")
    run.train(tiny_config(seed=4, num_seeds=SEEDS, train=dict(steps=40)), half)
    run.train(tiny_config(seed=4, num_seeds=SEEDS, resume=True), half)
    for seed in range(4, 4 + SEEDS):
        name = f"seed-{seed}"
        whole, parts = (rows(os.path.join(d, name), "train") for d in (workdir, half))
        timeless = ("time", "seconds", "steps_per_second")
        drop = [[{k: v for k, v in r.items() if k not in timeless} for r in x]
                for x in (whole, parts)]  # fmt: skip
        assert drop[0] == drop[1]


@pytest.mark.parametrize(
    ("num", "available", "used"), [(8, 2, 2), (8, 3, 2), (3, 2, 1), (6, 4, 3), (5, 16, 5)]
)
def test_seeds_are_divided_evenly_among_devices(num, available, used):
    assert seeds.shares(num, available) == used


def test_host_environments_and_used_directories_are_refused(trained, tmp_path):
    workdir, _ = trained
    config = tiny_config(num_seeds=2)
    config["env"] = {**config["env"], "name": "gym:Pendulum-v1"}
    with pytest.raises(ValueError, match="num_seeds=2"):
        run.train(config, str(tmp_path / "host"))
    with pytest.raises(ValueError, match="already holds a run"):
        run.train(tiny_config(seed=4, num_seeds=SEEDS), workdir)
