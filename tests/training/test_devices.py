"""Placement on meshes and among processes that this machine only pretends to have."""

from __future__ import annotations

import json
import types

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import multihost_utils

from mbx.agents.settings import Distributed
from mbx.config import presets
from mbx.fast import allocator
from mbx.settings import to_dict
from mbx.training import build, devices
from mbx.training.devices import ONE_DEVICE, Partition
from mbx.training.state import LoopState
from tests.faults.small import small_config
from tests.helpers import tiny_config

AUTO = (jax.sharding.AxisType.Auto,)
FOUR = jax.sharding.AbstractMesh((4,), ("data",), axis_types=AUTO)
P = jax.P


def of(*shape, dtype=np.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def specs(tree):
    return jax.tree.map(lambda s: s.spec, tree)


@pytest.fixture
def one():
    """A mesh of the one device there is."""
    return Partition(jax.make_mesh((1,), ("data",), axis_types=AUTO))


@pytest.fixture
def several(monkeypatch, one):
    """The second of three processes."""
    monkeypatch.setattr(jax, "process_count", lambda: 3)
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    return one


def loop_state(**leaves):
    nothing = dict.fromkeys(LoopState.__dataclass_fields__, None)
    return LoopState(**(nothing | leaves))


def test_counts_without_a_mesh_and_with_one(monkeypatch):
    assert (ONE_DEVICE.size, ONE_DEVICE.processes, Partition(FOUR).size) == (1, 1, 4)
    monkeypatch.setattr(jax, "process_count", lambda: 3)
    assert (ONE_DEVICE.processes, Partition(FOUR).processes) == (1, 3)


@pytest.mark.parametrize(
    ("mesh", "count", "index", "main", "seed"),
    [
        (FOUR, 1, 0, True, 7),
        (FOUR, 2, 0, True, 7),
        (FOUR, 2, 1, False, 1007),
        (FOUR, 3, 2, False, 2007),
        (None, 3, 2, True, 7),  # alone, whatever there is
    ],
)
def test_the_first_process_writes_and_each_has_a_seed(monkeypatch, mesh, count, index, main, seed):
    monkeypatch.setattr(jax, "process_count", lambda: count)
    monkeypatch.setattr(jax, "process_index", lambda: index)
    partition = Partition(mesh)
    assert partition.is_main_process is main and partition.own_seed(7) == seed


def test_what_leads_with_the_environments_is_divided_where_that_goes():
    tree = dict(even=of(8, 3), odd=of(6, 4), number=of(), none=of(0, 4), other=of(3, 8))
    assert specs(Partition(FOUR).of_environments(tree)) == dict(
        even=P("data"), odd=P(), number=P(), none=P(), other=P()
    )
    assert ONE_DEVICE.of_environments([1 * np.ones(4)]) == [None]


def test_parameters_are_copies_or_divided_along_the_longest_axis_that_goes():
    tree = dict(
        wide=of(512, 1024),
        tall=of(1024, 512),
        least=of(2**17, 2),  # as large as is divided
        small=of(2**17 - 4, 2),
        awkward=of(1024, 1026),
        never=of(513, 1027),
    )
    divided = specs(Partition(FOUR, fsdp=True).of_parameters(tree))
    assert divided == dict(
        wide=P(None, "data"),
        tall=P("data", None),
        least=P("data", None),
        small=P(),
        awkward=P("data", None),
        never=P(),
    )
    assert set(specs(Partition(FOUR).of_parameters(tree)).values()) == {P()}


def test_a_state_by_its_fields():
    state = loop_state(
        **{name: of(8, 2) for name in ("actor", "env", "obs", "reward", "is_first", "replay")},
        train={"w": of(1024, 1024)},
        key=of(8),
        steps=of(),
    )
    found = Partition(FOUR, fsdp=True).of_state(state)
    assert [x.spec for x in (found.actor, found.env, found.obs, found.reward)] == 4 * [P("data")]
    assert [x.spec for x in (found.is_first, found.replay)] == 2 * [P("data")]
    assert found.train["w"].spec == P("data", None)
    assert found.key.spec == found.steps.spec == P() and found.updates is None


def test_states_are_built_placed_and_kept_where_they_belong(one):
    def make(x, key):
        return loop_state(obs=2 * x, reward=None, train={"w": x[0]}, key=key, steps=jnp.int32(3))

    x = jnp.arange(6.0).reshape(2, 3)
    for partition, spec in ((ONE_DEVICE, None), (one, P("data"))):
        placed = partition.place(make(x, jax.random.key(0)))
        assert placed.obs.committed
        for made in (partition.build(make, x, jax.random.key(0)), placed):
            np.testing.assert_array_equal(made.obs, 2 * x)
            np.testing.assert_array_equal(made.train["w"], x[0])
            assert int(made.steps) == 3
            if spec is not None:
                assert made.obs.sharding.spec == spec and made.steps.sharding.spec == P()

    def step(state):
        return state.replace(steps=state.steps + 1), {"n": state.steps}

    assert ONE_DEVICE.keep(step) is step
    assert one.keep(step) is not step
    for partition, times in ((ONE_DEVICE, (0, 0)), (one, (1, 2))):
        state = partition.place(make(x, jax.random.key(0)))
        kept = partition.compile(partition.keep(step), donate=True)
        new, metrics = kept(state)
        assert int(new.steps) == 4 and int(metrics["n"]) == 3 and state.obs.is_deleted()
        again, _ = partition.compile(step)(new)
        assert int(again.steps) == 5 and not new.obs.is_deleted()
        for function, n in zip((step, partition.keep(step)), times, strict=True):
            text = partition.compile(function).lower(again).as_text()
            lines = [line for line in text.splitlines() if "sharding_constraint" in line]
            assert sum('"data"' in line for line in lines) == n
            assert not n or any('"data"' not in line for line in lines)  # metrics are copies


def test_rows_inside_a_program_are_divided(one):
    x = jnp.ones((4, 2))
    assert ONE_DEVICE.divided(x) is x
    text = jax.jit(lambda x: one.divided({"x": x})["x"]).lower(x).as_text()
    assert "sharding_constraint" in text and '"data"' in text


@flax.struct.dataclass
class Piece:
    index: tuple
    data: np.ndarray


def test_a_process_takes_and_gives_its_own_rows(monkeypatch, several):
    pieces = [Piece((slice(4, 6),), np.ones((2, 1))), Piece((slice(2, 4),), np.zeros((2, 1)))]
    array = types.SimpleNamespace(addressable_shards=pieces)
    np.testing.assert_array_equal(several.local([array])[0], [[0.0], [0.0], [1.0], [1.0]])
    first = [Piece((slice(2, 4),), np.ones(2)), Piece((slice(None, 2),), np.zeros(2))]
    array = types.SimpleNamespace(addressable_shards=first)
    np.testing.assert_array_equal(several.local(array), [0.0, 0.0, 1.0, 1.0])

    told = []

    def make(sharding, rows):
        told.append(sharding.spec)
        return rows + 1

    monkeypatch.setattr(jax, "make_array_from_process_local_data", make)
    np.testing.assert_array_equal(several.joined({"x": [1.0, 2.0]})["x"], [2.0, 3.0])
    assert told == [P("data"), P("data")]


def test_alone_rows_stay_as_they_are_and_nobody_is_waited_for(monkeypatch, one):
    monkeypatch.setattr(multihost_utils, "sync_global_devices", pytest.fail)
    for partition in (ONE_DEVICE, one):
        local = partition.local({"x": jnp.arange(3.0)})["x"]
        assert isinstance(local, np.ndarray) and local.tolist() == [0.0, 1.0, 2.0]
        joined = partition.joined({"x": local})["x"]
        assert isinstance(joined, jax.Array) and joined.tolist() == [0.0, 1.0, 2.0]
        values = np.arange(3)
        assert partition.gathered(values) is values and partition.copy_here(values) is values
        assert partition.agreed(True) is True and partition.agreed(False) is False
        partition.wait_for_all("here")


def test_processes_agree_wait_and_copy(monkeypatch, several):
    calls = []

    def gather(x, tiled):
        calls.append(tiled)
        return jnp.concatenate([x, jnp.zeros_like(x)])

    monkeypatch.setattr(multihost_utils, "process_allgather", gather)
    monkeypatch.setattr(multihost_utils, "sync_global_devices", calls.append)
    assert several.agreed(True) is True and several.agreed(False) is False
    assert several.gathered(np.ones(2)).tolist() == [1.0, 1.0, 0.0, 0.0]
    several.wait_for_all("here")
    assert calls == [True, True, True, "here"]
    whole = several.copy_here({"x": jnp.arange(3.0)})["x"]
    assert whole.tolist() == [0.0, 1.0, 2.0]
    assert devices._same(whole) is whole


@pytest.mark.parametrize(
    ("told", "given"),
    [
        (dict(enabled=False, num_processes=2), None),
        (dict(enabled=True, num_processes=1), None),
        (dict(enabled=True), (None, None, None)),
        (dict(enabled=True, num_processes=2, process_id=0), (None, 2, 0)),
        (dict(enabled=True, coordinator="a:1", num_processes=3, process_id=2), ("a:1", 3, 2)),
    ],
)
def test_who_joins_whom(monkeypatch, told, given):
    calls = []

    def initialize(*args, heartbeat_timeout_seconds):
        calls.append((args, heartbeat_timeout_seconds))

    monkeypatch.setattr(jax.distributed, "initialize", initialize)
    monkeypatch.setattr(multihost_utils, "sync_global_devices", calls.append)
    devices.initialize(Distributed(**told, heartbeat_timeout=9))
    assert calls == ([] if given is None else [(given, 9), "mbx starts"])


def test_what_jax_misses_is_told_with_the_settings(monkeypatch):
    def initialize(*args, **kwargs):
        raise ValueError("no number")

    monkeypatch.setattr(jax.distributed, "initialize", initialize)
    with pytest.raises(ValueError, match=r"num_processes=2, distributed.process_id=-1: no number"):
        devices.initialize(Distributed(enabled=True, num_processes=2))


@pytest.mark.parametrize("joined", [False, True])
def test_only_one_of_several_leaves_at_once(monkeypatch, joined):
    left = []
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: joined)
    monkeypatch.setattr(devices.os, "_exit", left.append)
    devices.abandon()
    assert left == ([1] if joined else [])


