"""One bit of a checkpoint is flipped: it comes back whole, or the older one does, and is named."""

from __future__ import annotations

import pathlib
import shutil
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mbx.training import checkpoint
from mbx.training.checkpoint import Checkpointer


def state_of(seed: int) -> dict[str, Any]:
    """Leaves of every width; noise, so that the compressed files hold much that matters."""
    rng = np.random.default_rng(seed)
    return {
        "weights": jnp.asarray(rng.normal(size=(30, 20)), jnp.float32),
        "half": jnp.asarray(rng.normal(size=50), jnp.bfloat16),
        "pixels": jnp.asarray(rng.integers(0, 256, (9, 9)), jnp.uint8),
        "zeros": jnp.zeros(400),
        "key": jax.random.key(seed),
        "step": jnp.int32(seed),
    }


def plain(state: Any) -> list[bytes]:
    """Every leaf's bytes."""
    leaves = [
        jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
        for x in jax.tree.leaves(state)
    ]
    return [np.asarray(x).tobytes() for x in leaves]


def flip(path: pathlib.Path, rng: np.random.Generator) -> None:
    """Flip one random bit of a file."""
    data = bytearray(path.read_bytes())
    data[rng.integers(len(data))] ^= 1 << rng.integers(8)
    path.write_bytes(data)


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> pathlib.Path:
    workdir = tmp_path_factory.mktemp("saved")
    checkpointer = Checkpointer(str(workdir))
    for step in (1, 2):
        checkpointer.save(step, state_of(step), {"interval": step, "host": "00" * 40})
    checkpointer.save_best(2, state_of(2), 3.5)
    checkpointer.close()
    return workdir


def flips(saved: pathlib.Path, tmp_path: pathlib.Path, number: int, seed: int) -> dict[str, int]:
    """Flip `number` bits, one at a time, over all files of checkpoint 2; outcomes by name."""
    rng = np.random.default_rng(seed)
    files = [p.relative_to(saved) for p in (saved / "checkpoints" / "2").rglob("*") if p.is_file()]
    files = [p for p in sorted(files) if (saved / p).stat().st_size]
    newest, older = plain(state_of(2)), plain(state_of(1))
    counts = {"harmless": 0, "fell back": 0}
    for i in range(number):
        name = files[i % len(files)]
        workdir = tmp_path / str(i)
        shutil.copytree(saved / "checkpoints", workdir / "checkpoints")
        flip(workdir / name, rng)
        checkpointer = Checkpointer(str(workdir))
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            state, meta = checkpointer.restore(state_of(0))
        checkpointer.close()
        shutil.rmtree(workdir)
        named = any("checkpoint 2 " in str(w.message) for w in said)
        outcome = "fell back" if named else "harmless"
        assert plain(state) == (older if named else newest), (name, i)
        assert meta == {"interval": 1 if named else 2, "host": "00" * 40}, (name, i)
        counts[outcome] += 1
    return counts


def test_no_flipped_bit_is_loaded(saved, tmp_path):
    counts = flips(saved, tmp_path, 60, seed=1)
    assert counts["fell back"] >= 15 and counts["harmless"] >= 1


@pytest.mark.slow
def test_none_of_500_flipped_bits_is_loaded(saved, tmp_path):
    print(flips(saved, tmp_path, 500, seed=2))


def change_one_number(x: Any) -> Any:
    data = np.array(x)
    data.reshape(-1).view(np.uint8)[-1] ^= 1
    return jnp.asarray(data)


@pytest.mark.parametrize("name", ["weights", "half", "pixels", "zeros", "step"])
def test_every_leaf_has_a_digest_of_its_own(name):
    tree = {k: v for k, v in state_of(3).items() if k != "key"}
    seen = checkpoint.digests_of(tree)
    assert checkpoint.damaged_leaf(tree, seen) is None
    assert (
        checkpoint.damaged_leaf({**tree, name: change_one_number(tree[name])}, seen)
        == f"['{name}']"
    )


def test_a_digest_is_the_crc_of_the_bytes():
    """The published check value of CRC-32."""
    assert checkpoint.crc_of(np.frombuffer(b"123456789", np.uint8)) == "cbf43926"


def test_parts_of_a_divided_array_are_checked_by_place():
    whole = np.arange(12, dtype=np.float32).reshape(4, 3)
    parts = {"0:2,0:3": checkpoint.crc_of(whole[:2]), "2:4,0:3": checkpoint.crc_of(whole[2:])}
    assert checkpoint.damaged_leaf({"x": jnp.asarray(whole)}, {"['x']": parts}) is None
    swapped = dict(zip(parts, reversed(parts.values()), strict=True))
    assert checkpoint.damaged_leaf({"x": jnp.asarray(whole)}, {"['x']": swapped}) == "['x']"
