"""Checkpoints: every kind of leaf bit for bit, damage, kills, other settings, the best."""

from __future__ import annotations

import asyncio
import gc
import os
import pathlib
import resource
import shutil
import signal
import subprocess
import sys
import time
from contextlib import closing
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct

from mbx.training import checkpoint
from mbx.training.checkpoint import Checkpointer

ROOT = pathlib.Path(__file__).parents[2]


class Pair(NamedTuple):
    count: jax.Array
    rest: Any


@struct.dataclass
class State:
    weights: jax.Array
    key: jax.Array
    keys: jax.Array
    flags: jax.Array
    small: jax.Array
    half: jax.Array
    pixels: jax.Array
    empty: jax.Array
    nothing: Any
    pair: Pair


def make_state(seed: int) -> State:
    """One leaf of every kind that a run keeps; values that rounding or casting would change."""
    rng = np.random.default_rng(seed)
    weights = rng.normal(size=(40, 7)).astype(np.float32)
    weights[0, :4] = np.nan, np.inf, -0.0, 1e-42
    return State(
        weights=jnp.asarray(weights),
        key=jax.random.key(seed),
        keys=jax.random.split(jax.random.key(seed), 3),
        flags=jnp.asarray(rng.random(9) < 0.5),
        small=jnp.asarray(rng.integers(-128, 128, 5), jnp.int8),
        half=jnp.asarray(rng.normal(size=6), jnp.bfloat16),
        pixels=jnp.asarray(rng.integers(0, 256, (4, 4)), jnp.uint8),
        empty=jnp.zeros((0, 3)),
        nothing=None,
        pair=Pair(jnp.int32(seed), {}),
    )


def assert_same(a: Any, b: Any) -> None:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype and x.shape == y.shape
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x, y = jax.random.key_data(x), jax.random.key_data(y)
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