def settings(num_envs=4, enabled=True, num_seeds=1, fsdp=False, shards=0, cores=0, draws=(8,)):
    return types.SimpleNamespace(
        gpu_compiler="full",
        train=types.SimpleNamespace(steps=1),
        distributed=Distributed(enabled=enabled, fsdp=fsdp, cores=cores),
        draws=lambda: draws,
        large_updates=lambda: False,
        env=types.SimpleNamespace(num_envs=num_envs),
        num_seeds=num_seeds,
        replay=types.SimpleNamespace(shards=shards),
    )


def test_the_partition_that_a_run_asks_for(monkeypatch):
    assert devices.make_partition(settings(enabled=False)) == ONE_DEVICE
    for fsdp in (False, True):
        partition = devices.make_partition(settings(fsdp=fsdp))
        assert partition.fsdp is fsdp and partition.mesh.axis_names == ("data",)
        assert partition.mesh.size == jax.device_count() == 1
        assert partition.mesh.axis_types == AUTO
    with pytest.raises(ValueError, match="distributed.enabled=True with num_seeds=2"):
        devices.make_partition(settings(num_seeds=2))
    monkeypatch.setattr(jax, "device_count", lambda: 2)
    with pytest.raises(ValueError, match="env.num_envs=3 cannot be divided among 2"):
        devices.make_partition(settings(num_envs=3))


