"""EMPO's agent: targets against the exact solution, human expectations, learning."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from mbx import power
from mbx.empo import suite as empo_envs
from mbx.empo.agent import agent as agent_module
from mbx.empo.agent import evaluation as empo_evaluation
from mbx.empo.agent import learners, make_agent
from mbx.empo.agent import models as empo_models
from mbx.empo.agent import targets as empo_targets
from tests.empo.helpers import (
    AT_ONCE,
    AVERAGING,
    EXPLORE,
    TABLES,
    changed,
    environment_of,
    errors_of,
    exact_tables,
    load,
    one_update,
    problem_of,
    settings_of,
    train,
    train_state,
)


def targets_of(found, states, tables=None, draws=0, **options):
    """(human profiles, targets, metrics) of states; draws: fresh ones, 0 for all."""
    problem = problem_of(found, settings_of(model=TABLES, curriculum=AT_ONCE))

    @jax.jit
    def compute(tables, states):
        if draws:
            human = empo_targets.fresh_profiles(found.world, states, jax.random.key(0), draws)
        else:
            human = empo_targets.exact_profiles(found.world, states)
        given = (problem, train_state(tables), states, human, jnp.ones(len(states), bool))
        return human, *empo_targets.make_targets(*given, **options)

    return compute(exact_tables(found) if tables is None else tables, states)


def running(found):
    return jnp.asarray(np.flatnonzero(~np.asarray(found.table.terminal)), jnp.int32)


# -------------------------------------------------------------------------------------------------
# Targets


@pytest.mark.parametrize("name", ["grid_rock_1h1r", "grid_corridor_2h1r", "dag_2h2r"])
def test_exact_targets_reproduce_the_exact_solution(name):
    # Among them states one step from the goal at the time limit: achieved and terminal at once.
    found = load(name)
    states = running(found)
    human, targets, metrics = targets_of(found, states)
    np.testing.assert_allclose(human.weight.sum(-1), 1.0, rtol=1e-5)
    np.testing.assert_allclose(human.entry.sum(-1), 1.0, rtol=1e-5)
    np.testing.assert_allclose(targets.q_r, found.solution.Q_r[states], rtol=1e-4)
    v = jnp.moveaxis(found.solution.V_h_e, -1, 0)[states]
    np.testing.assert_allclose(targets.v_h_e, v, atol=2e-5)
    np.testing.assert_allclose(targets.policy, found.solution.pi_r[states], atol=5e-4)
    assert float(metrics["mass_error"]) < 1e-5 and float(metrics["overflow"]) == 0
    assert float(metrics["zero_ability"]) == 0


def test_capacity_and_deduplication_leave_targets_alone():
    found = load("grid_rock_1h1r")
    states = running(found)[:40]
    _, plain, metrics = targets_of(found, states)
    used = int(metrics["n_successors"])
    for options in (dict(capacity=used, unique=200), dict(unique=2)):
        _, got, told = targets_of(found, states, **options)
        np.testing.assert_allclose(got.q_r, plain.q_r, rtol=1e-5)
        np.testing.assert_allclose(got.v_h_e, plain.v_h_e, atol=1e-6)
        assert float(told["overflow"]) == 0 and int(told["n_successors"]) == used
        if "unique" in options:
            assert 2 < int(told["n_unique"]) < used


def test_what_does_not_fit_is_no_target():
    # Room for the first three quarters: to count the rest 0 would make it better than anything.
    found = load("grid_rock_1h1r")
    states = running(found)[:40]
    _, plain, metrics = targets_of(found, states)
    used = int(metrics["n_successors"])
    _, got, metrics = targets_of(found, states, capacity=3 * used // 4)
    assert float(metrics["overflow"]) == used - 3 * used // 4
    assert float(metrics["mass_error"]) > 0.1
    known, covered = np.asarray(got.known), np.asarray(got.coverage) > 0
    assert 0.7 < known.mean() < 0.8 and np.all(np.asarray(plain.known))
    assert float(metrics["lost_targets"]) == pytest.approx(np.mean(~known))
    np.testing.assert_allclose(got.q_r[known], plain.q_r[known], rtol=1e-5)
    assert np.all(np.asarray(got.q_r)[~known] > np.asarray(plain.q_r)[~known] + 0.1)
    # The states are in order: the last ones have lost their successors, and so their V_h^e.
    assert np.all(covered[:29]) and not np.any(covered[31:])
    np.testing.assert_allclose(got.v_h_e[covered], plain.v_h_e[covered], atol=1e-6)


def test_entries_without_a_target_are_not_learned():
    found = load("grid_rock_1h1r")
    clip = dict(weight_decay=0, grad_clip_norm=1e-3, scale_clip=True)
    cases = {
        "tables": dict(model=TABLES, curriculum=AT_ONCE),
        "networks": dict(model=dict(hidden=16), curriculum=AT_ONCE, optimizer=clip),
    }
    for name, sections in cases.items():
        problem = problem_of(found, settings_of(**sections))
        learn = learners.learn_tables if name == "tables" else learners.learn_networks
        train = jax.jit(functools.partial(learners.init_state, problem))(jax.random.key(0))
        states = running(found)[:4]
        _, targets, _ = targets_of(found, states)
        learn = jax.jit(functools.partial(learn, problem, train, states))
        known = targets.known.at[1:].set(False)
        targets = targets._replace(known=known, coverage=0.0 * targets.coverage)
        wrong = targets._replace(
            q_r=jnp.where(known, targets.q_r, -1e-9), v_h_e=5.0 + targets.v_h_e
        )
        after, metrics = learn(targets, jnp.ones(4, bool))
        again, same = learn(wrong, jnp.ones(4, bool))
        assert not changed(after.params, again.params)
        assert float(metrics["loss/q_r"]) == float(same["loss/q_r"]) > 0 or name == "tables"
        assert changed(train.params["q_r"], after.params["q_r"])
        if name == "tables":
            np.testing.assert_array_equal(after.params["q_r"][states[1:]], -1.0)
        else:  # The clipping norm of 1e-3 is for a rate of 1e-4; Adam keeps a tenth of a gradient.
            assert float(optax.tree.norm(after.opt_state["q_r"][1].mu)) == pytest.approx(1e-3)


def test_a_run_that_loses_successors_often_is_stopped():
    agent = make_agent(settings_of(loss=dict(room=1.5)), environment_of(load("dag_2h2r")).spec)
    agent.check({"lost_targets": 0.01})
    with pytest.raises(ValueError, match="loss.room=1.5: .* 2.0% .* more than 1.0%"):
        agent.check({"lost_targets": 0.02})


def test_fresh_human_actions_follow_the_marginal_and_average_to_the_exact_targets():
    found = load("grid_corridor_2h1r")
    states = running(found)[:6]
    draws = 4_000
    human, drawn, _ = targets_of(found, states, draws=draws)
    marginal = jnp.einsum(
        "bhga,hg->bha", jax.vmap(found.world.human_policy)(states), found.world.goal_weight
    )
    counts = jax.nn.one_hot(human.actions, found.world.num_actions).sum(1)
    chi_square = jnp.sum(jnp.square(counts - draws * marginal) / (draws * marginal + 1e-9))
    degrees = 6 * 2 * 3
    assert float(chi_square) < degrees + 4 * np.sqrt(2 * degrees)
    _, exact, _ = targets_of(found, states)
    np.testing.assert_allclose(drawn.q_r, exact.q_r, rtol=0.02)
    weight = np.asarray(found.world.goal_weight)[None] > 0
    np.testing.assert_allclose(
        np.where(weight, drawn.v_h_e, 0), np.where(weight, exact.v_h_e, 0), atol=0.03
    )
    np.testing.assert_allclose(
        drawn.coverage, jnp.broadcast_to(found.world.goal_weight, drawn.coverage.shape), atol=0.03
    )


def test_unmet_states_at_the_ability_floor_are_counted():
    found = load("grid_rock_1h1r")
    nothing, states = exact_tables(found) | {"v_h_e": jnp.zeros((243, 1, 5))}, running(found)[:4]
    _, targets, metrics = targets_of(found, states, nothing)
    # Each successor that goes on, none of the slots that hold no successor.
    table = found.table
    listed = np.isin(table.succ_state, states) & ~np.asarray(table.terminal)[table.succ_next]
    assert float(metrics["zero_ability"]) == listed.sum() > 0
    assert bool(jnp.all(jnp.isfinite(targets.q_r)))


# -------------------------------------------------------------------------------------------------
# Learning


@pytest.mark.parametrize(
    ("name", "updates", "least"),
    [("grid_rock_1h1r", 250, 140), pytest.param("dag_2h2r", 600, 20, marks=pytest.mark.slow)],
)
def test_tables_converge_to_the_exact_solution(name, updates, least):
    found, settings = load(name), settings_of(model=TABLES, curriculum=EXPLORE)
    more = dict(capacity=2048, varied_starts=1.0)
    state, metrics = train(found, settings, updates, **more)
    errors, visited = errors_of(found, settings, state)
    assert visited > least
    assert errors["v_h_e"] < 1e-3 and errors["pi_r"] < 1e-3, errors
    assert metrics["overflow"] == 0 and metrics["mass_error"] < 1e-5


@pytest.mark.slow
def test_tables_with_drawn_human_actions_average_them():
    found = load("dag_2h2r")
    drawn = dict(human_expectation="fresh", human_samples=2)
    settings = settings_of(model=AVERAGING, curriculum=EXPLORE, loss=drawn)
    state, _ = train(found, settings, 1_500)
    errors, _ = errors_of(found, settings, state)
    assert errors["v_h_e"] < 0.03 and errors["pi_r"] < 0.03, errors


@pytest.mark.slow
@pytest.mark.parametrize("name", ["grid_rock_1h1r", "grid_corridor_2h1r"])
def test_networks_approach_the_exact_solution(name):
    found = empo_envs.named_world(name)
    plan = dict(v_h_e_steps=400, q_r_steps=400, ramp_steps=400, epsilon_steps=2_000, steps=4_000)
    settings = settings_of(model=dict(hidden=64), curriculum=plan)
    state, _ = train(found, settings, 4_000, num_envs=32)
    errors, _ = errors_of(found, settings, state)
    pi = np.asarray(found.solution.pi_r)[running(found)]
    uniform = 0.5 * np.abs(pi - 1 / pi.shape[1]).sum(axis=1).mean()  # 0.08 and 0.005
    assert errors["v_h_e"] < 0.05 and errors["pi_r_tv"] < max(0.5 * uniform, 0.02), errors


def test_networks_learn_only_what_their_stage_trains():
    found = load("dag_2h2r")
    settings = settings_of(
        model=dict(x_h="network", u_r="network", v_r="network", q_encoder="own", hidden=16),
        loss=dict(human_expectation="rollout", q_loss="mse", batch_size=4),
        curriculum=dict(v_h_e_steps=5, q_r_steps=5, ramp_steps=5),
    )
    before, after, metrics, action = one_update(settings, found)
    assert changed(before.params["v_h_e"], after.params["v_h_e"])
    for name in set(before.params) - {"v_h_e"}:
        assert not changed(before.params[name], after.params[name])
        assert not changed(before.opt_state[name], after.opt_state[name])
    assert not changed(before.target, after.target) and int(after.step) == 1
    assert all(np.isfinite(float(value)) for value in metrics.values()), metrics
    np.testing.assert_array_equal(action.sum(-1), 1.0)


def test_a_table_moves_by_the_mean_of_a_state_s_targets_and_counts_visits():
    found, settings = load("dag_2h2r"), settings_of(model=TABLES, curriculum=AT_ONCE)
    before, after, _, _ = one_update(settings, found)
    counts = np.asarray(after.opt_state["q_r"])[:, 0]
    assert counts.sum() == 32 and counts.max() > 1  # few states, many draws of each
    met = jnp.asarray(np.flatnonzero(counts), jnp.int32)
    _, targets, _ = targets_of(found, met, before.params)
    np.testing.assert_allclose(after.params["q_r"][met], targets.q_r, rtol=1e-4)
    np.testing.assert_allclose(after.params["v_h_e"][met], targets.v_h_e, atol=1e-5)


def test_a_learned_network_robot_lets_the_human_reach_more_than_a_random_one():
    # Exact 0.41, random and frozen 0.2: only a robot that pushes the rock away helps.
    found = empo_envs.named_world("grid_rock_1h1r")
    plan = dict(v_h_e_steps=150, q_r_steps=150, ramp_steps=150, epsilon_steps=600, steps=1_000)
    settings = settings_of(
        model=dict(hidden=48, q_head="dueling"), loss=dict(advantage_coef=1.0), curriculum=plan
    )
    state, _ = train(found, settings, 1_000, num_envs=32, capacity=8_192, varied_starts=0.5)
    problem = problem_of(found, settings)
    reached = {}
    for name, policy in (
        ("learned", empo_evaluation.learned_policy(problem, state.train)),
        ("random", empo_evaluation.random_policy(found.world)),
    ):
        result = empo_evaluation.goal_reaching(
            found.world, policy, jax.random.key(1), episodes=2_000, length=6
        )
        reached[name] = result["reached"]
    assert reached["learned"] > reached["random"] + 0.1, reached


@pytest.mark.slow
def test_a_network_robot_helps_as_the_exact_one_where_help_is_rare():
    # A 7x7 map, 2786 states: 0.66 beside the exact robot, 0.50 beside a random or a frozen one.
    found = empo_envs.named_world("multigrid/rock_loop")
    part = 1_000
    plan = dict(v_h_e_steps=part, q_r_steps=part, ramp_steps=part, epsilon_steps=5_000)
    settings = settings_of(
        model=dict(hidden=64, q_head="dueling"),
        loss=dict(advantage_coef=1.0),
        curriculum=plan | dict(steps=10_000),
    )
    state, _ = train(found, settings, 10_000, num_envs=32, capacity=65_536, varied_starts=0.5)
    policy = empo_evaluation.learned_policy(problem_of(found, settings), state.train)
    result = empo_evaluation.goal_reaching(
        found.world, policy, jax.random.key(1), episodes=10_000, length=9
    )
    assert result["reached"] > 0.62, result


def test_errors_of_q_by_hand():
    q, target = jnp.array([-2.0, -0.5, -3.0]), jnp.array([-1.0, -1.0, -1e-30])
    np.testing.assert_allclose(learners.q_errors("mse", q, target), [1.0, 0.25, 9.0], rtol=1e-6)
    ratio = np.array([0.5, 2.0, empo_models.Q_FLOOR / 3.0])
    wanted = ratio - np.log(ratio) - 1.0
    np.testing.assert_allclose(learners.q_errors("gamma", q, target), wanted, rtol=1e-5)


def test_room_is_a_batchs_successors():
    """loss.room for each of 5 states, 3^2 robots' and 3^4 human actions, where these are listed."""
    world = load("dag_2h2r").world._replace(num_humans=4, num_actions=3, max_successors=8)

    def room(**loss):
        settings = settings_of(loss=dict(batch_size=5, room=2.5) | loss)
        return agent_module._capacity(settings, world)

    assert room() == np.ceil(2.5 * 5 * 81 * 9)
    assert room(human_expectation="fresh", human_samples=2) == 2.5 * 5 * 2 * 9
    assert room(human_expectation="rollout") == np.ceil(2.5 * 5 * 9)
    assert room(room=0.0) is None and room(room=8.0) is None and room(room=7.9) is not None


