"""Files that somebody else wrote, or a disk garbled: read, or refused in a line that names them."""

from __future__ import annotations

import dataclasses
import functools
import importlib.resources
import json
import os
import pathlib
import random
import shutil
import warnings
import zipfile
from collections.abc import Callable

import jax
import numpy as np
import pytest

from mbx import envs
from mbx.agents.settings import RunSettings
from mbx.analysis.curves import load_curve
from mbx.empo.agent import settings as empo
from mbx.empo.multigrid.layout import load_map
from mbx.settings import to_dict
from mbx.training import run, rundir, transfer
from mbx.training.checkpoint import Checkpointer
from mbx.training.job import fresh_state, prepare
from mbx.training.logging import read_rows
from mbx.training.rundir import load_config, load_settings
from tests.faults.small import make_agent, small_config

TOKENS = (b"[", b"]", b"{", b"}", b'"', b"null", b"true", b"-1", b"1e999", b"NaN", b"9" * 400)
TOKENS += (b"\xff", b"\x00", b"$", b"\n", b",", b":", b"[" * 3000, b"{}", b"[]", b'"x"', b"0", b"")
VALUES = (None, True, -1, 0, 10**30, 1e308, float("inf"), "", "x", "$x", [], {}, [1], {"a": []})


def garble(data: bytes, chance: random.Random) -> bytes:
    """A file with one to three accidents."""
    for _ in range(chance.randint(1, 3)):
        at, size = chance.randrange(len(data) + 1), chance.choice((0, 1, 4, 30))
        kind = chance.randrange(5)
        if kind == 0 and data:
            spot = chance.randrange(len(data))
            data = data[:spot] + bytes([data[spot] ^ 1 << chance.randrange(8)]) + data[spot + 1 :]
        elif kind == 1:
            data = data[:at] + data[at + size :]
        elif kind == 2:
            data = data[:at] + chance.choice(TOKENS) + data[at + size :]
        elif kind == 3:
            data = data[:at]
        else:
            data = data[:at] + data[at : at + 30] * 2 + data[at + 30 :]
    return data


def garble_json(data: bytes, chance: random.Random) -> bytes:
    """A JSON object in which a field is something else, gone or new; or `garble` of its text."""
    if chance.random() < 0.4:
        return garble(data, chance)
    tree = json.loads(data)
    node = tree
    while True:
        keys = list(node) if isinstance(node, dict) else list(range(len(node)))
        if not keys:
            return garble(data, chance)
        key = chance.choice(keys)
        if not isinstance(node[key], dict | list) or not node[key] or chance.random() < 0.3:
            break
        node = node[key]
    if chance.random() < 0.2:
        del node[key]
    else:
        node[key] = chance.choice(VALUES)
    return json.dumps(tree).encode()


def read_metrics(path: str) -> None:
    read_rows(path)
    load_curve(os.path.dirname(path), "train/loss")


def read_config(path: str) -> None:
    load_config(os.path.dirname(path))
    given = small_config(resume=True)
    rundir.check(given, os.path.dirname(path), os.path.dirname(path))
    run.load(os.path.dirname(path))


def read_dataset(path: str) -> None:
    environment = envs.make("toy:point", 1)
    transfer.load_dataset(path, make_agent({}, environment.spec), environment.spec)


class Reader:
    """A kind of file: an example, where it lies in a run directory, and what reads it."""

    def __init__(self, name: str, read: Callable, mutate: Callable = garble) -> None:
        self.name, self.read, self.mutate = name, read, mutate


def read_record(path: str) -> None:
    rundir.attempts(os.path.dirname(path))


READERS = {
    "record": Reader("run.json", read_record, garble_json),
    "metrics": Reader("metrics.jsonl", read_metrics),
    "config": Reader("config.json", read_config, garble_json),
    "dataset": Reader("dataset.npz", read_dataset),
    "map": Reader("mine.yaml", load_map),
}


@pytest.fixture(scope="module")
def example(tmp_path_factory) -> pathlib.Path:
    """A run directory with one file of every kind."""
    workdir = tmp_path_factory.mktemp("example")
    run.train(small_config(train=dict(steps=40), replay=dict(save=True)), str(workdir))
    maps = importlib.resources.files("mbx.empo.multigrid") / "maps"
    known = sorted(path.name for path in maps.iterdir() if path.name.endswith(".yaml"))
    (workdir / "mine.yaml").write_bytes((maps / known[0]).read_bytes())
    return workdir