@pytest.fixture
def open_checkpointer():
    """Opens checkpointers and closes them after the test."""
    opened = []

    def open_one(workdir, **options) -> Checkpointer:
        opened.append(Checkpointer(str(workdir), **options))
        return opened[-1]

    yield open_one
    for checkpointer in opened:
        checkpointer.close()


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A run directory with states 10 and 20; not to be written to."""
    workdir = tmp_path_factory.mktemp("saved")
    checkpointer = Checkpointer(str(workdir))
    for step in (10, 20):
        checkpointer.save(step, make_state(step), {"interval": step // 10})
    checkpointer.close()
    return workdir


def damage(directory: pathlib.Path, pattern: str, how: str) -> None:
    paths = [p for p in directory.rglob(pattern) if p.is_file()]
    assert paths
    for path in paths:
        if how == "gone":
            path.unlink()
        else:
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2 * (how == "half")])


def small(value: float) -> dict[str, jax.Array]:
    return {"x": jnp.full(3, float(value))}


@pytest.mark.parametrize("abstract", [False, True])
def test_every_kind_of_leaf_comes_back_bit_for_bit(saved, open_checkpointer, abstract):
    example = make_state(0)
    if abstract:
        example = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), example)
    state, meta = open_checkpointer(saved).restore(example)
    assert_same(state, make_state(20))
    assert meta == {"interval": 2}


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
@pytest.mark.parametrize("abstract", [False, True])
def test_keys_keep_their_implementation(tmp_path, open_checkpointer, impl, abstract):
    key = {"key": jax.random.key(3, impl=impl)}
    checkpointer = open_checkpointer(tmp_path)
    checkpointer.save(1, key, {})
    checkpointer.wait()
    example = {"key": jax.ShapeDtypeStruct((), key["key"].dtype)} if abstract else key
    assert_same(checkpointer.restore(example)[0], key)


def test_a_step_can_be_asked_for(saved, open_checkpointer):
    checkpointer = open_checkpointer(saved)
    state, meta = checkpointer.restore(make_state(0), step=10)
    assert_same(state, make_state(10))
    assert meta == {"interval": 1} and checkpointer.latest_step() == 20
    with pytest.raises(FileNotFoundError, match="no checkpoint of step 15"), pytest.warns():
        checkpointer.restore(make_state(0), step=15)


def test_saving_copies_what_the_next_step_overwrites(tmp_path, open_checkpointer):
    """The training loop donates the state right after an asynchronous save."""
    checkpointer = open_checkpointer(tmp_path)
    overwrite = jax.jit(lambda s: jax.tree.map(lambda x: x * 0 - 1, s), donate_argnums=0)
    state = {"big": jnp.arange(500_000, dtype=jnp.float32), "small": jnp.arange(8)}
    before = jax.tree.map(np.array, state)
    checkpointer.save(1, state, {})
    state = jax.block_until_ready(overwrite(state))
    checkpointer.wait()
    assert_same(jax.tree.map(np.asarray, checkpointer.restore(state)[0]), before)


@pytest.mark.parametrize("how", ["half", "empty", "gone"])
@pytest.mark.parametrize("pattern", ["metadata", "manifest.ocdbt", "_METADATA", "*"])
def test_a_damaged_checkpoint_is_skipped(saved, tmp_path, open_checkpointer, pattern, how):
    """Either the older state with a warning or, where nothing needed was hit, the newest."""
    workdir = tmp_path / "run"
    shutil.copytree(saved, workdir)
    damage(workdir / "checkpoints" / "20", pattern, how)
    with pytest.warns(UserWarning, match="checkpoint 20 .* damaged"):
        state, meta = open_checkpointer(workdir).restore(make_state(0))
    assert_same(state, make_state(10))
    assert meta == {"interval": 1}


def test_after_a_read_that_failed_nothing_else_is_printed(saved, tmp_path):
    """The other arrays' reads report to an event loop that is closed by then; orbax logs, too."""
    for name, pattern, how in (("a", "d/*", "gone"), ("b", "*", "half")):
        shutil.copytree(saved, tmp_path / name)
        damage(tmp_path / name, pattern, how)
    read = (
        "import sys, warnings; warnings.simplefilter('ignore')\n"
        "from tests.training.test_checkpoint import Checkpointer, make_state\n"
        "for workdir in sys.argv[1:]:\n"
        "    try: Checkpointer(workdir).restore(make_state(0))\n"
        "    except OSError as error: print(f'error: {error}', file=sys.stderr)"
    )
    command = [sys.executable, "-c", read, str(tmp_path / "a"), str(tmp_path / "b")]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    lines = done.stderr.splitlines()
    assert len(lines) == 2, done.stderr
    assert all(line.startswith("error: no checkpoint") for line in lines)


def test_asyncio_is_silent_about_files_of_the_storage_only(caplog, open_checkpointer, tmp_path):
    async def broken(text):
        raise ValueError(text)

    open_checkpointer(tmp_path)
    loop = asyncio.new_event_loop()
    for text in ("NOT_FOUND [tensorstore_spec='{}']", "another"):
        future = loop.create_future()
        future.set_exception(ValueError(text))
        task = loop.create_task(broken(text))
        loop.run_until_complete(asyncio.sleep(0))
        del future, task
    gc.collect()
    loop.close()
    shown = [record.exc_info[1] for record in caplog.records if record.name == "asyncio"]
    assert [str(error) for error in shown] == ["another", "another"]


@pytest.mark.parametrize("keep", [1, 2])
def test_after_falling_back_saving_goes_on(tmp_path, open_checkpointer, keep):
    """The next save may have a lower step than the damaged one; it must not be left out."""
    first = open_checkpointer(tmp_path, keep=3)
    for step in (10, 20, 30):
        first.save(step, small(step), {})
    first.wait()
    damage(tmp_path / "checkpoints" / "30", "*", "half")
    second = open_checkpointer(tmp_path, keep=keep)
    with pytest.warns(UserWarning, match="checkpoint 30 .* damaged"):
        assert second.restore(small(0))[0]["x"][0] == 20
    second.save(25, small(25), {})
    second.wait()
    assert second.latest_step() == 25
    assert open_checkpointer(tmp_path).restore(small(0))[0]["x"][0] == 25


