"""Host environments saved and continued: exactly, by plain data, or not at all."""

from __future__ import annotations

import json
import pathlib
import pickle

import numpy as np
import pytest

from mbx import envs
from mbx.envs import snapshot
from mbx.envs.snapshot import SnapshotError


def same(a: object, b: object) -> bool:
    """Equal in type, shape and every bit."""
    if isinstance(a, np.ndarray | np.generic):
        return type(a) is type(b) and a.dtype == b.dtype and a.tobytes() == b.tobytes()
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    return type(a) is type(b) and repr(a) == repr(b)


@pytest.mark.parametrize(
    "tree",
    [
        None,
        True,
        [1, -0.0, 0.1, float("nan"), 2**200, "text", b"\x00\xff"],
        (1, ("a", [])),
        {"a": 1, 2: {"b": None}, (1, 2): "c"},
        np.arange(6.0).reshape(2, 3),
        np.array([True, False]),
        np.float32(1e-42),
        np.array(5, np.int8),
        np.zeros((0, 3)),
    ],
)
def test_plain_data_comes_back_bit_for_bit(tree):
    assert same(snapshot.decode(snapshot.encode(tree)), tree)


@pytest.mark.parametrize("bits", [np.random.PCG64, np.random.MT19937, np.random.Philox])
def test_a_generator_goes_on_where_it_was(bits):
    generator = np.random.Generator(bits(3))
    generator.random(5)
    again = snapshot.decode(snapshot.encode({"rng": generator}))["rng"]
    assert again.random(4).tolist() == generator.random(4).tolist()
    assert again.normal(size=3).tolist() == generator.normal(size=3).tolist()


@pytest.mark.parametrize("thing", [object(), {1, 2}, np.array([None]), lambda: 0, 1j])
def test_what_is_not_plain_is_refused(thing):
    with pytest.raises(TypeError):
        snapshot.encode(thing)


class Touch:
    """Runs code where it is unpickled."""

    def __init__(self, path: pathlib.Path) -> None:
        self.path = path

    def __reduce__(self):
        return pathlib.Path.touch, (self.path,)


@pytest.mark.parametrize("name", ["gym:Pendulum-v1", "multi:gym:Pendulum-v1+gym:Reacher-v5"])
def test_a_pickle_is_not_run(name, tmp_path):
    path = tmp_path / "ran"
    environment = envs.make(name, 2, episode_length=3)
    with pytest.raises(SnapshotError):
        environment.set_state(pickle.dumps([Touch(path), Touch(path)]))
    assert not path.exists()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        '{"pickle": ""}',
        "[" * 100_000,
        '{"array": ["|O8", [1], ""]}',
        '{"array": ["<f8", [3], "AAAA"]}',
        '{"generator": {"dict": [["bit_generator", "os"]]}}',
        '{"a": 1, "b": 2}',
    ],
)
def test_what_is_no_snapshot_is_refused(text):
    with pytest.raises(SnapshotError):
        snapshot.decode(text.encode())


# Ant, Humanoid and Pusher read results of the last MuJoCo step (places, forces) before the next.
@pytest.mark.parametrize(
    "name",
    [
        *(f"gym:{name}-v5" for name in ("Ant", "HalfCheetah", "Humanoid", "Pusher")),
        *("gym:CartPole-v1", "gym:Acrobot-v1", "gym:Pendulum-v1"),
        *("dmc:cartpole-balance", "dmc:reacher-easy"),
    ],
)
def test_host_tasks_continue_exactly(name):
    """In the middle of an episode, in another instance, through the end and the next reset."""
    if name.startswith("dmc"):
        pytest.importorskip("dm_control")
    environment, other = (envs.make(name, 2, episode_length=14, seed=seed) for seed in (3, 4))
    np.testing.assert_array_equal(environment.reset(5), environment.reset(5))
    rng = np.random.default_rng(0)
    actions = rng.uniform(-1, 1, (40, 2, environment.spec.action_dim)).astype(np.float32)
    for action in actions[:20]:
        environment.step(action)
    saved = environment.get_state()
    other.step(actions[0])
    other.set_state(saved)
    for action in actions[20:]:
        one = environment.step(action)
        for a, b in zip(one, other.step(action), strict=True):
            np.testing.assert_array_equal(a, b)
        done = one.terminated | one.truncated
        assert (one.episode_length[~done] < 14).all()
        np.testing.assert_array_equal(done, (one.obs != one.final_obs).any(axis=1))
    environment.close()


@pytest.mark.parametrize("name", ["step", "env", "np_random", "unwrapped", "model"])
def test_a_snapshot_cannot_set_methods_or_models(name):
    environment = envs.make("gym:Pendulum-v1", 1)
    saved = snapshot.decode(environment.get_state())
    task = snapshot.decode(saved[0][0])
    task["layers"][-1][name] = 3
    saved = [(snapshot.encode(task), saved[0][1])]
    with pytest.raises(SnapshotError, match=name):
        environment.set_state(snapshot.encode(saved))
    environment.step(np.zeros((1, 1)))


def test_a_snapshot_of_another_task_or_model_is_refused():
    one, other = (envs.make(f"gym:{n}-v5", 1) for n in ("Hopper", "Reacher"))
    with pytest.raises(SnapshotError, match="another one"):
        one.set_state(other.get_state())
    saved = one.get_state()
    one._tasks[0]._env.unwrapped.model.opt.gravity[2] = -5.0
    with pytest.raises(SnapshotError, match="another one"):
        one.set_state(saved)
    json.loads(saved)  # plain text all through
