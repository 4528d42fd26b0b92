"""Many devices and processes: an update of the whole batch is the update of one device."""

from __future__ import annotations

import json
import os
import pathlib
import socket
import subprocess
import sys
import time

import jax
import pytest

from mbx.training import logging

ROOT = pathlib.Path(__file__).parents[2]


def start(**told):
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": jax.config.jax_compilation_cache_dir,
    }
    return subprocess.Popen(
        [sys.executable, "-m", "tests.training.divided", json.dumps(told)],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def results(*programs):
    """What each program told."""
    found = []
    for program in programs:
        out, err = program.communicate(timeout=500)
        assert program.returncode == 0, err[-3000:]
        found.append(json.loads(out.split("RESULT ")[1]))
    return found


def free_address():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def processes(num, devices, **told):
    told |= dict(processes=num, devices=devices, coordinator=free_address())
    return results(*[start(process=i, **told) for i in range(num)])


@pytest.fixture(scope="module")
def empo():
    """EMPO's updates on one device, on eight and on two cores, by one process."""
    return results(start(agent="empo", devices=8, each=[{}, {"enabled": True}, {"cores": 2}]))[0]


@pytest.fixture(scope="module")
def alone(empo):
    """The update on one device, by agent."""
    found = {"empo": empo[0]}

    def get(agent):
        if agent not in found:
            found[agent] = results(start(agent=agent, devices=1))[0]
        return found[agent]

    return get


def check(ours, one, without=frozenset()):
    """Losses and gradients agree to 1e-5; the replay does not travel."""
    assert one["rows"] == ours["rows"] >= 160
    assert one["change"] > 1e-3
    assert one.keys() - ours.keys() == without
    for name in one.keys() & ours.keys():
        value = one[name]
        scale = max(abs(value), 1e-3)
        assert abs(ours[name] - value) <= 1e-5 * scale, (name, ours[name], value)
    assert ours["collective_bytes"] < 200_000


def test_eight_devices_and_two_cores_update_as_one_device(empo):
    one, eight, cores = empo
    check(eight, one)
    check(cores, one, without={"return"})


@pytest.mark.slow
@pytest.mark.parametrize("agent", ["tdmpc", "dreamer"])
def test_two_cores_update_other_agents_as_one_device(agent, alone):
    found = results(start(agent=agent, devices=2, cores=True))[0]
    check(found, alone(agent), without={"return"})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("agent", "num", "devices"),
    [
        ("tdmpc", 1, 8),
        ("dreamer", 1, 8),
        ("tdmpc", 2, 2),
        ("dreamer", 2, 1),
        ("empo", 2, 1),
        ("tdmpc", 4, 1),
        ("dreamer", 4, 1),
        ("empo", 4, 1),
    ],
)
def test_more_devices_and_processes_update_as_one(agent, num, devices, alone):
    several = (
        processes(num, devices, agent=agent)
        if num > 1
        else results(start(agent=agent, devices=devices))
    )
    for ours in several:
        check(ours, alone(agent))


@pytest.mark.slow
def test_a_process_that_compiles_for_longer_is_waited_for(alone):
    told = dict(agent="empo", devices=1, processes=2, coordinator=free_address())
    for ours in results(start(process=0, **told), start(process=1, late=60, **told)):
        check(ours, alone("empo"))


SLOW = """
import time
import gymnasium, numpy as np
from gymnasium.spaces import Box

class Slow(gymnasium.Env):
    max_episode_steps = 5
    action_space = Box(-1, 1, (1,))
    observation_space = Box(-9, 9, (2,))

    def __init__(self, seconds, phase):
        self.seconds, self.phase, self.count = seconds, phase, 0

    def reset(self, *, seed=None, options=None):
        return np.zeros(2, np.float32), {}

    def step(self, action):
        interval, step = divmod(self.count, 20)
        self.count += 1
        if interval == 3 or (interval == 4 and step % 2 == self.phase):
            time.sleep(self.seconds)
        return np.full(2, action[0], np.float32), 1.0, False, False, {}
"""


