"""Small parts of EMPO's targets and evaluation by hand."""

from __future__ import annotations

import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from matplotlib import figure

from mbx import envs
from mbx.empo import suite
from mbx.empo.agent import agent, diagnostics, evaluation, targets
from mbx.empo.agent.game import Game
from mbx.empo.power.codec import make_codec, make_records
from mbx.empo.power.worlds import Views, World
from tests.empo.helpers import TABLES, exact_tables, load, problem_of, settings_of, train_state


@pytest.mark.parametrize(
    ("model", "loss", "wanted"),
    [
        ({}, {}, dict(v_h_e=20, q_r=20)),
        (TABLES, {}, dict(v_h_e=1, q_r=1)),
        ({}, dict(target_interval=7, target_intervals=("q_r=3",)), dict(v_h_e=7, q_r=3)),
        (dict(kind="mixed", q_r="table", u_r="network"), {}, dict(v_h_e=20, q_r=1, u_r=20)),
    ],
)
def test_how_often_parameters_are_copied(model, loss, wanted):
    settings = settings_of(model=model, loss=loss)
    assert problem_of(load("dag_2h2r"), settings).target_intervals == wanted
    with pytest.raises(ValueError, match=r"target_intervals names \['x_h'\]: nothing holds it"):
        problem_of(load("dag_2h2r"), settings_of(loss=dict(target_intervals=("x_h=3",))))


def test_copies_are_made_after_every_interval_of_updates():
    problem = SimpleNamespace(target_intervals={"w": 3, "other": 2}, target_rate=0.0)
    now, then = {"w": 1.0, "other": 5.0}, {"w": 2.0, "other": 6.0}
    for step, copied in ((0, False), (1, False), (2, True), (3, False), (5, True)):
        train = agent._advance(problem, train_state(now, step, then))
        assert int(train.step) == step + 1 and train.params is now
        assert float(train.target["w"]) == (1.0 if copied else 2.0)
        assert float(train.target["other"]) == (5.0 if step % 2 else 6.0)
    assert agent._advance(problem, train_state(now, 2)).target is None


def test_copies_follow_the_parameters_by_a_share_of_the_way():
    problem = SimpleNamespace(target_rate=0.25)
    train = train_state({"w": 1.0}, target={"w": 2.0})
    for wanted in (1.75, 1.5625, 1.421875):
        train = agent._advance(problem, train)
        assert float(train.target["w"]) == wanted and train.params == {"w": 1.0}
    problem = problem_of(load("dag_2h2r"), settings_of(loss=dict(target_rate=0.25)))
    assert problem.target_rate == 0.25


def test_what_is_broken_or_lost_is_no_target():
    """Of two human profiles the second is never played in row 0, and only for goal 1 in row 1."""
    nan, inf = jnp.nan, jnp.inf
    weight = jnp.asarray([[1.0, 0.0], [0.5, 0.5], [1.0, 0.0]])
    entry = jnp.asarray([[[[1.0, 0.0]] * 2], [[[1.0, 0.0], [0.5, 0.5]]], [[[1.0, 0.0]] * 2]])
    human = targets.Profiles(jnp.zeros((3, 2, 1), jnp.int32), weight, entry, jnp.ones((3, 1, 2)))
    q = jnp.asarray([[-2.0, nan, -1.5], [-inf, -3.0, -4.0], [nan] * 3])
    v = jnp.asarray([[[0.5, inf]], [[0.25, 0.75]], [[nan, nan]]])
    known = jnp.ones((3, 3), bool).at[0, 2].set(False)
    lost = jnp.zeros((3, 2, 3), bool).at[:, 1, 2].set(True)
    made = targets.Targets(q, known, v, human.coverage, q, q)
    mask = jnp.asarray([True, True, False])
    found, told = jax.jit(targets.checked)(made, lost, human, mask)
    np.testing.assert_array_equal(found.q_r[:2], [[-2.0, -1.0, -1.5], [-1.0, -3.0, -4.0]])
    np.testing.assert_array_equal(found.known[:2], [[True, False, False], [False, True, False]])
    np.testing.assert_array_equal(found.v_h_e[:2], [[[0.5, 0.0]], [[0.25, 0.75]]])
    np.testing.assert_array_equal(found.coverage[:2], [[[1.0, 0.0]], [[1.0, 0.0]]])
    # Shares are of the actions of rows that exist.
    np.testing.assert_allclose([told["broken_targets"], told["lost_targets"]], [2 / 6, 1 / 6])
    _, told = targets.checked(made, lost, human, jnp.zeros(3, bool))
    assert float(told["lost_targets"]) == float(told["broken_targets"]) == 0.0


