"""EMPO's worlds: whose parameters, which humans, how large, where episodes begin."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mbx import envs, power
from mbx.empo import multigrid as mg
from mbx.empo import suite as empo_envs
from mbx.empo.agent import resolve
from mbx.power import HumanModel, PowerParams, solve
from mbx.training import build
from tests.empo.helpers import load, settings_of

ROOM = """map: |
  ######
  #>.D.#
  #..#1#
  ######
goals:
- [4, 1, 4, 1]
- [1, 1, 1, 1]
horizon: 6
"""


def world_file(folder, text=ROOM):
    path = folder / "room.yaml"
    path.write_text(text)
    return f"multigrid/{path}"


def chosen(name, **options):
    """The world of an environment with the options that settings give it."""
    return envs.make(f"empo:{name}", 1, **options).spec.world


def test_a_given_prior_takes_the_place_of_phase_1():
    found = load("grid_rock_1h1r")
    again = solve(found.table, found.params, human_policy=found.solution.pi_h)
    np.testing.assert_allclose(again.V_h_e, found.solution.V_h_e, atol=1e-6)
    np.testing.assert_allclose(again.pi_r, found.solution.pi_r, atol=1e-5)
    even = np.full(found.solution.pi_h.shape, 0.25)
    other = solve(found.table, found.params, human_policy=even)
    assert float(jnp.max(jnp.abs(other.V_h_e - again.V_h_e))) > 0.1
    with pytest.raises(ValueError, match="sum to one"):
        solve(found.table, found.params, human_policy=0.5 * even)
    with pytest.raises(ValueError, match="has shape"):
        solve(found.table, found.params, human_policy=even[0])


def test_parameters_of_settings_reach_prior_solution_and_learner(tmp_path):
    name = world_file(tmp_path, ROOM + "power: {beta_h: 2.0, zeta: 1.5}\n")
    own = chosen(name)
    assert own.params == PowerParams(beta_h=2.0, zeta=1.5)
    same = chosen(name, power=dict(source="world", beta_h=50.0))
    assert same.params == own.params
    sharp = dict(source="config", beta_h=50.0, gamma_h=0.9)
    found = chosen(name, power=sharp)
    assert found.params == PowerParams(beta_h=50.0, gamma_h=0.9)
    want = solve(found.table, found.params)
    np.testing.assert_allclose(found.solution.pi_h, want.pi_h)
    states = jnp.arange(found.world.num_states)
    policy = jnp.moveaxis(jax.vmap(found.world.human_policy)(states), 0, 2)
    np.testing.assert_allclose(policy, want.pi_h, atol=1e-6)
    assert float(jnp.max(jnp.abs(want.pi_h - own.solution.pi_h))) > 0.1
    settings = settings_of(power=dict(source="config", beta_h=50.0, gamma_h=0.9))
    values = {f: getattr(settings.power, f) for f in (*PowerParams._fields, "source")}
    spec = envs.make(f"empo:{name}", 1, power=values).spec
    assert resolve(settings, spec).params == spec.world.params
    assert spec.world.params.beta_h == 50.0 and spec.world.params.beta_r == 40.0
    packaged = chosen("grid_rock_1h1r", power=sharp)
    np.testing.assert_allclose(
        packaged.solution.pi_h, solve(packaged.table, packaged.params).pi_h, atol=1e-6
    )
    assert packaged.params.beta_h == 50.0


def test_a_choice_of_humans_reaches_prior_and_solution(tmp_path):
    name = world_file(tmp_path, ROOM + "humans: {model: paths, beta: 5.0}\n")
    by_file, again = chosen(name), chosen(name, humans=dict(model="paths", beta=5.0))
    assert by_file.prior == "paths" and chosen("grid_rock_1h1r").prior == "exact"
    np.testing.assert_array_equal(by_file.solution.pi_h, again.solution.pi_h)
    weak = chosen(name, humans=dict(model="paths", beta=0.5))
    assert float(jnp.max(jnp.abs(by_file.solution.pi_h - weak.solution.pi_h))) > 0.2
    even = chosen(name, humans=dict(model="uniform"))
    np.testing.assert_allclose(even.world.human_policy(0), 0.2)
    mixed = chosen(
        name, power=dict(source="config", nu_h=0.4), humans=dict(model="paths", beta=5.0)
    )
    want = 0.6 * by_file.world.human_policy(0) + 0.4 / 5
    np.testing.assert_allclose(mixed.world.human_policy(0), want, atol=1e-6)
    even = chosen("grid_rock_1h1r", humans=dict(model="uniform"))
    np.testing.assert_allclose(even.solution.pi_h[0, 0, 0], 0.25)
    np.testing.assert_allclose(even.world.human_policy(0), 0.25)


def test_habits_and_goal_probabilities_of_a_map(tmp_path, monkeypatch):
    export = mg.world._export  # what follows does not depend on goals' probabilities
    plain = lambda layout, most: export(layout._replace(goal_prob=None), most)  # noqa: E731
    monkeypatch.setattr(mg.world, "_export", plain)
    name = world_file(tmp_path, ROOM + "goal_prob: [3, 1]\nhumans: {model: exact, habit: paths}\n")
    sure = chosen(name, power=dict(source="config", nu_h=1.0))
    ways = chosen(name, humans=dict(model="paths"))
    running = ~np.asarray(sure.table.terminal) & ~np.asarray(sure.table.achieved[0], bool)
    for goal in (0, 1):
        where = running[goal]
        np.testing.assert_allclose(
            sure.solution.pi_h[0, goal][where], ways.solution.pi_h[0, goal][where], atol=1e-6
        )
    np.testing.assert_allclose(sure.world.goal_weight, [[0.5, 0.5]])
    np.testing.assert_allclose(power.goal_distribution(sure.world), [[0.75, 0.25]])
    weights = np.asarray([[0.75, 0.25]])
    want = solve(ways.table, ways.params, human_policy=ways.solution.pi_h, goal_prob=weights)
    np.testing.assert_allclose(ways.solution.Q_r, want.Q_r, rtol=1e-5)
    settings = settings_of(humans=dict(model="exact", habit="paths"))
    with pytest.raises(ValueError, match="habit='paths' has no effect.*power.nu_h is 0"):
        resolve(settings, envs.make(f"empo:{name}", 1).spec)
    with pytest.raises(ValueError, match="humans.habit='paths': this world has no such habit"):
        chosen("grid_rock_1h1r", humans=dict(model="exact", habit="paths"))


def test_goals_are_drawn_and_weighed_by_their_areas():
    room = "######\n#>..1#\n#..#.#\n######"
    layout = mg.parse_map(room, goals={"random": 300, "seed": 1}, horizon=3, goal_weight="area")
    x1, y1, x2, y2 = layout.goals[0].T
    assert layout.goals.shape == (1, 300, 4) and {*x1.tolist(), *x2.tolist()} == {1, 2, 3, 4}
    assert np.all((x1 <= x2) & (y1 <= y2)) and {*y1.tolist(), *y2.tolist()} == {1, 2}
    assert not np.any((x1 == 3) & (x2 == 3) & (y1 == 2))  # all wall
    area = (x2 - x1 + 1) * (y2 - y1 + 1)
    np.testing.assert_allclose(layout.goal_weight[0], area / area.sum())
    assert layout.goal_prob is None
    with pytest.raises(ValueError, match="goals={'random': 0}: give rectangles, or"):
        mg.parse_map(room, goals={"random": 0}, horizon=3)
    with pytest.raises(ValueError, match="goal_prob=.*: all must be positive"):
        mg.parse_map(room, goals=[[1, 1, 1, 1]], horizon=3, goal_prob=[0])


def test_a_registered_world_keeps_its_humans_with_other_parameters():
    found = load("dag_2h2r")
    assert found.prior == "exact"
    empo_envs.register_world("known", lambda: found)
    even = empo_envs.named_world("known", None, HumanModel("uniform"))
    empo_envs.register_world("even", lambda: even)
    other = chosen("even", power=dict(source="config", zeta=3.0))
    assert even.prior == other.prior == "uniform" and other.params.zeta == 3.0
    np.testing.assert_array_equal(other.solution.pi_h, even.solution.pi_h)
    assert float(jnp.max(jnp.abs(other.solution.pi_r - even.solution.pi_r))) > 1e-3
    again = chosen("even", power=dict(source="config"), humans=dict(model="exact"))
    assert again.prior == "exact"
    assert float(jnp.max(jnp.abs(again.solution.pi_h - even.solution.pi_h))) > 0.1


def test_large_worlds_fall_back_to_shortest_ways_with_one_line(tmp_path, capsys, monkeypatch):
    name = world_file(tmp_path)
    few = dict(model="auto", max_states=10)
    found = chosen(name, humans=few)
    assert found.world.num_states is None and found.solution is None and found.prior == "paths"
    policy = jax.jit(found.world.human_policy)(found.world.example_state)
    assert policy.shape == (1, 2, 5)
    np.testing.assert_allclose(policy.sum(-1), 1.0, rtol=1e-5)
    chosen(name, humans=few)
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 1 and "more than humans.max_states=10 states" in said[0]
    assert chosen(name, humans=dict(model="auto")).world.num_states > 10
    monkeypatch.setattr(mg.world, "MAX_JOINT", 24)
    assert chosen(name, humans=dict(model="auto", max_states=4_999)).world.num_states is None
    assert "25 joint actions, more than 24" in capsys.readouterr().out
    assert chosen(name, humans=dict(model="exact")).world.num_states > 10
    with pytest.raises(ValueError, match="more than 10 reachable states.*humans.max_states"):
        chosen(name, humans=dict(model="exact", max_states=10))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("power: {zeta: 0.5}", "power.zeta=0.5: give at least 1"),
        ("power: {gamma_r: 1.0}", "power.gamma_r=1.0: give a discount"),
        ("power: {terminal_v_r: 5.0}", "power.terminal_v_r=5.0: give a number below 0"),
        ("power: {strength: 1}", "power=.*choose among .*beta_h"),
        ("power: {zeta: much}", "power.zeta='much' has the wrong type"),
        ("humans: {model: clever}", "humans.model='clever': choose one of"),
        ("humans: {model: paths, beta: -1}", "humans.beta=-1: give a number"),
        ("humans: 3", "humans=3, choose among"),
    ],
)
def test_a_world_file_names_its_mistakes(tmp_path, line, message):
    with pytest.raises(ValueError, match=message):
        mg.load_world(world_file(tmp_path, ROOM + line).removeprefix("multigrid/"))


def test_impossible_parameters_and_humans_of_settings_are_refused():
    with pytest.raises(ValueError, match="power.xi=0.5"):
        chosen("grid_rock_1h1r", power=dict(source="config", xi=0.5))
    with pytest.raises(ValueError, match="humans.model='paths': this world has no such humans"):
        chosen("grid_rock_1h1r", humans=dict(model="paths"))
    empo_envs.register_world("open", lambda: load("dag_2h2r").world)
    with pytest.raises(ValueError, match="humans.model='exact': this world has no such humans"):
        empo_envs.named_world("open", None, HumanModel("exact"))


def test_humans_may_act_at_random_and_change_their_minds():
    found = load("grid_rock_1h1r")
    codec = power.make_codec(found.world)

    def first_step(epsilon, resample):
        world = found.world._replace(epsilon=epsilon)
        raw = empo_envs.raw_environment("empo:x", world, resample=resample)

        def one(key):
            state, obs = raw.reset(key)
            after = raw.step(key, state, jnp.eye(4)[0])[1]
            return *codec.unpack(obs)[:2], *codec.unpack(after)[1:]

        place, *rest = jax.jit(jax.vmap(one))(jax.random.split(jax.random.key(0), 4_000))
        before, after, action = map(np.asarray, rest)
        shares = np.bincount(action[:, 0], minlength=4) / 4_000
        return place, np.mean(before != after), shares

    place, always, shares = first_step(1.0, 1.0)
    np.testing.assert_allclose(shares, 0.25, atol=0.03)
    prior = np.asarray(jax.vmap(found.world.human_policy)(place))[:, 0].mean(axis=0)
    marginal = found.world.goal_weight[0] @ prior
    assert np.abs(np.asarray(marginal) - 0.25).max() > 0.1  # the prior is not uniform there
    _, never, shares = first_step(0.0, 0.0)
    np.testing.assert_allclose(shares, marginal, atol=0.03)
    assert always > never + 0.4


def test_training_may_begin_anywhere_and_evaluations_do_not():
    found = load("grid_rock_1h1r")
    running = np.flatnonzero(~np.asarray(found.table.terminal))
    codec = power.make_codec(found.world)
    raw = empo_envs.raw_environment("empo:x", found.world, varied_starts=0.5)
    _, obs = jax.jit(jax.vmap(raw.reset))(jax.random.split(jax.random.key(0), 8_000))
    place = np.asarray(jax.vmap(codec.unpack)(obs)[0])
    count = np.bincount(place, minlength=found.world.num_states)
    start = int(found.world.init(jax.random.key(0)))
    assert abs(count[start] - 4_000) < 300 and set(np.flatnonzero(count)) <= set(running)
    others = np.delete(count[running], list(running).index(start))
    assert abs(others.mean() - 4_000 / len(running)) < 3 and others.std() < 3 * others.mean() ** 0.5
    start_anywhere = dict(name="empo:grid_rock_1h1r", episode_length=5, varied_starts=1.0)
    config = settings_of(env=start_anywhere)
    train = build.make_environment(config, 200, seed=0)
    _, obs = train.reset(jax.random.key(0))
    assert len(np.unique(jax.vmap(codec.unpack)(obs)[0])) > 50
    _, obs = build.evaluation_environment(config, 200, seed=0).reset(jax.random.key(0))
    assert np.unique(jax.vmap(codec.unpack)(obs)[0]).tolist() == [start]


def test_where_states_are_not_listed_training_begins_after_a_random_walk(tmp_path):
    world = chosen(world_file(tmp_path), humans=dict(model="auto", max_states=10)).world
    begin = jax.jit(jax.vmap(power.make_varied_start(world, 4)))
    states = begin(jax.random.split(jax.random.key(0), 500))
    time = np.asarray(states.time)
    assert time.min() == 0 and time.max() == 4  # never the sixth step, when all is over
    np.testing.assert_allclose(np.bincount(time) / 500, 0.2, atol=0.06)
    assert len({tuple(x) for x in np.asarray(states.agents)[:, 0].tolist()}) > 5


def test_varied_starts_can_be_made_while_a_program_is_traced():
    # As when a checkpoint's shapes are asked for: `run.load(which="latest")`.
    world = load("dag_2h2r").world
    place = jax.eval_shape(lambda: power.make_varied_start(world, 3)(jax.random.key(0)))
    assert place.shape == () and place.dtype == jnp.int32
    found = jax.jit(lambda key: power.make_varied_start(world, 3)(key))(jax.random.key(0))
    assert int(found) == int(power.make_varied_start(world, 3)(jax.random.key(0)))