@pytest.mark.slow
def test_a_slow_environment_is_waited_for_once_a_step(tmp_path):
    """Two processes, each of which steps its own; then both are slow, then each in its turn.

    A step ends when the slowest environment has: neither the other one's exchange nor its own adds
    to that. In turn, a step takes as long as if both were slow.
    """
    path, seconds = tmp_path / "slow.py", 0.25
    path.write_text(SLOW)
    told = dict(processes=2, devices=1, coordinator=free_address())
    name = f"gym:{path}:Slow"
    both = [start(process=i, host=[name, i, seconds], **told) for i in range(2)]
    for found in results(*both):
        took = [x / 20 for x in found["seconds"]]
        print([f"{1e3 * x:.0f} ms a step" for x in took])
        quick = (took[2] + took[5]) / 2
        for slow in took[3:5]:
            assert seconds <= slow < seconds + 1.5 * quick + 0.05
        assert found["updates"] > 100


@pytest.mark.slow
def test_processes_train_one_run_and_another_number_resumes_it(tmp_path):
    workdir = str(tmp_path / "run")
    told = processes(2, 1, agent="tdmpc", run=[workdir, 160])
    assert told[0] == told[1] and told[0]["steps"] == 160
    on_four = results(start(agent="tdmpc", devices=4, run=[workdir, 320]))[0]
    assert [step for step, _ in on_four["evaluations"]] == [160, 320]
    on_one = results(start(agent="tdmpc", devices=1, run=[workdir, 480]))[0]
    assert [step for step, _ in on_one["evaluations"]] == [160, 320, 480]
    rows = logging.read_rows(os.path.join(workdir, "metrics.jsonl"))
    assert [row["step"] for row in rows if row["kind"] == "train"] == list(range(80, 481, 80))


@pytest.mark.slow
def test_the_first_of_several_processes_makes_the_diagnostics(tmp_path):
    workdir = tmp_path / "run"
    processes(2, 1, agent="dreamer", run=[str(workdir), 160])
    row = [r for r in logging.read_rows(str(workdir / "metrics.jsonl")) if r["kind"] == "eval"][-1]
    assert all(row[f"report/{what}/vector"] > 0 for what in ("loss", "grad_norm"))
    assert row["open_loop_error_1"] > 0 and (workdir / "open_loop.png").stat().st_size > 1000


@pytest.mark.slow
def test_a_killed_process_ends_the_others_and_the_run_resumes(tmp_path):
    workdir = str(tmp_path / "run")
    told = dict(agent="tdmpc", devices=1, processes=2, coordinator=free_address())
    both = [start(process=i, run=[workdir, 10**6], **told) for i in range(2)]
    log = os.path.join(workdir, "metrics.jsonl")
    while not any(row["step"] >= 320 for row in logging.read_rows(log)):
        assert both[0].poll() is None
        time.sleep(0.5)
    both[1].kill()
    for process in both:  # read to the end, so that no pipe stays open
        process.communicate(timeout=90)
    assert both[0].returncode != 0
    on_one = results(start(agent="tdmpc", devices=1, run=[workdir, 1600]))[0]
    assert on_one["steps"] == 1600


@pytest.mark.slow
def test_a_process_that_fails_ends_at_once_and_the_others_soon_after(tmp_path):
    told = dict(enabled=True, coordinator=free_address(), num_processes=2, heartbeat_timeout=10)

    def train(process, *flags):
        settings = [f"--config.distributed.{name}={value}" for name, value in told.items()]
        return subprocess.Popen(
            [
                sys.executable,
                "-m",
                "experiments.train",
                "--config=configs/tdmpc.py",
                *settings,
                f"--config.distributed.process_id={process}",
                f"--workdir={tmp_path / 'run'}",
                *flags,
            ],
            cwd=ROOT,
            stderr=subprocess.PIPE,
            text=True,
        )

    fine, failing = train(0), train(1, "--config.loss.batch_size=0")
    errors = failing.communicate(timeout=120)[1]
    assert failing.returncode == 1 and "error: config.loss.batch_size=0" in errors, errors
    errors = fine.communicate(timeout=60)[1]
    assert fine.returncode not in (0, None), errors


@pytest.mark.slow
def test_divided_parameters_update_as_copies(alone):
    found = results(start(agent="tdmpc", devices=8, fsdp=True))[0]
    assert found["divided"] > 30  # kernels, their targets and moments
    check(found, alone("tdmpc"))


@pytest.mark.slow
def test_an_unknown_coordinator_is_told():
    flags = ("--config.distributed.enabled=True", "--config.distributed.num_processes=2")
    command = [sys.executable, "-m", "experiments.train", "--config=configs/tdmpc.py", *flags]
    told = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert told.returncode == 1 and "error: distributed.coordinator=''" in told.stderr, told.stderr