def test_shards_are_as_many_as_devices_unless_configured():
    assert devices.num_shards(settings(), Partition(FOUR)) == 4
    assert devices.num_shards(settings(shards=8), Partition(FOUR)) == 8


@pytest.mark.parametrize(
    ("num_envs", "draws", "shards"), [(4, (8, 4), 4), (4, (8, 6), 1), (2, (8,), 1), (4, (1,), 1)]
)
def test_cores_draw_their_share_where_all_of_it_is_whole(num_envs, draws, shards):
    of = settings(num_envs=num_envs, draws=draws, enabled=False)
    assert devices.num_shards(of, Partition(FOUR, cores=True)) == shards
    assert devices.num_shards(of, Partition(FOUR)) == 4  # which is refused where it is drawn


@pytest.mark.parametrize(
    ("num_envs", "available", "cores"),
    [(4, 1, 1), (4, 2, 2), (4, 3, 2), (4, 16, 4), (6, 4, 3), (1, 16, 2), (5, 4, 2), (1, 1, 1)],
)
def test_cores_that_a_run_has_use_for(num_envs, available, cores):
    config = small_config(env=dict(num_envs=num_envs))
    assert devices.cores_for(build.read(config), available) == 1  # it does not say that it gains
    config = tiny_config(env=dict(num_envs=num_envs))
    assert devices.cores_for(build.read(config), available) == cores


