"""Runs that cannot fit are refused before a file is written; others run."""

from __future__ import annotations

import math

import pytest

from mbx.training import build, run, rundir
from mbx.training.job import abstract_state, prepare
from tests.faults.processes import finish
from tests.faults.small import small_config


def abstract_of(config):
    settings = build.read(config)
    return abstract_state(prepare(settings))


def sizes_of(config) -> dict[str, int]:
    return rundir.state_bytes(abstract_of(config))


def test_sizes_are_those_of_the_arrays():
    """A row: obs 2, action 2 and reward as float32, three flags: 23 bytes; ages none."""
    one, two = (sizes_of(small_config(replay=dict(capacity=n))) for n in (400, 800))
    assert two["replay"] - one["replay"] == 400 * 23
    assert one["parameters"] == 4 * 3 * 4 and one["train state"] == 4 * 3 * 4 + 4


@pytest.mark.parametrize("capacity", [2_000, 2 * 10**9])
@pytest.mark.parametrize("over", [False, True])
def test_memory_is_refused_where_it_cannot_suffice(capacity, over, monkeypatch, tmp_path):
    """Replay and train state, twice for a checkpoint's copy, and gradients: to the byte."""
    config = small_config(replay=dict(capacity=capacity))
    sizes = sizes_of(config)
    needed = 2 * (sizes["replay"] + sizes["train state"]) + 2 * sizes["parameters"]
    monkeypatch.setattr(rundir, "free_memory", lambda: float(needed - over))
    monkeypatch.setattr(rundir, "free_disk", lambda path: math.inf)
    state = abstract_of(config)
    if not over:
        return rundir.check_room(config, str(tmp_path), state, 80)
    with pytest.raises(ValueError, match=f"replay.capacity={capacity} .*lower replay.capacity"):
        run.train(config, str(tmp_path / "run"))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("steps", "share"), [(80, 0.1), (800, 1.0), (8_000, 1.0)])
def test_disk_is_counted_for_the_rows_that_will_be_there(steps, share, monkeypatch, tmp_path):
    config = small_config(replay=dict(capacity=800), train=dict(steps=steps))
    sizes = sizes_of(config)
    state = abstract_of(config)
    needed = 2 * (sizes["train state"] + share * sizes["replay"]) + 50e6
    monkeypatch.setattr(rundir, "free_disk", lambda path: needed)
    rundir.check_room(config, str(tmp_path), state, steps)
    monkeypatch.setattr(rundir, "free_disk", lambda path: needed - 1)
    with pytest.raises(
        ValueError, match="MB free, the run needs 50.* for 2 checkpoints and its log"
    ):
        run.train(config, str(tmp_path / "run"))
    assert not list(tmp_path.iterdir())


def test_what_this_machine_has_free(tmp_path):
    assert 1e6 < rundir.free_memory() < math.inf
    assert rundir.free_disk(str(tmp_path / "not" / "yet")) == pytest.approx(
        rundir.free_disk(str(tmp_path)), rel=0.1
    )


def test_the_limits_of_a_process_count(monkeypatch):
    resource = pytest.importorskip("resource")
    limits = {resource.RLIMIT_AS: 5_000, resource.RLIMIT_DATA: resource.RLIM_INFINITY}
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (limits[kind], limits[kind]))
    assert rundir.free_memory() == 5_000
    limits[resource.RLIMIT_DATA] = 4_000
    assert rundir.free_memory() == 4_000


TEN = """
import os, resource
from mbx.training import run
from tests.faults.small import small_config
resource.setrlimit(resource.RLIMIT_AS, (LIMIT, LIMIT))
for i, (rows, seeds) in enumerate(CASES):
    config = small_config(replay=dict(capacity=rows), num_seeds=seeds, train=dict(steps=40))
    workdir = os.path.join(sys.argv[1], str(i))
    try:
        run.train(config, workdir)
        print("outcome ran", os.path.exists(os.path.join(workdir, "checkpoints", "40")))
    except ValueError as error:
        print("outcome refused", os.path.exists(workdir), error)
sys.exit()
"""


@pytest.mark.slow
def test_ten_configurations_within_a_limit_run_or_are_refused(tmp_path):
    """23 bytes a row, twice for a checkpoint's copy, within 20 GB."""
    under = [(400, 1), (10_000, 1), (10**6, 1), (10**7, 1), (10**6, 2)]
    over = [(5 * 10**8, 1), (10**9, 1), (2 * 10**9, 1), (3 * 10**8, 2), (2 * 10**8, 3)]
    before = f"LIMIT, CASES = {20 * 10**9}, {under + over}\n{TEN}"
    code, output = finish(tmp_path, steps=40, before=before)
    found = [line for line in output.splitlines() if line.startswith("outcome")]
    assert code == 0 and len(found) == 10, output
    assert found[:5] == ["outcome ran True"] * 5, output
    assert all(line.startswith("outcome refused False replay.capacity=") for line in found[5:])
    assert all("of memory" in line and "lower replay.capacity" in line for line in found[5:])
