"""Images that are observed: grey, size, stacks, pictures; in JAX and on the host alike."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium.spaces import Box
from PIL import Image

from mbx import envs, observations
from mbx.envs import base, images
from mbx.envs import gymnasium as gymnasium_suite
from mbx.envs.render import NoRenderer
from mbx.training import build
from mbx.training.build import make_environment
from mbx.training.logging import read_rows
from mbx.types import Part
from tests.envs.test_parallel import threads
from tests.envs.toys import Counting, counting, on_host, rollout
from tests.helpers import tiny_config

IMAGES = envs.Images
ROOT = pathlib.Path(__file__).parents[2]
COLORS = np.random.default_rng(0).integers(0, 256, (6, 9, 3)).astype(np.uint8)


def both(options, image):
    """`images.see` of NumPy's arrays and under jit."""
    found = images.see(options, image)
    traced = jax.jit(lambda x: images.see(options, x))(jnp.asarray(image))
    assert isinstance(found, np.ndarray) and traced.dtype == found.dtype
    assert traced.shape == found.shape
    return found, np.asarray(traced)


def test_grey_is_that_of_pil():
    wanted = np.asarray(Image.fromarray(COLORS).convert("L"))[..., None]
    for found in both(IMAGES(grey=True), COLORS):
        np.testing.assert_array_equal(found, wanted)
    floats = COLORS.astype(np.float32) / 255
    for found in both(IMAGES(grey=True), floats):
        np.testing.assert_allclose(found * 255, wanted, atol=0.51)
        assert found.dtype == np.float32


def test_sizes_are_averages_of_what_a_pixel_stands_for():
    # Twice as large a side: a triangle over four pixels, of weights 1, 3, 3, 1, cut at edges.
    row = np.float32([0, 80, 160, 240])
    weights = np.float32([[3, 3, 1, 0], [0, 1, 3, 3]])
    wanted = (weights @ row) / weights.sum(1)
    image = np.broadcast_to(row[None, :, None], (4, 4, 1))
    for found in both(IMAGES(size=2), image.astype(np.uint8)):
        assert np.abs(found[..., 0] - wanted[None].round()).max() <= 1
        assert found.dtype == np.uint8
    for found in both(IMAGES(size=2), image.copy()):
        np.testing.assert_allclose(found[..., 0], np.tile(wanted, (2, 1)), rtol=1e-5)
    one, other = both(IMAGES(size=4), COLORS)  # both of a rectangle, within a rounding
    assert np.abs(one.astype(int) - other).max() <= 1 and one.std() > 10


def test_floats_become_bytes():
    image = np.float32([[[0.0, 0.5, 1.0, 0.25, 1.7, -0.2]]])
    for found in both(IMAGES(pixels=True), image):
        np.testing.assert_array_equal(found, np.uint8([[[0, 128, 255, 64, 255, 0]]]))


def test_stacks_of_several_images_and_a_vector():
    parts = (Part("left", (2, 2, 1)), Part("speed", (2,)), Part("right", (2, 2, 2)))

    def obs(i):
        images = {"left": 1, "right": 100}
        pictures = {n: np.full(dict(parts)[n], x + i, np.uint8) for n, x in images.items()}
        return observations.join(parts, {**pictures, "speed": np.float32([i, -i])})

    shape = observations.joined(parts)[0]
    stack, new, stacked = images.Stack.of(3, shape, parts)
    assert new == (2 * 2 * 9 + 8,) and stacked[2].shape == (2, 2, 6)
    for convert in (np.asarray, jnp.asarray):
        frames, one = stack.begin(convert(obs(0))[None])  # one environment
        seen = [one]
        for i in (1, 2, 3):
            frames, one = stack.push(frames, convert(obs(i))[None])
            seen.append(one)
        for one, wanted in ((seen[0], (0, 0, 0)), (seen[1], (0, 0, 1)), (seen[3], (1, 2, 3))):
            assert isinstance(one, np.ndarray) == (convert is np.asarray)
            found = observations.split(stacked, one)
            left, right = found["image"][0, 0, 0, :3], found["image"][0, 0, 0, 3:]
            np.testing.assert_array_equal(left, np.array(wanted) + 1)
            np.testing.assert_array_equal(right, np.repeat(np.array(wanted) + 100, 2))
            np.testing.assert_array_equal(found["vector"], [[wanted[-1], -wanted[-1]]])