def fuzz(kind: str, example: pathlib.Path, tmp_path: pathlib.Path, number: int, seed: int) -> None:
    reader, chance = READERS[kind], random.Random(f"{kind} {seed}")
    workdir = pathlib.Path(shutil.copytree(example, tmp_path / "run"))
    path, whole = workdir / reader.name, (example / reader.name).read_bytes()
    if kind == "dataset":  # parts of the archive itself, half of the time
        unpacked = {
            i.filename: zipfile.ZipFile(path).read(i) for i in zipfile.ZipFile(path).filelist
        }
    before, refused = sorted(p for p in tmp_path.rglob("*")), 0
    reader.read(str(path))
    for i in range(number):
        data = reader.mutate(whole, chance)
        if kind == "dataset" and i % 2:
            with zipfile.ZipFile(path, "w") as archive:
                hit = chance.choice(sorted(unpacked))
                for name, content in unpacked.items():
                    archive.writestr(name, garble(content, chance) if name == hit else content)
        else:
            path.write_bytes(data)
        kept = path.read_bytes()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                reader.read(str(path))
        except (ValueError, FileNotFoundError, ImportError) as error:
            refused += 1
            assert len(str(error).splitlines()) == 1, (i, error)
            assert reader.name in str(error), (i, error)
        except Exception as error:
            raise AssertionError(f"{kind} {seed}, file {i}: {kept[:300]!r}") from error
        assert sorted(p for p in tmp_path.rglob("*")) == before
    assert refused > number / 5


@pytest.mark.parametrize("kind", READERS)
def test_garbled_files_are_refused_in_a_line(kind, example, tmp_path):
    fuzz(kind, example, tmp_path, 80, seed=0)


@pytest.mark.slow
@pytest.mark.parametrize("kind", READERS)
def test_a_thousand_garbled_files_are_refused_in_a_line(kind, example, tmp_path):
    fuzz(kind, example, tmp_path, 1100, seed=1)


def checkpoint_metadata(example, tmp_path, number: int, seed: int) -> None:
    """Garbled metadata of the newest checkpoint: the older one comes back, and that is said."""
    chance, parts = random.Random(seed), prepare(small_config())
    state = jax.eval_shape(functools.partial(fresh_state, parts), jax.random.key(0))
    for i in range(number):
        workdir = pathlib.Path(shutil.copytree(example, tmp_path / str(i)))
        path = workdir / "checkpoints" / "40" / "meta" / "metadata"
        whole = path.read_bytes()
        path.write_bytes(garble_json(whole, chance))
        same = json.loads(whole) == _or_none(path.read_bytes())
        checkpointer = Checkpointer(str(workdir))
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            _, meta = checkpointer.restore(state)
        checkpointer.close()
        assert meta["interval"] == (2 if same else 1), i
        assert same or any("checkpoint 40" in str(w.message) for w in said)
        shutil.rmtree(workdir)


def _or_none(data: bytes):
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None


def test_garbled_metadata_falls_back(example, tmp_path):
    checkpoint_metadata(example, tmp_path, 25, seed=0)


@pytest.mark.slow
def test_much_garbled_metadata_falls_back(example, tmp_path):
    checkpoint_metadata(example, tmp_path, 600, seed=1)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("5", "line 2 holds int"),
        ('{"step": 5}', "line 2: field 'kind' is missing"),
        ('{"kind": "train", "step": "x"}', "line 2: field 'step' is 'x'"),
        ('{"kind": "train", "step": 1, "loss": [1]}', r"line 2: field 'loss' is \[1\]"),
        ("[" * 100_000, "line 2 is no JSON that can be read: it nests too deeply"),
        ("{bad", "line 2 is no JSON"),
    ],
)
def test_a_row_that_is_none_is_named(line, message, tmp_path):
    path = tmp_path / "metrics.jsonl"
    good = '{"kind": "train", "step": 1, "time": 2.5, "loss": null}\n'
    path.write_text(f"{good}{line}\n{good}")
    with pytest.raises(ValueError, match=f"{path}, {message}"):
        read_rows(str(path))
    path.write_text(f"{good}{line}")  # cut short
    assert len(read_rows(str(path))) == 1


@pytest.mark.parametrize("field", ["row/obs", "size", "position", "row/is_first"])
def test_a_field_of_a_dataset_is_named(field, example, tmp_path):
    arrays = dict(np.load(example / "dataset.npz"))
    wrong = {
        "row/obs": np.full_like(arrays["row/obs"], np.nan),
        "size": arrays["size"] + 10**6,
        "position": arrays["position"][:1],
        "row/is_first": arrays["row/is_first"][0],
    }
    np.savez(tmp_path / "wrong.npz", **{**arrays, field: wrong[field]})
    with pytest.raises(ValueError, match=f"wrong.npz.*field '{field}'"):
        read_dataset(str(tmp_path / "wrong.npz"))


