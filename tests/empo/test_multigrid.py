"""The multigrid world: the reference's transitions, objects one by one, maps, EMPO on it."""

from __future__ import annotations

import functools
import io
import pathlib

import imageio.v2 as imageio
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

from mbx.agents.pictures import to_gif, to_png
from mbx.empo import multigrid as mg
from mbx.empo import suite as empo_envs
from mbx.empo.multigrid import dynamics
from mbx.empo.multigrid import state as grid_state
from mbx.empo.multigrid.paths import make_paths
from mbx.empo.power.worlds import check_world
from tests.empo.helpers import programs
from tests.empo.test_multigrid_oracle import WORLDS

FOLDER = pathlib.Path(__file__).parents[1] / "fixtures" / "empo"
GOAL = [[1, 1, 1, 1]]
FIXTURES = {
    "grid_rock_1h1r": (
        "######\n#1o..#\n##>###\n######",
        [[1, 1, 1, 1], [2, 1, 2, 1], [3, 1, 3, 1], [4, 1, 4, 1], [2, 2, 2, 2]],
    ),
    "grid_corridor_2h1r": (
        "#####\n#>.>#\n##1##\n#####",
        [[1, 1, 1, 1], [2, 1, 2, 1], [3, 1, 3, 1]],
    ),
}


def make(text, goals=GOAL, horizon=9, **fields):
    return mg.make_grid(mg.parse_map(text, goals=goals, horizon=horizon, **fields))


@functools.cache
def exported(name):
    """A fixture's steps, goals, table and states."""
    steps = dict(np.load(FOLDER / f"{name}.npz"))
    text, goals = FIXTURES[name]
    return steps, goals, *mg.export(make(text, goals, int(steps["step_count"].max())))


@pytest.mark.parametrize("name", list(FIXTURES))
def test_every_transition_of_the_reference(name):
    a, goals, table, states = exported(name)
    check_world(table)
    assert (table.num_states, len(table.succ_prob)) == (len(a["agent_state"]), len(a["succ_prob"]))

    def names(*columns):
        columns = [np.reshape(x, (table.num_states, -1)) for x in columns]
        return [tuple(row) for row in np.concatenate(columns, axis=1).astype(int).tolist()]

    theirs = names(a["agent_state"], a["mobile_xy"], a["step_count"])
    number = {name: s for s, name in enumerate(theirs)}
    to = np.array([number[s] for s in names(states.agents, states.movable, states.time)])
    ways = zip(to[table.succ_state], table.succ_joint, to[table.succ_next], strict=True)
    ours = dict(zip(ways, table.succ_prob, strict=True))
    expected = zip(a["succ_state"], a["succ_joint"], a["succ_next"], a["succ_prob"], strict=True)
    for *way, prob in expected:
        np.testing.assert_allclose(ours[tuple(way)], prob, rtol=1e-6)
    weighted = a["goal_weight"] > 0
    same = [
        np.array_equal(table.achieved[h, g], a["achieved"][h, k][to])
        for h in range(len(table.humans))
        for k in range(weighted.shape[1])
        for g in range(len(goals))
    ]
    assert sum(same) >= weighted.sum()  # every goal of theirs is one of these rectangles
    np.testing.assert_array_equal(table.terminal, a["terminal"][to])


def test_the_bound_on_outcomes():
    text = "#####\n#...#\n#v..#\n#u1.#\n#...#\n#####"
    most = lambda *drawn, **more: dynamics.make_bounds(make(*drawn, **more).layout).total  # noqa: E731
    assert most(text, stumble=0.4) == 2 * 3 and most(text.replace("u", "."), stumble=0.4) == 2
    assert most("#####\n#>.3#\n##4##\n#####") == 3
    assert [dynamics.max_winners(n) for n in (1, 2, 3, 4, 5)] == [1, 2, 3, 4, 6]


@pytest.mark.parametrize("seed", range(3))
def test_ways_to_settle_contests_against_brute_force(seed):
    rng = np.random.default_rng(seed)
    claims = rng.integers(0, 3, 4)
    got: dict = {}
    for k in range(dynamics.max_winners(4)):
        claimed = tuple(jnp.asarray(claims))
        order, prob, rest = dynamics.contend(claimed, jnp.int32(k), dynamics.max_winners(4))
        if rest == 0:
            key = tuple(int(i) for i in order)
            got[key] = got.get(key, 0.0) + float(prob)
    blocks = [np.flatnonzero(claims == c) for c in np.unique(claims)]
    expected: dict = {}
    for choice in np.ndindex(*(len(b) for b in blocks)):
        first = sorted(int(b[i]) for b, i in zip(blocks, choice, strict=True))
        order = (*first, *(i for i in range(4) if i not in first))
        expected[order] = expected.get(order, 0.0) + 1 / np.prod([len(b) for b in blocks])
    assert got.keys() == expected.keys()
    for order, prob in expected.items():
        np.testing.assert_allclose(got[order], prob, rtol=1e-6)