def test_what_is_logged_of_a_batch():
    """Means over the rows that exist, and of their entries over those that have a target."""
    found, rng = load("dag_2h2r"), np.random.default_rng(0)
    problem = problem_of(found, settings_of(curriculum=AT_ONCE))
    q, x = -rng.uniform(1.0, 3.0, (3, 4)), rng.uniform(0.2, 0.8, (3, 2))
    policy = rng.dirichlet(np.ones(4), size=3)
    v, coverage = rng.uniform(size=(2, 3, 2, 5))
    known = np.array([[True] * 4, [True, False, True, True], [True] * 4])
    coverage[:, :, 1], mask = 0.0, np.array([True, True, False])
    targets = empo_targets.Targets(*map(jnp.asarray, (q, known, v, coverage, policy, x)))
    p = found.params
    told = agent_module._progress(problem, p, targets, jnp.asarray(mask))
    told |= agent_module._stage(problem, jnp.int32(5))
    np.testing.assert_allclose(told["q_r"], q[:2][known[:2]].mean(), rtol=1e-5)
    weight = coverage[:2]
    np.testing.assert_allclose(told["v_h_e"], (v[:2] * weight).sum() / weight.sum(), rtol=1e-5)
    u = -(np.mean(x ** -float(p.xi), axis=1) ** float(p.eta))
    np.testing.assert_allclose(told["u_r"], u[:2].mean(), rtol=1e-5)
    np.testing.assert_allclose(told["v_r"], u[0] + policy[0] @ q[0], rtol=1e-5)
    entropy = -(policy * np.log(policy)).sum(axis=1)
    np.testing.assert_allclose(told["entropy"], entropy[:2].mean(), rtol=1e-5)
    np.testing.assert_allclose([told["x_h_1"], told["x_h_2"]], x[:2].mean(axis=0), rtol=1e-5)
    bits = np.log2(x[:2]).mean(axis=0)
    np.testing.assert_allclose([told["w_h_1"], told["w_h_2"]], bits, rtol=1e-5)
    assert float(told["beta_r"]) == p.beta_r and float(told["stage"]) > 0