def test_numbers_of_episodes():
    reached = np.array([[True, True], [True, False], [False, False], [True, True]])
    value = np.array([[0.5, 1.0], [0.25, 0.0], [0.0, 0.0], [1.0, 1.0]])
    told = evaluation.summarise(reached, value)
    assert told == {
        "reached": 0.625,
        "reached_error": np.std([1.0, 0.5, 0.0, 1.0]) / 2,
        "discounted": value.mean(),
        "discounted_error": np.std([0.75, 0.125, 0.0, 1.0]) / 2,
        "all_reached": 0.5,
    }


def corridor(length):
    """One human walks right for ever along cells 0, 1, ...; goals are to be at cell 1 or 3. The
    robot's second action holds everybody back. The last cell ends the episode."""

    def successors(state, actions):
        new = jnp.where(actions[1] == 1, state, jnp.minimum(state + 1, length - 1))
        return new[None], jnp.ones(1), jnp.ones(1, bool)

    fields = dict.fromkeys(World._fields)
    return World(**fields)._replace(
        num_humans=1,
        num_robots=1,
        num_actions=2,
        init=lambda key: jnp.int32(0),
        successors=successors,
        terminal=lambda state: state == length - 1,
        achieved=lambda state: (state == jnp.asarray([1, 3]))[None],
        goal_weight=jnp.full((1, 2), 0.5),
        human_policy=lambda state: jnp.broadcast_to(jnp.asarray([1.0, 0.0]), (1, 2, 2)),
    )


def test_what_is_reached_and_when():
    world, length = corridor(5), 6

    played = jax.jit(
        lambda key: evaluation.play(
            world, evaluation.frozen_policy, key, episodes=8, length=length, gamma=0.5
        )
    )(jax.random.key(0))
    goals = np.asarray(played.goals)[:, 0]
    assert set(goals) == {0, 1} and np.asarray(played.reached).all()
    np.testing.assert_allclose(played.value[:, 0], np.where(goals == 0, 1.0, 0.25))
    np.testing.assert_array_equal(played.states, [[0, 1, 2, 3, 4, 4, 4]] * 8)
    np.testing.assert_array_equal(played.over, [[False] * 5 + [True] * 2] * 8)
    held = jax.jit(
        lambda key: evaluation.play(world, lambda s, k: jnp.int32(1), key, episodes=2, length=2)
    )(jax.random.key(0))
    assert not np.any(held.reached) and not np.any(held.value) and not np.any(held.states)


def seen_world():
    """Two humans on 3 x 2 cells; a state's number is where the first is, the second is opposite."""

    def positions(state):
        x, y = state % 3, state // 3
        return jnp.stack([jnp.stack([x, y]), jnp.stack([2 - x, 1 - y])])

    return SimpleNamespace(
        views=SimpleNamespace(
            size=(3, 2),
            positions=positions,
            blocked=np.array([[False, True, False], [False, False, False]]),
            walls=None,
            render=lambda state, goals: (10 * state + goals[0]) * jnp.ones((1, 1, 3), jnp.int32),
        )
    )


def episodes_of(states, over, goals=None):
    none = np.zeros((len(states), 2))
    goals = np.zeros((len(states), 2), int) if goals is None else goals
    return evaluation.Episodes(goals, none > 0, none, np.asarray(states), np.asarray(over, bool))