@pytest.mark.parametrize(
    ("agent", "size", "gains"),
    [
        ("tdmpc", "tiny", True),
        ("tdmpc", "1", True),
        ("tdmpc", "5", False),
        ("dreamer", "1m", True),
        ("dreamer", "12m", False),
    ],
)
def test_small_models_gain_by_cores(agent, size, gains):
    config = presets.load(agent)
    config.model.size = size
    assert build.read(config.to_dict()).gains_by_cores() is gains


@pytest.mark.parametrize(
    ("agent", "changes", "large"),
    [
        ("tdmpc", {}, False),
        ("dreamer", {}, False),  # 16 sequences, dreams of 16 rows from 8 each
        ("dreamer", {"imagination.rows": 31}, False),
        ("dreamer", {"imagination.rows": 32}, True),  # 8,192 dreamed rows
        ("dreamer", {"imagination.rows": 0}, True),  # from all 32
        ("dreamer", {"imagination.rows": 32, "imagination.horizon": 14}, False),
        ("dreamer", {"imagination.rows": 0, "loss.batch_size": 8}, False),
        ("dreamerv3", {}, True),
        ("dreamerv3", {"model.size": "12m"}, False),  # has arrays of more than 64 MB
    ],
)
def test_large_updates_on_several_cores_have_their_memory_in_pieces(
    agent, changes, large, monkeypatch
):
    called, two = [], 2 * jax.devices()
    monkeypatch.setattr(allocator, "keep_pieces", lambda: called.append(True) or not called[1:])
    monkeypatch.setattr(jax, "devices", lambda: two)
    monkeypatch.setattr(jax, "make_mesh", lambda shape, *_, **__: shape)
    for cores, kept in ((1, False), (2, True), (2, False)):  # where the allocator took the setting
        config = presets.load(agent)
        config.update_from_flattened_dict(changes | {"distributed.cores": cores})
        partition = devices.make_partition(build.read(config.to_dict()))
        assert partition.pieces is (large and kept)
    assert len(called) == 2 * large


@pytest.mark.parametrize(
    ("agent", "sections", "draws"),
    [
        ("tdmpc", dict(reanalyze=dict(enabled=False)), (128,)),
        ("tdmpc", dict(reanalyze=dict(batch_size=99)), (128, 99)),
        ("tdmpc", dict(reanalyze=dict(batch_size=99, current_batch=True)), (128, 25)),
        (
            "tdmpc",
            dict(loss=dict(batch_size=7), reanalyze=dict(batch_size=99, current_batch=True)),
            (7, 7),
        ),
        ("dreamer", dict(loss=dict(batch_size=6)), (6,)),
        ("empo", dict(loss=dict(batch_size=6)), (6,)),
    ],
)
def test_what_a_learner_draws_at_once(agent, sections, draws):
    config = presets.load(agent).to_dict()
    for section, values in sections.items():
        config[section].update(values)
    assert config["loss"].get("horizon", 3) == 3  # windows of a pass have 4 rows
    assert build.read(config).draws() == draws