def test_a_dueling_head_is_a_level_and_an_advantage():
    raw = jnp.array([[2.0, 0.5, -0.5, 3.0]])
    q = empo_models.q_from_raw(raw, "dueling")
    want = -(np.exp(2.0 + np.array([0.5, -0.5, 3.0]) - 1.0) + empo_models.Q_FLOOR)
    np.testing.assert_allclose(q[0], want, rtol=1e-6)
    size = np.log(-want)
    np.testing.assert_allclose(learners.log_advantage(q)[0], size - size.mean(), atol=1e-5)
    shifted = learners.log_advantage(7.0 * q)
    np.testing.assert_allclose(shifted, learners.log_advantage(q), atol=1e-5)


def test_the_loss_on_the_advantage_sees_no_level():
    found = load("dag_2h2r")
    model = dict(hidden=8, q_head="dueling")
    settings = settings_of(model=model, loss=dict(advantage_coef=3.0), curriculum=AT_ONCE)
    problem = problem_of(found, settings)
    states = running(found)[:4]
    params = jax.jit(problem.model.init)(jax.random.key(0))
    _, targets, _ = targets_of(found, states)
    codes = problem.model.encode(states)
    loss = jax.jit(
        lambda q: learners.losses(
            problem, params, codes, targets._replace(q_r=q), jnp.ones(4, bool)
        )["loss/advantage"]
    )
    q = problem.model.q_r(params, problem.model.trunk(params, codes))
    assert float(loss(5.0 * q)) < 1e-6
    # Twice as good an action: log 2 less its mean over R actions, squared, averaged, times 3.
    num = q.shape[1]
    off = np.where(np.arange(num) == 0, np.log(2.0), 0.0) - np.log(2.0) / num
    want = 3.0 * np.mean(off**2)
    scale = jnp.where(jnp.arange(num) == 0, 0.5, 1.0)[None]
    np.testing.assert_allclose(loss(q * scale), want, rtol=2e-3)


