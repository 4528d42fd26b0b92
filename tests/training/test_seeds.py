"""Several seeds in one program: each is the run it would be alone, and resumes as one."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from mbx.analysis import report
from mbx.training import job, logging, loop, run, seeds
from tests.faults.small import small_config
from tests.helpers import register_toy, tiny_config

# Without planner targets: those of an untrained model are ties, which rounding decides.
PLAIN = dict(
    model=dict(critic="q", policy="squashed"),
    train=dict(steps=60),
    loss=dict(value_target="td", policy_loss="svg"),
)
LOSSES = ("loss/consistency", "loss/reward", "loss/value", "loss/policy")

# Two devices, in a process of its own: their number is fixed once jax has started.
PROGRAM = """
import json, sys
import jax
jax.config.update("jax_num_cpu_devices", 2)
from mbx.training import run, seeds
from tests.faults.small import small_config
from tests.helpers import tiny_config
assert seeds.device_mesh(2).size == 2
for workdir, settings in json.loads(sys.argv[1]):
    make = small_config if settings is None else tiny_config
    result = run.train(make(seed=4, num_seeds=2, **settings or {}), workdir)
    print(json.dumps([result.steps, result.evaluations]))
"""


def train_on_two_devices(*runs):
    """Steps and evaluations of runs (workdir, settings) of seeds 4 and 5, a device each.

    Settings are TD-MPC's; None is the small agent, which compiles in a second.
    """
    command = [sys.executable, "-c", PROGRAM, json.dumps(runs)]
    told = subprocess.run(
        command,
        check=True,
        cwd=pathlib.Path(__file__).parents[2],
        stdout=subprocess.PIPE,
    )
    return [json.loads(line) for line in told.stdout.splitlines() if line.startswith(b"[")]


def rows(path, kind):
    found = logging.read_rows(os.path.join(path, "metrics.jsonl"))
    return [row for row in found if row["kind"] == kind]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The workdir of two seeds, and what its training gave back."""
    register_toy()
    workdir = str(tmp_path_factory.mktemp("seeds") / "run")
    return workdir, train_on_two_devices((workdir, PLAIN))[0]


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """The same of the small agent."""
    small_config()  # registers it here
    workdir = str(tmp_path_factory.mktemp("seeds") / "small")
    return workdir, train_on_two_devices((workdir, None))[0]


def test_every_seed_keeps_its_own_log_and_reads_as_a_run(small):
    workdir, (steps, evaluations) = small
    assert steps == 80 and len(evaluations) == 2
    report.at_end(workdir)
    assert {"curve.png", "report.html"} <= set(os.listdir(workdir))
    finals = []
    for seed in (4, 5):
        path = os.path.join(workdir, f"seed-{seed}")
        with open(os.path.join(path, "config.json")) as file:
            config = json.load(file)
        assert (config["seed"], config["num_seeds"]) == (seed, 1)
        assert rows(path, "setup")[0]["parameters"] == (2 + 2) * (2 + 1)
        finals.append(rows(path, "eval")[-1]["return_mean"])
        _, state, _ = run.load(path)
        assert state.params.shape == (4, 3) and np.isfinite(state.params).all()
    assert finals[0] != finals[1]
    np.testing.assert_allclose(evaluations[-1][1], np.mean(finals), rtol=1e-6)


def test_a_small_seed_of_the_batch_is_that_seed_alone(small, tmp_path):
    alone = str(tmp_path / "alone")
    run.train(small_config(seed=5), alone)
    ours, theirs = rows(os.path.join(small[0], "seed-5"), "train"), rows(alone, "train")
    assert len(ours) == 4
    for a, b in zip(ours, theirs, strict=True):
        assert (a["updates"], a["episodes"], a["step"]) == (b["updates"], b["episodes"], b["step"])
        np.testing.assert_allclose(a["loss"], b["loss"], rtol=1e-5)


@pytest.mark.slow
def test_batched_seeds_equal_seeds_in_turn(trained):
    """What an accelerator runs against what a processor ran."""
    config = tiny_config(seed=4, num_seeds=2, **PLAIN)
    whole = job.prepare(config)
    state, _ = job.begin(whole, None)
    interval = seeds.make_seeds_interval(
        whole.agent,
        whole.environment,
        whole.schedule,
        length=whole.intervals.length,
        batched=True,
    )
    for i in range(3):
        state, sums = whole._replace(interval=interval).advance(state)
        for index in range(2):
            ours = loop.summarise(seeds.pick(sums, index))
            theirs = rows(os.path.join(trained[0], f"seed-{4 + index}"), "train")[i]
            assert ours["updates"] == theirs["updates"]
            # Sums are taken in another order, which the planner amplifies.
            for name in LOSSES:
                close = 1e-3 if i == 0 else 3e-2
                np.testing.assert_allclose(ours[name], theirs[name], rtol=close, err_msg=name)


@pytest.mark.slow
def test_seeds_resume_bit_for_bit(trained, tmp_path):
    workdir, _ = trained
    half = str(tmp_path / "half")
    begun = {**PLAIN, "train": dict(steps=40)}
    train_on_two_devices((half, begun), (half, {**PLAIN, "resume": True}))
    for seed in (4, 5):
        name = f"seed-{seed}"
        whole, parts = (rows(os.path.join(d, name), "train") for d in (workdir, half))
        timeless = ("time", "seconds", "steps_per_second")
        drop = [
            [{k: v for k, v in r.items() if k not in timeless} for r in x] for x in (whole, parts)
        ]
        assert drop[0] == drop[1]


def test_host_environments_and_used_directories_are_refused(small, tmp_path):
    workdir, _ = small
    config = tiny_config(num_seeds=2)
    config["env"] = {**config["env"], "name": "gym:Pendulum-v1"}
    with pytest.raises(ValueError, match="num_seeds=2"):
        run.train(config, str(tmp_path / "host"))
    with pytest.raises(ValueError, match="already holds a run"):
        run.train(tiny_config(seed=4, num_seeds=2), workdir)
