"""EMPO's equations and solver: golden worlds, hand-solved ones, and the ways to get them wrong."""

from __future__ import annotations

import itertools
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mbx import power
from mbx.empo.power import curriculum as schedules
from mbx.power import PowerParams, TabularWorld, curriculum, solve, solver
from tests.empo.helpers import golden
from tests.helpers import FIXTURES, in_programs

curriculum = in_programs(curriculum)
power = in_programs(
    power,
    "aggregate_ability",
    "attained",
    "human_aggregate",
    "intrinsic_reward",
    "robot_policy",
    "soft_clamp",
)

ACYCLIC = ("grid_rock_1h1r", "grid_corridor_2h1r", "dag_2h2r", "dag_1h1r_sharp")
CYCLIC = ("cyclic_2h2r", "cyclic_1h2r_noterm", "cyclic_3h1r_sum_unitweights")
ABSOLUTE = ("V_hm", "Q_hm", "pi_h", "V_h_e", "X_h", "pi_r")
RELATIVE = ("y", "U_r", "V_r", "Q_r")


@pytest.fixture
def double():
    with jax.enable_x64(True):
        yield


def rows(d):
    """Our index of each of the fixture's robot profiles."""
    return power.joint_index(d["robot_profiles"], int(d["num_actions"]))


def solved(d, solution, key):
    got = np.asarray(getattr(solution, key.removeprefix("ref_")))
    return got[:, rows(d)] if key in ("Q_r", "pi_r", "ref_pi_r") else got


# -------------------------------------------------------------------------------------------------
# Golden worlds


@pytest.mark.parametrize("name", ACYCLIC + CYCLIC)
def test_solve_matches_golden_world(name, double):
    d, world, params = golden(name)
    solution = solve(world, params, tol=1e-13, max_iterations=5_000)
    assert bool(solution.converged) and float(solution.residual) <= 1e-13
    for key in ABSOLUTE:
        np.testing.assert_allclose(solved(d, solution, key), d[key], rtol=0, atol=1e-10)
    for key in RELATIVE:
        np.testing.assert_allclose(solved(d, solution, key), d[key], rtol=1e-10)
    assert int(solution.zero_ability) == 0


@pytest.mark.parametrize("name", ACYCLIC)
def test_solve_is_within_the_stated_gap_of_the_original_solver(name, double):
    d, world, params = golden(name)
    solution = solve(world, params)
    keys = ("ref_pi_h", "ref_V_hm", "ref_V_h_e", "ref_pi_r")
    for key in keys:
        got, want = solved(d, solution, key), d[key]
        if name == "dag_1h1r_sharp" and key in ("ref_pi_h", "ref_pi_r"):
            # Float noise decides the original's tie at state 0, goal 4, and so its policy there:
            # `pi_r` of the fixture differs from `ref_pi_r` as much as ours.
            axis = 2 if key == "ref_pi_h" else 0
            got, want = np.delete(got, 0, axis), np.delete(want, 0, axis)
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-3)
    scale, running = d["ref_reward_scale"], ~d["terminal"]
    running[0] &= name != "dag_1h1r_sharp"  # the tie again
    ours = np.asarray(solution.V_r)[running] * scale
    np.testing.assert_allclose(ours, d["ref_V_r"][running], rtol=1e-3)


@pytest.mark.parametrize("name", ["grid_rock_1h1r", "dag_1h1r_sharp", "cyclic_1h2r_noterm"])
def test_solve_in_float32_is_within_the_suggested_tolerance(name):
    d, world, params = golden(name)
    solution = solve(world, params)
    assert bool(solution.converged) and solution.V_r.dtype == jnp.float32
    for key, tolerance in (("V_h_e", 2e-5), ("X_h", 2e-5), ("pi_r", 5e-4)):
        np.testing.assert_allclose(solved(d, solution, key), d[key], rtol=0, atol=tolerance)
    for key in ("Q_r", "V_r"):
        np.testing.assert_allclose(solved(d, solution, key), d[key], rtol=1e-4)


