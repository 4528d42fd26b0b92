"""Data sets of Minari as replay rows, and rows of ours as one (`mbx.training.datasets`)."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import warnings

import gymnasium
import minari
import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, MultiDiscrete

from mbx import envs, observations
from mbx.agents.settings import Env
from mbx.commands import export_data
from mbx.envs.images import Images
from mbx.training import datasets, run, rundir, transfer
from mbx.training.logging import read_rows
from tests.faults.small import make_agent, small_config

NAME = f"gym:{__file__}:Game"
SETTINGS = Env(name=NAME, num_envs=2)


class Game(gymnasium.Env):
    """Parts of every kind and actions 2 to 4; episodes of even seeds terminate at 5 of 7 steps."""

    action_space = Discrete(3, start=2)
    observation_space = Dict(
        {
            "arm": Dict({"angle": Box(-9.0, 9.0, (2,))}),
            "mode": Discrete(3, start=1),
            "camera": Box(0, 255, (16, 16, 3), np.uint8),
        }
    )

    def _see(self):
        angle = np.float32([self.time, self.number])
        camera = np.full((16, 16, 3), 10 * self.time, np.uint8)
        return {"arm": {"angle": angle}, "mode": np.int64(1 + self.time % 3), "camera": camera}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time, self.number = 0, 0 if seed is None else seed
        return self._see(), {}

    def step(self, action):
        self.time += 1
        ended = self.number % 2 == 0 and self.time == 5
        return self._see(), float(action), ended, self.time == 7, {}


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MINARI_DATASETS_PATH", str(tmp_path_factory.mktemp("minari")))
        yield


@pytest.fixture(scope="module")
def spec():
    with envs.make(NAME, 1, episode_length=7) as environment:
        return environment.spec


@pytest.fixture(scope="module")
def game():
    """Three recorded episodes, of 5, 7 and 5 steps."""
    env = minari.DataCollector(Game(), record_infos=False, jpeg_encoding=False)
    for seed in (0, 1, 2):
        env.reset(seed=seed)
        for t in range(5 if seed % 2 == 0 else 7):
            env.step(np.int64(2 + t % 3))
    with warnings.catch_warnings(action="ignore"):  # optional metadata that is left out
        env.create_dataset("game-v0")
    env.close()
    env._tmp_dir.cleanup()
    return "minari:game-v0"


def test_every_part_of_an_episode_arrives(game, spec):
    assert datasets.size(game, 2) == (2, 6 + 6)
    rows = datasets.read(game, spec, SETTINGS)
    assert rows["size"].tolist() == [12, 8] and rows["transitions"].tolist() == [10, 7]
    assert rows["position"].tolist() == [0, 8]
    first, one = rows["row/obs"][0, :6], rows["row/obs"][1, :8]
    seen = observations.named(spec.parts, observations.split(spec.parts, one))
    np.testing.assert_array_equal(seen["arm/angle"], [[t, 1.0] for t in range(8)])
    np.testing.assert_array_equal(seen["mode"], np.eye(3)[np.arange(8) % 3])
    np.testing.assert_array_equal(seen["camera"][:, 0, 0, 0], 10 * np.arange(8))
    assert first.dtype == np.uint8
    wanted = np.eye(3)[[0, 1, 2, 0, 1]]
    np.testing.assert_array_equal(rows["row/action"][0, :6], [*wanted, np.zeros(3)])
    assert rows["row/reward"][0, :6].tolist() == [0.0, 2.0, 3.0, 4.0, 2.0, 3.0]
    assert np.flatnonzero(rows["row/is_first"][0]).tolist() == [0, 6]
    assert np.flatnonzero(rows["row/is_last"][0]).tolist() == [5, 11]
    # Seeds 0 and 2 terminate, seed 1 was cut.
    assert np.flatnonzero(rows["row/terminated"][0]).tolist() == [5, 11]
    assert rows["row/is_last"][1, 7] and not rows["row/terminated"][1].any()


def test_images_are_processed_as_the_task_s(game):
    options = dict(frame_stack=2, grey=True, image_size=8, observe=("camera",))
    images = dict(pixels=False, size=8, grey=True, stack=2)
    with envs.make(
        NAME, 1, episode_length=7, observe=("camera",), images=Images(**images)
    ) as environment:
        spec = environment.spec
    rows = datasets.read(game, spec, dataclasses.replace(SETTINGS, **options))
    assert rows["row/obs"].shape == (2, 12, 8, 8, 2)
    np.testing.assert_array_equal(rows["row/obs"][0, :3, 0, 0], [[0, 0], [0, 10], [10, 20]])


def test_what_does_not_fit_is_named(game, spec, tmp_path):
    def refused(match, name=game, **changes):
        with pytest.raises(ValueError, match=match) as found:
            datasets.read(name, spec._replace(**changes), SETTINGS)
        assert "\n" not in str(found.value)

    lacking = (*spec.parts, spec.parts[0]._replace(name="goal"))
    refused(
        r"game-v0' does not fit .*: its observations have no 'goal', but \['arm/an", parts=lacking
    )
    refused(r"3 discrete actions from \[2.0\] to \[4.0\], the task .* 4 disc", action_dim=4)
    refused(r"the task .* \[0.0\] to \[2.0\]", action_low=(0.0,))
    refused("set env.action_repeat=1, as it was recorded", action_repeat=2)
    refused("choose one task", tasks=(spec, spec))
    acted = MultiDiscrete([3, 2])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets._Minari, "spaces", lambda *_: (Box(0, 1), acted))
        refused("actions are a single Box or Discrete space in data sets, and have", parts=())
    refused("an episode terminates, gym:.* only ends by its time limit", can_terminate=False)
    refused("'minari:none-v0' cannot be read, .*not found", "minari:none-v0")
    damaged = shutil.copytree(f"{os.environ['MINARI_DATASETS_PATH']}/game-v0", tmp_path / "game")
    with open(damaged / "data" / "main_data.hdf5", "r+b") as file:
        file.truncate(2000)
    refused("/game' cannot be read, give .* complete one", f"minari:{damaged}")


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "minari", None)
    with pytest.raises(
        ImportError, match=r"'minari:a-v0' needs minari: pip install 'mbx-rl\[minari\]'"
    ):
        datasets.opened("minari:a-v0")


@pytest.mark.parametrize("task", ["toy:ends", "toy:point"])
def test_own_rows_come_back(task, tmp_path):
    workdir = str(tmp_path / "run")
    run.train(small_config(env=dict(name=task), replay=dict(save=True, capacity=60)), workdir)
    name = f"own/{task.replace(':', '-')}-v0"
    assert export_data.write(workdir, name) == len(minari.load_dataset(name)) > 3
    spec = envs.make(task, 1).spec
    agent, settings = make_agent({}, spec), Env(name=task, num_envs=2)
    before = transfer.load_dataset(f"{workdir}/dataset.npz", agent, spec)
    after = transfer.load_dataset(f"minari:{name}", agent, spec, settings, capacity=50)

    def transitions(state):
        """Rows of all transitions with the next observation, in one order."""
        found = []
        for env in range(2):
            order = (state.position[env] - state.size[env] + np.arange(state.size[env])) % (
                state.data["reward"].shape[1]
            )
            rows = {n: np.asarray(x)[env, order] for n, x in state.data.items()}
            good = np.flatnonzero(~rows["is_last"][:-1] & ~rows["is_first"][1:])
            ends = rows["terminated"][good + 1, None], rows["reward"][good + 1, None]
            found += [*np.hstack([rows["obs"][good], rows["action"][good], *ends])]
        return np.array(sorted(map(tuple, found)))

    assert int(before.transitions.sum()) == int(after.transitions.sum()) == len(transitions(after))
    np.testing.assert_allclose(transitions(after), transitions(before), atol=1e-6)
    with pytest.raises(ValueError, match="already exists"):
        export_data.write(workdir, name)
    assert len(minari.load_dataset(name)) > 3  # and what is there stays


def test_a_data_set_appears_when_it_is_whole(tmp_path, monkeypatch):
    """Interrupted after its episodes are written: seen at no time, and nothing is left."""
    workdir, root, seen = str(tmp_path / "run"), tmp_path / "minari", []
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(root))
    run.train(small_config(replay=dict(save=True, capacity=60)), workdir)
    create = minari.create_dataset_from_buffers

    def interrupted(*args, **kwargs):
        create(*args, **kwargs)
        seen.extend(name for name in os.listdir(root) if not name.startswith("."))
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(minari, "create_dataset_from_buffers", interrupted)
        export_data.write(workdir, "own/half-v0")
    assert not seen and not os.listdir(root)
    for bad in ("../escape-v0", "no version"):
        with pytest.raises(ValueError, match="Malformed dataset ID"):
            export_data.write(workdir, bad)
    assert sorted(os.listdir(tmp_path)) == ["minari", "run"] and not os.listdir(root)
    for name in ("own/whole-v0", "own/deep/whole-v0", "own/whole-v1", "alone-v0"):
        assert export_data.write(workdir, name) == len(minari.load_dataset(name))
    assert (
        len(minari.list_local_datasets()) == 4 and str(root) == os.environ["MINARI_DATASETS_PATH"]
    )


@pytest.mark.parametrize("stack", [1, 2])
def test_parts_images_and_discrete_actions_come_back(game, tmp_path, stack):
    with envs.make(NAME, 1, episode_length=7, images=Images(stack=stack)) as environment:
        spec = environment.spec
    settings = dataclasses.replace(SETTINGS, num_envs=1, frame_stack=stack)
    rows, workdir = datasets.read(game, spec, settings), str(tmp_path)
    header = json.dumps(dict(version=transfer.DATASET_VERSION, task=NAME)).encode()
    np.savez(tmp_path / "dataset.npz", header=np.frombuffer(header, np.uint8), **rows)
    rundir.save_spec(spec, workdir)
    config = small_config(env=dict(frame_stack=stack))
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert export_data.write(workdir, f"own/game{stack}-v0") == 3
    again = datasets.read(f"minari:own/game{stack}-v0", spec, settings)
    assert set(again) == set(rows)
    for field, x in rows.items():
        np.testing.assert_array_equal(again[field], x)


def test_a_run_acts_with_the_data_in_its_replay(tmp_path):
    workdir = str(tmp_path / "run")
    run.train(small_config(replay=dict(save=True)), workdir)
    export_data.write(workdir, "own/seed-v0")
    for dataset in ("minari:own/seed-v0", f"{workdir}/dataset.npz"):
        config = small_config(
            train=dict(dataset=dataset, online=True, steps=40),
            replay=dict(save=True, capacity=1000),
        )
        out = str(tmp_path / os.path.basename(dataset))
        run.train(config, out)
        rows = [x for x in read_rows(f"{out}/metrics.jsonl") if x["kind"] == "train"]
        assert sum(row["updates"] for row in rows) == 2 + 40 // 2  # no seed phase
        kept = dict(np.load(f"{out}/dataset.npz"))
        recorded = dict(np.load(f"{workdir}/dataset.npz"))
        assert kept["transitions"].sum() == recorded["transitions"].sum() + 40 - 2
        config["replay"]["capacity"] = 20
        with pytest.raises(ValueError, match="replay.capacity=20 with train.dataset=.* give room"):
            run.train(config, str(tmp_path / "small"))
    # The file says how many environments there are, and so how many rows.
    num_envs, length = recorded["row/is_first"].shape
    for other, capacity in ((1, num_envs * length - 1), (99, num_envs * length)):
        settings = rundir.load_settings(workdir)
        settings = dataclasses.replace(
            settings,
            env=dataclasses.replace(settings.env, num_envs=other),
            train=dataclasses.replace(settings.train, dataset=dataset, online=True),
            replay=dataclasses.replace(settings.replay, capacity=capacity),
        )
        if other == 99:
            assert transfer.resolve(settings).env.num_envs == num_envs
            continue
        with pytest.raises(ValueError, match=f"for its rows, {num_envs * length}, and"):
            transfer.resolve(settings)


class Robot(Game):
    """LeRobot's usual names, and a reward that the last step alone has."""

    action_space = Box(-2.0, 2.0, (1,))
    observation_space = Dict(
        {"agent_pos": Box(-9.0, 9.0, (2,)), "pixels": Box(0, 255, (16, 16, 3), np.uint8)}
    )

    def _see(self):
        return {
            "agent_pos": np.float32([self.time, self.number]),
            "pixels": np.full((16, 16, 3), 10 * self.time, np.uint8),
        }