RED = {"R": {"type": "door", "color": "red", "state": "locked"}}
TWO, GATE, BEHIND = "####\n#>1#\n####", "####\n#>R#\n#1##\n####", dict(goals=[[3, 1, 3, 1]])


@pytest.mark.parametrize(
    ("text", "fields", "message"),
    [
        ("####\n#>?#\n#1.#\n####", {}, "line 2, column 3"),
        ("####\n#>1\n####", {}, "line 2"),
        ("####\n#>.#\n####", {}, "no robot"),
        ("####\n#1.#\n####", {}, "no human"),
        ("####\n.>1#\n####", {}, "border"),
        (TWO, dict(goals=[[1, 1, 9, 1]]), "is outside"),
        (TWO, dict(goals=[[0, 0, 0, 0]]), "can never be reached"),
        (TWO, dict(goals=[1, 1]), "rectangles"),
        (TWO, dict(horizon=-1), "horizon=-1"),
        (TWO, dict(stumble=2.0), "stumble=2.0"),
        (TWO, dict(goal_weight=[0.0]), "goal_weight"),
        (TWO, dict(magic_entry=1.5), "magic_entry=1.5"),
        (TWO, dict(magic_users="cats"), "magic_users='cats'"),
        (GATE, dict(legend={"R": {"type": "gate"}}), "type 'gate'"),
        (GATE, dict(legend={">": {"type": "wall"}}), "symbol '>'"),
        (GATE, dict(legend=["R"]), "give a mapping"),
        (GATE, dict(legend={"R": {"type": "door", "colour": 1}}), "colour"),
        (GATE, dict(legend={"R": {"type": "key", "color": "pink"}}), "pink"),
        (GATE, dict(legend={"R": {"type": "box", "holds": {"type": "wall"}}}), "hold a wall"),
        (GATE, dict(legend={"R": {"type": "control_button", "target": "humans"}}), "both humans"),
        # The goal lies behind a lock without its key, lava, a button, a wall for robots only.
        ("#####\n#>R.#\n#1#k#\n#####", dict(legend=RED, **BEHIND), "never"),
        ("#####\n#>~.#\n#1###\n#####", BEHIND, "column 2, line 2"),
        ("#####\n#>K.#\n#1###\n#####", BEHIND, "never"),
        ("#####\n#>m.#\n#1###\n#####", dict(magic_users="robots", **BEHIND), "never"),
    ],
)
def test_bad_maps_and_legends_are_refused(text, fields, message):
    with pytest.raises(ValueError, match=message):
        mg.parse_map(text, **{"goals": GOAL, "horizon": 5, **fields})


def test_far_too_many_outcomes_are_refused():
    text = "########\n" + "#>uuuu1#\n" * 4 + "########"
    with pytest.raises(ValueError, match="more than 4096: draw fewer agents"):
        make(text)


def test_without_a_horizon_time_stands_still():
    grid = make("####\n#>.#\n#1.#\n####", horizon=0)
    after = jax.jit(grid.outcomes)(grid.initial, jnp.zeros(2, jnp.int32))[0]
    assert int(after.time[0]) == 0 and not bool(grid.terminal(grid.initial))


def test_pictures_show_where_things_are():
    grid = make("#####\n#>k.#\n#1~.#\n#####", [[3, 1, 3, 1]])
    picture = jax.jit(mg.make_render(grid.layout))
    before = np.asarray(picture(grid.initial))
    assert before.shape == (4 * 24, 5 * 24, 3) and before.dtype == np.uint8
    carried = jnp.asarray([[grid_state.CARRIED, 0]], jnp.int8)
    changed = (np.asarray(picture(grid.initial._replace(items=carried))) != before).any(-1)
    cells = changed.reshape(4, 24, 5, 24).any((1, 3))
    assert np.argwhere(cells).tolist() == [[1, 1], [1, 2]]  # its bearer, and where the key lay
    framed = (np.asarray(picture(grid.initial, jnp.asarray([0]))) != before).any(-1)
    assert np.argwhere(framed.reshape(4, 24, 5, 24).any((1, 3))).tolist() == [[1, 3]]


