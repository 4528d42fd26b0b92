"""Suites by name, step by step next to loops over the environments of their packages.

Needs the extras atari, crafter, bsuite, dmc and minigrid; skipped without them.
"""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest
from PIL import Image

from mbx import config, envs
from mbx.envs.base import seeds_of
from mbx.training.build import make_environment

SEED = 3


def compare(environment, raw, steps):
    """Equal observations, rewards and ends; `raw` yields them for the numbers of actions sent.
    Returns the metrics of the episodes that ended.
    """
    rng, spec, ends = np.random.default_rng(0), environment.spec, []
    np.testing.assert_array_equal(environment.reset(SEED)[0], next(raw))
    for _ in range(steps):
        chosen = int(rng.integers(spec.action_dim))
        step = environment.step(np.eye(spec.action_dim, dtype=np.float32)[[chosen]])
        obs, reward, terminated, truncated = raw.send(chosen)
        np.testing.assert_array_equal(step.final_obs[0], obs)
        found = step.reward[0], bool(step.terminated[0]), bool(step.truncated[0])
        assert found == (np.float32(reward), terminated, truncated)
        if terminated or truncated:
            ends.append({name: float(x[0]) for name, x in step.metrics.items()})
            np.testing.assert_array_equal(step.obs[0], next(raw))
    environment.close()
    return ends


def preset(suite, **env):
    """A preset's environment, one copy."""
    changes = [f"env.{name}={value}" for name, value in (env | dict(num_envs=1)).items()]
    return make_environment(config.load(f"suites:{suite}", changes), 1, seed=SEED)


def first_seed():
    return int(seeds_of(SEED, 1)[0]) % 2**31


@pytest.mark.parametrize("suite, side, colour", [("atari", 96, "L"), ("atari100k", 64, "RGB")])
def test_atari(suite, side, colour):
    """Sticky and all actions in one, needed ones in the other; lives do not end an episode."""
    pytest.importorskip("ale_py", reason="pip install 'mbx-rl[atari]'")
    pytest.importorskip("cv2", reason="pip install 'mbx-rl[atari]'")
    environment, old = preset(suite, name="atari:Breakout"), suite == "atari"
    assert environment.spec.action_dim == (18 if old else 4)
    assert environment.spec.episode_length == 27_000
    own = dict(repeat_action_probability=0.25 if old else 0.0, full_action_space=old)
    env = gymnasium.make("ALE/Breakout-v5", frameskip=1, **own)
    screen = env.unwrapped.ale.getScreenRGB

    def seen(frames):
        image = Image.fromarray(np.max(frames, axis=0)).convert(colour)
        return np.asarray(image.resize((side, side), Image.Resampling.BILINEAR)).reshape(
            side, side, -1
        )

    def raw():
        seed, lives = first_seed(), []
        while True:
            env.reset(seed=seed)
            for _ in range(env.unwrapped.np_random.integers(1, 31)):
                env.step(0)
            action, seed, ended, frames = (yield seen([screen()])), None, False, [screen()] * 2
            while not ended:
                reward = 0.0
                for frame in range(4):
                    _, r, ended, cut, _ = env.step(action)
                    reward += r
                    if ended:
                        break
                    if frame >= 2:
                        frames[frame - 2] = screen()
                lives.append(env.unwrapped.ale.lives())
                frames[1] = np.max(frames, axis=0)  # an end between pictures still shows it
                action = yield seen(frames), reward, ended, cut
            assert len(set(lives)) > 2

    assert len(compare(environment, raw(), 500)) >= 2


def test_crafter():
    """Death terminates, the length truncates; achievements are in the metrics.

    Next to what its own environment gives: two copies part, since its sets are ordered by address.
    """
    pytest.importorskip("crafter", reason="pip install 'mbx-rl[crafter]'")
    environment = preset("crafter", metrics="collect_sapling", **{"kwargs.length": 150})
    env, got, steps, begun = environment._tasks[0]._env._env, [], [], []
    step, reset = env.step, env.reset
    env.step = lambda action: steps.append((action, *step(action))) or steps[-1][1:]
    env.reset = lambda: begun.append(reset()) or begun[-1]

    def raw():
        assert (env._seed, env._episode) == (first_seed(), 1)
        action = yield begun[-1]
        while True:
            sent, obs, reward, done, info = steps[-1]
            assert sent == action
            dead = info["inventory"]["health"] <= 0
            action = yield obs, reward, dead, done and not dead
            if done:
                got.append(sum(n > 0 for n in info["achievements"].values()))
                action = yield begun[-1]

    assert environment.spec.obs_shape == (64, 64, 3) and environment.spec.action_dim == 17
    ends = compare(environment, raw(), 400)
    assert [end["achievements_last"] for end in ends] == got and sum(got) > 2
    assert all(0 <= end["collect_sapling_last"] <= 1 for end in ends)