def test_an_oscillating_world_is_damped_by_itself(double):
    # Two runs through the iteration with a map that plain steps never settle.
    from mbx.empo.power.solver import iterate

    one = jnp.asarray(1.0)
    x, residual, count = iterate(
        lambda x: 1.0 - 1.5 * (x - 1.0),
        jnp.asarray(0.0),
        tol=1e-10 * one,
        max_iterations=2_000,
    )
    assert float(residual) <= 1e-10 and int(count) > 100
    np.testing.assert_allclose(x, 1.0, atol=1e-9)


def test_ties_do_not_depend_on_the_order_of_the_sums(double):
    d, world, params = golden("dag_1h1r_sharp")
    order = np.random.default_rng(0).permutation(len(world.succ_state))
    columns = ("succ_state", "succ_joint", "succ_next", "succ_prob")
    shuffled = world._replace(**{c: getattr(world, c)[order] for c in columns})
    solution = solve(shuffled, params)
    np.testing.assert_allclose(solution.pi_h, d["pi_h"], atol=1e-10)
    np.testing.assert_allclose(solution.pi_h[0, 4, 0], 0.25)  # four actions tie exactly


@pytest.mark.parametrize("beta", [1e2, 1e7, 1e12])
def test_policies_of_very_large_betas_are_numbers(beta):
    """Alike actions share; of others the better one wins, by as much as in float64."""
    q = np.array([[-7.0, -7.0, -7.0], [-3.0, -3.03, -3.0]], np.float32)
    logs = -beta * (np.log(-q.astype(np.float64)) - np.log([[7.0], [3.0]]))
    expected = np.exp(logs) / np.exp(logs).sum(-1, keepdims=True)
    np.testing.assert_allclose(power.robot_policy(q, np.float32(beta)), expected, atol=1e-4)
    assert np.all(np.isfinite(power.robot_policy(np.float32([[0.0, -1.0, -2e4]]), beta)))
    h = np.array([[0.7, 0.7, 0.7], [0.3, 0.3 - 2e-7, 0.3]], np.float32)
    logits = np.float64(np.float32(beta)) * (h.astype(np.float64) - h.max(-1, keepdims=True))
    expected = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    soft = jax.jit(solver._soft_best)(h, jnp.float32(beta))
    np.testing.assert_allclose(soft, expected, rtol=1e-5, atol=1e-6)