def clock(shape=(2, 2, 1), dtype=jnp.uint8):
    """A task whose image shows its environment steps; it ends after 6."""
    return counting(lambda c: jnp.full(shape, c).astype(dtype), ends=lambda c: c >= 6)


def show(count):
    return np.full((2, 2, 1), count, np.uint8)


def picture(self):
    return np.full((5, 7, 3), 10 * self.count, np.uint8)


@pytest.mark.parametrize("kind", ["jax", "host"])
def test_a_stack_holds_agent_steps_and_begins_anew(kind):
    options = dict(action_repeat=2, images=IMAGES(stack=3))
    if kind == "jax":
        environment = base.episodic(clock(), 2, **options)
    else:
        environment, other = (on_host(2, show, ends=lambda c: c >= 6, **options) for _ in range(2))
    assert environment.spec.obs_shape == (2, 2, 3)
    obs, rows = rollout(environment, 4)
    found = [x[1, 1, 1].tolist() for x in (obs, *(row.obs for row in rows))]
    assert found == [[0, 0, 0], [0, 0, 2], [0, 2, 4], [0, 0, 0], [0, 0, 2]]
    assert rows[2].final_obs[0, 1, 1].tolist() == [2, 4, 6]
    if kind == "host":  # frames are saved
        other.set_state(environment.get_state())
        action = np.zeros((2, 1))
        np.testing.assert_array_equal(other.step(action).obs, environment.step(action).obs)


def test_a_run_says_by_its_settings_what_becomes_of_images(monkeypatch):
    monkeypatch.setattr(Counting, "picture", picture, raising=False)
    colors = np.uint8([10, 20, 30])
    task = lambda *_, **drawn: Counting(lambda c: np.full((2, 2, 3), c, np.uint8) * colors)  # noqa: E731
    suite = base.Suite(host=task, draws=True)
    monkeypatch.setitem(envs._SUITES, "clock", suite)

    def made(**env):
        config = tiny_config(env=dict(name="clock:x", num_envs=2, **env))
        environment = make_environment(build.read(config), 2, seed=0)
        return environment, environment.step(np.zeros((2, 1), np.float32)).obs[1, 0, 0].tolist()

    assert made()[1] == [10, 20, 30]
    environment, seen = made(image_size=4, grey=True, frame_stack=3)
    # 0.299 * 10 + 0.587 * 20 + 0.114 * 30 = 18.15
    assert environment.spec.obs_shape == (4, 4, 3) and seen == [0, 0, 18]
    environment, seen = made(pixels=True, shadows=False)
    assert environment.spec.obs_shape == (64, 64, 3) and seen == [10, 10, 10]
    config = tiny_config(env=dict(name="clock:x"))
    config["env"]["shadows"] = False
    with pytest.raises(ValueError, match="env.shadows=False has no effect.*env.pixels=True"):
        build.read(config)


class Lamp(gymnasium.Env):
    max_episode_steps = 4
    metadata = {"render_modes": ["rgb_array"]}  # noqa: RUF012
    action_space = Box(-1, 1, (1,))
    observation_space = Box(0, 255, (16, 3, 2), np.uint8)

    def __init__(self, render_mode=None, height=96):
        self.render_mode, self.height = render_mode, height

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.step(None)[0], {}

    def step(self, action):
        self.light = self.np_random.integers(0, 256, (16, 3, 2), np.uint8)
        return self.light, 0.0, False, False, {"light": self.light[0, 0, 0]}

    def render(self):
        return np.full((self.height, 128, 3), self.light[0, 0, 0], np.uint8)


LAMP = f"gym:{__file__}:Lamp"