def test_when_nothing_is_usable_the_error_says_so(tmp_path, open_checkpointer):
    checkpointer = open_checkpointer(tmp_path)
    assert checkpointer.latest_step() is None and checkpointer.best_step() is None
    with pytest.raises(FileNotFoundError, match="another workdir"):
        checkpointer.restore(small(0))
    checkpointer.save(1, small(1), {})
    checkpointer.wait()
    damage(tmp_path / "checkpoints" / "1", "*", "empty")
    with pytest.raises(FileNotFoundError, match="could be read"), pytest.warns(match="damaged"):
        open_checkpointer(tmp_path).restore(small(0))


def test_the_newest_are_kept(tmp_path, open_checkpointer):
    checkpointer = open_checkpointer(tmp_path, keep=2)
    for step in (1, 2, 3, 4):
        checkpointer.save(step, small(step), {})
    checkpointer.wait()
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["3", "4"]
    with pytest.raises(ValueError, match="checkpoint.keep=0"):
        Checkpointer(str(tmp_path), keep=0)


def test_the_best_is_kept_apart(tmp_path, open_checkpointer):
    checkpointer = open_checkpointer(tmp_path, keep=1)
    scores = [(1, -3.0), (2, np.float32(5.0)), (3, 4.0), (4, float("nan")), (5, float("inf"))]
    scores.append((6, 5.0))  # as good is not better
    kept = [checkpointer.save_best(step, small(step), score) for step, score in scores]
    assert kept == [True, True, False, False, False, False]
    for step in (1, 2, 3):
        checkpointer.save(step, {"other": jnp.zeros(step)}, {})
    checkpointer.wait()
    state, meta = checkpointer.restore_best(small(0))
    assert state["x"][0] == 2 and meta == {"score": 5.0, "step": 2}
    assert checkpointer.best_step() == 2 and checkpointer.latest_step() == 3


def test_best_states_and_checkpoints_of_a_step_have_barriers_of_their_own(tmp_path, monkeypatch):
    """By one name for both, of two processes one could wait for the other until a time ran out."""
    plain, given = checkpoint.ocp.CheckpointManagerOptions, []

    def options(**chosen):
        given.append(chosen["multiprocessing_options"].barrier_sync_key_prefix)
        return plain(**chosen)

    monkeypatch.setattr(checkpoint.ocp, "CheckpointManagerOptions", options)
    with closing(Checkpointer(str(tmp_path), keep=1)):
        assert given == ["checkpoints", "best"]


def test_a_best_of_steps_that_are_made_again_has_to_be_beaten_no_more(tmp_path, open_checkpointer):
    checkpointer = open_checkpointer(tmp_path)
    assert Checkpointer.saved_steps(str(tmp_path / "absent")) == []
    checkpointer.resume_at(10, 99.0)  # there is none yet
    assert checkpointer.save_best(30, small(30), 5.0)
    checkpointer.resume_at(30, 1.0)
    checkpointer.resume_at(40, 1.0)
    assert not checkpointer.save_best(50, small(50), 4.0)
    checkpointer.resume_at(20, 1.0)
    assert not checkpointer.save_best(22, small(22), 0.5)
    assert checkpointer.save_best(25, small(25), 2.0)
    checkpointer.wait()
    assert checkpointer.best_step() == 25 and Checkpointer.saved_steps(str(tmp_path)) == []


