"""Observations of named parts: joined to one array, seen by both agents, refused in words."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import types as python_types

import flax.struct
import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, Text

from examples import own_dictionary, run_exported
from mbx import envs, heads, observations
from mbx.agents.base import Agent
from mbx.agents.dreamer.agent import resolve as resolve_dreamer
from mbx.agents.dreamer.settings import Settings as DreamerSettings
from mbx.agents.dreamer.update import observe_dict
from mbx.agents.tdmpc.agent import shift_images
from mbx.agents.tdmpc.settings import Settings
from mbx.envs import custom
from mbx.envs.base import RawEnvironment
from mbx.envs.checks import check_raw
from mbx.training import rundir
from mbx.training.logging import read_rows
from mbx.training.policy import Policy
from mbx.types import EnvSpec, Part
from mbx.world_model import config_for_size, make_world_model
from tests.helpers import PARTS, in_parts

ROOT = pathlib.Path(__file__).resolve().parents[1]
CAMERA, POLE = Part("camera", (2, 2, 1)), Part("pole", (2,))
BOTH = (POLE, CAMERA, Part("depth", (2, 2, 2)), Part("hook", ()), Part("wind", (1,)))
PIXELS = np.arange(4, dtype=np.uint8).reshape(2, 2, 1)


def values(lead=()):
    """Numbers of all parts of BOTH."""
    draw = np.random.default_rng(0)
    found = {}
    for part in BOTH:
        size = (*lead, *part.shape)
        found[part.name] = draw.integers(0, 256, size, np.uint8)
        if not part.is_image:
            found[part.name] = draw.normal(size=size).astype(np.float32)
    return found


def test_images_come_first_and_numbers_follow_as_bytes():
    obs = observations.join((POLE, CAMERA), {"camera": PIXELS, "pole": np.array([1.0, -2.0])})
    assert obs.dtype == np.uint8
    assert obs.tolist() == [0, 1, 2, 3, *(0, 0, 128, 63), *(0, 0, 0, 192)]
    assert observations.joined((POLE, CAMERA)) == ((12,), np.uint8)
    assert observations.joined(BOTH) == ((4 * 3 + 4 * 4,), np.uint8)
    assert observations.layout(BOTH) == ((2, 2, 3), 4)


def test_parts_of_one_kind_are_no_bytes():
    numbers = observations.join((POLE, Part("hook", ())), {"hook": 3, "pole": [1, 2]})
    assert numbers.dtype == np.float32 and numbers.tolist() == [1.0, 2.0, 3.0]
    images = observations.join(
        (CAMERA, Part("night", (2, 2, 1))), dict(camera=PIXELS, night=PIXELS)
    )
    assert images.dtype == np.uint8 and images[..., 1].tolist() == [[0, 1], [2, 3]]
    for parts in ((POLE,), (CAMERA,)):
        assert not observations.is_packed(parts)
        assert observations.numbers(parts, 7) == 7


@pytest.mark.parametrize("lead", [(), (3, 2)])
def test_parts_are_found_again_by_numpy_and_by_jax(lead):
    given = values(lead)
    packed = observations.join(BOTH, given)
    traced = jax.jit(lambda tree: observations.join(BOTH, tree))(given)
    np.testing.assert_array_equal(packed, traced)
    for obs in (packed, traced):
        found = observations.named(BOTH, observations.split(BOTH, obs))
        jax.tree.map(np.testing.assert_array_equal, found, given)
        vector = observations.numbers(BOTH, obs)
        np.testing.assert_array_equal(vector[..., :2], given["pole"])
        np.testing.assert_array_equal(vector[..., 2], given["hook"])
    # A new image, and the numbers as they were.
    moved = observations.map_image(BOTH, traced, lambda image: 255 - image)
    found = observations.named(BOTH, observations.split(BOTH, moved))
    np.testing.assert_array_equal(found["depth"], 255 - given["depth"])
    np.testing.assert_array_equal(found["pole"], given["pole"])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"camera": PIXELS}, r"without 'pole', wanted pole \[2\], camera \[2, 2, 1\]"),
        ({"camera": PIXELS, "pole": [1.0]}, r"whose 'pole' is of shape \(1,\), wanted"),
        ({"camera": PIXELS[None], "pole": [1.0, 2.0]}, r"'camera' is of shape \(1, 2, 2, 1\)"),
    ],
)
def test_values_that_do_not_fit_are_named(given, message):
    with pytest.raises(ValueError, match=message):
        observations.join((POLE, CAMERA), given)


SHAPES = {"state": (3,), "camera": (4, 4, 3), "robot/privileged_state": (9,), "word": ()}
DTYPES = {"state": np.float64, "camera": np.uint8, "robot/privileged_state": float, "word": str}


def chosen(observe=(), **changes):
    shapes = {n: x for n, x in {**SHAPES, **changes}.items() if x is not None}
    return [part.name for part in observations.choose("gym:X", shapes, DTYPES, observe)]


def test_privileged_parts_are_seen_where_they_are_asked_for():
    assert chosen() == chosen(word=None) == ["state", "camera"]
    assert chosen(["robot/privileged_state", "state"]) == ["state", "robot/privileged_state"]


@pytest.mark.parametrize(
    ("observe", "changes", "message"),
    [
        (["sonar"], {}, r"env.observe=\('sonar',\): .* gym:X have no 'sonar': choose"),
        ((), dict(state=None, camera=None, word=None), "nothing is left .robot/privileged_state."),
        (["word"], {}, "the observation's 'word' is text: numbers are needed"),
        ((), dict(state=None, camera=None), "'word' is text: numbers are needed"),
        ((), dict(state=(4, 4, 3), word=None), r"'state' is float64\[4, 4, 3\]: three"),
    ],
)
def test_parts_that_nobody_can_see_are_refused(observe, changes, message):
    with pytest.raises(ValueError, match=message):
        chosen(observe, **changes)


# Running statistics


def after(batches):
    known = observations.init(batches[0].shape[-1])
    for rows in batches:
        known = observations.update(known, jnp.asarray(rows, jnp.float32))
    return jax.tree.map(np.asarray, known)


def test_statistics_of_numbers_that_are_large_and_vary_by_little_cost_no_precision():
    rng = np.random.default_rng(0)
    batches = 3000.0 + 0.1 * rng.normal(size=(500, 64, 1)).astype(np.float32)
    known = after(batches)
    # The first batch has no mean to be measured from: of 64 rows its error is that of 3000 squared.
    np.testing.assert_allclose(known["variance"], 0.01, rtol=0.2)
    np.testing.assert_allclose(known["mean"], 3000.0, atol=0.01)


def test_what_never_varied_is_bounded_and_what_was_never_seen_stays():
    rows = jnp.asarray([[0.5], [2.0]])
    new = observations.init(1)
    np.testing.assert_allclose(observations.normalize(new, rows), rows, rtol=1e-4)
    known = observations.update(new, jnp.zeros((3, 1)))
    np.testing.assert_allclose(observations.normalize(known, rows), 100.0 * rows, rtol=1e-4)


def test_statistics_of_parts_of_a_batch_are_those_of_the_whole():
    rows = jnp.asarray(np.random.default_rng(0).normal(3.0, 2.0, size=(3, 2 * PARTS, 2)))
    start = observations.update(observations.init(2), 2.0 * rows)
    whole = observations.update(start, rows)
    parts = in_parts(lambda rows: observations.update(start, rows), (1,), rows)
    for name, wanted in whole.items():
        for found in parts[name]:
            np.testing.assert_allclose(found, wanted, rtol=1e-5)


# In environments and agents


LARGE = np.arange(256, dtype=np.uint8).reshape(16, 16, 1)


class Robot(gymnasium.Env):
    """Picture, nested numbers, a choice, and a text that nothing can read."""

    max_episode_steps = 3
    action_space = Box(-1, 1, (1,))
    observation_space = Dict(
        arm=Dict(angle=Box(-9, 9, (2,)), gear=Discrete(3)),
        camera=Box(0, 255, (16, 16, 1), np.uint8),
        order=Text(9),
    )
    angle = 1.0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self._seen(), {}

    def step(self, action):
        self.angle = 1.0 + 3.0 * float(action[0])
        return self._seen(), 1.0, False, False, {}

    def _seen(self):
        angle = np.array([self.angle, np.nan if self.angle > 3.5 else 0.0], np.float32)
        return {"arm": {"angle": angle, "gear": 2}, "camera": LARGE, "order": "go"}


def test_a_gymnasium_dictionary_is_one_row_of_bytes(monkeypatch):
    monkeypatch.setitem(custom._GIVEN, "gym:python:Robot", Robot)
    with pytest.raises(ValueError, match="'order' is text"):
        envs.make("gym:python:Robot", 2, observe=["order"])
    environment = envs.make("gym:python:Robot", 2)  # without the order
    spec = environment.spec
    camera = Part("camera", (16, 16, 1))
    assert spec.parts == (Part("arm/angle", (2,)), Part("arm/gear", (3,)), camera)
    assert (spec.obs_shape, spec.obs_dtype) == ((256 + 4 * 5,), np.uint8)
    obs = environment.reset(0)
    found = observations.split(spec.parts, obs)
    assert found["vector"].tolist() == [[1.0, 0.0, 0.0, 0.0, 1.0]] * 2
    np.testing.assert_array_equal(found["image"], np.stack([LARGE] * 2))
    timestep = environment.step(np.array([[0.5], [1.0]]))  # the second one's angle is no number
    assert observations.split(spec.parts, timestep.final_obs)["vector"][0, 0] == 2.5
    assert timestep.fault.tolist() == [False, True] == timestep.truncated.tolist()
    with pytest.raises(ValueError, match="an observation of gym:Pendulum-v1 is one array without"):
        envs.make("gym:Pendulum-v1", 1, observe=["angle"])


def rail(**changes):
    """A JAX environment whose observation is a dictionary."""

    def seen(x):
        return {"camera": jnp.full((2, 2, 1), 7, jnp.uint8), "pole": jnp.stack([x, 1.0 / x])}

    def step(key, state, action):
        new = state - action[0]
        return new, seen(new), new, jnp.bool_(False)

    shapes = {"camera": (2, 2, 1), "pole": (2,)}
    dtypes = {"camera": jnp.uint8, "pole": jnp.float32}
    raw = RawEnvironment("jax:rail", shapes, dtypes, 1, 5, lambda key: (5.0, seen(5.0)), step)
    return raw._replace(**changes)


def test_a_dictionary_of_a_jax_environment_is_one_row_of_bytes():
    check_raw(rail())
    environment = envs.episodic(rail(), 2)
    assert environment.spec.parts == (CAMERA, POLE)
    assert environment.spec.obs_shape == (12,)
    state, obs = environment.reset(jax.random.key(0))
    found = observations.split(environment.spec.parts, obs)
    assert found["vector"].tolist() == [[5.0, np.float32(0.2)]] * 2 and (found["image"] == 7).all()
    state = state.replace(raw=jnp.array([1.0, 3.0]))
    timestep = environment.step(state, jnp.ones((2, 1)), jax.random.key(1))[1]
    assert timestep.fault.tolist() == [True, False]  # 1 / 0
    found = observations.split(environment.spec.parts, timestep.final_obs)["vector"]
    assert found[1].tolist() == [2.0, 0.5]
    alone = envs.episodic(rail(), 1, observe=["pole"])
    assert alone.reset(jax.random.key(0))[1].tolist() == [[5.0, np.float32(0.2)]]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(obs_dtype=jnp.float32), r"obs_dtype is .*, wanted one of each of \['cam"),
        (
            dict(obs_shape={"pole": (2,)}, obs_dtype={"pole": jnp.float32}),
            r"of reset\(\) is {'camera': .*}, wanted {'pole': 'float32\[2\]'}",
        ),
        (
            dict(obs_shape={"camera": (2, 2, 1), "pole": (3,)}),
            r"observation of reset\(\) is .*'pole': 'float32\[2\]'}, wanted .*\[3\]",
        ),
        (
            dict(obs_dtype={"camera": jnp.float32, "pole": jnp.float32}),
            r"of reset\(\) is {'camera': 'uint8\[.*wanted {'camera': 'float32\[",
        ),
        (
            dict(reset=lambda key: (5.0, jnp.zeros(2))),
            r"the observation of reset\(\) is float32\[2\], wanted {'camera': ",
        ),
        (dict(step=lambda key, state, action: rail().step(key, 1.0, action)), "'pole' of .*finite"),
    ],
)
def test_a_jax_dictionary_other_than_declared_is_refused(changes, message):
    with pytest.raises(ValueError, match=message) as told:
        check_raw(rail(**changes))
    assert str(told.value).startswith("env.name='jax:rail'")


@flax.struct.dataclass
class PlaygroundState:
    """Of Playground's interface, as far as mbx needs it."""

    obs: dict
    reward: jax.Array
    done: jax.Array
    info: dict
    metrics: dict


