"""What goes wrong outside: environments that give no numbers, two runs on one directory."""

from __future__ import annotations

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mbx import envs, replay
from mbx.envs.host import SteppedEnvironment
from mbx.training import evaluation, files, loop, run
from mbx.training.logging import read_rows
from tests.faults.small import small_config
from tests.helpers import program, tiny_config


def broken(where):
    """A counter whose third step gives NaN in the observation, or Inf in the reward."""

    def reset(key):  # "half" of the episodes begin after the bad step
        start = 3.0 * jax.random.bernoulli(key) if where == "half" else 0.0
        return jnp.float32(start), jnp.zeros(2)

    def step(key, state, action):
        bad = state == 2.0
        obs = jnp.full(2, state + 1.0)
        if where != "reward":
            return state + 1.0, jnp.where(bad, jnp.nan, obs), jnp.float32(1.0), bad
        return state + 1.0, obs, jnp.where(bad, jnp.inf, 1.0), jnp.bool_(False)

    return envs.RawEnvironment("broken", (2,), np.float32, 1, 10, reset, step)


@pytest.mark.parametrize("where", ["obs", "reward"])
def test_a_fault_ends_its_episode_and_counts_nothing(where):
    environment = envs.episodic(broken(where), 2)
    state, _ = environment.reset(jax.random.key(0))
    for i in range(6):
        state, step = jax.jit(environment.step)(state, jnp.zeros((2, 1)), jax.random.key(i))
        bad = i % 3 == 2
        assert step.fault.tolist() == step.truncated.tolist() == [bad] * 2
        assert not step.terminated.any() and np.isfinite(step.obs).all()
        assert step.reward.tolist() == [0.0 if bad else 1.0] * 2
        assert step.episode_return.tolist() == [min(i % 3 + 1.0, 2.0)] * 2


def test_a_fault_on_the_host_does_the_same():
    class Task:
        obs_shape, obs_dtype, num_actions = (2,), np.float32, 0
        action_low, action_high = -np.ones(1), np.ones(1)
        time_limit, ends_at, can_terminate = 10, None, True

        def reset(self, seed):
            self.count = 0
            return np.zeros(2, np.float32)

        def step(self, action):
            self.count += 1
            value = np.nan if self.count == 3 else 1.0
            return np.full(2, value, np.float32), 1.0, self.count == 3, False

    environment = SteppedEnvironment("broken", [Task()])
    steps = [environment.step(np.zeros((1, 1))) for _ in range(4)]
    assert [bool(s.fault[0]) for s in steps] == [False, False, True, False]
    assert [bool(s.truncated[0]) for s in steps] == [False, False, True, False]
    assert not steps[2].terminated[0] and steps[2].episode_return[0] == 2.0
    assert steps[3].episode_length[0] == 1 and np.isfinite(steps[2].obs).all()


def test_the_transition_to_a_fault_is_not_stored():
    row = dict(
        obs=jnp.zeros(2),
        action=jnp.zeros(1),
        reward=jnp.float32(0),
        is_first=jnp.bool_(False),
        is_last=jnp.bool_(False),
        terminated=jnp.bool_(False),
    )
    environment = envs.episodic(broken("obs"), 1)
    (env, obs), step_once = environment.reset(jax.random.key(0)), jax.jit(environment.step)
    no = jnp.zeros(1, bool)
    state = loop.LoopState(
        train=None,
        actor=None,
        env=env,
        obs=obs,
        reward=jnp.zeros(1),
        is_first=~no,
        replay=replay.init(row, num_envs=1, capacity=20),
        key=None,
        steps=jnp.int32(0),
        update_debt=None,
        updates=None,
    )

    class Forgets:
        replay_extras = None

    store = program(loop.store, Forgets)
    for i in range(7):  # two whole episodes, and the first step of the third
        action = jnp.zeros((1, 1))
        env, step = step_once(state.env, action, jax.random.key(i))
        state, _ = store(state.replace(env=env), action, None, None, step)
    size = int(state.replay.size[0])
    assert size == 7 and np.isfinite(state.replay.data["obs"][0, :size]).all()
    assert state.replay.data["is_first"][0, :size].tolist() == [True, False, False] * 2 + [True]
    # Rows 0-1, 1-2, 3-4 and 4-5; the steps from rows 2 and 5 are gone.
    assert int(replay.num_transitions(state.replay)) == 4