def test_the_best_is_there_until_a_better_one_is_complete(tmp_path, open_checkpointer, monkeypatch):
    """Also when the better one is of a lower step: a kill in mid-save costs nothing."""
    first = open_checkpointer(tmp_path)
    first.save_best(30, small(30), 5.0)
    first.wait()
    second = open_checkpointer(tmp_path)
    kept = []
    save = second._best.manager.save

    def look_and_save(*args, **options):
        kept.extend(os.listdir(tmp_path / "best"))
        return save(*args, **options)

    monkeypatch.setattr(second._best.manager, "save", look_and_save)
    second.save_best(20, small(20), 7.0)
    second.wait()
    assert kept == ["30"] and len(os.listdir(tmp_path / "best")) == 2
    third = open_checkpointer(tmp_path)
    assert third.best_step() == 20 and not third.save_best(50, small(50), 6.0)
    assert third.restore_best(small(0))[1] == {"score": 7.0, "step": 20}


def test_of_a_damaged_best_the_one_before_is_taken(tmp_path, open_checkpointer):
    first = open_checkpointer(tmp_path)
    for step, score in ((10, 1.0), (20, 2.0), (30, 3.0)):
        first.save_best(step, small(step), score)
    first.wait()
    assert sorted(os.listdir(tmp_path / "best")) == ["20", "30"]
    damage(tmp_path / "best" / "30", "*", "half")
    with pytest.warns(UserWarning, match="checkpoint 30 .*best is damaged"):
        state, meta = open_checkpointer(tmp_path).restore_best(small(0))
    assert state["x"][0] == 20 and meta == {"score": 2.0, "step": 20}


def test_only_saving_removes_what_a_killed_process_left(tmp_path, open_checkpointer):
    leftover = tmp_path / "checkpoints" / "7.orbax-checkpoint-tmp"
    leftover.mkdir(parents=True)
    (leftover / "data").write_bytes(b"half")
    checkpointer = open_checkpointer(tmp_path)
    assert checkpointer.latest_step() is None and leftover.exists()
    checkpointer.save(1, small(1), {})
    checkpointer.wait()
    assert os.listdir(tmp_path / "checkpoints") == ["1"]