class Walker:
    """A task of Playground's interface whose observations are a dictionary."""

    action_size = 2
    _config = python_types.SimpleNamespace(episode_length=7)

    def reset(self, rng):
        return self._at(jnp.zeros(()), rng)

    def step(self, state, action):
        return self._at(state.obs["state"][0] + action[0], state.info["rng"])

    def _at(self, x, rng):
        obs = {"state": jnp.stack([x, -x, x]), "privileged_state": jnp.full(5, x)}
        return PlaygroundState(obs, x, jnp.float32(x > 1.5), {"rng": rng}, {"speed": x})


def test_playground_tasks_show_their_state_and_privileged_state_if_asked(monkeypatch):
    made = []
    suite = python_types.SimpleNamespace(ALL_ENVS=("CartpoleSwingup",))

    def load(task, config_overrides):
        made.append((task, config_overrides))
        return Walker() if set(config_overrides) == {"impl"} else {}["Key does not exist"]

    registry = python_types.SimpleNamespace(ALL_ENVS=("CartpoleSwingup", "Walker"), load=load)
    module = python_types.ModuleType("mujoco_playground")
    module.registry, module.dm_control_suite = registry, suite
    monkeypatch.setitem(sys.modules, "mujoco_playground", module)
    environment = envs.make("playground:Walker", 2)
    spec = environment.spec
    assert made == [("Walker", {"impl": "jax"})]
    assert (spec.parts, spec.obs_shape) == ((Part("state", (3,)),), (3,))
    assert (spec.action_repeat, spec.episode_length, spec.can_terminate) == (1, 7, True)
    state, _ = environment.reset(jax.random.key(0))
    _, timestep = environment.step(state, jnp.ones((2, 2)), jax.random.key(1))
    assert timestep.obs.tolist() == [[1.0, -1.0, 1.0]] * 2 and not timestep.terminated.any()
    both = envs.make("playground:Walker", 1, observe=["state", "privileged_state"])
    assert both.spec.obs_shape == (8,)
    spec = envs.make("playground:CartpoleSwingup", 1).spec
    assert spec.action_repeat == 2 and not spec.can_terminate
    with pytest.raises(ValueError, match=r"'playground:Walkr' is unknown: .*\['Walker'\]"):
        envs.make("playground:Walkr", 1)
    envs.make("playground:Walker", 1, kwargs={"impl": "warp"})
    assert made[-1] == ("Walker", {"impl": "warp"})
    with pytest.raises(ValueError, match=r"env.kwargs={'imp': 1}: playground:Walker: 'Key does no"):
        envs.make("playground:Walker", 1, kwargs={"imp": 1})
    with pytest.raises(
        ValueError, match="env.action_repeat=2: playground:CartpoleSwingup with impl"
    ):
        envs.make("playground:CartpoleSwingup", 1, kwargs={"impl": "warp"})