def test_stacks_of_several_workers(monkeypatch):
    threads(monkeypatch)
    made = [envs.make(LAMP, 3, workers=n, images=IMAGES(stack=2), seed=3) for n in (0, 2)]
    assert made[0].spec == made[1].spec and made[1].spec.obs_shape == (16, 3, 4)
    actions = np.zeros((6, 3, 1), np.float32)
    for action in actions[:3]:
        one, other = (environment.step(action) for environment in made)
        np.testing.assert_array_equal(one.obs, other.obs)
    saved = made[1].get_state()
    wanted = [made[1].step(action).obs for action in actions[3:]]
    for environment in made:  # either goes on where the other stood
        environment.set_state(saved)
        found = [environment.step(action).obs for action in actions[3:]]
        np.testing.assert_array_equal(found, wanted)
        environment.close()


def test_pictures_are_seen_instead_of_numbers(monkeypatch):
    monkeypatch.setattr(Counting, "picture", picture, raising=False)
    options = IMAGES(pixels=True, size=4, grey=True, stack=2)
    environment = on_host(1, show, action_repeat=2, images=options)
    assert environment.spec.obs_shape == (4, 4, 2) and environment.spec.obs_dtype == np.uint8
    timestep = environment.step(np.zeros((1, 1), np.float32))
    np.testing.assert_array_equal(timestep.obs[0, 3], [[0, 20]] * 4)
    monkeypatch.setattr(Counting, "picture", lambda self: np.zeros((5, 7), np.uint8))
    with pytest.raises(NoRenderer, match=r"render\(\) gave uint8\[5, 7\]"):
        environment.step(np.zeros((1, 1), np.float32))


def test_pixels_of_gymnasium_are_its_own_pictures():
    seen = dict(metrics=["light"], images=IMAGES(pixels=True, stack=2))
    made = envs.make(LAMP, 2, kwargs={"height": 32}, **seen)
    assert made.spec.obs_shape == (64, 64, 6)
    _, (before, timestep) = rollout(made, 2)
    lights = [before.metrics["light_last"], timestep.metrics["light_last"]]
    np.testing.assert_array_equal(timestep.obs[:, 0, 0], np.repeat(lights, 3, axis=0).T)
    with pytest.raises(ValueError, match="env.shadows=False.*leave it out"):
        gymnasium_suite.load("Pendulum-v1", 0, images=IMAGES(pixels=True, shadows=False))


@pytest.mark.parametrize(
    "shape, options, words",
    [
        ((3,), dict(stack=3), r"env.frame_stack=3: toy:clock observes numbers, \(3,\)"),
        ((3,), dict(size=64), "env.image_size=64: .*env.pixels=True draws"),
        ((3,), dict(pixels=True), "env.pixels=True: toy:clock observes numbers"),
        ((10, 10, 4), dict(grey=True), "env.grey=True: .*10, 10, 4.*colours"),
        ((2, 2, 3), dict(shadows=False), "env.shadows=False: toy:clock is not drawn"),
        ((2, 2, 3), dict(pixels=True), "toy:clock observes an image already"),
    ],
)
def test_refused_in_words_where_there_are_no_images(shape, options, words):
    with pytest.raises(ValueError, match=words):
        base.episodic(clock(shape), 1, images=IMAGES(**options))


def test_what_is_observed_of_nested_parts():
    shape = {"arm": {"camera": (6, 9, 3), "angle": (2,)}}
    dtype = {"arm": {"camera": np.uint8, "angle": np.float32}}
    parts = Part("arm/camera", (4, 4, 1)), Part("arm/angle", (2,))
    found = images.observed("toy:x", shape, dtype, images=IMAGES(size=4, grey=True))
    assert found == (*observations.joined(parts), parts)


def test_tasks_that_are_not_drawn_say_so(monkeypatch):
    suite = base.Suite(host=lambda task, seed: Counting(show))
    monkeypatch.setitem(envs._SUITES, "bare", suite)
    with pytest.raises(ValueError, match="env.pixels=True: bare:x is not drawn to be observed"):
        envs.make("bare:x", 1, images=IMAGES(pixels=True))
    monkeypatch.setitem(envs._SUITES, "bare", suite._replace(draws=True))
    with pytest.raises(ValueError, match="env.name='bare:x' draws itself: make it with film=True"):
        envs.make_renderer("bare:x")
    with pytest.raises(ValueError, match="env.grey=True: empo:.* single tasks have"):
        envs.make("empo:grid_rock_1h1r", 1, images=IMAGES(grey=True))


