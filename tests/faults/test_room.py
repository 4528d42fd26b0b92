"""Runs that cannot fit are refused before a file is written; others run."""

from __future__ import annotations

import math

import pytest

from mbx.training import build, room, run
from mbx.training.job import prepare
from tests.faults.small import small_config


def abstract_of(config):
    settings = build.read(config)
    return run.abstract_state(settings, prepare(settings))


def sizes_of(config) -> dict[str, int]:
    return room.parts(abstract_of(config))


def test_sizes_are_those_of_the_arrays():
    """A row: obs 2, action 2 and reward as float32, three flags: 23 bytes; ages none."""
    one, two = (sizes_of(small_config(replay=dict(capacity=n))) for n in (400, 800))
    assert two["replay"] - one["replay"] == 400 * 23
    assert one["parameters"] == 4 * 3 * 4 and one["train state"] == 4 * 3 * 4 + 4


@pytest.mark.parametrize("capacity", [2_000, 10**6, 10**8, 2 * 10**9])
@pytest.mark.parametrize("over", [False, True])
def test_memory_is_refused_where_it_cannot_suffice(capacity, over, monkeypatch, tmp_path):
    """Replay and train state, twice for a checkpoint's copy, and gradients: to the byte."""
    config = small_config(replay=dict(capacity=capacity))
    sizes = sizes_of(config)
    needed = 2 * (sizes["replay"] + sizes["train state"]) + 2 * sizes["parameters"]
    monkeypatch.setattr(room, "free_memory", lambda: float(needed - over))
    monkeypatch.setattr(room, "free_disk", lambda path: math.inf)
    state = abstract_of(config)
    if not over:
        return room.check(config, str(tmp_path), state, 80)
    with pytest.raises(ValueError, match=f"replay.capacity={capacity} .*lower replay.capacity"):
        run.train(config, str(tmp_path / "run"))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("steps", "share"), [(80, 0.1), (800, 1.0), (8_000, 1.0)])
def test_disk_is_counted_for_the_rows_that_will_be_there(steps, share, monkeypatch, tmp_path):
    config = small_config(replay=dict(capacity=800), train=dict(steps=steps))
    sizes = sizes_of(config)
    state = abstract_of(config)
    needed = 2 * (sizes["train state"] + share * sizes["replay"]) + 50e6
    monkeypatch.setattr(room, "free_disk", lambda path: needed)
    room.check(config, str(tmp_path), state, steps)
    monkeypatch.setattr(room, "free_disk", lambda path: needed - 1)
    with pytest.raises(
        ValueError, match="MB free, the run needs 50.* for 2 checkpoints and its log"
    ):
        run.train(config, str(tmp_path / "run"))
    assert not list(tmp_path.iterdir())


def test_what_this_machine_has_free(tmp_path):
    assert 1e6 < room.free_memory() < math.inf
    assert room.free_disk(str(tmp_path / "not" / "yet")) == pytest.approx(
        room.free_disk(str(tmp_path)), rel=0.1
    )