def test_heads_stay_in_their_range_with_a_living_gradient():
    raw = jnp.linspace(-20, 20, 9)
    for head in ("exp", "softplus"):
        q, slope = jax.vmap(jax.value_and_grad(lambda x, h=head: empo_models.q_from_raw(x, h)))(raw)
        assert bool(jnp.all(q <= -2 * empo_models.Q_FLOOR)) and bool(jnp.all(slope < 0))


@pytest.mark.parametrize("q_encoder", ["shared", "split"])
def test_a_stage_trains_what_it_says(q_encoder):
    """What is not trained reaches no parameter, by no encoder that it shares with what is."""
    found, stages = load("dag_2h2r"), power.curriculum.NETWORKS
    nets = dict.fromkeys(("x_h", "u_r", "v_r"), "network")
    settings = settings_of(
        model=nets | dict(hidden=4, q_encoder=q_encoder, q_head="dueling"),
        curriculum={f"{name}_steps": 1 for name in (*stages, "ramp")},
    )
    problem = problem_of(found, settings)
    train = jax.jit(functools.partial(learners.init_state, problem))(jax.random.key(0))
    states, every = running(found)[:4], jnp.ones(4, bool)
    _, targets, _ = targets_of(found, states)
    targets = targets._replace(y=jnp.full(4, 2.0), v_r=jnp.full(4, -3.0))
    other = {
        "v_h_e": dict(v_h_e=targets.v_h_e[::-1] + 0.1),
        "q_r": dict(q_r=targets.q_r[:, ::-1] * 3.0),
        "u_r": dict(y=targets.y + 1.0),
        "v_r": dict(v_r=targets.v_r - 1.0),
    }

    @jax.jit
    def after(step, targets):
        new, _ = learners.learn_networks(problem, train.replace(step=step), states, targets, every)
        return new.params

    for stage in range(len(stages)):
        plain = after(jnp.int32(stage), targets)
        for number, name in enumerate(stages):
            assert changed(train.params[name], plain[name]) == (number <= stage)
            if name in other:
                moved = after(jnp.int32(stage), targets._replace(**other[name]))
                assert changed(plain, moved) == (number <= stage), (stage, name)