@pytest.mark.parametrize("task", ["catch/0", "cartpole/3", "deep_sea/1", "bandit_noise/2"])
def test_bsuite(task):
    """Its own seeds are replaced by the run's, by shimmy."""
    package = pytest.importorskip("bsuite", reason="pip install 'mbx-rl[bsuite]'")
    pytest.importorskip("shimmy", reason="pip install 'mbx-rl[bsuite]'")
    env = package.load_from_id(task)

    def raw():
        inner = getattr(env, "raw_env", env)
        env._rng = inner._rng = np.random.RandomState(first_seed())
        action = yield env.reset().observation
        while True:
            step = env.step(action)
            action = yield step.observation, step.reward, step.last() and not step.discount, False
            if step.last():
                action = yield env.reset().observation

    environment = preset("bsuite", name=f"bsuite:{task}")
    assert environment.spec.episode_length == 1_001
    assert len(compare(environment, raw(), 300)) >= 2


def test_minigrid():
    """The direction, one-hot, then the symbols of the seven by seven cells in front."""
    pytest.importorskip("minigrid", reason="pip install 'mbx-rl[minigrid]'")
    name = "gym:minigrid:MiniGrid-Empty-5x5-v0"
    environment = preset("minigrid", name=name)
    env = gymnasium.make(name.rpartition(":")[2])

    def seen(obs):
        return np.float32([*np.eye(4)[obs["direction"]], *obs["image"].ravel()])

    def raw():
        seed = first_seed()
        while True:
            action, seed, ended = (yield seen(env.reset(seed=seed)[0])), None, False
            while not ended:
                obs, reward, terminated, truncated, _ = env.step(action)
                ended = terminated or truncated
                action = yield seen(obs), reward, terminated, truncated

    assert len(compare(environment, raw(), 300)) >= 2


def test_dmc_from_pixels(opengl):
    """Pictures of the first camera, 64 pixels a side, every second step's."""
    mujoco = pytest.importorskip("mujoco")
    suite = pytest.importorskip("dm_control.suite", reason="pip install 'mbx-rl[dmc]'")
    environment = preset("dmc_vision")
    assert environment.spec.episode_length == 500 and environment.spec.action_repeat == 2
    actions = np.random.default_rng(0).integers(-1, 2, (25, 1, 6)).astype(np.float32)
    seen, steps = [environment.reset(SEED)], []
    for action in actions:
        steps.append(environment.step(action))
        seen.append(steps[-1].obs)
    environment.close()
    env = suite.load("walker", "walk")
    env.task.random.seed(int(seeds_of(SEED, 1)[0]))
    env.reset()
    renderer = mujoco.Renderer(env.physics.model.ptr, 64, 64)
    for obs, action, step in zip(seen, actions, steps, strict=False):
        renderer.update_scene(env.physics.data.ptr, camera=0)
        np.testing.assert_array_equal(obs[0], renderer.render())
        reward = sum(env.step(action[0]).reward for _ in range(2))
        assert step.reward[0] == np.float32(reward) and not step.terminated[0]
    renderer.close()


def test_what_suites_do_not_take():
    """Errors that name the setting and what would do."""
    pytest.importorskip("crafter", reason="pip install 'mbx-rl[crafter]'")
    with pytest.raises(ValueError, match="choose crafter:reward or crafter:noreward"):
        preset("crafter", name="crafter:x")
    with pytest.raises(ValueError, match="env.pixels=True, env.shadows=True: crafter:reward obse"):
        preset("crafter", pixels=True)
    with pytest.raises(envs.EnvironmentFailure, match="making it raised TypeError.*lenth"):
        preset("crafter", **{"kwargs.lenth": 3})
