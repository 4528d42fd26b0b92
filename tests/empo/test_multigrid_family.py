"""Many maps in one program: each behaves as it does alone."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mbx.empo import multigrid as mg
from mbx.empo.multigrid import compact, family, generate, packed
from mbx.empo.multigrid.paths import make_paths
from mbx.empo.multigrid.render import make_text
from mbx.empo.multigrid.state import GONE, initial_state
from mbx.empo.power.worlds import make_varied_start
from mbx.power import HumanModel, PowerParams

GOALS = {"goals": [[1, 1, 4, 2], [4, 1, 4, 1]], "horizon": 9, "stumble": 0.5}
# One has what the other lacks; both have a human and a robot, the robot first in the second.
TEXTS = ("######\n#>ok.#\n#uDb2#\n######", "######\n#1L.m#\n#~>k##\n######")


@functools.cache
def pair():
    layouts = [mg.parse_map(text, **GOALS) for text in TEXTS]
    return layouts, family.make_family(layouts)


def pick(tree, number):
    return jax.tree.map(lambda x: x[number], tree)


def test_missing_things_stand_in_the_corner_and_humans_come_first():
    _, made = pair()
    one, two = made.layouts
    assert one.agents.tolist() == [[1, 1, 0], [4, 2, 1]] and one.is_human.tolist() == [True, False]
    assert two.agents.tolist() == [[2, 2, 0], [1, 1, 0]]
    assert one.movable.tolist() == [[2, 1], [3, 2]] and one.heavy.tolist() == [True, False]
    assert two.movable.tolist() == [[0, 0], [0, 0]]
    assert one.magic.tolist() == [[0, 0]] and two.magic.tolist() == [[4, 1]]
    assert two.door_state.tolist() == [2] and two.doors.tolist() == [[2, 1]]
    assert made.template.unsteady.sum() == 1
    lost = family.make_family([mg.parse_map(TEXTS[0].replace("k", "."), **GOALS), *made.layouts])
    assert lost.starts.items[:, 0, 0].tolist() == [GONE, 3, 3]


def test_a_place_gives_its_layout_back():
    _, made = pair()
    for number, layout in enumerate(made.layouts):
        again = family.read_place(made.template, pick(made.places, number))
        for name in set(mg.Layout._fields) - {"agents"}:  # where these are is in the state
            ours, want = getattr(again, name), getattr(layout, name)
            np.testing.assert_array_equal(ours, want, err_msg=name)


def test_states_are_shown_on_their_own_map():
    layouts, made = pair()
    world = family.family_world(made, [0, 1], HumanModel("uniform"))
    assert world.views.size == (6, 4) and len(world.views.actions) == 7
    for number, layout in enumerate(layouts):
        situation = family.Situation(pick(made.places, number), pick(made.starts, number))
        alone = initial_state(layout)
        for goals in (None, jnp.array([1])):
            want = make_text(layout)(alone, goals)
            assert world.views.text(situation, goals) == want
        np.testing.assert_array_equal(world.views.walls(situation), layout.wall)
        assert (
            world.views.positions(situation).tolist() == layout.agents[layout.humans, :2].tolist()
        )


@pytest.mark.slow
def test_pictures_are_of_their_own_map():
    layouts, made = pair()
    world = family.family_world(made, [0, 1], HumanModel("uniform"))
    draw = jax.jit(world.views.render)
    for number, layout in enumerate(layouts):
        situation = family.Situation(pick(made.places, number), pick(made.starts, number))
        for goal in (0, 1):
            goals = jnp.array([goal])
            want = jax.jit(mg.make_render(layout))(initial_state(layout), goals)
            np.testing.assert_array_equal(draw(situation, goals), want)


def walks(layout, grid, key, steps=24):
    """States of a random walk, and the actions taken in them."""

    def step(state, key):
        action_key, chance_key = jax.random.split(key)
        actions = jax.random.randint(action_key, (2,), 0, layout.num_actions)
        states, prob = grid.outcomes(state, actions)
        chosen = jax.random.categorical(chance_key, jnp.log(prob))
        after = jax.tree.map(lambda x: x[chosen], states)
        after = after._replace(time=jnp.minimum(after.time, 5))
        return after, (state, actions)

    start = grid.initial
    return jax.lax.scan(step, start, jax.random.split(key, steps))[1]


@pytest.mark.slow
def test_every_map_behaves_as_it_does_alone():
    layouts, made = pair()
    world = family.family_world(made, [0, 1], HumanModel("paths"), PowerParams(nu_h=0.25))
    for number, layout in enumerate(made.layouts):
        compare(world, made, number, layout)


def compare(world, made, number, layout):
    """One of the maps in the family's world with the same map's own grid, along a walk."""
    grid = mg.make_grid(layout)._replace(initial=pick(made.starts, number))
    states, actions = jax.jit(lambda key: walks(layout, grid, key))(jax.random.key(number))
    num = len(actions)
    assert len(np.unique(np.asarray(states.agents).reshape(num, -1), axis=0)) > 8
    place = pick(made.places, number)
    place = jax.tree.map(lambda x: jnp.broadcast_to(x, (num, *x.shape)), place)
    situations = family.Situation(place, states)
    after, prob, overflow = jax.jit(jax.vmap(world.successors))(situations, actions)
    want, chances = jax.jit(jax.vmap(grid.outcomes))(states, actions)
    assert not np.asarray(overflow).any()
    np.testing.assert_array_equal(after.place.grid[:, 0], place.grid)
    # The family has room for more kinds of chance: what has no probability is left out.
    for row in range(num):
        alone = sorted(listed(pick(want, row), chances[row]))
        together = sorted(listed(pick(after.now, row), prob[row]))
        assert [one[0] for one in alone] == [one[0] for one in together]
        np.testing.assert_allclose(
            [one[1] for one in alone], [one[1] for one in together], atol=1e-6
        )
    alone = jax.jit(jax.vmap(make_paths(layout, 3.0)))(states)
    together = jax.jit(jax.vmap(world.human_policy))(situations)
    np.testing.assert_allclose(together, 0.75 * alone + 0.25 / layout.num_actions, atol=1e-6)
    np.testing.assert_array_equal(
        jax.vmap(world.achieved)(situations), jax.vmap(grid.achieved)(states)
    )
    ends = situations._replace(now=states._replace(time=states.time + 4))
    late = np.asarray(states.time) + 4 >= 9
    np.testing.assert_array_equal(jax.vmap(world.terminal)(ends), late)


def listed(states, prob):
    """Different successors with what each is worth."""
    total = {}
    for number in np.flatnonzero(np.asarray(prob) > 0):
        words = tuple(np.concatenate([np.ravel(x[number]) for x in states]).tolist())
        total[words] = total.get(words, 0.0) + float(prob[number])
    return list(total.items())


OTHERS = {
    "size": ("#####\n#>.1#\n#####", {}),
    "humans": ("######\n#>1>.#\n#....#\n######", {}),
    "robots": ("######\n#>1..#\n#..1.#\n######", {}),
    "goals": ("######\n#>1..#\n#....#\n######", {"goals": [[1, 1, 1, 1]]}),
    "goal_weight": ("######\n#>1..#\n#....#\n######", {"goal_weight": [1, 3]}),
    "horizon 8": ("######\n#>1..#\n#....#\n######", {"horizon": 8}),
    "box": (
        "######\n#>1.B#\n#....#\n######",
        {"legend": {"B": {"type": "box", "holds": {"type": "key"}}}},
    ),
    "kill_button": (
        "######\n#>1.K#\n#..Q.#\n######",
        {"legend": {"Q": {"type": "kill_button", "trigger": "robots"}}},
    ),
}


@pytest.mark.parametrize("what", OTHERS)
def test_maps_that_do_not_go_together_are_named(what):
    text, options = OTHERS[what]
    fields = GOALS | {"goals": [[1, 1, 3, 1], [3, 1, 3, 1]]} | options
    other = mg.parse_map(text, **fields)
    first = mg.parse_map(TEXTS[0], **GOALS)
    with pytest.raises(ValueError, match=f"b.yaml has .*{what}"):
        family.make_family([first, other], ["a.yaml", "b.yaml"])


def test_worlds_of_many_maps_refuse_what_needs_a_list():
    _, made = pair()
    with pytest.raises(ValueError, match="exact' needs a list of states"):
        family.family_world(made, [0], HumanModel("exact"))
    with pytest.raises(ValueError, match="no maps"):
        family.family_world(made, [], HumanModel())
    with pytest.raises(ValueError, match="no map: give at least one"):
        family.make_family([])
    even = family.family_world(made, [0], HumanModel("uniform")).human_policy(None)
    assert even.shape == (1, 2, 7) and float(even[0, 0, 0]) == pytest.approx(1 / 7)


def test_episodes_begin_on_the_chosen_maps():
    _, made = pair()
    keys = jax.random.split(jax.random.key(0), 32)
    for chosen in ([1], [0, 1]):
        world = family.family_world(made, chosen, HumanModel("uniform"))
        begin = jax.jit(jax.vmap(world.init))(keys)
        at = {tuple(place) for place in np.asarray(begin.now.agents)[:, 0, :2].tolist()}
        assert at == {((1, 1), (2, 2))[number] for number in chosen}


def test_what_networks_read_of_a_situation():
    _, made = pair()
    kept = compact.used_channels(made.places)
    features, (channels, rows, columns) = compact.make_features(made.template, kept)
    assert (rows, columns) == (2, 4)
    layout, start = made.layouts[0], pick(made.starts, 0)
    state = start._replace(
        agents=jnp.asarray([[1, 1, 0], [4, 2, 3]], jnp.int8),
        items=jnp.asarray([[-1, 1]], jnp.int8),  # the robot carries the key
        alive=jnp.asarray([1, 0], jnp.int8),
        time=jnp.int32(3),
    )
    seen = np.asarray(jax.jit(lambda now: features(layout, now))(state))
    picture = seen[: channels * 8].reshape(channels, 2, 4)
    rest = seen[channels * 8 :]
    np.testing.assert_allclose(rest[:4], [1 - 3 / 9, 0.5, 0.5, 0.0], atol=1e-6)
    human, robot = rest[4:].reshape(2, 13)  # no map has a button
    wanted = [1 / 5, 1 / 3, 1, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0]
    np.testing.assert_allclose(human, wanted, atol=1e-6)
    wanted = [4 / 5, 2 / 3, 0, 0, 0, 1, 0, 1, 1 / 3, 5 / 7, 0, 1, 0]
    np.testing.assert_allclose(robot, wanted, atol=1e-6)
    looks = picture[-10:-2].reshape(2, 4, 2, 4)
    assert looks.sum() == 1 and looks[0, 0, 0, 0] == 1  # who is out looks nowhere
    assert picture[-2].tolist() == [[1] * 4] * 2  # "anywhere"
    assert picture[-1].tolist() == [[0, 0, 0, 1], [0] * 4]
    look = lambda now: packed.channels(packed.encode(packed.grid_fields(layout, now)))  # noqa: E731
    grid = np.asarray(jax.jit(look)(state))
    used = [number for number in range(40) if grid[number, 1:-1, 1:-1].any()]
    kept = {picture[n].tobytes() for n in range(channels - 10)}
    assert {grid[n, 1:-1, 1:-1].tobytes() for n in used} <= kept and channels < 30


def test_buttons_and_paused_agents_are_read():
    legend = {"P": {"type": "pause_switch", "trigger": "robots", "target": "humans"}}
    text = "######\n#>1PC#\n#..X.#\n######"
    goals = GOALS | {"goals": [[1, 1, 2, 2]]}
    layout = mg.parse_map(text, legend=legend, **goals)
    made = family.make_family([layout])
    layout, start = made.layouts[0], pick(made.starts, 0)
    assert [mg.layout.BUTTONS[k][0] for k in layout.button_kind] == ["p", "c", "d"]
    buttons = np.array(start.buttons)
    buttons[0, 1], buttons[1, 2:], buttons[2, 0] = 1, (4, 2), 0
    state = start._replace(buttons=jnp.asarray(buttons))
    read = lambda now: (  # noqa: E731
        compact.agent_features(layout, now)[:, 10],
        compact.interactive_features(layout, now),
    )
    paused, seen = (np.asarray(x) for x in jax.jit(read)(state))
    assert paused.tolist() == [1.0, 0.0]
    kill, pause, disable, control = np.split(seen, [20, 44, 68])
    assert not kill.any() and seen.shape == (96,)
    np.testing.assert_allclose(pause[:6], [3 / 5, 1 / 3, 1, 0, 1, 1], atol=1e-6)
    np.testing.assert_allclose(disable[:6], [3 / 5, 2 / 3, 0, 0, 1, 1 / 4], atol=1e-6)
    np.testing.assert_allclose(control[:7], [4 / 5, 1 / 3, 1, 1, 0, 4 / 5, 1], atol=1e-6)
    kept = compact.used_channels(made.places)
    features, (channels, *_) = compact.make_features(made.template, kept)
    shape = jax.eval_shape(lambda now: features(layout, now), state).shape
    assert shape == (channels * 8 + 4 + 26 + 96,)


def nearest(closed, ends, cell):
    """0.9^steps by a search of its own from the ends, a cell at a time; 0 where none comes."""
    steps, queue = {end: 0 for end in ends}, list(ends)
    for x, y in queue:
        for after in ((x + 1, y), (x - 1, y), (x, y + 1), (x, y - 1)):
            if after not in steps and not closed[after[1]][after[0]]:
                steps[after] = steps[x, y] + 1
                queue.append(after)
    return 0.9 ** steps[cell] if cell in steps else 0.0


def test_closeness_is_that_of_a_search_of_its_own():
    texts = (("########\n#>o..L.#\n#.b#m#.#\n#..2#.1#\n########", GOALS), (TEXTS[0], GOALS))
    for number, (text, goals) in enumerate(texts):
        made = family.make_family([mg.parse_map(text, **goals)])
        template, layout = made.template, made.layouts[0]
        situation = family.Situation(pick(made.places, 0), pick(made.starts, 0))
        draw = jax.vmap(lambda key, t=template, s=situation: family.scatter(t, key, s))
        states = draw(jax.random.split(jax.random.key(number), 24)).now
        seen = np.asarray(jax.jit(jax.vmap(lambda s, k=layout: compact.closeness(k, s)))(states))
        assert 0.0 < (seen == 0).mean() < 1.0
        kept = compact.used_channels(made.places)
        plain, _ = compact.make_features(template, kept)
        features, of_goals = compact.with_closeness(template, plain)
        read = np.asarray(jax.jit(lambda s, k=layout, f=features: f(k, s))(pick(states, 0)))
        assert of_goals.shape == (1, 2, 3 * len(template.agents) * 5)
        np.testing.assert_array_equal(read[of_goals[0, 1]], seen[0, :, 1].ravel())
        for i, got in enumerate(seen):
            state = jax.tree.map(lambda x, i=i: np.asarray(x[i]), states)
            ends = [
                [(x, y) for x in range(a, c + 1) for y in range(b, d + 1)]
                for a, b, c, d in layout.goals.reshape(-1, 4).tolist()
            ]
            ends += [[tuple(place)] for place in state.movable.tolist()]
            for way, closed in enumerate(closed_cells(layout, state)):
                for end, own in enumerate(ends):
                    for agent, (x, y, look) in enumerate(state.agents.tolist()):
                        moves = np.roll([(1, 0), (0, 1), (-1, 0), (0, -1)], -look, axis=0)
                        around = [(x, y), *((x + dx, y + dy) for dx, dy in moves.tolist())]
                        want = [nearest(closed, own, cell) for cell in around]
                        np.testing.assert_allclose(got[way, end, agent], want, rtol=1e-5)


def closed_cells(layout, state):
    """What ways avoid: all that is shut and robots, all that is shut, what always is."""

    def marked(cells, *others):
        cells = cells.copy()
        for x, y in np.concatenate(others).astype(int).tolist():
            cells[y, x] = True
        return cells.tolist()

    always = np.array(layout.wall | layout.lava)
    always = np.array(marked(always, layout.buttons.reshape(-1, 2)))
    locked = layout.doors[state.doors == mg.layout.LOCKED]
    shut = state.movable, locked, layout.magic
    robots = state.agents[layout.robots, :2]
    return marked(always, *shut, robots), marked(always, *shut), always.tolist()


def test_maps_are_drawn_in_which_a_robot_matters():
    found = generate.generate("doors", 12, seed=3)
    assert [one.movable.tolist() for one in found[:5]] == [
        one.movable.tolist() for one in generate.generate("doors", 5, seed=3)
    ]
    assert {len(one.movable) for one in found} == {1}
    for one in found:
        assert one.wall.shape == (7, 7) and one.goals.shape == (1, 4, 4)
        closed = {(int(x), int(y)) for y, x in np.argwhere(one.wall)}
        closed |= {tuple(place) for place in one.movable.tolist()}
        human = tuple(one.agents[one.is_human][0, :2].tolist())
        own = generate._reach(human, closed)
        inside = [tuple(goal[:2]) in own for goal in one.goals[0, 1:].tolist()]
        assert inside == [True, False, False]
    with pytest.raises(ValueError, match="choose one of .*rocks"):
        generate.generate("caves", 3)


ROOM = ("########", "#...o..#", "#.###..#", "########")


@pytest.mark.parametrize(
    ("rows", "robot", "heading", "most", "helps"),
    [
        (("#######", "#...o.#", "#.#####", "#######"), (3, 1), 0, 30, False),  # onto the goal
        (ROOM, (3, 1), 0, 2, True),  # pushed twice, the rock lies beside the way
        (ROOM, (3, 1), 0, 1, False),
        (ROOM, (3, 1), 3, 2, False),  # it has to turn first
        (ROOM, (6, 2), 2, 30, False),  # from there onto the human
    ],
)
def test_whether_a_robot_can_help(rows, robot, heading, most, helps):
    cells = np.array([list(row) for row in rows])
    far = (6, 2) if len(rows[0]) == 8 else (5, 1)
    assert generate._helps(cells, robot, heading, [(1, 1)], [[far]], most) is helps


def test_how_far_a_human_is_from_the_gap():
    cells = np.array([list(row) for row in ROOM])
    assert generate._steps_to(cells, (1, 2), (4, 1)) == 3
    assert generate._steps_to(cells, (6, 2), (4, 1)) == 2


def test_varied_starts_scatter_what_moves():
    _, made = pair()
    world = family.family_world(made, [0, 1], HumanModel("uniform"))
    start = jax.jit(jax.vmap(make_varied_start(world, 5)))
    found = start(jax.random.split(jax.random.key(0), 200))
    now = jax.tree.map(np.asarray, found.now)
    first = np.asarray(found.place.grid == made.places.grid[0][None]).all(axis=(1, 2))
    assert 60 < first.sum() < 140
    agents, movable = now.agents[first], now.movable[first]
    closed = made.layouts[0].wall.copy()
    closed[1, 3] = closed[2, 2] = True  # the key and the door
    for kind in (agents[:, :, :2], movable):
        assert not closed[kind[..., 1], kind[..., 0]].any()
    cells = np.concatenate([agents[:, :, :2], movable], axis=1).astype(int)
    cells = cells[..., 0] + 6 * cells[..., 1]
    assert all(len(set(row)) == 4 for row in cells.tolist())  # nobody stands on anything
    kept = (movable == made.layouts[0].movable[None]).all(axis=(1, 2))
    assert 0.3 < kept.mean() < 0.7
    assert set(agents[:, 0, 2].tolist()) == {0, 1, 2, 3}
    assert set(now.doors[first][:, 0].tolist()) == {0, 1}
    second = now.movable[~first]
    assert not second.any() and (now.doors[~first] == 2).all()  # nothing there; locked
    lava = made.layouts[1].lava
    at = now.agents[~first]
    assert not lava[at[..., 1], at[..., 0]].any()