def test_a_table_counts_the_targets_that_there_are():
    """An action without a target keeps its rate for when it has one."""
    found = load("dag_2h2r")
    problem = problem_of(found, settings_of(model=TABLES, curriculum=AT_ONCE))
    train = jax.jit(functools.partial(learners.init_state, problem))(jax.random.key(0))
    states = running(found)[:3]
    _, targets, _ = targets_of(found, states)
    known = np.ones(targets.known.shape, bool)
    known[0], known[1, 2] = False, False
    learn = jax.jit(functools.partial(learners.learn_tables, problem))
    every = jnp.ones(3, bool)
    new, _ = learn(train, states, targets._replace(known=jnp.asarray(known)), every)
    np.testing.assert_array_equal(np.asarray(new.opt_state["q_r"])[np.asarray(states)], known)


def test_an_ability_learned_from_drawn_goals_is_right_on_average():
    """Goals are drawn by their probabilities, whatever their weights are."""
    found = load("dag_2h2r")
    world = found.world._replace(goal_prob=jnp.asarray([[0.1, 0.2, 0.3, 0.4]] * 2))
    settings = settings_of(model=dict(x_h="network"), loss=dict(x_h_goals=2))
    problem = problem_of(dataclasses.replace(found, world=world), settings)
    v = jnp.asarray(np.random.default_rng(0).uniform(0.2, 1.0, (3, 2, 4)), jnp.float32)
    each = jax.jit(jax.vmap(lambda key: learners.ability(problem, v, key)))
    drawn = np.asarray(each(jax.random.split(jax.random.key(0), 4_000)))
    plain = problem_of(found, settings_of(model=dict(x_h="network")))
    error = 4 * drawn.std(axis=0) / 4_000**0.5
    assert np.all(np.abs(drawn.mean(axis=0) - learners.ability(plain, v, None)) < error)
    assert np.all(drawn.std(axis=0) > 0.05)


def test_a_time_limit_is_no_end():
    """Exact tables stay what they are where every episode is cut after a step: values go on."""
    found, settings = load("cyclic_1h2r_noterm"), settings_of(model=TABLES, curriculum=AT_ONCE)
    state, _ = train(found, settings, 1, episode_length=1)
    assert np.asarray(state.replay.data["is_last"]).any()
    assert not np.asarray(state.replay.data["terminated"]).any()
    exact = exact_tables(found)
    before = state.train.replace(params=exact)
    update = jax.jit(make_agent(settings, environment_of(found).spec).update)
    after, *_ = update(before, state.replay, jax.random.key(0))
    assert np.asarray(after.opt_state["q_r"]).sum() > 0
    for name, table in exact.items():
        np.testing.assert_allclose(after.params[name], table, rtol=1e-4, atol=1e-4)