SIGN = (Part("camera", (64, 64, 1)), Part("flag", (1,)))
SPEC = EnvSpec("gym:sign", *observations.joined(SIGN), 1, 10, 1, parts=SIGN)


def sign(camera, flag):
    return observations.join(
        SIGN,
        {"camera": np.zeros((64, 64, 1), np.uint8) + np.uint8(camera), "flag": np.float32([flag])},
    )


def test_tdmpc_reads_images_by_convolutions_and_numbers_by_dense_layers():
    widths = dict(enc_dim=8, mlp_dim=8, latent_dim=16, num_channels=2, num_bins=5)
    config = config_for_size("tiny", obs_shape=SPEC.obs_shape, parts=SIGN, action_dim=1, **widths)
    model = make_world_model(config)
    draw = np.random.default_rng(0)
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    params = jax.tree.map(lambda x: draw.normal(0.0, 0.5, x.shape).astype(np.float32), shapes)
    assert params["encoder"]["conv"]["conv_0"]["kernel"].shape == (7, 7, 1, 2)
    vector = jax.tree.leaves(params["encoder"]["vector"])
    assert (1, 8) in [x.shape for x in vector]
    picture = draw.integers(0, 256, (64, 64, 1), np.uint8)
    obs = np.stack([sign(0, 1.0), sign(picture, 1.0), sign(0, -1.0), sign(0, 1.0)])
    z = jax.jit(model.encode)(params, jnp.asarray(obs))
    assert z.shape == (4, config.latent) == (4, 16)
    np.testing.assert_allclose(z.reshape(4, 2, 8).sum(-1), 1.0, rtol=1e-5)  # SimNorm groups
    np.testing.assert_array_equal(z[0], z[3])
    assert np.abs(z[1] - z[0]).max() > 1e-4 and np.abs(z[2] - z[0]).max() > 1e-4
    with pytest.raises(ValueError, match=r"obs_shape=\(8, 8, 1\): the pixel encoder takes 64x64xC"):
        config_for_size("tiny", obs_shape=(68,), parts=(Part("c", (8, 8, 1)), POLE), action_dim=1)