def test_a_map_of_values_is_their_mean_by_the_humans_cell():
    states, over = [[0, 4, 4], [4, 5, 5]], [[0, 0, 1], [0, 0, 1]]
    values = np.random.default_rng(0).uniform(size=(6, 2, 1))
    mean, count = diagnostics.value_map(seen_world(), episodes_of(states, over), values)
    there = {}
    for number, (state, ended) in enumerate(zip(np.ravel(states), np.ravel(over), strict=True)):
        x, y = state % 3, state // 3
        for human, cell in ((0, (y, x)), (1, (1 - y, 2 - x))):
            if not ended:
                there.setdefault((human, *cell), []).append(values[number, human, 0])
    assert count.sum() == 8 and mean.shape == (2, 1, 2, 3)
    for index in np.ndindex(2, 2, 3):
        held = there.get(index, [])
        assert count[index] == len(held)
        wanted = np.mean(held) if held else 0.0
        np.testing.assert_allclose(mean[index[0], 0, index[1], index[2]], wanted)


def test_a_map_is_drawn_a_row_a_human_and_a_column_a_goal(monkeypatch):
    drawn = []
    monkeypatch.setattr(figure.Figure, "savefig", lambda self, *_, **__: drawn.append(self))
    mean = np.random.default_rng(0).uniform(size=(2, 3, 2, 3))
    count = np.array([[[1, 0, 2], [0, 0, 1]], [[1, 1, 1], [0, 3, 1]]])
    diagnostics.draw_map(mean, count, seen_world())
    np.testing.assert_allclose(drawn[0].get_size_inches(), (1.0 + 3 * 2.2, 0.6 + 2 * 2.3))
    for number, (human, goal) in enumerate(np.ndindex(2, 3)):
        axis = drawn[0].axes[number]
        assert axis.get_title() == f"human {human + 1}, goal {goal + 1}"
        shown, wall = (np.ma.filled(image.get_array(), np.nan) for image in axis.images)
        np.testing.assert_array_equal(shown, np.where(count[human] > 0, mean[human, goal], np.nan))
        np.testing.assert_array_equal(wall, [[np.nan, 1.0, np.nan], [np.nan] * 3])
        assert [image.get_clim() for image in axis.images] == [(0.0, 1.0), (0.0, 1.5)]


def test_frames_are_of_the_first_episodes_with_the_last_state_twice():
    states = [[0, 1, 2], [3, 4, 4], [5, 5, 5], [1, 2, 3]]
    over = [[0, 0, 0], [0, 0, 1], [0, 1, 1], [0, 0, 0]]
    goals = np.array([[1, 0], [2, 0], [3, 0], [4, 0]])
    frames = diagnostics._frames(seen_world(), episodes_of(states, over, goals))
    wanted = [1, 11, 21, 21, 32, 42, 42, 53, 53]
    assert [int(frame[0, 0, 0]) for frame in frames] == wanted