def test_robot_policy_and_soft_clamp_match_golden(double):
    d = dict(np.load(FIXTURES / "empo" / "robot_policy_and_transforms.npz"))
    q = jnp.asarray(d["Q_r"])
    for i, beta in enumerate(d["betas"]):
        pi = np.asarray(power.robot_policy(q, float(beta)))
        np.testing.assert_allclose(pi, d[f"pi_{i}"], rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(pi, d[f"pi_clamped_f32_{i}"], atol=2e-4)
    many = power.robot_policy(jnp.broadcast_to(q, (6, *q.shape)), jnp.asarray(d["betas"])[:, None])
    np.testing.assert_allclose(many[3], d["pi_3"], rtol=1e-9, atol=1e-12)
    for i in range(len(d["eta_xi"])):
        low, high = d[f"softclamp_bounds_{i}"]
        clamped = power.soft_clamp(jnp.asarray(d["softclamp_x"]), low, high)
        np.testing.assert_allclose(clamped, d[f"softclamp_{i}"], atol=1e-12)
    np.testing.assert_array_equal(power.profiles(2, 4), d["index_to_actions"])


@pytest.mark.parametrize("name", ["schedules_default", "schedules_all_networks"])
def test_schedules_match_golden(name, double):
    d = dict(np.load(FIXTURES / "empo" / f"{name}.npz"))
    c = json.loads(str(d["config"]))
    plan = power.Curriculum(
        steps=c["num_training_steps"],
        v_h_e_steps=c["warmup_v_h_e_steps"],
        x_h_steps=c["warmup_x_h_steps"],
        u_r_steps=c["warmup_u_r_steps"],
        q_r_steps=c["warmup_q_r_steps"],
        v_r_steps=c["warmup_v_r_steps"],
        ramp_steps=c["beta_r_rampup_steps"],
        use_x_h=c["x_h_use_network"],
        use_u_r=c["u_r_use_network"],
        use_v_r=c["v_r_use_network"],
        gamma_h_ramp=c["gamma_h_rampup_steps"] if c["gamma_h_curriculum"] else 0,
        gamma_h_start=c["gamma_h_start"],
        gamma_r_ramp=c["gamma_r_rampup_steps"] if c["gamma_r_curriculum"] else 0,
        gamma_r_start=c["gamma_r_start"],
        epsilon_start=c["epsilon_r_start"],
        epsilon_end=c["epsilon_r_end"],
        epsilon_steps=c["epsilon_r_decay_steps"],
        constant_fraction=c["lr_constant_fraction"],
    )
    step = jnp.asarray(d["step"])
    got = dict(
        stage=curriculum.stage(plan, step),
        active=curriculum.active(plan, step),
        beta_r=curriculum.beta_r(plan, step, c["beta_r"]),
        epsilon_r=curriculum.epsilon(plan, step),
        epsilon_h=curriculum.epsilon(plan, step),
        gamma_h=curriculum.gamma_h(plan, step, c["gamma_h"]),
        gamma_r=curriculum.gamma_r(plan, step, c["gamma_r"]),
        lr_q_r=curriculum.learning_rate(plan, step, c["lr_q_r"]),
        lr_v_h_e=curriculum.learning_rate(plan, step, c["lr_v_h_e"]),
    )
    for key, value in got.items():
        np.testing.assert_allclose(value, d[key], rtol=1e-9, atol=1e-12, err_msg=key)


# -------------------------------------------------------------------------------------------------
# Worlds small enough to solve by hand


def chain(length, *, achieved_at, terminal_end=True, num_actions=2, human_moves=True):
    """States 0..length-1 in a row; the human's action 1 (or any) moves one on; robot idle."""
    last = length - 1
    sources, joints, following = [], [], []
    for s in range(length if not terminal_end else last):
        for j in range(num_actions**2):
            moves = j % num_actions == 1 if human_moves else True
            sources.append(s), joints.append(j)
            following.append(min(s + moves, last))
    achieved = np.zeros((1, 1, length), bool)
    achieved[0, 0, achieved_at] = True
    return TabularWorld(
        np.array(sources),
        np.array(joints),
        np.array(following),
        np.ones(len(sources)),
        np.arange(length) == (last if terminal_end else -1),
        achieved,
        np.ones((1, 1)),
        np.array([0]),
        np.array([1]),
        num_actions,
        length,
    )


def test_gamma_discounts_only_what_is_not_yet_achieved(double):
    world = chain(4, achieved_at=3, human_moves=False)
    solution = solve(world, PowerParams(gamma_h=0.9))
    # One step from the goal 1 (though the goal state is terminal), then gamma a step.
    np.testing.assert_allclose(solution.V_h_e[0, 0], [0.81, 0.9, 1.0, 0.0])


def test_terminal_without_the_goal_is_worth_nothing_to_the_human(double):
    solution = solve(chain(3, achieved_at=0, human_moves=False), PowerParams(gamma_h=0.9))
    np.testing.assert_allclose(solution.V_h_e[0, 0], 0.0)
    assert bool(solution.unreachable[0, 0]) and int(solution.zero_ability) == 2


def test_a_constant_reward_is_counted_once(double):
    world = chain(1, achieved_at=0, terminal_end=False)
    solution = solve(world, PowerParams(gamma_r=0.9))
    np.testing.assert_allclose(solution.U_r, -1.0)  # V_h^e = X_h = 1
    np.testing.assert_allclose(solution.V_r, -10.0, rtol=1e-9)
    np.testing.assert_allclose(solution.Q_r, -9.0, rtol=1e-9)


def two_state(robot_can_help):
    """State 0; joint action decides whether the goal state 1 (terminal) follows.

    Human action 1 tries; it succeeds when the robot's action is 1, too, if robot_can_help, else
    always.
    """
    joints = np.arange(4)
    human, robot = joints % 2, joints // 2
    success = (human == 1) & ((robot == 1) | (not robot_can_help))
    return TabularWorld(
        np.zeros(4, int),
        joints,
        success.astype(int),
        np.ones(4),
        np.array([False, True]),
        np.array([[[False, True]]]),
        np.ones((1, 1)),
        np.array([0]),
        np.array([1]),
        2,
        2,
    )


def test_pessimistic_and_optimistic_robots_in_the_prior(double):
    gamma, beta = 0.5, 2.0
    pessimistic = solve(two_state(True), PowerParams(beta_h=beta, gamma_h=gamma))
    np.testing.assert_allclose(pessimistic.Q_hm[0, 0, 0], 0.0, atol=1e-10)  # hindered for ever
    np.testing.assert_allclose(pessimistic.pi_h[0, 0, 0], 0.5)
    optimistic = solve(two_state(True), PowerParams(beta_h=beta, gamma_h=gamma, optimistic=True))
    # V = p + (1 - p) gamma V with Q = (gamma V, 1) and p = sigmoid(beta (1 - gamma V)).
    v = float(optimistic.V_hm[0, 0, 0])
    p = 1.0 / (1.0 + np.exp(-beta * (1.0 - gamma * v)))
    np.testing.assert_allclose(v, p + (1 - p) * gamma * v, rtol=1e-9)
    np.testing.assert_allclose(optimistic.Q_hm[0, 0, 0], [gamma * v, 1.0], rtol=1e-9)
    np.testing.assert_allclose(optimistic.pi_h[0, 0, 0], [1 - p, p], rtol=1e-9)


def test_the_habit_mixture_is_uniform_and_spares_achieved_goals(double):
    nu = 0.3
    solution = solve(two_state(False), PowerParams(beta_h=np.inf, gamma_h=0.5, nu_h=nu))
    np.testing.assert_allclose(solution.pi_h[0, 0, 0], [nu / 2, 1 - nu / 2])
    # V = (1 - nu/2) + nu/2 gamma V.
    np.testing.assert_allclose(solution.V_hm[0, 0, 0], (1 - nu / 2) / (1 - nu / 4), rtol=1e-9)
    still = solve(chain(2, achieved_at=0, terminal_end=False), PowerParams(nu_h=nu, gamma_h=0.9))
    np.testing.assert_allclose(still.pi_h[0, 0, 0], [1.0, 0.0])


# -------------------------------------------------------------------------------------------------
# Properties


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.floats(-1e3, -1e-3), min_size=2, max_size=5), st.floats(1e-2, 1e2), st.floats(0, 20)
)
def test_the_policy_is_scale_free_and_prefers_better_actions(q, scale, beta):
    q = jnp.asarray(q)
    pi = power.robot_policy(q, beta)
    np.testing.assert_allclose(power.robot_policy(scale * q, beta), pi, atol=2e-4)
    np.testing.assert_allclose(jnp.sum(pi), 1.0, rtol=1e-5)
    order = np.argsort(np.asarray(q), kind="stable")
    assert np.all(np.diff(np.asarray(pi)[order]) >= -1e-6)