def test_a_run_learns_on_around_faults_and_tells_once(tmp_path):
    envs.register("faulty", envs_of_broken)
    config = small_config(env=dict(name="faulty:half"))
    with pytest.warns(UserWarning, match="not finite") as told:
        run.train(config, str(tmp_path))
    assert len([w for w in told if "were not finite" in str(w.message)]) == 1
    rows = read_rows(str(tmp_path / "metrics.jsonl"))
    train = [row for row in rows if row["kind"] == "train"]
    assert sum(row["faults"] > 0 for row in train) > 1
    assert all(np.isfinite(row["loss"]) for row in train[1:])
    means = {row["return_mean"] for row in rows if row["kind"] == "eval"}
    assert means <= {None, 10.0}  # of whole episodes


@pytest.mark.parametrize("where", ["obs", "reward", "half"])
def test_a_fault_makes_an_evaluation_nan(where):
    environment = envs.episodic(broken(where), 8)
    result = evaluation.make_random(environment)(jax.random.key(0))
    faulty = np.isnan(result.returns)
    assert faulty.all() if where != "half" else 0 < faulty.sum() < 8
    np.testing.assert_array_equal(result.lengths, np.where(faulty, 3, 10))
    summary = result.summary()
    assert np.isnan(summary["return_mean"]) and summary["faulty_episodes"] == faulty.sum()


def test_a_run_whose_every_episode_is_faulty_ends(tmp_path):
    envs.register("faulty", envs_of_broken)
    config = small_config(env=dict(name="faulty:obs"))
    with (
        pytest.warns(UserWarning, match="were not finite"),
        pytest.raises(FloatingPointError, match="each of the 1. episodes .* fix env.name='broken'"),
    ):
        run.train(config, str(tmp_path))
    rows = read_rows(str(tmp_path / "metrics.jsonl"))
    assert [row["step"] for row in rows if row["kind"] == "train"] == [20, 40]


def test_one_good_episode_lets_a_run_go_on():
    seen, others = run.SeedRun(None, None), run.SeedRun(None, None)
    with pytest.warns(UserWarning, match="1 environment steps up to step 20"):
        run.count_faults(seen, {"faults": 1.0, "episodes": 2.0}, 20, "broken")
    run.count_faults(seen, {"faults": 50.0, "episodes": 50.0}, 40, "broken")
    with pytest.warns(UserWarning, match="9 environment steps"):
        run.count_faults(others, {"faults": 9.0, "episodes": 9.0}, 20, "broken")
    with pytest.raises(FloatingPointError, match="each of the 10 episodes"):
        run.count_faults(others, {"faults": 1.0, "episodes": 1.0}, 40, "broken")


def envs_of_broken(task, num_envs, *, action_repeat, episode_length, seed):
    return envs.episodic(broken(task), num_envs)


def test_a_directory_has_one_writer(tmp_path):
    program = (
        "import sys; from mbx.training import files\n"
        "with files.sole_writer(sys.argv[1]):\n    print('held', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as other:
        assert other.stdout.readline() == "held\n"
        with (
            pytest.raises(ValueError, match="is being written by another run"),
            files.sole_writer(str(tmp_path)),
        ):
            pass
        with pytest.raises(ValueError, match="is being written by another run"):
            run.train(tiny_config(), str(tmp_path))
        assert os.listdir(tmp_path) == [".lock"]
        other.kill()
    with files.sole_writer(str(tmp_path)):
        pass