def test_what_each_robot_lets_humans_reach_is_told_beside_pictures_of_the_learned(monkeypatch):
    """Of four episodes humans reach their goal in one, two or none, by the robot."""
    for name, does in (("learned_policy", 1), ("random_policy", 2)):
        monkeypatch.setattr(evaluation, name, lambda *_, does=does: lambda *_: jnp.int32(does))

    def play(world, policy, key, *, episodes, length, gamma):
        number = jnp.arange(episodes)[:, None]
        reached = number < policy(jnp.int32(0), key)
        states = number + jnp.arange(length + 1)[None]
        return evaluation.Episodes(0 * number, reached, gamma * reached, states, states > 5)

    monkeypatch.setattr(evaluation, "play", play)
    drawn = []
    monkeypatch.setattr(
        diagnostics, "looks", lambda problem, train, played: played.states + train.params
    )
    monkeypatch.setattr(diagnostics, "pictures", lambda *given: drawn.append(given) or {"x": b"y"})
    world, params = seen_world(), SimpleNamespace(gamma_h=0.5)
    problem = SimpleNamespace(world=world, params=params, held_out=None)
    train = train_state(jnp.int32(1))
    look = diagnostics.make_diagnostics(problem, 4, 2)
    found = look(train, None, jax.random.key(0))
    errors = {1: np.sqrt(3) / 8, 2: 0.25, 0: 0.0}
    assert found.metrics == pytest.approx(
        {
            f"{what}_{robot}{ending}": number
            for robot, num in (("learned", 1), ("random", 2), ("frozen", 0))
            for what, ending, number in (
                ("reached", "", num / 4),
                ("reached", "_error", errors[num]),
                ("all_reached", "", num / 4),
            )
        }
    )
    # Beside the maps held out as many more are told, of episodes on these.
    elsewhere = []
    beside = lambda world, *given, **sizes: elsewhere.append(world) or play(world, *given, **sizes)  # noqa: E731
    monkeypatch.setattr(evaluation, "play", beside)
    problem.held_out = other = seen_world()
    more = diagnostics.make_diagnostics(problem, 4, 2)(train, None, jax.random.key(0)).metrics
    new = {name.replace("reached_", "reached_new_"): x for name, x in found.metrics.items()}
    assert more == pytest.approx(found.metrics | new)
    assert [one is other for one in elsewhere] == [False, True]
    assert found.files == {"x": b"y"} and len(drawn) == 2
    shown, learned, looked = drawn[0]
    assert shown is world
    np.testing.assert_array_equal(learned.reached[:, 0], [True, False, False, False])
    np.testing.assert_array_equal(looked, np.arange(4)[:, None] + np.arange(3) + 1)


def test_pictures_of_many_maps_are_of_the_first_that_is_held_out(monkeypatch):
    begun = []

    def play(world, policy, key, *, episodes, length, gamma):
        begun.append((world, episodes))
        none = jnp.zeros((episodes, 1))
        return evaluation.Episodes(none, none, none, none + world.init(key), none)

    monkeypatch.setattr(evaluation, "play", play)
    monkeypatch.setattr(diagnostics, "looks", lambda problem, train, played: played.states)
    drawn = []
    monkeypatch.setattr(diagnostics, "pictures", lambda *given: drawn.append(given) or {})
    views = Views(None, None, (3, 2), np.zeros((2, 3), bool), walls=lambda state: None)
    worlds = [
        World(*[None] * 6, jnp.int32(first), lambda key: jnp.int32(0), *[None] * 8, views=views)
        for first in (5, 7)
    ]
    for held_out, first in ((worlds[1], 7), (None, 5)):
        given = SimpleNamespace(world=worlds[0], params=SimpleNamespace(gamma_h=0.5))
        given.held_out = held_out
        train = train_state(jnp.int32(1))
        diagnostics.make_diagnostics(given, 100, 2)(train, None, jax.random.key(0))
        assert begun[-1][1] == diagnostics.ON_ONE_MAP
        world, played, looked = drawn.pop()
        assert world is worlds[0] and not drawn
        np.testing.assert_array_equal(played.states, np.full((64, 1), first))
        np.testing.assert_array_equal(looked, played.states)


def test_what_is_drawn_of_states_is_what_was_learned_of_them():
    found = load("dag_2h2r")
    problem = problem_of(found, settings_of(model=TABLES, power=dict(zeta=2.0, source="config")))
    tables = exact_tables(found)
    train = train_state(tables, 10**6)
    states = np.array([[0, 3, 5], [2, 1, 0]])
    looks = jax.jit(functools.partial(diagnostics.looks, problem))
    values = looks(train, episodes_of(states, states < 0))
    v_h_e = np.asarray(tables["v_h_e"])[states.reshape(-1)]
    np.testing.assert_allclose(values[..., :-1], v_h_e, rtol=1e-6)
    x_h = (np.asarray(found.world.goal_weight) * v_h_e**2).sum(axis=-1)
    np.testing.assert_allclose(values[..., -1], x_h, rtol=1e-5)