def test_a_lerobot_data_set_is_read(tmp_path, monkeypatch):
    """Needs the extra lerobot, which CI has not."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    made = pytest.importorskip("lerobot.datasets.lerobot_dataset").LeRobotDataset

    def record(name, **more):
        state = dict(dtype="float32", shape=(2,), names=None)
        image = dict(dtype="image", shape=(16, 16, 3), names=["height", "width", "channels"])
        one, flag = dict(state, shape=(1,)), dict(state, shape=(1,), dtype="bool")
        features = {"observation.state": state, "observation.image": image, "action": one}
        features |= {name: flag if "done" in name else one for name in more}
        folder = str(tmp_path / name)
        data = made.create("own/robot", fps=10, features=features, root=folder, use_videos=False)
        env = Robot()
        for seed in (0, 1):
            obs, _ = env.reset(seed=seed)
            for t in range(3 if seed == 0 else 7):
                frame = {"observation.state": obs["agent_pos"], "observation.image": obs["pixels"]}
                frame |= {n: np.array([x(t, seed)]) for n, x in more.items()}
                data.add_frame(frame | {"action": np.float32([t % 3 - 1]), "task": "go"})
                obs = env.step(t)[0]
            data.save_episode()
        data.finalize()
        return f"lerobot:{folder}"

    last = {"next.done": lambda t, seed: bool(t == (2, 6)[seed])}
    reward = {"next.reward": lambda t, seed: np.float32(t == 2)}
    robot = f"gym:{__file__}:Robot"
    with envs.make(robot, 1, episode_length=7) as environment:
        spec = environment.spec
    settings = dataclasses.replace(SETTINGS, name=robot)
    rows = datasets.read(record("whole", **last, **reward), spec, settings)
    assert rows["size"].tolist() == [4, 8] and rows["transitions"].tolist() == [3, 7]
    one = observations.named(spec.parts, observations.split(spec.parts, rows["row/obs"][0, :4]))
    assert one["agent_pos"].tolist() == [[0, 0], [1, 0], [2, 0], [2, 0]]  # the last one again
    assert one["pixels"][:, 3, 4, 1].tolist() == [0, 10, 20, 20]
    assert rows["row/action"][0, :3, 0].tolist() == [-0.5, 0.0, 0.5]
    assert rows["row/reward"][0, :4].tolist() == [0, 0, 0, 1]
    # The first episode ends before the time limit of 7, the second one with it.
    assert rows["row/terminated"][0, 3] and not rows["row/terminated"][1].any()
    with pytest.raises(ValueError, match="does not fit .*: it lacks next.reward and has action, "):
        datasets.read(record("without", **last), spec, settings)
    with pytest.raises(ValueError, match="the task .* 3 discrete actions"):
        discrete = spec._replace(discrete=True, action_dim=3, action_low=(), action_high=())
        datasets.read(f"lerobot:{tmp_path}/whole", discrete, settings)
    with pytest.raises(ValueError, match="lerobot:own/none' cannot be read"):
        datasets.opened("lerobot:own/none")
