"""Videos of episodes: what is drawn, how long it is shown, and what is said where it cannot be."""

from __future__ import annotations

import json
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

from mbx import envs
from mbx.agents.tdmpc.settings import Env, Settings
from mbx.commands import arguments as commands
from mbx.commands import evaluate
from mbx.envs import gymnax, pictures
from mbx.envs.render import Renderer, mujoco_drawing
from mbx.settings import to_dict
from mbx.training import build, video
from mbx.training.build import environment_spec
from mbx.training.loop import random_actions
from tests.helpers import register_toy

MODEL = """
<mujoco><worldbody>
  <light pos="0 0 3"/>
  <body>
    <joint axis="0 1 0"/><geom type="capsule" fromto="0 0 0 0 0 1" size=".1"/>
  </body>
</worldbody></mujoco>
"""


def config_of(name: str, **env) -> Settings:
    return Settings(env=Env(name=name, num_envs=1, **env))


def random_agent(config):
    spec = environment_spec(config)

    def act(train, actor, obs, is_first, key, evaluate):
        return random_actions(spec, key, obs.shape[0]), actor

    return act, lambda num_envs: jnp.zeros(num_envs)


@pytest.mark.parametrize("task", ["Pendulum-v1", "CartPole-v1", "Breakout-MinAtar"])
def test_states_are_drawn(task):
    renderer, raw = envs.make_renderer(f"gymnax:{task}"), gymnax.raw(task)
    view = jax.jit(lambda key: renderer.view(raw.reset(key)[0]))(jax.random.key(0))
    picture = renderer.draw(jax.device_get(view))
    assert picture.shape == (240, 240, 3) and picture.dtype == np.uint8
    assert len(np.unique(picture.reshape(-1, 3), axis=0)) >= 2


def test_a_pendulum_points_where_it_points():
    def red(angle):
        picture = pictures.draw_pendulum(dict(angle=angle, torque=0.0)).astype(int)
        rows, columns = np.nonzero(picture[..., 0] - picture[..., 2] > 80)
        return rows.mean() / pictures.SIZE, columns.mean() / pictures.SIZE

    up, down, left = red(0.0), red(np.pi), red(np.pi / 2)
    assert up[0] < 0.4 < 0.6 < down[0] and abs(up[1] - 0.5) < 0.02 and left[1] < 0.4


def test_a_cart_and_its_pole_are_where_they_are():
    left = pictures.draw_cartpole(dict(position=-1.0, angle=0.0))
    right = pictures.draw_cartpole(dict(position=1.0, angle=0.0))
    half = pictures.SIZE // 2
    pole = slice(0, half)  # above the track
    assert left[pole, :half].min() < 200 and left[pole, half:].min() > 240
    assert right[pole, half:].min() < 200 and right[pole, :half].min() > 240


def test_grids_have_a_colour_a_channel():
    grid = np.zeros((2, 3, 2), bool)
    grid[0, 0, 0] = grid[1, 2, 1] = True
    picture, side = pictures.draw_grid(grid), pictures.SIZE // 3
    assert picture.shape == (2 * side, 3 * side, 3)
    colors = {tuple(picture[r * side + 9, c * side + 9]) for r, c in ((0, 0), (1, 2), (0, 1))}
    assert len(colors) == 3


def test_an_episode_becomes_a_gif(tmp_path):
    config, path = config_of("gymnax:Catch-bsuite"), str(tmp_path / "episode.gif")
    episode = video.record(*random_agent(config), None, config, jax.random.key(0))
    assert episode.length == len(episode.frames) == 9 and abs(episode.total) == 1.0
    video.write(path, episode)
    with Image.open(path) as gif:
        assert gif.n_frames == 9 and gif.info["duration"] == 150
    assert os.listdir(tmp_path) == ["episode.gif"]


def test_a_film_that_nobody_asked_for_has_no_size():
    with pytest.raises(ValueError, match="--video_width=200 is of a film: give --video"):
        evaluate.check_film(None, 200, 0.0)
    with pytest.raises(ValueError, match="--video_seconds=6.0 is of a film"):
        evaluate.check_film(None, 0, 6.0)
    evaluate.check_film("episode.gif", 200, 6.0)
    evaluate.check_film(None, 0, 0.0)


def test_a_film_is_cut_and_made_smaller():
    picture = np.zeros((2, 4, 3), np.uint8)
    picture[:, 2:] = (200, 100, 40)
    episode = video.Episode([picture + np.uint8(i) for i in range(8)], 100, -3.0, 16)
    short = video.shortened(episode, width=2, seconds=0.25)
    np.testing.assert_array_equal(
        short.frames, [[[[i] * 3, [200 + i, 100 + i, 40 + i]]] for i in (0, 1)]
    )
    assert short[1:] == episode[1:]
    assert video.shortened(episode).frames == episode.frames
    assert len(video.shortened(episode, seconds=0.01).frames) == 1


def test_long_episodes_are_thinned_and_shown_at_their_pace():
    register_toy()  # episodes of 7 steps
    renderer = Renderer(lambda state: state, lambda view: np.zeros((4, 4, 3), np.uint8), 0.05)
    config = config_of("toy:line")
    agent = random_agent(config)
    episode = video.record(*agent, None, config, jax.random.key(0), renderer=renderer, max_frames=3)
    assert episode.length == 7 and len(episode.frames) == 2 and episode.milliseconds == 200


