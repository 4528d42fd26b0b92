"""Every program of a run is traced and compiled once, from its first call to its last.

`test_run` counts them in the runs that it makes anyway.
"""

from __future__ import annotations

import jax
import pytest

from mbx.agents.tdmpc.settings import Settings
from mbx.settings import from_dict
from mbx.training import job, run
from mbx.training.build import make_environment
from tests.helpers import FUSED, HOST, counting, once, programs_of, tiny_config
from tests.training.test_ranges import tiny_dreamer, tiny_empo


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


@pytest.mark.parametrize("config", [tiny_dreamer(), tiny_empo()], ids=["dreamer", "empo"])
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
@pytest.mark.parametrize(
    ("config", "programs", "resumes"),
    [
        (short("brax:fast"), FUSED, False),
        (short("multi:gymnax:Pendulum-v1+toy:point"), FUSED, False),
        (short() | {"num_seeds": 2}, FUSED, True),
        (short("gym:Pendulum-v1"), HOST, True),
        (tiny_dreamer(), FUSED, False),
        (tiny_empo(), FUSED, False),
    ],
    ids=["a simulator", "tasks", "seeds", "the host", "dreamer", "empo"],
)
def test_of_other_runs(config, programs, resumes, tmp_path):
    assert_once(config, str(tmp_path / "run"), *programs)
    if resumes:
        assert_once(resumed(config), str(tmp_path / "run"), *programs)