def test_tdmpc_shifts_the_images_of_packed_rows_alone():
    picture = np.arange(64, dtype=np.uint8)[:, None, None].repeat(64, axis=1)
    row = observations.join(SIGN, {"camera": picture, "flag": np.float32([0.5])})
    batch = jnp.asarray(np.broadcast_to(row, (2, 3, row.size)))
    moved = observations.split(SIGN, shift_images(batch, jax.random.key(0), parts=SIGN))
    assert (moved["vector"] == 0.5).all()
    tops = np.unique(moved["image"][:, :, 30, 30])
    assert tops.size > 1 and tops.min() >= 27 and tops.max() <= 33


def test_dreamer_observes_both():
    net = resolve_dreamer(DreamerSettings(), SPEC).model
    assert (net.image_shape, net.vector_dim, net.obs_shape) == ((64, 64, 1), 1, SPEC.obs_shape)
    found = observe_dict(net, jnp.asarray(sign(9, 0.25))[None])
    assert found["vector"].tolist() == [[0.25]] and (found["image"] == 9).all()
    alone = EnvSpec("x", *observations.joined(SIGN[:1]), 1, 10, 1, parts=SIGN[:1])
    assert resolve_dreamer(DreamerSettings(), alone).model.vector_dim == 0


def test_heads_find_the_parts_by_name():
    own = heads.Heads({}, {}, {}, SPEC)
    window = own.seen(jnp.asarray(np.stack([sign(1, 2.0), sign(3, 4.0)]))[:, None])
    assert window["camera"].shape == (2, 1, 64, 64, 1)
    assert window["flag"].tolist() == [[[2.0]], [[4.0]]]