def test_files_are_an_episode_and_maps_with_the_walls_of_theirs(monkeypatch):
    drawn = []
    monkeypatch.setattr(diagnostics, "draw_map", lambda *given, **more: drawn.append((given, more)))
    world = seen_world()
    world.num_humans, world.num_goals, world.num_robots, world.num_actions = 2, 1, 2, 2
    world.views.render = lambda state, goals: jnp.zeros((8, 8, 3), jnp.uint8)
    played = episodes_of([[0, 4]], [[0, 0]])
    looked = np.random.default_rng(0).uniform(size=(2, 2, 2))
    files = diagnostics.pictures(world, played, looked)
    assert list(files) == ["episode.gif", "value_map.png"]
    assert files["episode.gif"][:4] == b"GIF8"
    (values,) = drawn
    np.testing.assert_array_equal(values[0][0], diagnostics.value_map(world, played, looked)[0])
    assert values[1]["titles"][1] == ["human 2, goal 1", "$X_2$"]
    assert values[1]["blocked"] is world.views.blocked
    world.views.walls = lambda state: jnp.full((2, 3), state == 0)
    diagnostics.pictures(world, played, looked)
    assert drawn[-1][1]["blocked"].all()


def test_humans_act_at_random_wherever_they_act():
    """`humans.epsilon`: in environments, next to robots, in games; not in what is learned from."""
    world = corridor(5)._replace(
        num_humans=2,
        num_actions=8,
        max_successors=1,
        example_state=jnp.int32(0),
        # The state is what the second human has done.
        successors=lambda state, actions: (actions[1:2], jnp.ones(1), jnp.bool_(False)),
        terminal=lambda state: state < 0,
        achieved=lambda state: jnp.zeros((2, 2), bool),
        goal_weight=jnp.full((2, 2), 0.5),
        human_policy=lambda state: jnp.broadcast_to(jax.nn.one_hot(0, 8), (2, 2, 8)),
        views=Views(None, None, None, None, text=lambda *_: "", actions=tuple("abcdefgh")),
    )
    suite.register_world("acting", lambda: world)
    key, frozen, num = jax.random.key(0), evaluation.frozen_policy, 200
    for epsilon, kinds in ((0.0, 1), (1.0, 8)):
        humans = dict(model="world", epsilon=epsilon)
        made = envs.make("empo:acting", num, humans=humans, episode_length=9)
        own = made.spec.world.world
        game, records, codec = Game(own, frozen, key), make_records(own), make_codec(own)

        @jax.jit
        def drawn(keys, made=made, own=own, game=game, records=records, codec=codec):
            _, now = made.step(made.reset(key)[0], jnp.zeros((num, 8)), key)
            turn = lambda k: game._moved(jnp.int32(0), game.goals, jnp.int32(0), k)[0]  # noqa: E731
            return (
                jax.vmap(codec.unpack)(now.obs)[0],
                evaluation.play(own, frozen, key, episodes=num, length=1).states[:, 1],
                jax.vmap(turn)(keys),
                jax.vmap(lambda k: records.draw(jnp.int32(0), k).actions)(keys)[:, 1],
            )

        *acting, learned = drawn(jax.random.split(key, num))
        assert [len(set(np.asarray(x).tolist())) for x in acting] == [kinds] * 3
        assert not np.any(learned)


def test_an_evaluation_computes_only_the_robot_that_plays(monkeypatch):
    """The learned robot is asked once a step of its own episodes, not while others play."""
    asked = []

    def learned(problem, train):
        def policy(state, key):
            jax.debug.callback(lambda _: asked.append(1), state)
            return jnp.int32(0)

        return policy

    monkeypatch.setattr(evaluation, "learned_policy", learned)
    world = corridor(5)._replace(num_actions=2)
    params = SimpleNamespace(gamma_h=0.5)
    problem = SimpleNamespace(world=world, params=params, held_out=None)
    train = train_state(jnp.int32(1))
    found = diagnostics.make_diagnostics(problem, 4, 3)(train, None, jax.random.key(0))
    jax.effects_barrier()
    assert len(asked) == 4 * 3 and found.metrics["reached_learned"] > 0
