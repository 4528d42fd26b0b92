"""Many devices and processes: an update of the whole batch is the update of one device."""

from __future__ import annotations

import json
import os
import pathlib
import socket
import subprocess
import sys

import jax
import numpy as np
import pytest

from mbx.training import sharding
from tests.helpers import tiny_config

ROOT = pathlib.Path(__file__).parents[2]


def start(**told):
    environment = {
        **os.environ, "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": jax.config.jax_compilation_cache_dir,
    }  # fmt: skip
    return subprocess.Popen(
        [sys.executable, "-m", "tests.training.divided", json.dumps(told)], cwd=ROOT,
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def results(*programs):
    """What each program told."""
    found = []
    for program in programs:
        out, err = program.communicate(timeout=500)
        assert program.returncode == 0, err[-3000:]
        found.append(json.loads(out.split("RESULT ")[1]))
    return found


def processes(num, devices, **told):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        coordinator = f"127.0.0.1:{probe.getsockname()[1]}"
    told |= dict(processes=num, devices=devices, coordinator=coordinator)
    return results(*[start(process=i, **told) for i in range(num)])


@pytest.fixture(scope="module")
def alone():
    """The update on one device, by agent."""
    found = {}

    def get(agent):
        if agent not in found:
            found[agent] = results(start(agent=agent, devices=1))[0]
        return found[agent]

    return get


def check(ours, one):
    """Losses and gradients agree to 1e-5; the replay does not travel."""
    assert one["rows"] == ours["rows"] >= 160
    assert one["change"] > 1e-3
    for name, value in one.items():
        scale = max(abs(value), 1e-3)
        assert abs(ours[name] - value) <= 1e-5 * scale, (name, ours[name], value)
    assert ours["collective_bytes"] < 200_000


def test_eight_devices_update_as_one(alone):
    check(results(start(agent="tdmpc", devices=8))[0], alone("tdmpc"))


def test_two_processes_update_as_one(alone):
    for ours in processes(2, 1, agent="empo"):
        check(ours, alone("empo"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("agent", "num", "devices"),
    [("dreamer", 1, 8), ("empo", 1, 8), ("tdmpc", 2, 2), ("dreamer", 2, 1), ("tdmpc", 4, 1),
     ("dreamer", 4, 1), ("empo", 4, 1)],
)  # fmt: skip
def test_more_devices_and_processes_update_as_one(agent, num, devices, alone):
    several = processes(num, devices, agent=agent) if num > 1 else results(
        start(agent=agent, devices=devices)
    )  # fmt: skip
    for ours in several:
        check(ours, alone(agent))


@pytest.mark.slow
def test_divided_parameters_update_as_copies(alone):
    check(results(start(agent="tdmpc", devices=8, fsdp=True))[0], alone("tdmpc"))


def test_environments_that_cannot_be_divided_are_refused(monkeypatch):
    config = tiny_config(env=dict(num_envs=3), distributed=dict(enabled=True))
    monkeypatch.setattr(jax, "device_count", lambda: 2)
    with pytest.raises(ValueError, match=r"env.num_envs=3 cannot be divided among 2 devices"):
        sharding.make_layout(config)


def test_an_unknown_coordinator_is_told():
    config = tiny_config(distributed=dict(enabled=True, num_processes=2))
    with pytest.raises(ValueError, match=r"distributed.coordinator=''"):
        sharding.initialize(config)


def test_large_parameters_are_divided_along_their_longest_axis():
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    layout = sharding.Layout(mesh, fsdp=True)
    shapes = {"w": (512, 1024), "b": (1024,)}
    tree = {n: jax.ShapeDtypeStruct(s, np.float32) for n, s in shapes.items()}
    specs = {n: s.spec for n, s in layout.of_parameters(tree).items()}
    assert specs == {"w": jax.P(None, "data"), "b": jax.P()}