def test_joint_indices_round_trip_and_factor():
    actions = power.profiles(3, 4)
    np.testing.assert_array_equal(power.joint_index(actions, 4), np.arange(64))
    np.testing.assert_array_equal(actions[1], [1, 0, 0])


def test_zero_ability_is_floored_with_finite_gradients():
    u, slope = jax.value_and_grad(lambda x: power.intrinsic_reward(x, 1.0, 1.1))(
        jnp.array([0.0, 0.5])
    )
    assert np.isfinite(u) and np.all(np.isfinite(slope)) and u < -1e9
    for zeta in (0.5, 2.0):
        slope = jax.grad(lambda v, z=zeta: power.aggregate_ability(v, jnp.ones(2) / 2, z))(
            jnp.array([0.0, 0.25])
        )
        assert np.all(np.isfinite(slope)) and slope[0] == 0.0
    top = jax.grad(lambda x: power.intrinsic_reward(x, 1.0, 1.1))(jnp.ones(1))
    np.testing.assert_allclose(top, 1.1, rtol=1e-6)


def test_masked_humans_reach_no_gradient():
    masked, mask = jnp.array([0.5, 0.25, jnp.nan]), jnp.array([True, True, False])
    u, slope = jax.value_and_grad(lambda x: power.intrinsic_reward(x, 1.0, 2.0, mask))(masked)
    np.testing.assert_allclose(u, -9.0, rtol=1e-6)
    assert np.all(np.isfinite(slope)) and slope[2] == 0
    with pytest.raises(ValueError, match="reduce='max'"):
        power.intrinsic_reward(masked, 1.0, 1.0, reduce="max")


