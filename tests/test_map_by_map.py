"""What humans reach map by map: listed maps against the same maps listed by the usual route."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import map_by_map
from experiments.map_by_map import Sizes, in_words, known_by_map, reached_by_map, row
from mbx.commands.results import read_rows, write_rows
from mbx.empo import multigrid as mg
from mbx.empo.multigrid.export import TooManyStates
from mbx.empo.multigrid.family import family_world, make_family
from mbx.empo.power.worlds import dense_successors
from mbx.power import HumanModel, PowerParams, World, solve_assistance

# A rock before the human, which only the robot can push away; no rock, the robot itself in the way.
MAPS = ("######\n##.###\n#>o..#\n##4###\n######", "######\n##.###\n#>2.##\n######\n######")
GOALS = [[1, 1, 4, 3], [3, 2, 4, 2]]  # anywhere, the far end
HORIZON, GAMMA = 9, 0.9
SIZES = Sizes(episodes=16_000, length=2 * HORIZON, batch=1_024)  # longer than the worlds last
PARAMS = PowerParams(gamma_h=GAMMA, gamma_r=0.9, beta_r=15.0, zeta=1.0)
PATHS = HumanModel("paths")


def layouts():
    return [mg.parse_map(text, goals=GOALS, horizon=HORIZON) for text in MAPS]


def reached(following, prob, over, achieved, humans, robot, length):
    """The share of goals, equally likely, that a human reaches from state 0, over all outcomes.

    following, prob `[S, J, K]`, joint action a + A r; achieved `[G, S]`, humans `[G, S, A]`, robot
    `[G, S, R]`, which may know the goal.
    """
    total = []
    for goal, own in enumerate(achieved):
        joint = np.einsum("sa,sr->sra", humans[goal], robot[goal]).reshape(len(over), -1)
        moves = (joint[..., None] * prob)[~over]
        at, there = np.zeros(len(over)), 0.0
        at[0] = 1.0
        for _ in range(length):
            mass = at[~over][:, None, None] * moves
            at = np.bincount(following[~over].ravel(), mass.ravel(), len(over))
            there += at[own].sum()
            at[own] = 0.0
        total.append(there)
    return float(np.mean(total))


def usual(layout):
    """What is reached beside the helper and the exact robot, and how many states there are, by
    `make_world`."""
    found = mg.make_world(layout, PATHS, params=PARAMS)
    table, solution = found.table, found.solution
    best = np.asarray(solve_assistance(table, solution.pi_h, GAMMA).q)[:, 0]
    helper = np.eye(best.shape[-1])[best.argmax(axis=-1)]
    exact = np.broadcast_to(np.asarray(solution.pi_r), best.shape)
    over, achieved = np.asarray(table.terminal, bool), np.asarray(table.achieved[0], bool)
    given = *dense_successors(table), over, achieved, np.asarray(solution.pi_h)[0]
    return *(reached(*given, robot, SIZES.length) for robot in (helper, exact)), len(over)


@pytest.mark.slow
def test_maps_of_a_family_are_solved_as_they_are_alone(tmp_path):
    family = make_family(layouts())
    world = family_world(family, [0, 1], PATHS)
    want = [usual(layout) for layout in layouts()]
    assert not {2048, 1024} & {num for *_, num in want}  # so that there are states to put in
    path = str(tmp_path / "maps.csv")
    drawn = known_by_map(world, family, "two", 2, PARAMS, SIZES, path)
    rows = read_rows(path)
    assert [int(row["states"]) for row in rows] == [2048, 1024]
    programs = map_by_map.make_programs(world, family.template)
    for number, (helper, exact, num) in enumerate(want):
        assert 0.55 < exact < helper - 0.01 < 0.99  # it matters who the robot is
        one, goals = map_by_map.list_map(family, number, programs, PARAMS, SIZES)
        assert goals.tolist() == [[0], [1]]
        assert one.over[num:].all() and not one.over[:num].all()
        best = np.asarray(one.best)[:, 0]
        helps = np.eye(best.shape[-1])[best.argmax(axis=-1)]
        solved = np.broadcast_to(one.pi_r, helps.shape)
        humans, achieved = np.moveaxis(one.policy[:, 0], 0, 1), one.achieved[:, 0].T
        given = one.following, one.prob, one.over, achieved, humans
        for robot, name, exactly in ((helps, "helper", helper), (solved, "exact", exact)):
            assert reached(*given, robot, SIZES.length) == pytest.approx(exactly, abs=1e-4)
            error = np.sqrt(exactly * (1.0 - exactly) / SIZES.episodes)
            assert drawn[name][number] == pytest.approx(exactly, abs=4 * error + 1e-3)
    # A map that is too large for an exact robot has its helper; what is in the file stays.
    few = SIZES._replace(exact_states=1024)
    again = known_by_map(world, family, "two", 2, PARAMS, few, path, humans="others")
    np.testing.assert_array_equal(again["helper"], drawn["helper"])
    assert np.isnan(again["exact"][0]) and again["exact"][1] == drawn["exact"][1]
    assert read_rows(path)[:2] == rows and len(read_rows(path)) == 4
    with pytest.raises(TooManyStates, match="more than 700 reachable"):
        map_by_map.list_map(family, 0, programs, PARAMS, SIZES._replace(states=700))


def test_what_a_file_has_is_not_computed_again(tmp_path, capsys):
    family = make_family(layouts())
    world, path = family_world(family, [0, 1], PATHS), str(tmp_path / "maps.csv")
    own = in_words(PARAMS, length="12")
    rows = [
        {"world": world_, "map": number, "power": power, "states": "8", "helper": h, "exact": e}
        for world_, number, power, h, e in (
            ("two", "2", own, "0.25", "nan"),
            ("two", "1", own, "0.75", "0.5"),
            ("two", "1", in_words(PARAMS), "0.1", "0.1"),
            ("other", "1", own, "0.2", "0.2"),
        )
    ]
    write_rows(path, rows)
    none = Sizes(states=0)  # that no map has
    got = known_by_map(world, family, "two", 2, PARAMS, none, path, length="12")
    np.testing.assert_array_equal(got["helper"], [0.75, 0.25])
    np.testing.assert_array_equal(got["exact"], [0.5, np.nan])
    assert read_rows(path) == rows and capsys.readouterr().out == ""


def test_numbers_are_known_by_what_they_depend_on():
    words = "gamma_h=0.9 gamma_r=0.9 beta_r=15 zeta=1 xi=1 eta=1.1"
    assert in_words(PARAMS) == words  # as it stands in docs/results/empo_layouts_maps.csv
    assert in_words(PARAMS._replace(nu_h=0.25)) == f"{words} nu_h=0.25"
    assert in_words(PARAMS._replace(reduce="sum"), length="9") == f"{words} reduce=sum length=9"


class _Place(NamedTuple):
    grid: Any
    goals: Any


class _State(NamedTuple):
    place: _Place
    time: Any


def _three_maps():
    """Maps told apart by grid and goals together; episodes begin on the first two, and the human
    gets there on the first, or on both if the robot does 1."""
    grids, goals = jnp.array([[[1]], [[1]], [[2]]]), jnp.array([[3], [4], [3]])
    state = lambda n: _State(_Place(grids[n], goals[n]), jnp.int32(0))  # noqa: E731
    return World(
        *(1, 1, 2, 1, 1, None, state(0)),
        init=lambda key: state(jax.random.randint(key, (), 0, 2)),
        successors=lambda s, joint: (
            jax.tree.map(lambda x: x[None], s._replace(time=s.time + joint[1])),
            jnp.ones(1),
            jnp.bool_(False),
        ),
        terminal=lambda s: jnp.bool_(False),
        achieved=lambda s: ((s.place.goals == 3) | (s.time > 2))[:, None],
        human_policy=lambda s: jnp.full((1, 1, 2), 0.5),
        features=lambda s: jnp.zeros(1),
        index=lambda s: jnp.int32(0),
        goal_features=jnp.zeros((1, 1, 1)),
        goal_weight=jnp.ones((1, 1)),
    ), np.array([[1, 3], [1, 4], [2, 3]])


def test_episodes_are_counted_for_the_map_they_are_on():
    world, grids = _three_maps()
    key = jax.random.key(0)
    for action, length, want in ((1, 3, 1.0), (1, 2, 0.0)):
        robot = lambda state, key, action=action: jnp.int32(action)  # noqa: E731
        got = reached_by_map(world, robot, grids, key, episodes=16, length=length)
        np.testing.assert_array_equal(got, [1.0, want, np.nan])


def test_a_row_is_of_means_over_maps_and_of_pairs_on_one_map():
    learned, other = np.array([0.5, 0.9, 0.7, 0.3]), np.array([0.2, np.nan, 0.5, 0.5])
    got = row("held out", "exact", other, learned)
    gain = np.array([0.3, 0.2, -0.2])
    assert got == {
        "maps": "held out",
        "number": 3,
        "robot": "exact",
        "reached": pytest.approx(0.4),
        "reached_error": pytest.approx(np.sqrt(0.03 / 3)),
        "learned_above": pytest.approx(0.1),
        "learned_above_error": pytest.approx(np.sqrt(gain.var() * 3 / 2 / 3)),
    }