def test_suites_of_ones_own_may_bring_a_renderer():
    register_toy()
    with pytest.raises(ValueError, match="env.name='toy:line' is not drawn: .* make_renderer"):
        envs.make_renderer("toy:line")
    wanted = Renderer(lambda state: state, np.asarray, 0.1)
    envs.register("drawn", lambda *_, **__: None, make_renderer=lambda task: wanted)
    assert envs.make_renderer("drawn:x") is wanted
    envs.register("drawn", lambda *_, **__: None)
    with pytest.raises(ValueError, match="drawn:x"):
        envs.make_renderer("drawn:x")


@pytest.mark.parametrize(
    ("name", "path", "message"),
    [
        ("gymnax:Pendulum-v1", "episode.mp4", r"video='episode.mp4': must end in .gif"),
        ("gymnax:MountainCar-v0", "episode.gif", "'gymnax:MountainCar-v0' is not drawn"),
        ("multi:a+b", "episode.gif", "'multi:a.b' is not drawn: give `mbx.envs.register` a make_r"),
    ],
)
def test_what_is_not_drawn_is_told(name, path, message):
    with pytest.raises(ValueError, match=message):
        video.check(config_of(name), path)


def test_models_are_drawn_where_there_is_a_renderer(opengl):
    import mujoco

    draw = mujoco_drawing(mujoco.MjModel.from_xml_string(MODEL), height=48, width=64)
    upright, turned = (draw(dict(qpos=np.array([angle]))) for angle in (0.0, 1.5))
    assert upright.shape == (48, 64, 3) and upright.dtype == np.uint8
    assert np.abs(upright.astype(int) - turned).max() > 30


def test_without_a_renderer_the_evaluation_goes_on_without_the_video(tmp_path, monkeypatch, capsys):
    """`find_renderer` is what the command asks before it evaluates."""
    monkeypatch.setenv("MUJOCO_GL", "disable")
    (tmp_path / "config.json").write_text(json.dumps(to_dict(config_of("brax:inverted_pendulum"))))
    assert evaluate.find_renderer(str(tmp_path), "episode.gif") == (False, None)
    told = capsys.readouterr().err
    assert told.startswith("video skipped: no OpenGL renderer") and "MUJOCO_GL=disable" in told
    assert "install EGL" in told


def test_the_run_directory_is_the_argument_or_the_flag():
    def directory(*arguments):
        parser = commands.make_parser("evaluate", "")
        commands.add_run(parser)
        return commands.run_directory(parser.parse_args(arguments))

    assert directory("runs/a") == directory("--workdir=runs/a") == os.path.abspath("runs/a")
    for arguments in ([], ["a", "--workdir=b"]):
        with pytest.raises(ValueError, match="give one run directory"):
            directory(*arguments)


OWN = """
import gymnasium, numpy as np
from gymnasium.spaces import Box

class Bar(gymnasium.Env):
    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}
    max_episode_steps = 9
    action_space, observation_space = Box(-1, 1, (1,)), Box(-1, 1, (1,))

    def __init__(self, render_mode=None):
        self.render_mode = render_mode

    def reset(self, *, seed=None, options=None):
        self.t = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.t += 1
        return np.zeros(1, np.float32), 1.0, False, False, {}

    def render(self):
        assert self.render_mode == "rgb_array"
        return np.full((4, 6, 3), 10 * self.t, np.uint8)

class Blind(Bar):
    def __init__(self):
        pass

class Text(Bar):
    def render(self):
        return "......"
"""


@pytest.fixture
def own_file(tmp_path) -> str:
    path = tmp_path / "bar.py"
    path.write_text(OWN)
    return str(path)


def test_a_gymnasium_task_is_drawn_by_itself(own_file):
    config = config_of(f"gym:{own_file}:Bar", action_repeat=2)
    assert video.check(config, "episode.gif") is None
    act, init_actor = random_agent(config)
    episode = video.record(act, init_actor, None, config, jax.random.key(0))
    # Nine steps in pairs: what is shown are the states before an action was chosen.
    assert [int(frame[0, 0, 0]) for frame in episode.frames] == [0, 20, 40, 60, 80]
    assert episode.length == 5 and episode.total == 9.0 and episode.milliseconds == 200
    few = video.record(act, init_actor, None, config, jax.random.key(0), max_frames=3)
    assert [int(frame[0, 0, 0]) for frame in few.frames] == [0, 40, 80]
    assert few.milliseconds == 400


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ("Blind", "is not made with render_mode='rgb_array' .*let it take that argument"),
        ("Text", r"render\(\) gave <U6\[\]: let it give uint8"),
    ],
)
def test_a_task_that_does_not_draw_itself_is_told_what_it_lacks(own_file, task, message):
    with pytest.raises(envs.NoRenderer, match=message):
        video.check(config_of(f"gym:{own_file}:{task}"), "episode.gif")


@pytest.mark.slow
def test_a_dm_control_task_is_drawn_where_it_is(opengl):
    pytest.importorskip("dm_control")
    config = config_of("dmc:cartpole-swingup", episode_length=5)
    assert video.check(config, "episode.gif") is None
    environment = video._environment(build.read(config), film=True)
    before = environment.render()
    for _ in range(20):
        environment.step(np.ones((1, 1), np.float32))
    after = environment.render()
    assert before.shape == (240, 320, 3) and environment.seconds == pytest.approx(0.01)
    assert np.abs(before.astype(int) - after).max() > 30
    environment.close()
    episode = video.record(*random_agent(config), None, config, jax.random.key(0))
    assert len(episode.frames) == episode.length == 5