def test_scaling_goal_weights_scales_rewards_and_leaves_the_robot_alone(double):
    _, world, params = golden("dag_2h2r")
    one = solve(world, params)
    double_ = solve(world._replace(goal_weight=2.0 * world.goal_weight), params)
    factor = 2.0 ** (-params.xi * params.eta)
    np.testing.assert_allclose(double_.U_r, factor * np.asarray(one.U_r), rtol=1e-10)
    np.testing.assert_allclose(double_.pi_r, one.pi_r, atol=1e-8)


# -------------------------------------------------------------------------------------------------
# Bad input


def test_inconsistent_worlds_are_refused():
    _, world, params = golden("cyclic_2h2r")
    prob = world.succ_prob.copy()
    prob[3] *= 0.5
    broken = {
        "succ_prob sums to": dict(succ_prob=prob),
        "must not be negative": dict(succ_prob=-world.succ_prob),
        "succ_next holds": dict(succ_next=world.succ_next + 20),
        "number the agents": dict(humans=np.array([0])),
        "achieved": dict(achieved=world.achieved[:, :, :-1]),
        "goal_weight=": dict(goal_weight=0.0 * world.goal_weight),
    }
    for message, change in broken.items():
        with pytest.raises(ValueError, match=message):
            solve(world._replace(**change), params)
    nan = world.succ_prob.copy()
    nan[0] = np.nan
    with pytest.raises(ValueError, match="succ_prob"):
        solve(world._replace(succ_prob=nan), params)


def test_agents_may_be_numbered_in_lists():
    world = two_state(False)
    listed = world._replace(humans=[0], robots=(1,))
    one, other = (solve(w, PowerParams(gamma_h=0.5)) for w in (world, listed))
    np.testing.assert_array_equal(one.V_r, other.V_r)


@pytest.mark.parametrize(
    "change",
    [
        dict(xi=0.0),
        dict(gamma_h=1.1),
        dict(beta_r=-1.0),
        dict(terminal_v_r=0.0),
        dict(reduce="max"),
        dict(nu_h=2.0),
    ],
)
def test_impossible_parameters_are_refused(change):
    (name,) = change
    with pytest.raises(ValueError, match=f"power.{name}="):
        solve(two_state(False), PowerParams()._replace(**change))
    with pytest.raises(ValueError, match="max_iterations=0"):
        solve(two_state(False), PowerParams(), max_iterations=0)


# -------------------------------------------------------------------------------------------------
# Worlds as functions


