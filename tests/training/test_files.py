"""Checkpoints, logs and curves by themselves."""

from __future__ import annotations

import json
import os
import pathlib

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mbx.training import curves
from mbx.training.checkpoint import Checkpointer, load_config
from mbx.training.metrics import RunLogger, atomic_write, read_rows


@flax.struct.dataclass
class State:
    a: jax.Array
    b: dict


def make_state(value: float) -> State:
    leaves = dict(
        key=jax.random.key(3), flag=jnp.array([True, False]), small=jnp.int8(-3),
        half=jnp.full((2,), value, jnp.bfloat16), image=jnp.uint8(200), none=None,
        empty=jnp.zeros((0, 4)), nan=jnp.array([jnp.nan, jnp.inf, value]),
    )  # fmt: skip
    return State(jnp.full((2, 3), value), leaves)


def same(x: State, y: State) -> bool:
    def raw(leaf):
        key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        return np.asarray(jax.random.key_data(leaf) if key else leaf).tobytes()

    pairs = zip(jax.tree.leaves(x), jax.tree.leaves(y), strict=True)
    return all(a.dtype == b.dtype and a.shape == b.shape and raw(a) == raw(b) for a, b in pairs)


@pytest.fixture
def saved(tmp_path):
    checkpointer = Checkpointer(str(tmp_path), keep=2)
    for step in (10, 20, 30):
        checkpointer.save(step, make_state(float(step)), {"interval": step})
    checkpointer.close()
    return tmp_path


def test_round_trip_is_exact_and_keeps_the_newest(saved):
    checkpointer = Checkpointer(str(saved), keep=2)
    assert checkpointer.latest_step() == 30
    state, meta = checkpointer.restore(make_state(0.0))
    assert same(state, make_state(30.0)) and meta == {"interval": 30}
    abstract = jax.eval_shape(lambda: make_state(0.0))
    state, _ = checkpointer.restore(abstract, step=20)
    assert same(state, make_state(20.0))
    assert sorted(p.name for p in (saved / "checkpoints").iterdir() if p.name.isdigit()) == [
        "20", "30",
    ]  # fmt: skip
    checkpointer.close()


def test_damaged_ones_are_skipped_and_none_left_is_an_error(saved):
    for step in (30, 20):
        for path in (saved / "checkpoints" / str(step)).rglob("*"):
            if path.is_file():
                path.write_bytes(b"")
        checkpointer = Checkpointer(str(saved))
        if step == 30:
            with pytest.warns(UserWarning, match="30"):
                state, _ = checkpointer.restore(make_state(0.0))
            assert same(state, make_state(20.0))
        else:
            with pytest.warns(UserWarning), pytest.raises(FileNotFoundError, match="anew"):
                checkpointer.restore(make_state(0.0))
        checkpointer.close()


def test_a_different_structure_names_the_leaf(saved):
    checkpointer = Checkpointer(str(saved))
    other = make_state(0.0).replace(a=jnp.zeros((2, 4)))
    with pytest.raises(ValueError, match=r"\.a: saved float32\[2, 3\], wanted float32\[2, 4\]"):
        checkpointer.restore(other)
    checkpointer.close()


def test_the_best_survives_a_restart(tmp_path):
    first = Checkpointer(str(tmp_path))
    assert first.save_best(1, make_state(1.0), -5.0)
    assert not first.save_best(2, make_state(2.0), -6.0)
    first.close()
    second = Checkpointer(str(tmp_path))
    assert not second.save_best(3, make_state(3.0), -5.5)
    assert second.save_best(4, make_state(4.0), -1.0)
    second.wait()
    state, meta = second.restore_best(make_state(0.0))
    assert same(state, make_state(4.0)) and meta["score"] == -1.0
    second.close()


def test_keep_must_be_positive(tmp_path):
    with pytest.raises(ValueError, match="keep=0"):
        Checkpointer(str(tmp_path), keep=0)


def log_run(path: pathlib.Path, values, start: int = 0, resume: int | None = None) -> None:
    config = dict(agent="tdmpc", env=dict(name="toy:point"))
    logger = RunLogger(str(path), config=config, resume_step=resume, progress_total=100)
    for i, value in enumerate(values):
        step = start + 10 * (i + 1)
        logger.log("train", step, {"loss/value": value, f"only/{step}": 1.0})
        logger.log("eval", step, {"return_mean": value, "seconds": 1.0})
    logger.close()


def test_logs_append_resume_and_survive_a_torn_line(tmp_path):
    with pytest.warns(UserWarning, match="loss/value is not finite at step 20"):
        log_run(tmp_path, [1.0, float("nan"), 3.0])
    with open(tmp_path / "metrics.jsonl", "ab") as file:
        file.write(b'{"kind": "train", "st')
    log_run(tmp_path, [7.0], start=20, resume=20)
    rows = read_rows(str(tmp_path / "metrics.jsonl"))
    assert [r["step"] for r in rows if r["kind"] == "eval"] == [10, 20, 30]
    assert [r["return_mean"] for r in rows if r["kind"] == "eval"] == [1.0, None, 7.0]
    lines = (tmp_path / "metrics.csv").read_text().splitlines()
    assert lines[0] == "kind,step,name,value" and lines[-1].startswith("eval,30,seconds,")
    assert sum(line.startswith("eval,30,return_mean") for line in lines) == 1
    assert load_config(str(tmp_path))["agent"] == "tdmpc"
    assert json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[0])["kind"] == "train"


def test_atomic_write_leaves_the_old_file_when_it_fails(tmp_path):
    path = str(tmp_path / "x")
    atomic_write(path, b"old")
    with pytest.raises(TypeError):
        atomic_write(path, "not bytes")  # type: ignore[arg-type]
    assert pathlib.Path(path).read_bytes() == b"old" and os.listdir(tmp_path) == ["x"]


def test_curves_are_read_aggregated_and_drawn(tmp_path):
    for seed in range(3):
        log_run(tmp_path / str(seed), [0.0, 10.0 + seed, 20.0])
    dirs = [str(tmp_path / str(seed)) for seed in range(3)]
    curve = curves.load_curve(dirs[1])
    np.testing.assert_array_equal(curve.steps, [10, 20, 30])
    steps, mean, low, high = curves.aggregate([curves.load_curve(d) for d in dirs], points=3)
    np.testing.assert_allclose(mean, [0, 11, 20])
    np.testing.assert_allclose((low[1], high[1]), (10, 12))
    reference = tmp_path / "published" / "task.csv"
    reference.parent.mkdir()
    reference.write_text("step,reward,seed\n0,1,1\n40,2,1\n0,3,2\n40,4,2\n")
    np.testing.assert_allclose(curves.load_reference(str(reference))[1][[0, -1]], [2, 3])
    out = str(tmp_path / "curve.png")
    curves.plot_runs(dirs, out, references=[str(reference)])
    assert pathlib.Path(out).read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="eval/nothing"):
        curves.plot_runs(dirs, out, metric="eval/nothing")
    with pytest.raises(FileNotFoundError, match="holds no run"):
        load_config(str(tmp_path / "nowhere"))
