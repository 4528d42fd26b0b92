"""Episodes of toy tasks whose every number is known: in JAX (`episodic`) and on the host."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mbx import envs
from mbx.envs.base import EnvSpec, RawEnvironment, episodic, solved
from tests.envs.toys import counting, on_host, rollout


def counter(limit: int = 100) -> RawEnvironment:
    """State [c]: starts at a random whole number 0..4, grows by one a step, terminates at 8.

    The reward is the new count; the action is added to the observation.
    """

    def reset(key):
        c = jax.random.randint(key, (), 0, 5).astype(jnp.float32)
        return c, c[None]

    def step(key, state, action):
        c = state + 1.0
        return c, c[None] + action, c, c >= 8.0

    return RawEnvironment("toy:counter", (1,), jnp.float32, 1, limit, reset, step)


def endless() -> RawEnvironment:
    """State and observation are one array; whole-number rewards of 1, a Python False, no end."""

    def reset(key):
        x = jax.random.uniform(key, (1,))
        return x, x

    def step(key, state, action):
        return state + 1.0, state + 1.0, 1, False

    return RawEnvironment("toy:endless", (1,), jnp.float32, 1, 100, reset, step)


def test_termination_keeps_the_final_observation_and_resets_only_its_environment():
    obs, rows = rollout(episodic(counter(), 5), 12)
    assert len(set(obs[:, 0])) > 1  # environments begin differently
    current, length, total = obs[:, 0].copy(), np.zeros(5), np.zeros(5)
    fresh = []
    for row in rows:
        current, length = current + 1, length + 1
        total += current
        np.testing.assert_array_equal(row.final_obs[:, 0], current)
        np.testing.assert_array_equal(row.reward, current)
        np.testing.assert_array_equal(row.terminated, current >= 8)
        assert not row.truncated.any()
        np.testing.assert_array_equal(row.episode_length, length)
        np.testing.assert_array_equal(row.episode_return, total)
        done = row.terminated
        np.testing.assert_array_equal(row.obs[~done], row.final_obs[~done])
        assert (row.obs[done] < 5).all()
        fresh += list(row.obs[done, 0])
        current = row.obs[:, 0].copy()
        length[done], total[done] = 0, 0
    assert len(set(fresh)) > 1  # resets are fresh draws, not the first state again


def test_time_limits_truncate_and_never_terminate():
    _, rows = rollout(episodic(counter(), 8, episode_length=5), 5)
    assert not any((row.terminated & row.truncated).any() for row in rows)  # termination wins
    assert any(row.terminated.any() for row in rows) and rows[4].truncated.any()
    assert not any(row.truncated.any() for row in rows[:4])


def gapped(kind, num, good=1.0, **options):
    """Rewards in [-1, 1], `good` but for the third, seventh, … step of an episode, which earn 0."""
    fields = dict(can_terminate=False, reward_range=(-1.0, 1.0))
    reward = lambda c: good * (c % 4 != 3)  # noqa: E731
    if kind == "jax":
        return episodic(counting(lambda c: c[None], reward, **fields), num, **options)
    return on_host(num, lambda c: np.full(1, c, np.float32), reward, fields=fields, **options)


def ends(rows, number):
    return [i + 1 for i, row in enumerate(rows) if row.truncated[number]]


@pytest.mark.parametrize("kind", ["jax", "host"])
@pytest.mark.parametrize(
    ("reset_solved", "good", "shorter"),
    [
        (0, 1.0, [8, 16]),
        (2, 1.0, [2, 4, 6, 8, 10, 12, 14, 16, 18]),
        (3, 1.0, [6, 12, 18]),  # the third step begins the count again, and so does each episode
        (3, 0.81, [6, 12, 18]),
        (3, 0.79, [8, 16]),  # nine tenths of the way from -1 to 1 are 0.8
        (4, 1.0, [8, 16]),
    ],
)
def test_three_environments_in_four_begin_again_where_a_task_is_solved(
    kind, reset_solved, good, shorter
):
    made = gapped(kind, 6, good, episode_length=8, reset_solved=reset_solved)
    assert made.spec == gapped(kind, 1, episode_length=8).spec
    _, rows = rollout(made, 18)
    for number in range(6):
        found = ends(rows, number)
        assert found == ([8, 16] if number in (0, 4) else shorter)
        assert rows[found[0] - 1].episode_length[number] == found[0]
        assert rows[found[0]].episode_length[number] == 1
    assert not any(row.terminated.any() for row in rows)
    if kind == "jax":
        assert (made.reset(jax.random.key(0))[0].solved is None) == (reset_solved == 0)


def test_a_snapshot_on_the_host_knows_what_is_solved():
    for first, whole in ((3, (1,)), (8, (0, 4))):
        options = dict(episode_length=8, reset_solved=3, first=first)
        made, other = (gapped("host", 5, **options) for _ in range(2))
        rows = rollout(made, 5)[1]
        other.set_state(made.get_state())  # two of three steps in a row are done
        rows += [other.step(np.zeros((5, 1))) for _ in range(13)]
        for number in range(5):
            assert ends(rows, number) == ([8, 16] if number in whole else [6, 12, 18])
    before, after = (gapped("host", 2, episode_length=8, reset_solved=n) for n in (0, 3))
    rollout(before, 2)
    after.set_state(before.get_state())  # a resumed run may begin to count
    # Two steps are behind, the third earns nothing, then come three in a row.
    assert ends([after.step(np.zeros((2, 1))) for _ in range(6)], 1) == [4]
    assert ends(rollout(after, 6)[1], 1) == [6]  # a reset begins the count again, too


def test_the_highest_reward_of_a_repeated_action_is_that_of_all_its_steps():
    options = dict(action_repeat=2, episode_length=9)
    _, rows = rollout(gapped("jax", 2, reset_solved=2, **options), 6)
    # Two environment steps each: 2, 1, 2, 1, …, of which 1.6 are enough; never two in a row.
    assert [float(row.reward[1]) for row in rows] == [2.0, 1.0] * 3 and not ends(rows, 1)
    assert ends(rollout(gapped("jax", 2, reset_solved=1, **options), 3)[1], 1) == [1, 2, 3]


def test_fifty_steps_of_a_long_episode_are_enough_where_it_is_left_to_the_task():
    spec = EnvSpec("toy:a", (3,), "float32", 1, 200, 1, can_terminate=False, reward_range=(-1, 1))
    assert solved(spec, 0, [3]) == (spec, None) and solved(spec, 7, [3])[0] is spec
    usual, enough = solved(spec, None, range(6))
    assert usual.reset_solved == 50
    assert enough.after.tolist()[1:] == [50, 50, 50, 2**31 - 1, 50]
    assert enough.reward == pytest.approx(0.8)
    for unlike in (dict(episode_length=199), dict(can_terminate=True), dict(reward_range=())):
        other, enough = solved(spec._replace(**unlike), None, [3])
        assert other.reset_solved == 0 and enough is None
    assert gapped("jax", 2, episode_length=200, reset_solved=None).spec.reset_solved == 50


@pytest.mark.parametrize("given", [(1.0,), (2.0, 1.0), (-np.inf, 0.0), (0.0, np.nan), (0, 1, 2)])
def test_ranges_of_rewards_that_are_none_are_refused(given):
    assert episodic(endless()._replace(reward_range=(0, 1)), 1).spec.reward_range == (0.0, 1.0)
    with pytest.raises(ValueError, match="'toy:endless': reward_range=.* must be .lowest, highest"):
        episodic(endless()._replace(reward_range=given), 1)


def test_resets_that_cannot_come_are_refused():
    with pytest.raises(ValueError, match="reset_solved=8: .* toy:clock is over after 8"):
        gapped("jax", 6, episode_length=8, reset_solved=8)
    with pytest.raises(ValueError, match="reset_solved=3: toy:endless does not say what its rew"):
        episodic(endless(), 6, reset_solved=3)


def test_action_repeat_stops_at_termination():
    environment = episodic(counter(), 4, action_repeat=3)
    assert environment.spec.episode_length == 34  # 100 / 3 rounded up
    obs, rows = rollout(environment, 3)
    current = obs[:, 0]
    for row in rows:
        steps = np.minimum(3, 8 - current)
        expected = sum(np.where(k <= steps, current + k, 0.0) for k in (1, 2, 3))
        np.testing.assert_array_equal(row.reward, expected)
        np.testing.assert_array_equal(row.final_obs[:, 0], current + steps)
        current = row.obs[:, 0]


def test_action_repeat_stops_at_a_time_limit_it_does_not_divide():
    environment = episodic(endless()._replace(time_limit=7), 2, action_repeat=3)
    assert environment.spec.episode_length == 3  # 3 + 3 + 1 environment steps
    obs, rows = rollout(environment, 6)
    assert ends(rows, 0) == ends(rows, 1) == [3, 6]
    np.testing.assert_array_equal([r.reward[0] for r in rows], [3, 3, 1] * 2)
    np.testing.assert_allclose(rows[2].final_obs, obs + 7.0, rtol=1e-6)
    # A length of the user's own is whole agent steps.
    _, rows = rollout(episodic(endless(), 2, action_repeat=3, episode_length=2), 2)
    np.testing.assert_array_equal(rows[-1].episode_return, [6, 6])


def test_every_environment_step_draws_anew():
    def step(key, state, action):
        noise = jax.random.normal(key, (1,))
        return state + noise, state + noise, noise[0], False

    raw = endless()._replace(step=step)
    environment = episodic(raw, 2, action_repeat=3)
    state, _ = environment.reset(jax.random.key(0))
    with jax.debug_key_reuse(True):
        _, timestep = jax.jit(environment.step)(state, jnp.zeros((2, 1)), jax.random.key(1))
    once, _ = episodic(raw, 2).step(state, jnp.zeros((2, 1)), jax.random.key(1))
    assert not np.allclose(timestep.reward, 3 * once.episode_return)


def assert_unshared(tree):
    leaves = jax.tree.leaves(tree)
    assert len({leaf.unsafe_buffer_pointer() for leaf in leaves}) == len(leaves)


@pytest.mark.parametrize("compiled", [False, True])
def test_state_observation_and_timestep_can_be_donated_together(compiled):
    environment = episodic(endless(), 2, episode_length=2, action_repeat=1 + compiled)
    wrap = jax.jit if compiled else lambda f: f
    actions = jnp.zeros((2, 1))

    @functools.partial(jax.jit, donate_argnums=0)
    def step(carry, key):
        state, timestep = environment.step(carry[0], actions, key)
        return state, timestep.obs, timestep

    state, obs = wrap(environment.reset)(jax.random.key(0))  # the toy's state is its observation
    assert_unshared((state, obs))
    state, timestep = wrap(environment.step)(state, actions, jax.random.key(1))
    assert_unshared((state, timestep))
    # The types of the protocol, whatever the task returns.
    assert timestep.reward.dtype == timestep.episode_return.dtype == np.float32
    assert timestep.terminated.dtype == timestep.truncated.dtype == bool
    carry = (state, obs, timestep)
    for i in range(3):
        carry = step(carry, jax.random.key(i))
    np.testing.assert_array_equal(carry[2].episode_length, [2, 2])


def test_actions_are_clipped():
    _, rows = rollout(episodic(counter(), 2), 1, action=5.0)
    np.testing.assert_array_equal(rows[0].final_obs[:, 0], rows[0].reward + 1.0)


@pytest.mark.parametrize("field", ["num_envs", "action_repeat", "episode_length"])
def test_counts_below_one_are_errors(field):
    counts = dict(num_envs=1, action_repeat=1, episode_length=1) | {field: 0}
    num = counts.pop("num_envs")
    with pytest.raises(ValueError, match=f"env.{field}=0"):
        episodic(counter(), num, **counts)


def test_register_adds_a_suite(monkeypatch):
    monkeypatch.setitem(envs._SUITES, "toy", "")

    def factory(task, num_envs, *, action_repeat, episode_length, seed):
        return episodic(whole, num_envs, episode_length=episode_length)

    whole = counter()._replace(can_terminate=False, reward_range=(-1.0, 1.0), time_limit=200)
    envs.register("toy", factory)
    assert envs.make("toy:counter", 2).num_envs == 2
    with pytest.raises(ValueError, match="reset_solved=7: toy:counter makes whole environments"):
        envs.make("toy:counter", 2, reset_solved=7)
    assert envs.make("toy:counter", 2, reset_solved=None).spec.reset_solved == 0  # nothing is cut
    tired = counter()._replace(can_terminate=False)
    envs.register("toy", envs.Suite(raw=lambda task: tired._replace(name=task), default_repeat=3))
    spec = envs.make("toy:slow", 2).spec
    assert (spec.name, spec.action_repeat, spec.can_terminate) == ("slow", 3, False)
    assert envs.make("toy:slow", 2, action_repeat=1).spec.action_repeat == 1