def test_a_tabular_world_as_functions_lists_the_same_transitions():
    d, table, params = golden("dag_2h2r")
    solution = solve(table, params)
    world = power.tabular_world(table, solution)
    assert (world.num_humans, world.num_robots, world.num_states) == (2, 2, 36)
    order = [*d["humans"], *d["robots"]]
    listed = {}
    for s, j, n, p in zip(
        d["succ_state"], d["succ_joint"], d["succ_next"], d["succ_prob"], strict=True
    ):
        listed.setdefault((s, j), {})[n] = p
    successors = jax.jit(jax.vmap(world.successors))
    keys = list(itertools.islice(listed, 0, None, 7))
    actions = np.array([[power.profiles(4, 2)[j][a] for a in order] for _, j in keys])
    following, prob, overflow = successors(
        jnp.array([s for s, _ in keys]), jnp.asarray(actions, jnp.int32)
    )
    assert not np.any(overflow)
    for i, key in enumerate(keys):
        got = {int(n): float(p) for n, p in zip(following[i], prob[i], strict=True) if p > 0}
        assert got == pytest.approx(listed[key], rel=1e-6)
    np.testing.assert_allclose(world.human_policy(jnp.int32(1)), solution.pi_h[:, :, 1])
    np.testing.assert_array_equal(world.achieved(jnp.int32(5)), d["achieved"][:, :, 5])
    starts = {int(world.init(jax.random.key(i))) for i in range(20)}
    entered = set(d["succ_next"])
    assert starts and not starts & entered
    with pytest.raises(ValueError, match="human_policy has shape"):
        power.tabular_world(table, np.ones((1, 2)))


@pytest.mark.parametrize("name", ["steps", "ramp_steps", "epsilon_steps"])
def test_negative_durations_are_refused(name):
    with pytest.raises(ValueError, match=f"curriculum.{name}=-1: must not be negative"):
        schedules.Curriculum(**{name: -1})


def test_every_schedule_moves_from_its_start_to_its_end():
    """Whatever has no length, too: rates that begin to fall at once are no rates of 0."""
    steps = jnp.arange(200)
    for stages, rises, fraction in itertools.product((0, 4), (0, 6), (0.0, 0.5)):
        plan = schedules.Curriculum(
            steps=40,
            **{f"{name}_steps": stages for name in ("v_h_e", "x_h", "q_r", "ramp")},
            **{f"{name}_ramp": rises for name in ("gamma_h", "gamma_r")},
            epsilon_steps=rises,
            constant_fraction=fraction,
        )
        rate = np.asarray(schedules.learning_rate(plan, steps, 0.1))
        assert rate[0] == np.float32(0.1) and (np.diff(rate) <= 0).all() and 0 < rate[-1] < 0.05
        assert float(schedules.beta_r(plan, steps, 5.0)[-1]) == 5.0
        for gamma in (schedules.gamma_h, schedules.gamma_r):
            assert float(gamma(plan, steps, 0.9)[-1]) == np.float32(0.9)
        assert float(schedules.epsilon(plan, steps)[-1]) == pytest.approx(plan.epsilon_end)
        assert int(schedules.stage(plan, steps)[-1]) == 6


def test_values_that_may_be_off_are_told():
    """One state for ever: V_r = -1 / (1 - gamma_r), which sweeps approach from above."""
    table = chain(1, achieved_at=0, terminal_end=False)
    params = PowerParams(gamma_r=0.9999)
    with pytest.warns(RuntimeWarning, match="solve did not converge .* off by up to .* = 2e"):
        solution = solve(table, params, max_iterations=50)
    assert not bool(solution.converged)
    with pytest.warns(RuntimeWarning, match="solve converged only to a residual") as told:
        solution = solve(table, params, tol=1e-3)
    bound = float(re.search(r"= ([\d.e+-]+) ", str(told[0].message))[1])
    assert abs(float(solution.V_r[0]) / -1e4 - 1.0) < bound and bool(solution.converged)
    with pytest.warns(RuntimeWarning, match="solve did not converge and stopped at a .* = 0.0002 "):
        solver.warn_of_error(2e-6, 1e-6, 0.99)  # though the bound is small


def test_without_a_humans_discount_v_h_e_is_a_probability(double):
    """One try in two moves on: the goal is reached for certain, late or early."""
    table = chain(3, achieved_at=2)
    solution = solve(table, PowerParams(gamma_h=1.0, beta_h=0.0))
    power.check_params(PowerParams(gamma_h=1.0))
    np.testing.assert_allclose(solution.V_h_e[0, 0, :2], 1.0, atol=1e-9)