def test_a_run_says_of_what_its_observations_are_joined(tmp_path):
    rundir.save_spec(SPEC, str(tmp_path))
    assert rundir.load_spec(str(tmp_path)) == SPEC._replace(obs_dtype=np.dtype(np.uint8))
    path = tmp_path / "spec.json"
    path.write_text(path.read_text().replace('"flag"', "3"))
    assert rundir.load_spec(str(tmp_path)).parts[1].name == "3"
    path.write_text(path.read_text().replace("64", '"wide"'))
    with pytest.raises(ValueError, match=r"spec.json: field 'parts': invalid literal"):
        rundir.load_spec(str(tmp_path))


@flax.struct.dataclass
class Nothing:
    params: jax.Array


def flag_policy(batch=None):
    """A policy that answers with the flag it sees."""

    def act(train, actor, obs, first, key, evaluate):
        return observations.split(SIGN, obs)["vector"] * train.params, actor

    agent = Agent(None, lambda num: jnp.zeros(num), act, None, None)
    return Policy(agent, Nothing(jnp.ones(())), SPEC, Settings(), batch=batch)


def test_a_policy_takes_dictionaries_with_and_without_what_it_does_not_see():
    policy = flag_policy()
    seen = {"camera": np.zeros((64, 64, 1), np.uint8), "flag": np.float32([0.25]), "more": "text"}
    assert policy(seen).tolist() == policy(sign(0, 0.25)).tolist() == [0.25]
    with pytest.raises(ValueError, match=r"without 'flag': it has \['camera'\]"):
        policy({"camera": seen["camera"]})
    for parts, lead in ((BOTH, (2,)), (BOTH[:1], (2,)), (BOTH[1:3], (2,)), (BOTH, (1,))):
        shape = (*lead, *observations.joined(parts)[0])
        about = {"obs_shape": shape, "parts": parts, "choices": []}
        given = values(lead)
        seen = run_exported.as_seen(about, given)
        np.testing.assert_array_equal(seen, observations.join(parts, given))