@pytest.fixture
def machine(monkeypatch):
    """What jax was told, on a machine whose cores and devices a test chooses."""
    told = {}

    def made(cores=2, platform="cpu"):
        monkeypatch.setattr(devices, "available_cores", lambda: cores)
        monkeypatch.setattr(jax, "default_backend", lambda: platform)
        return told

    monkeypatch.setattr(jax.config, "update", told.__setitem__)
    return made


def test_the_command_makes_cores_devices(machine, tmp_path):
    told = machine(cores=2)
    used = devices.use_cores(build.read(tiny_config()), str(tmp_path))
    assert told == {"jax_num_cpu_devices": 2} and used.distributed.cores == 2
    used = devices.use_cores(build.read(tiny_config(distributed=dict(cores=1))), str(tmp_path))
    assert told == {"jax_num_cpu_devices": 1} and used.distributed.cores == 1


@pytest.mark.parametrize("kept", [0, 1, 3, None])
def test_a_resumed_run_keeps_its_cores(machine, tmp_path, kept):
    """0: of a run from Python or on an accelerator, which had one device."""
    told = machine(cores=2)
    saved = build.read(tiny_config(distributed=dict(cores=kept or 0)))
    values = to_dict(saved)
    if kept is None:  # of a version that had one device
        del values["distributed"]["cores"]
    (tmp_path / "config.json").write_text(json.dumps(values))
    used = devices.use_cores(build.read(tiny_config(resume=True)), str(tmp_path))
    assert used.distributed.cores == told["jax_num_cpu_devices"] == (kept or 1)
    other = build.read(tiny_config(resume=True, distributed=dict(cores=2)))
    assert devices.use_cores(other, str(tmp_path)).distributed.cores == 2


def test_seeds_share_cores_and_processes_and_accelerators_have_no_use_for_them(machine, tmp_path):
    told = machine(cores=2)
    given = build.read(tiny_config(distributed=dict(enabled=True)))
    assert devices.use_cores(given, str(tmp_path)) == given and told == {}
    for seeds, cores, used in ((8, 2, 2), (8, 3, 2), (3, 2, 1), (6, 4, 3), (5, 16, 5)):
        machine(cores=cores)
        given = build.read(tiny_config(num_seeds=seeds))
        assert devices.use_cores(given, str(tmp_path)) == given
        assert told == {"jax_num_cpu_devices": used}
    machine(cores=2, platform="gpu")
    assert devices.use_cores(build.read(tiny_config()), str(tmp_path)).distributed.cores == 0
    with pytest.raises(ValueError, match="distributed.cores=2 is for .* on a gpu: leave it 0"):
        devices.use_cores(build.read(tiny_config(distributed=dict(cores=2))), str(tmp_path))


def test_the_partition_of_cores(monkeypatch):
    with pytest.raises(ValueError, match=r"cores=2: jax has 1 cpu device.*num_cpu_devices', 2"):
        devices.make_partition(settings(enabled=False, cores=2))
    assert devices.make_partition(settings(enabled=False, cores=1)).mesh is None
    three = 3 * jax.devices()
    monkeypatch.setattr(jax, "devices", lambda: three)
    monkeypatch.setattr(jax, "make_mesh", lambda shape, *_, **__: shape)
    for num_envs, replicated in ((3, False), (6, False), (4, True), (1, True)):
        asked = settings(enabled=False, cores=3, num_envs=num_envs)
        assert devices.make_partition(asked) == Partition((3,), cores=True, replicated=replicated)
    monkeypatch.undo()