@pytest.mark.parametrize(
    "error", [jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory"), MemoryError()]
)
def test_running_out_of_memory_is_not_taken_for_damage(
    saved, open_checkpointer, monkeypatch, error
):
    def refuse(*_):
        raise error

    checkpointer = open_checkpointer(saved)
    monkeypatch.setattr(checkpointer._all, "_read", refuse)
    with pytest.raises(type(error)):
        checkpointer.restore(make_state(0))


def test_restored_leaves_are_committed_to_the_device(saved, open_checkpointer):
    state, _ = open_checkpointer(saved).restore(make_state(0))
    assert all(x.committed and x.devices() == {jax.devices()[0]} for x in jax.tree.leaves(state))


@pytest.mark.parametrize(
    ("example", "message"),
    [
        ({"x": jnp.zeros(4)}, r"\['x'\]: saved float32\[3\], wanted float32\[4\]"),
        ({"x": jnp.zeros(3, jnp.int32)}, r"saved float32\[3\], wanted int32\[3\]"),
        ({"y": jnp.zeros(3)}, r"\['x'\]: saved float32\[3\], wanted nothing; \['y'\]: saved nothi"),
    ],
)
def test_other_shapes_are_named_with_a_remedy(tmp_path, open_checkpointer, example, message):
    checkpointer = open_checkpointer(tmp_path)
    checkpointer.save(1, small(1), {})
    checkpointer.wait()
    with pytest.raises(ValueError, match=message) as caught:
        checkpointer.restore(example)
    assert "config.json" in str(caught.value)


def test_another_format_version_is_refused(tmp_path, open_checkpointer, monkeypatch):
    checkpointer = open_checkpointer(tmp_path)
    checkpointer.save(1, small(1), {})
    checkpointer.wait()
    monkeypatch.setattr(checkpoint, "FORMAT_VERSION", 7)
    with pytest.raises(ValueError, match="has format version 2, this code reads 7"):
        checkpointer.restore(small(0))


def test_meta_that_is_not_json_is_told_at_once(tmp_path, open_checkpointer):
    checkpointer = open_checkpointer(tmp_path)
    with pytest.raises(ValueError, match="meta of checkpoint 1 .*float32"):
        checkpointer.save(1, small(1), {"score": np.float32(1)})
    checkpointer.save(1, small(1), {"score": 1.0})
    checkpointer.wait()
    assert checkpointer.restore(small(0))[1] == {"score": 1.0}


def test_a_relative_workdir_does(tmp_path, open_checkpointer, monkeypatch):
    monkeypatch.chdir(tmp_path)
    checkpointer = open_checkpointer("run")
    monkeypatch.chdir("/")
    checkpointer.save(1, small(1), {})
    checkpointer.wait()
    assert (tmp_path / "run" / "checkpoints" / "1").is_dir()


@pytest.mark.parametrize(
    "name", ["lr=[0.1]", "[old]", "back\\slash", "a*b", "what?", "gs:", "für 50%", "new\nline"]
)
def test_checkpoints_are_read_in_folders_of_every_name(tmp_path, open_checkpointer, name):
    """orbax takes some of these for patterns or for URLs; `acb` would match `a*b`."""
    folder = tmp_path / name / "run"
    for workdir, value in ((tmp_path / "acb" / "run", 7), (folder, 1)):
        checkpointer = open_checkpointer(workdir)
        checkpointer.save(1, small(value), {})
        checkpointer.save_best(1, small(value), 2.0)
        checkpointer.close()
    again = open_checkpointer(folder)
    assert again.restore(small(0))[0]["x"][0] == again.restore_best(small(0))[0]["x"][0] == 1
    assert sorted(os.listdir(folder)) == ["best", "checkpoints"]


SAVE_FOREVER = """
import itertools, sys
import jax.numpy as jnp
from mbx.training.checkpoint import Checkpointer
checkpointer = Checkpointer(sys.argv[1], keep=3)
for step in itertools.count(1):
    checkpointer.save(step, {"x": jnp.full(200_000, float(step))}, {"interval": step})
    print(step, flush=True)
"""


def test_a_kill_in_the_middle_of_saving_leaves_a_whole_checkpoint(tmp_path, open_checkpointer):
    """kill -9 at random moments of three processes that do nothing but save."""
    environment = dict(os.environ, JAX_PLATFORMS="cpu", PYTHONPATH=str(ROOT))
    rng = np.random.default_rng()
    for attempt in range(3):
        workdir = tmp_path / str(attempt)
        process = subprocess.Popen(
            [sys.executable, "-c", SAVE_FOREVER, str(workdir)],
            env=environment,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )
        with process:
            started = [int(process.stdout.readline()) for _ in range(4)][-1]
            time.sleep(rng.uniform(0, 0.2))
            process.send_signal(signal.SIGKILL)
        checkpointer = open_checkpointer(workdir)
        state, meta = checkpointer.restore({"x": jnp.zeros(200_000)})
        # A save begins when the one before is complete.
        assert meta["interval"] >= started - 1
        assert (np.asarray(state["x"]) == meta["interval"]).all()
        checkpointer.save(meta["interval"] + 1, state, {})
        checkpointer.wait()
        assert checkpointer.latest_step() == meta["interval"] + 1


def test_a_full_disk_is_told_and_loses_nothing(tmp_path, open_checkpointer):
    """Files may not grow beyond a size that one checkpoint needs more than."""
    state = {"x": jax.random.normal(jax.random.key(0), (300_000,))}
    checkpointer = open_checkpointer(tmp_path)
    checkpointer.save(1, state, {})
    checkpointer.wait()
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # then writing fails as on a full disk
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(OSError, match=f"{tmp_path}.*free space.*resume"):
            checkpointer.save(2, state, {})
            checkpointer.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, ignored)
    again = open_checkpointer(tmp_path)
    assert again.latest_step() == 1
    np.testing.assert_array_equal(again.restore(state)[0]["x"], state["x"])
    again.save(3, state, {})
    again.wait()
    assert again.latest_step() == 3