def test_the_example_is_worth_what_it_says():
    env, steps = own_dictionary.Signpost(), {}
    draw = np.random.default_rng(0)
    ways = {
        "both": lambda obs: 0.4 * (obs["flag"] + (1 if obs["camera"][0, -1] else -1)),
        "flag": lambda obs: 0.4 * obs["flag"],
        "camera": lambda obs: 0.4 * np.array([1 if obs["camera"][0, -1] else -1]),
        "random": lambda obs: draw.uniform(-1, 1, 1),
    }
    for name, way in ways.items():
        rewards = []
        for i in range(200):
            obs, _ = env.reset(seed=i)
            assert env.observation_space.contains(obs)
            rewards.append(env.step(way(obs))[1])
        steps[name] = np.mean(rewards)
    np.testing.assert_allclose([steps[n] for n in ("both", "flag", "camera")], [1, 0.6, 0.6])
    assert abs(steps["random"] - 0.34) < 0.07


# A random policy has 3.4, one that misses the picture or the flag at best 6, one that sees both 10.
SIGNPOST = (
    *("--config.env.name=gym:examples/own_dictionary.py:Signpost", "--config.train.seed_steps=200"),
    *("--config.eval.episodes=20", "--config.eval.interval=0", "--config.train.log_interval=100"),
)
TDMPC = (
    *("--config.train.steps=600", "--config.train.pretrain_updates=0", "--config.eval.model=False"),
    *("--config.train.utd_ratio=1.0", "--config.optimizer.learning_rate=1e-3"),
    "--config.optimizer.policy_lr_scale=1.0",
    *("--config.loss.batch_size=32", "--config.replay.capacity=5e3"),
    *("--config.reanalyze.batch_size=8", "--config.planner.num_samples=64"),
    *("--config.planner.num_elites=16", "--config.training_planner.num_samples=16"),
    *("--config.replay.keep_targets=8",),
)
DREAMER = (  # an update an agent step; the defaults' train_ratio would be one in eight
    *(
        "--config.train.steps=1500",
        "--config.train.train_ratio=256",
        "--config.replay.capacity=4e3",
    ),
    *("--config.loss.batch_length=16", "--config.imagination.horizon=5"),
    *("--config.critic.gamma=0.9", "--config.eval.exploring=False"),
    "--config.env.kwargs.size=16",
)


@pytest.mark.slow
@pytest.mark.parametrize(("agent", "flags"), [("tdmpc", TDMPC), ("dreamer", DREAMER)])
def test_an_agent_needs_the_picture_and_the_flag_and_sees_both(tmp_path, agent, flags):
    command = [sys.executable, "-m", "experiments.train", f"--config={agent}", *SIGNPOST, *flags]
    environ = {**os.environ, "JAX_PLATFORMS": "cpu"}
    subprocess.run([*command, f"--workdir={tmp_path}/run"], cwd=ROOT, env=environ, check=True)
    rows = read_rows(str(tmp_path / "run" / "metrics.jsonl"))
    last = next(row for row in reversed(rows) if row["kind"] == "eval")
    print(f"{agent}: return {last['return_mean']:.2f} after {last['step']} steps, random 3.4")
    assert last["return_mean"] > 8.0