def test_floats_of_a_jax_task_as_pictures():
    raw = clock((2, 2, 1), jnp.float32)
    raw = raw._replace(reset=lambda key: (jnp.int32(0), jnp.full((2, 2, 1), 0.25)))
    options = IMAGES(pixels=True, size=4, stack=2)
    environment = base.episodic(raw, 1, images=options)
    assert environment.spec.obs_shape == (4, 4, 2) and environment.spec.obs_dtype == np.uint8
    obs, (timestep,) = rollout(environment, 1)
    assert obs[0, 1, 1].tolist() == [64, 64]
    assert timestep.obs[0, 3, 0].tolist() == [64, 255]  # 1.0 is white


@pytest.mark.parametrize(
    "task", ["cartpole-swingup", pytest.param("reacher-easy", marks=pytest.mark.slow)]
)
def test_pictures_of_dm_control(task, opengl):
    """What is seen is what MuJoCo's own renderer draws of the very state."""
    mujoco = pytest.importorskip("mujoco")
    pytest.importorskip("dm_control")
    options = IMAGES(pixels=True, size=32)
    environment = envs.make(f"dmc:{task}", 2, images=options)
    for _ in range(3):
        timestep = environment.step(np.ones((2, environment.spec.action_dim), np.float32))
    assert timestep.obs.shape == (2, 32, 32, 3) and timestep.obs.dtype == np.uint8
    for i, one in enumerate(environment._tasks):
        physics = one._env.physics
        renderer = mujoco.Renderer(physics.model.ptr, 32, 32)
        renderer.update_scene(physics.data.ptr, camera=0)
        np.testing.assert_array_equal(timestep.obs[i], renderer.render())
        renderer.close()
    assert (timestep.obs[0] != timestep.obs[1]).any()
    plain = envs.make(f"dmc:{task}", 1, images=options._replace(shadows=False))
    seen, shaded = plain.reset(0)[0], environment.reset(0)[0]
    assert seen.std() > 5 and (seen != shaded).any()
    environment.close()


SHORT = {
    "tdmpc": (
        *("--config.env.frame_stack=3", "--config.train.utd_ratio=0.1"),
        *("--config.train.pretrain_updates=0", "--config.eval.model=False"),
        *("--config.planner.num_samples=32", "--config.planner.num_elites=8"),
    ),
    "dreamer": ("--config.env.image_size=32", "--config.train.train_ratio=32"),
}


@pytest.mark.slow
@pytest.mark.parametrize("agent", list(SHORT))
def test_a_run_from_pixels_learns_resumes_and_is_filmed(tmp_path, agent):
    """By the commands: 400 steps, 200 more of them resumed, then a film of what it does."""
    pytest.importorskip("dm_control")
    flags = (
        *(f"--config={agent}", "--config.env.name=dmc:cartpole-swingup"),
        *("--config.env.pixels=True", "--config.env.grey=True", "--config.env.shadows=False"),
        *("--config.env.num_envs=2", "--config.env.episode_length=25", *SHORT[agent]),
        *("--config.train.seed_steps=200", "--config.train.log_interval=100"),
        *("--config.loss.batch_size=8", "--config.replay.capacity=2000"),
        *("--config.eval.interval=0", "--config.eval.episodes=2", f"--workdir={tmp_path}/run"),
    )
    environ = {**os.environ, "JAX_PLATFORMS": "cpu"}

    def command(module, *given):
        done = subprocess.run(
            [sys.executable, "-m", f"experiments.{module}", *given],
            cwd=ROOT,
            env=environ,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr[-3000:]

    command("train", *flags, "--config.train.steps=400")
    command("train", *flags, "--config.train.steps=600", "--config.resume=True")
    rows = read_rows(str(tmp_path / "run" / "metrics.jsonl"))
    assert rows[-1]["step"] == 600 and np.isfinite(rows[-1]["return_mean"])
    command("evaluate", f"--workdir={tmp_path}/run", "--episodes=1", f"--video={tmp_path}/a.gif")
    assert (tmp_path / "a.gif").stat().st_size > 10_000
