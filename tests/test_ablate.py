"""Sweeps: every setting exists; runs, figure, table and tracked data of a tiny one."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from benchmarks import empo
from mbx.training import build
from mbx.types import EnvSpec
from tests.helpers import overridden

ROOT = pathlib.Path(__file__).parents[1]


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        env=dict(os.environ, JAX_PLATFORMS="cpu"),
    )


def test_every_variant_is_accepted():
    """Settings that exist, are in range and have an effect together."""
    code = "import json; from benchmarks import suites; print(json.dumps(suites.DATA['sweeps']))"
    done = python("-c", code)
    assert done.returncode == 0, done.stderr
    spec = EnvSpec("x:continuous", (24,), np.float32, 6, 500, 2)
    for sweep, variants in json.loads(done.stdout).items():
        assert len({json.dumps(v) for v in variants.values()}) == len(variants), sweep
        config = "dreamer" if sweep in ("replay_loss", "continues") else "tdmpc"
        for overrides in variants.values():
            values = overridden(f"configs/{config}.py", overrides)
            build.build_agent(build.read(values), spec)


@pytest.mark.slow
def test_a_sweep_leaves_figure_table_and_data(tmp_path):
    tiny = ("env.num_envs=2", "loss.batch_size=8", "planner.num_samples=16", "planner.num_elites=4")
    done = python(
        "-m",
        "benchmarks.reproduce",
        "--sweep=targets",
        "--seeds=1",
        "--steps=60",
        "--eval_interval=30",
        "--episodes=1",
        f"--out={tmp_path}/runs",
        *(f"--set={x}" for x in (*tiny, "train.seed_steps=20", "train.pretrain_updates=1")),
        *("--set=env.episode_length=10", "--set=replay.capacity=200"),
        "--set=train.log_interval=20",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    folder = tmp_path / "runs/targets"
    assert (folder / "curves.png").exists()
    assert (folder / "scores.md").read_text().count("\n| ") == 2
    rows = (folder / "curves.csv").read_text().splitlines()
    assert rows[0] == "task,setting,seed,step,value" and len(rows) == 5
    assert rows[1].startswith("gymnax:Pendulum-v1,stored,0,")
    manifest = json.loads((folder / "runs.json").read_text())
    assert [run["run"] for run in manifest["runs"]] == ["stored seed 0", "legacy seed 0"]


@pytest.mark.parametrize("variant", list(empo.VARIANTS))
def test_every_variant_of_empos_networks_has_settings(variant):
    changes = {name: own for name, own in empo.VARIANTS[variant].items() if name != "run"}
    settings = empo.settings_of(10, **changes)
    for section, values in changes.items():
        for name, value in values.items():
            assert getattr(getattr(settings, section), name) == value
