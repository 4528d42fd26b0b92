"""A prior learned from exact ones on small maps: its file, its errors, and a run with it."""

from __future__ import annotations

import csv
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import empo_prior
from mbx.config import load
from mbx.empo import named_world
from mbx.empo.multigrid import family, learned
from mbx.empo.multigrid.layout import parse_map
from mbx.power import HumanModel, PowerParams
from mbx.training import build, run, rundir
from mbx.training.logging import read_rows

GOALS = [[1, 1, 4, 1], [1, 1, 1, 1]]
TEXT = f"map: |\n  ######\n  #{{}}#\n  ######\ngoals: {GOALS}\nhorizon: 0\n"
ROWS = (">..1", ".>.1", "..>1")
POWER = {"gamma_h": 0.9, "gamma_r": 0.8, "beta_h": 10.0, "optimistic": True}
PARAMS = PowerParams(**POWER)


def row_of(text):
    """A map of one row."""
    border = "#" * (len(text) + 2)
    return f"{border}\n#{text}#\n{border}"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder of maps, and the network learned from two of them."""
    folder = tmp_path_factory.mktemp("maps")
    for number, row in enumerate(ROWS):
        (folder / f"{number}.yaml").write_text(TEXT.format(row))
    changes = [f"env.name=empo:maps/{folder}/", "env.maps=2", "env.held_out=1"]
    changes += ["power.source=config", *(f"power.{name}={value}" for name, value in POWER.items())]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(learned, "ROUNDS", 3)
        patch.setattr(empo_prior, "WIDTH", 8)
        patch.setattr(empo_prior, "TESTED", 64)
        patch.setattr(empo_prior, "BETAS", (1.0,))
        settings = load("empo_layouts", [*changes, "humans.model=exact"])
        empo_prior.run(str(folder / "prior.npz"), settings, [0], 400)
        yield folder, changes


def test_errors_on_maps_held_out_are_below_those_of_simpler_priors(made):
    folder, _ = made
    with open(folder / "prior.csv", newline="") as file:
        rows = {row["prior"]: row for row in csv.DictReader(file)}
    off = {name: float(row["tv"]) for name, row in rows.items()}
    assert list(off) == ["uniform", *(f"paths {x:g}" for x in empo_prior.BETAS), "learned"]
    assert off["uniform"] > 0.3 and off["learned"] < 0.5 * off["uniform"]
    assert float(rows["learned"]["tv_achieved"]) < 0.1 and rows["learned"]["maps"] == "1"


def test_lessons_are_the_exact_prior_of_the_map_alone(made):
    folder, _ = made
    kin = family.make_family([parse_map(row_of(row), goals=GOALS, horizon=0) for row in ROWS])
    lesson = empo_prior.solved(kin, 1, PARAMS, 1_000)
    alone = named_world(f"multigrid/{folder}/1.yaml", params=PARAMS)
    assert len(lesson.maps) == alone.table.num_states and (lesson.maps == 1).all()
    np.testing.assert_allclose(lesson.prior[0], alone.solution.pi_h[:, :, 0], atol=1e-5)
    np.testing.assert_array_equal(lesson.open[0], [[False, True]])
    with pytest.raises(ValueError, match="no map has at most humans.max_states=3 states"):
        empo_prior.listed(kin, [0, 1], PARAMS, 3)


def test_each_human_and_goal_is_read_where_the_human_stands():
    """Two humans, a robot, two goals: the picture ends with four planes an agent and the goals."""
    agreed = {"picture": (1 + 12 + 4, 2, 3), "humans": 2, "robots": 1, "goals": 2, "actions": 3}
    network = learned.Network(agreed, 8)
    x = jnp.abs(jax.random.normal(jax.random.key(0), (17 * 6 + 2,)))
    params = network.init(jax.random.key(1), x[None])

    def logits(x):
        return network.apply(params, x[None])[0]

    slopes = np.asarray(jax.jit(jax.jacrev(lambda x: logits(x).sum(-1)))(x))
    marks = np.abs(slopes[..., 13 * 6 : 17 * 6].reshape(2, 2, 2, 2, 6)).sum(-1)
    np.testing.assert_array_equal(marks > 0.0, np.eye(4, dtype=bool).reshape(2, 2, 2, 2))
    gone = jax.jit(logits)(x.at[5 * 6 : 9 * 6].set(0.0))  # the second human is nowhere
    np.testing.assert_array_equal(gone[1, 0], gone[1, 1])
    assert np.abs(gone[0, 0] - gone[0, 1]).min() > 0.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rows": (">...1",)}, "picture=.13, 1, 4., this run has .13, 1, 5."),
        ({"rows": (">.o1",)}, "channels=.0, 37, 38., this run has .0, 6, 37, 38."),
        ({"goals": GOALS[:1]}, "goals=2, this run has 1"),
        ({"rows": (">>.1",)}, "humans=1, this run has 2"),
        ({"rows": (">1.1",)}, "robots=1, this run has 2"),
        ({"actions": 5}, "actions=4, this run has 5"),
        ({"horizon": 9}, "horizon=0, this run has 9"),
        ({"power": {"gamma_h": 0.5}}, "power.gamma_h=0.9, this run has 0.5"),
        ({"power": {"optimistic": False}}, "power.optimistic=True, this run has False"),
    ],
)
def test_a_file_of_other_maps_or_power_is_refused(made, changes, message):
    changes = {"rows": ROWS, "power": {}, "goals": GOALS, "horizon": 0} | changes
    rows, params = changes.pop("rows"), PARAMS._replace(**changes.pop("power"))
    kin = family.make_family([parse_map(row_of(row), **changes) for row in rows])
    with pytest.raises(
        ValueError, match=f"humans.network='.*prior.npz' was learned with {message}"
    ):
        learned.load(f"{made[0]}/prior.npz", kin, params)


def test_files_of_another_kind_are_refused(made, tmp_path):
    kin = family.make_family([parse_map(row_of(row), goals=GOALS, horizon=0) for row in ROWS])
    with np.load(made[0] / "prior.npz") as file:
        arrays = dict(file)
    files = {
        "missing": (None, "cannot be read .*No such file"),
        "text": (b"hello", "cannot be read"),
        "empty": (b"", "cannot be read"),
        "other": ({"x": np.zeros(3)}, "cannot be read .'about'.: give a file that"),
        "pickled": ({"about": np.array({}, object)}, "cannot be read .*allow_pickle"),
        "damaged": (arrays | {"out/bias": np.zeros(7)}, "is damaged"),
    }
    for name, (content, message) in files.items():
        path = tmp_path / f"{name}.npz"
        if isinstance(content, bytes):
            path.write_bytes(content)
        elif content is not None:
            np.savez(path, **content)
        with pytest.raises(ValueError, match=f"humans.network='.*{name}.npz' {message}"):
            learned.load(str(path), kin, PARAMS)


def test_worlds_and_settings_that_have_no_learned_prior_are_told(made, tmp_path):
    people = HumanModel("learned", network=f"{made[0]}/prior.npz")
    with pytest.raises(ValueError, match="'learned' is for empo:maps/SOURCE, also the file of one"):
        named_world("multigrid/rock_gate", humans=people)
    with pytest.raises(ValueError, match="'learned': this world has no such humans"):
        named_world("grid_rock_1h1r", humans=people)
    with pytest.raises(ValueError, match="humans.network='' cannot be read"):
        named_world("maps/doors", humans=HumanModel("learned"), maps=(1, 0, 0))
    with pytest.raises(ValueError, match="humans.network='x' has no effect"):
        load("empo_layouts", ["humans.network=x"])
    text = TEXT.format(ROWS[0]) + "humans: {model: learned, network: prior.npz}\n"
    (tmp_path / "own.yaml").write_text(text)
    with pytest.raises(ValueError, match="own.yaml.*humans.network is a setting of a run"):
        named_world(f"maps/{tmp_path}/own.yaml", maps=(1, 0, 0))
    for out, name in (("prior.csv", "maps/doors"), ("prior.npz", "multigrid/door")):
        settings = load("empo", [f"env.name=empo:{name}"])
        with pytest.raises(ValueError, match="NAME.npz and empo:maps/SOURCE"):
            empo_prior.run(out, settings, [0], 1)


def run_settings(made, tmp_path, *more):
    """Settings of a run with a copy of the network, and its path."""
    folder, changes = made
    network = tmp_path / "own.npz"
    network.write_bytes((folder / "prior.npz").read_bytes())
    own = ["humans.model=learned", f"humans.network={network}"]
    return load("empo_layouts", [*changes, *own, *more]), network


def test_a_run_keeps_the_network_of_its_humans(made, tmp_path):
    settings, network = run_settings(made, tmp_path)
    directory = str(tmp_path / "run")
    assert settings.files()["humans.network"] == str(network)
    rundir.keep_inputs(settings.files(), directory)
    network.unlink()
    kept = rundir.with_kept_inputs(settings, directory)
    assert kept.humans.network == f"{directory}/inputs/humans.network.npz"
    world = build.make_environment(kept, 1, seed=0).spec.world
    policy = jax.jit(world.world.human_policy)(world.held_out.example_state)
    np.testing.assert_allclose(policy.sum(-1), 1.0, atol=1e-5)
    assert world.prior == "learned" and policy[0, 1].max() > 0.3
    os.unlink(kept.humans.network)
    with pytest.raises(ValueError, match="humans.network=.*own.npz lies outside of the run"):
        rundir.with_kept_inputs(settings, directory)


@pytest.mark.slow
def test_a_robot_learns_next_to_learned_humans(made, tmp_path):
    tiny = ["env.num_envs=4", "env.episode_length=6", "train.steps=1600", "train.seed_steps=80"]
    tiny += ["train.log_interval=800", "train.utd_ratio=0.25", "eval.interval=1600"]
    tiny += ["eval.review_episodes=64", "eval.episodes=2", "loss.batch_size=4"]
    settings, network = run_settings(made, tmp_path, *tiny, "model.hidden=8")
    run.train(settings, str(tmp_path / "run"))
    (last,) = (row for row in read_rows(f"{tmp_path}/run/metrics.jsonl") if row["kind"] == "eval")
    assert last["reached_new_learned"] > 0.65
    network.unlink()
    assert run.load(str(tmp_path / "run"))[2].humans.model == "learned"