def test_picture_files():
    frames = [np.full((4, 6, 3), 40 * k, np.uint8) for k in range(3)]
    assert np.array_equal(Image.open(io.BytesIO(to_png(frames[1]))), frames[1])
    assert Image.open(io.BytesIO(to_gif(frames))).n_frames == 3
    for wrong, message in ((frames[0] / 2, "float64"), (frames[0][0], r"shape \(6, 3\)")):
        with pytest.raises(ValueError, match=message):
            to_png(wrong)
    with pytest.raises(ValueError, match="at least one frame"):
        to_gif([])


def test_bad_files_names_and_priors_are_told(tmp_path):
    with pytest.raises(ValueError, match="rock_gate"):
        mg.load_map("rock_gat")
    with pytest.raises(FileNotFoundError, match="map 'absent.yaml': there is no .*: fix the path"):
        mg.load_map("absent.yaml")
    path = tmp_path / "x.yaml"
    path.write_text("map: |\n  ####\nhorizon: 3\n")
    with pytest.raises(ValueError, match="goals"):
        mg.load_map(str(path))
    with pytest.raises(ValueError, match="humans.model='clever'"):
        mg.make_world("rock_gate", "clever")


def test_a_run_on_a_grid_leaves_its_review_behind(tmp_path, capsys):
    from configs import empo
    from mbx.training import run
    from mbx.training.logging import read_rows

    config = empo.get_config().to_dict()
    assert config["env"]["name"] == "empo:multigrid/gates_2h2r"  # what trains by default
    layout = mg.parse_map("####\n#>.#\n#1.#\n####", goals=[[2, 1, 2, 1]], horizon=0)
    empo_envs.register_world("small", lambda: mg.make_world(layout, "paths"))
    config["env"].update(name="empo:small", num_envs=2, episode_length=5)
    config["train"].update(steps=20, seed_steps=8, log_interval=20, utd_ratio=0.5)
    config["eval"].update(episodes=2, review_episodes=4, profile=True)
    config["model"]["kind"], config["loss"]["batch_size"] = "tables", 4
    config["replay"]["capacity"] = 32
    run.train(config, str(tmp_path))
    (row,) = [r for r in read_rows(str(tmp_path / "metrics.jsonl")) if r["kind"] == "eval"]
    for robot in ("learned", "random", "frozen"):
        assert 0.0 <= row[f"reached_{robot}"] <= 1.0
    parts = ("draw", "successors", "features", "networks", "aggregation", "targets")
    assert all(row[f"profile/{part}_ms"] > 0.0 for part in parts)
    assert 4 * 4 <= row["profile/successors"] <= 2 * 4 * 4  # batch, actions; contests have two ways
    assert "profile  states 4  draw_ms " in capsys.readouterr().out
    frames = imageio.mimread(tmp_path / "episode.gif")
    assert len(frames) > 1 and frames[0].shape[:2] == (4 * 24, 4 * 24)
    assert imageio.imread(tmp_path / "value_map.png").shape[0] > 100


def test_no_sum_of_a_world_depends_on_the_precision():
    """With JAX_ENABLE_X64 sums of int32 are int64, unless they name their type."""
    text, fields = WORLDS["items"]
    layout = mg.parse_map(text, goals=[[1, 1, 3, 3]], horizon=9, **fields)
    grid = mg.make_grid(layout)
    actions = jnp.zeros((2, len(layout.agents)), jnp.int32)
    states = jax.tree.map(lambda x: jnp.stack([x, x]), grid.initial)
    with jax.enable_x64(True):
        traced = (
            jax.make_jaxpr(jax.vmap(grid.outcomes))(states, actions),
            jax.make_jaxpr(jax.vmap(make_paths(layout, 3.0)))(states),
        )
    for program in (one for outer in traced for one in programs(outer)):
        for equation in getattr(program, "jaxpr", program).eqns:
            if equation.primitive.name in ("reduce_sum", "reduce_prod", "cumsum"):
                assert equation.outvars[0].aval.dtype not in (np.int64, np.uint64), equation


def test_a_map_is_the_same_world_in_64_bits():
    *_, table, states = exported("grid_rock_1h1r")
    with jax.enable_x64(True):
        *_, wide, wide_states = exported.__wrapped__("grid_rock_1h1r")
    for one, other in zip((*states, *table), (*wide_states, *wide), strict=True):
        np.testing.assert_array_equal(one, other)
        assert np.asarray(one).dtype == np.asarray(other).dtype