def test_worlds_are_the_same_in_64_bits():
    """Draws have the same types, what is packed and planned the same values, too."""
    _, table, params = golden("dag_2h2r")
    prior, key = solve(table, params).pi_h, jax.random.key(0)
    two = np.array([1, 0], np.int32)

    @jax.jit
    def drawn():
        world = power.tabular_world(table, prior)._replace(epsilon=0.5)
        codec, records, state = power.make_codec(world), power.make_records(world), jnp.int32(0)
        goals = power.draw_goals(world, key)
        start = power.make_varied_start(world._replace(states=None), 5)(key)
        drawn = (start, goals, power.draw_actions(world, state, goals, key))
        packed = codec.pack(state, two, two)
        record = records.pack(records.draw(state, key)._replace(goals=two, actions=two))
        sure = (packed, codec.unpack(packed), world.successors(state, jnp.asarray([*two, *two])))
        return jax.tree.leaves((*drawn, record, records.unpack(record))), jax.tree.leaves(sure)

    plain = drawn()
    with jax.enable_x64(True):
        wide = drawn()
    for one, other in zip(plain[0] + plain[1], wide[0] + wide[1], strict=True):
        assert one.dtype == other.dtype
    for one, other in zip(plain[1], wide[1], strict=True):
        np.testing.assert_array_equal(one, other)


def test_habits_and_numbers_by_goal(double):
    """Shares nu_h of a habit per goal; inverse temperatures per goal; goals pursued as often."""
    _, table, params = golden("dag_2h2r")
    plain = solve(table, params)
    rng = np.random.default_rng(0)
    habit = rng.dirichlet(np.ones(2), plain.pi_h.shape[:3])
    found = solve(table, params._replace(nu_h=(0.0, 0.25, 1.0, 1.0)), habit=habit)
    on = ~np.asarray(table.terminal) & ~np.asarray(table.achieved, bool)
    np.testing.assert_allclose(found.pi_h[:, 0], plain.pi_h[:, 0])
    for goal in (2, 3):
        where = on[:, goal]
        np.testing.assert_allclose(found.pi_h[:, goal][where], habit[:, goal][where])
    assert not np.allclose(found.pi_h[:, 1], plain.pi_h[:, 1], atol=1e-3)
    even = solve(table, params._replace(beta_h=(0.0, params.beta_h, 0.0, params.beta_h)))
    np.testing.assert_allclose(even.pi_h[:, 2][on[:, 2]], 0.5)
    np.testing.assert_allclose(even.pi_h[:, 3], plain.pi_h[:, 3])
    with pytest.raises(ValueError, match="power.nu_h=.*: give a share"):
        solve(table, params._replace(nu_h=(0.0, 2.0, 0.0, 0.0)))
    same = solve(table, params, goal_prob=3.0 * np.asarray(table.goal_weight))
    np.testing.assert_allclose(same.Q_r, plain.Q_r)
    first = np.zeros(table.goal_weight.shape)
    first[:, 0] = 1.0  # all pursue goal 0: Q_r is that of their policies for it
    sure = np.broadcast_to(np.asarray(plain.pi_h)[:, :1], plain.pi_h.shape)
    sure = np.where(np.asarray(table.terminal)[None, None, :, None], 0.5, sure)
    found = solve(table, params, human_policy=sure, goal_prob=first)
    np.testing.assert_allclose(found.Q_r, solve(table, params, human_policy=sure).Q_r)
    drawn = solve(table, params, goal_prob=first)
    assert not np.allclose(drawn.Q_r, plain.Q_r, rtol=1e-3)
    with pytest.raises(ValueError, match=r"give \[H, G\] = \(2, 4\), none negative"):
        solve(table, params, goal_prob=first[:, :2])
    world = power.tabular_world(table, plain, goal_prob=first)
    keys = jax.random.split(jax.random.key(0), 9)
    assert not np.any(jax.vmap(lambda key: power.draw_goals(world, key))(keys))