@pytest.fixture
def begun(example, tmp_path, monkeypatch) -> pathlib.Path:
    """The directory of a run with a file of the user's, which is then changed, stopped before its
    first step. An @ in its path is no option of the world's."""
    mine, workdir = tmp_path / "mine.yaml", tmp_path / "a@b" / "run"
    mine.write_bytes((example / "mine.yaml").read_bytes())
    monkeypatch.chdir(tmp_path)
    settings = empo.Settings(
        env=dataclasses.replace(empo.Settings().env, name="empo:multigrid/mine.yaml@stored")
    )
    rundir.check_inputs(settings.files(), str(workdir))
    rundir.keep_inputs(settings.files(), str(workdir))
    (workdir / "config.json").write_text(json.dumps(to_dict(settings)))
    mine.write_bytes(b"changed")
    return workdir


def test_a_run_is_read_with_its_own_copies_of_the_users_files(begun, example):
    found = load_settings(str(begun))
    assert found.env.name == f"empo:multigrid/{begun}/inputs/env.name.yaml@stored"
    copy = begun / "inputs" / "env.name.yaml"
    assert copy.read_bytes() == (example / "mine.yaml").read_bytes()
    copy.write_text("5")
    with pytest.raises(ValueError, match=f"map '{copy}' must have"):
        envs.make(found.env.name, 1)
    with pytest.raises(ValueError, match="only option after @ is stored"):
        envs.make("empo:multigrid/rock_gate@sorted", 1)


@pytest.mark.parametrize("kind", ["gone", "link"])
def test_a_path_out_of_a_strangers_configuration_is_not_opened(kind, begun, tmp_path):
    name = "env.name.yaml"
    (begun / "inputs" / name).unlink()
    outside = tmp_path / "outside"
    os.mkfifo(outside)  # whoever opened it would wait forever
    if kind == "link":
        (begun / "inputs" / name).symlink_to(outside)
    path = begun / "config.json"
    config = json.loads(path.read_text())
    config["env"]["name"] = f"empo:multigrid/{tmp_path}/elsewhere.yaml"
    path.write_text(json.dumps(config))
    setting = name.rpartition(".")[0]
    message = f"config.json.*{setting}=.* lies outside of the run and is not opened.*{begun}/inputs"
    with pytest.raises(ValueError, match=message):
        run.load(str(begun))
    with pytest.raises(ValueError, match=f"{setting}=.* is not opened"):  # train.init_from
        transfer.start_from(str(begun), None, None, None)


def test_a_run_is_not_continued_with_another_file(begun):
    env = dataclasses.replace(empo.Settings().env, name="empo:multigrid/mine.yaml")
    settings = dataclasses.replace(empo.Settings(), env=env)
    with pytest.raises(ValueError, match="env.name=mine.yaml is not what the run in .* began"):
        rundir.check_inputs(settings.files(), str(begun))


def test_where_a_run_began_from_is_not_followed_when_it_is_read(example, tmp_path):
    """`train.init_from` and `train.dataset` of its configuration; a pipe would be waited for."""
    workdir, pipe = shutil.copytree(example, tmp_path / "run"), tmp_path / "pipe.npz"
    os.mkfifo(pipe)
    path = workdir / "config.json"
    config = json.loads(path.read_text())
    config["train"].update(init_from=str(tmp_path / "nowhere"), dataset=str(pipe))
    path.write_text(json.dumps(config))
    assert run.load(str(workdir), which="latest")[2].train.dataset == str(pipe)


def test_a_run_keeps_the_users_files_before_it_begins(tmp_path, monkeypatch):
    mine, workdir = tmp_path / "mine.yaml", tmp_path / "run"
    mine.write_text("one")

    def stop(*_: object) -> None:
        raise InterruptedError

    monkeypatch.setattr(run, "_drive", stop)
    monkeypatch.setattr(RunSettings, "files", lambda self: {"env.name": str(mine)})
    with pytest.raises(InterruptedError):
        run.train(small_config(), str(workdir))
    assert (workdir / "inputs" / "env.name.yaml").read_text() == "one"
    mine.write_text("two")
    with pytest.raises(ValueError, match=f"env.name={mine} is not what the run in {workdir} began"):
        run.train(small_config(resume=True), str(workdir))
    assert (workdir / "inputs" / "env.name.yaml").read_text() == "one"


def test_64_bits_are_refused(monkeypatch, tmp_path):
    with jax.enable_x64(True):
        for start in (lambda: run.train(small_config(), str(tmp_path / "x")), run.load):
            with pytest.raises(ValueError, match="JAX_ENABLE_X64.*float32; unset it"):
                start() if start is not run.load else start(str(tmp_path))
    assert not (tmp_path / "x").exists()
