"""Every program of a run is traced and compiled once, from its first call to its last.

`test_run` counts them in the runs that it makes anyway.
"""

from __future__ import annotations

import jax
import pytest

from configs import dreamer, empo
from mbx.agents.tdmpc.settings import Settings
from mbx.settings import from_dict
from mbx.training import job, run
from mbx.training.build import make_environment
from tests.helpers import FUSED, counting, once, programs_of, tiny_config


def short(name: str = "gymnax:Pendulum-v1", **sections):
    """Three intervals, the last two learning, two evaluations and a checkpoint at the end."""
    config = tiny_config(env=dict(name=name, episode_length=20), **sections)
    config["train"].update(steps=60)
    config["eval"]["interval"], config["checkpoint"]["interval"] = 40, 60
    return config


def assert_once(config, workdir, *programs: str) -> None:
    """Run it: its programs are `programs`, and each is traced and compiled once."""
    with counting() as counter:
        run.train(config, workdir)
    assert programs_of(counter) == once(*programs)


def resumed(config):
    """The same run, to be continued by one interval."""
    return {**config, "resume": True, "train": {**config["train"], "steps": 80}}


def test_the_counter_sees_a_program_that_is_compiled_twice():
    with counting() as counter:

        def train_twice(x):
            return x + 1

        program = jax.jit(train_twice)
        program(1)  # weakly typed
        program(jax.numpy.int32(1))
    assert counter["compiled", "train_twice"] == 2


def small_dreamer():
    config = dreamer.get_config()
    config.env.update(name="gymnax:CartPole-v1", num_envs=2, episode_length=8)
    config.model.update(size="tiny", num_bins=21)
    config.loss.update(batch_size=2, batch_length=4)
    config.imagination.update(horizon=2, rows=0)
    config.replay.capacity = 200
    config.train.update(steps=60, seed_steps=16, log_interval=20, train_ratio=1.0)
    config.eval.update(episodes=2, interval=40, exploring=False)
    return config.to_dict()


def small_empo():
    config = empo.get_config()
    config.env.update(name="empo:grid_rock_1h1r", num_envs=2)
    config.train.update(steps=60, seed_steps=16, log_interval=20)
    config.eval.update(episodes=2, interval=40, review_episodes=0)
    config.replay.capacity = 200
    config.loss.batch_size = 4
    return config.to_dict()


def weak(tree):
    return [x for x in jax.tree.leaves(tree) if x.weak_type]


@pytest.mark.parametrize("name", ["gymnax:Pendulum-v1", "multi:gymnax:Pendulum-v1+toy:point"])
def test_an_environment_hands_back_the_types_it_was_given(name):
    environment = make_environment(from_dict(Settings(), short(name)), 2, seed=0)
    key = jax.random.key(0)
    state, first = jax.eval_shape(environment.reset, key)
    action = jax.ShapeDtypeStruct((2, environment.spec.action_dim), jax.numpy.float32)
    assert not weak((state, first))
    new, _ = jax.eval_shape(environment.step, state, action, key)
    for before, after in zip(jax.tree.leaves(state), jax.tree.leaves(new), strict=True):
        assert (before.shape, before.dtype) == (after.shape, after.dtype)


@pytest.mark.parametrize("config", [small_dreamer(), small_empo()], ids=["dreamer", "empo"])
def test_other_agents_start_from_the_types_that_they_hand_back(config):
    parts = job.prepare(config)

    def start(key):
        return job.fresh_state(parts, key)

    state = jax.eval_shape(start, jax.random.key(0))
    assert not weak(state)
    after = jax.eval_shape(parts.interval, state, jax.numpy.int32(60))[0]
    assert jax.tree.map(str, state) == jax.tree.map(str, after)


@pytest.mark.slow
def test_from_parameters_and_from_a_dataset(tmp_path):
    config = short()
    config["replay"]["save"] = True
    first = str(tmp_path / "first")
    run.train(config, first)
    started = {**config, "train": {**config["train"], "init_from": first}}
    assert_once(started, str(tmp_path / "started"), *FUSED)
    offline = {**config, "train": {**config["train"], "dataset": f"{first}/dataset.npz"}}
    assert_once(offline, str(tmp_path / "offline"), *FUSED)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["brax:fast", "multi:gymnax:Pendulum-v1+toy:point"])
def test_other_suites(name, tmp_path):
    assert_once(short(name), str(tmp_path / "run"), *FUSED)


@pytest.mark.slow
def test_two_seeds(tmp_path):
    config = {**short(), "num_seeds": 2}
    assert_once(config, str(tmp_path / "run"), *FUSED)
    assert_once(resumed(config), str(tmp_path / "run"), *FUSED)


@pytest.mark.slow
def test_an_environment_of_the_host(tmp_path):
    config = short("gym:Pendulum-v1")
    programs = ("initial_state", "train_act", "train_store", "train_learn", "evaluation")
    assert_once(config, str(tmp_path / "run"), *programs)
    assert_once(resumed(config), str(tmp_path / "run"), *programs)


@pytest.mark.slow
@pytest.mark.parametrize("config", [small_dreamer(), small_empo()], ids=["dreamer", "empo"])
def test_other_agents(config, tmp_path):
    assert_once(config, str(tmp_path / "run"), *FUSED)
