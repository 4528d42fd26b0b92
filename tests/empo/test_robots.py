"""Robots to compare with: the best help by hand and by recursion, beliefs by Bayes' rule."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mbx import power
from mbx.empo.agent import evaluation, robots
from mbx.empo.agent.robots import make_robot
from mbx.empo.power.named import NamedWorld
from mbx.empo.power.worlds import dense_successors, tabular_world
from mbx.power import PowerParams, TabularWorld
from tests.empo.helpers import load

KEY = jax.random.key(0)
LEFT, RIGHT = 0, 1


def crossing():
    """A human at 0 goes left to 1 or right to 2; the robot's 0 opens left, its 1 opens right.

    The human moves on with probability 1/2 if the way it takes is open. Goals: to be at 1, at 2.
    """
    rows = []
    for human, robot in itertools.product(range(2), range(2)):
        joint = human + 2 * robot
        moved = [(1 + human, 0.5), (0, 0.5)] if human == robot else [(0, 1.0)]
        rows += [(0, joint, following, p) for following, p in moved]
        rows += [(s, joint, s, 1.0) for s in (1, 2)]
    state, joint, following, prob = (np.array(column) for column in zip(*rows, strict=True))
    table = TabularWorld(
        *(state, joint, following, prob),
        terminal=np.zeros(3, bool),
        achieved=np.array([[[0, 1, 0], [0, 0, 1]]]),
        goal_weight=np.array([[0.5, 0.5]]),
        humans=np.array([0]),
        robots=np.array([1]),
        num_actions=2,
        num_states=3,
    )
    # Who wants left goes left with 0.9, who wants right right with 0.8.
    prior = np.array([[[0.9, 0.1]] * 3, [[0.2, 0.8]] * 3])[None]
    solution = power.solve(table, PowerParams(), human_policy=prior)
    return NamedWorld(tabular_world(table, solution), PowerParams(), table, solution), prior


def test_the_best_help_by_hand():
    found, prior = crossing()
    best = power.solve_assistance(found.table, prior, 0.5)
    assert best.goals.tolist() == [[0], [1]] and float(best.residual) <= 1e-6
    # Open: arrives with p = .9 / 2 in a step, v = p + (1 - p) v / 2; closed: v / 2 a step later.
    v = [0.45 / (1 - 0.55 / 2), 0.4 / (1 - 0.6 / 2)]
    # The wrong way opened: it is taken with .1 and .2, and leads away for good half of the times.
    wrong = [(1 - 0.05) * v[0] / 2, (1 - 0.1) * v[1] / 2]
    np.testing.assert_allclose(best.q[0, 0, 0], [v[0], wrong[0]], rtol=1e-4)
    np.testing.assert_allclose(best.q[1, 0, 0], [wrong[1], v[1]], rtol=1e-4)
    assert not np.any(best.q[:, 1])  # who has arrived counts no more
    np.testing.assert_allclose(best.q[0, 0, 1], 1.0)  # at the goal, and again after the step


def by_recursion(table, prior, goals, gamma):
    """The value of the first state by recursion, one human action after the other."""
    following, prob = dense_successors(table)
    humans, num = np.asarray(table.humans), int(table.num_actions)
    robots, known = np.asarray(table.robots), {}

    def value(state, arrived):
        if table.terminal[state] or all(arrived):
            return 0.0
        if (state, arrived) not in known:
            options = []
            for robot in itertools.product(range(num), repeat=len(robots)):
                total = 0.0
                for human in itertools.product(range(num), repeat=len(humans)):
                    joint = sum(a * num**i for i, a in zip(robots, robot, strict=True))
                    joint += sum(a * num**i for i, a in zip(humans, human, strict=True))
                    own = [prior[h, goals[h], state, a] for h, a in enumerate(human)]
                    for k, p in enumerate(prob[state, joint]):
                        after = following[state, joint, k]
                        there = [bool(table.achieved[h, g, after]) for h, g in enumerate(goals)]
                        new = tuple(a or t for a, t in zip(arrived, there, strict=True))
                        gain = (sum(new) - sum(arrived)) / len(humans)
                        if p > 0:
                            total += np.prod(own) * p * (gain + gamma * value(int(after), new))
                options.append(total)
            known[state, arrived] = max(options)
        return known[state, arrived]

    return value(0, (False,) * len(humans))


def test_the_best_help_for_two_humans_by_recursion():
    found = load("dag_2h2r")
    prior = np.asarray(found.solution.pi_h)
    best = power.solve_assistance(found.table, prior, 0.9)
    assert best.q.shape == (16, 4, 36, 4)
    goals = np.asarray(best.goals)
    np.testing.assert_array_equal(goals[6], [2, 1])  # human 0 fastest
    for number in (0, 6, 9):
        wanted = by_recursion(found.table, prior, goals[number], 0.9)
        assert float(best.q[number, 0, 0].max()) == pytest.approx(wanted, abs=1e-5)


def test_what_cannot_be_helped_is_refused(monkeypatch):
    found, prior = crossing()
    with pytest.raises(ValueError, match="has shape"):
        power.solve_assistance(found.table, prior[0], 0.5)
    with pytest.raises(ValueError, match="gamma=1.0: give a discount"):
        power.solve_assistance(found.table, prior, 1.0)
    monkeypatch.setattr("mbx.empo.power.assistance.LARGEST", 10)
    with pytest.raises(ValueError, match="1 humans with 2 goals in 3 states: too many"):
        power.solve_assistance(found.table, prior, 0.5)


def test_a_helper_knows_the_goals_and_counts_arrivals_once():
    found, _ = crossing()
    helper = make_robot("helper", found, 0.5)
    for goal, open_way in ((0, LEFT), (1, RIGHT)):
        memory = helper.begin(jnp.array([goal]))
        assert int(helper.act(memory, jnp.int32(0), KEY)) == open_way
        wrong = jnp.array([1 - goal])  # an action that who wants the other goal takes
        same = helper.observe(memory, jnp.int32(0), wrong, jnp.int32(2 - goal))
        assert int(helper.act(same, jnp.int32(0), KEY)) == open_way
        there = helper.observe(memory, jnp.int32(0), jnp.array([0]), jnp.int32(1 + goal))
        assert int(helper.act(there, jnp.int32(0), KEY)) == 0  # nothing left to do: the first
        back = helper.observe(there, jnp.int32(1 + goal), jnp.array([0]), jnp.int32(0))
        assert int(helper.act(back, jnp.int32(0), KEY)) == 0  # it has arrived before


def test_an_inferring_robot_follows_bayes_rule():
    found, prior = crossing()
    robot = make_robot("inferring", found, 0.5)
    memory = robot.begin(jnp.array([1]))
    np.testing.assert_allclose(np.exp(memory[0]), [[0.5, 0.5]], rtol=1e-6)
    assert not np.any(memory[1])
    value = np.asarray(power.solve_assistance(found.table, prior, 0.5).q)[:, 0, 0]
    assert int(robot.act(memory, jnp.int32(0), KEY)) == (0.5 * value.sum(0)).argmax() == LEFT
    belief = np.array([0.5, 0.5])
    for action, wanted in ((RIGHT, RIGHT), (LEFT, RIGHT), (LEFT, LEFT), (RIGHT, RIGHT)):
        memory = robot.observe(memory, jnp.int32(0), jnp.array([action]), jnp.int32(0))
        belief = belief * prior[0, :, 0, action]
        belief = belief / belief.sum()
        np.testing.assert_allclose(jax.nn.softmax(memory[0])[0], belief, rtol=1e-4)
        assert (belief @ value).argmax() == wanted
        assert int(robot.act(memory, jnp.int32(0), KEY)) == wanted
    # Having been at 1 it may still want to be at 2, and nothing else.
    memory = robot.observe(memory, jnp.int32(0), jnp.array([LEFT]), jnp.int32(1))
    assert np.asarray(memory[1]).tolist() == [[True, False]]
    assert int(robot.act(memory, jnp.int32(0), KEY)) == RIGHT


@pytest.mark.slow
def test_what_humans_reach_beside_helpers_is_what_they_promise():
    found = load("dag_2h2r")
    best = power.solve_assistance(found.table, found.solution.pi_h, 0.9)
    weights = np.asarray(found.world.goal_weight)
    weights = weights / weights.sum(axis=1, keepdims=True)
    chance = [np.prod([weights[h, g] for h, g in enumerate(goals)]) for goals in best.goals]
    promised = float(np.asarray(best.q)[:, 0, 0].max(axis=1) @ np.array(chance))
    got = {}
    for name in ("helper", "inferring"):
        result = evaluation.goal_reaching(
            found.world, make_robot(name, found, 0.9), KEY, episodes=4_000, length=8, gamma=0.9
        )
        got[name] = result["discounted"]
    error = 3 * result["discounted_error"]
    assert abs(got["helper"] - promised) < error and got["inferring"] < promised + error


def test_robots_by_name():
    found, _ = crossing()
    assert int(make_robot("frozen", found, 0.5).act((), jnp.int32(0), KEY)) == 0
    drawn = [int(make_robot("random", found, 0.5).act((), 0, jax.random.key(i))) for i in range(8)]
    assert {*drawn} == {0, 1}
    sure = found.solution._replace(pi_r=jnp.eye(2)[jnp.array([1, 0, 1])])
    exact = make_robot("exact", NamedWorld(found.world, None, found.table, sure), 0.5)
    assert [int(exact.act((), jnp.int32(s), KEY)) for s in range(3)] == [1, 0, 1]
    open_world = NamedWorld(found.world)
    for name in ("exact", "helper", "inferring"):
        with pytest.raises(ValueError, match=f"robot='{name}': this world's states are not"):
            make_robot(name, open_world, 0.5)
    with pytest.raises(ValueError, match="robot='learned': needs a run"):
        make_robot("learned", found, 0.5)
    with pytest.raises(ValueError, match="robot='best': choose one of"):
        make_robot("best", found, 0.5)


def test_a_policy_is_a_robot_without_memory():
    robot = robots.as_robot(lambda state, key: state + 1)
    memory = robot.begin(jnp.array([0]))
    assert memory == () and int(robot.act(memory, jnp.int32(4), KEY)) == 5
    assert robot.observe(memory, 0, jnp.array([0]), 1) == () and robots.as_robot(robot) is robot
