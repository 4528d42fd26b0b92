"""The examples run, at a tiny size, and do what they are there for."""

from __future__ import annotations

import ast
import os
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from examples import (
    ilqr,
    own_agent,
    own_environment,
    own_loop,
    own_model,
    own_paper,
    own_review,
    own_sequences,
    own_world,
)
from mbx import distributions, envs, replay
from mbx.fast import gradients
from mbx.settings import to_dict
from mbx.training import build, run
from mbx.training.build import make_environment
from mbx.training.logging import read_rows
from mbx.training.state import make_schedule
from mbx.types import EnvSpec
from mbx.world_model import config_for_size, make_world_model
from tests.helpers import tiny_config

EXAMPLES = pathlib.Path(ilqr.__file__).parent


@pytest.fixture(autouse=True)
def as_users_run_them():
    """Tests of the package refuse that arrays of other ranks are joined; users need not."""
    with jax.numpy_rank_promotion("allow"):
        yield


def lines_of_code(path: pathlib.Path) -> int:
    """Lines that hold code: no blank ones, no comments, no docstrings."""
    text = path.read_text()
    lines = {i for i, line in enumerate(text.splitlines(), 1) if line.partition("#")[0].strip()}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            lines -= set(range(node.lineno, node.end_lineno + 1))
    return len(lines)


def test_examples_stay_short():
    files = {path.stem: lines_of_code(path) for path in EXAMPLES.glob("*.py")}
    limits = dict.fromkeys(files, 80) | dict(
        own_head=25,
        own_paper=25,
        own_planner=30,
        run_exported=100,
        run_onnx=30,
        single_file_tdmpc=330,
    )
    assert {"own_agent", "own_head", "own_planner", "own_loop"} <= files.keys()
    assert not {name: n for name, n in files.items() if n > limits[name]}, files


def test_own_model():
    path = np.asarray(own_model.main())
    assert path.shape == (40, 3, 4)
    left = np.linalg.norm(path[-1, :, :2] - own_model.GOAL, axis=-1)
    from_obstacle = np.linalg.norm(path[..., :2] - own_model.OBSTACLE, axis=-1)
    assert left.max() < 0.2 and from_obstacle.min() > own_model.RADIUS - 0.05


def test_ilqr_finds_the_actions_that_lead_to_the_goal():
    found, unknown, costs = ilqr.main()
    np.testing.assert_allclose(found, unknown, atol=0.02)
    assert costs[-1] < 1e-3 < 1.0 < costs[0]
    assert np.diff(costs).max() < 1e-7  # an iteration that finds nothing better changes nothing


@pytest.mark.slow
def test_ilqr_through_a_learned_model_against_finite_differences_and_the_world():
    """A point that actions push: its model is learned from random steps, then planned through."""
    goal, fields = jnp.array([0.6, -0.4]), dict(enc_dim=32, mlp_dim=64, latent_dim=16, num_bins=21)
    config = config_for_size("tiny", obs_shape=(2,), action_dim=2, dropout=0.0, **fields)
    model, adam = make_world_model(config), optax.adam(1e-3)

    def world(x, a):
        return x + 0.3 * a

    def loss(params, key):
        x, a = jax.random.uniform(key, (2, 256, 2), minval=-1.0)
        z, now = model.encode(params, x), world(x, a)
        wanted = jax.lax.stop_gradient(model.encode(params, now))
        step = jnp.mean((model.step(params, z[None], a)[0] - wanted) ** 2)
        reward = -10.0 * jnp.sum((now - goal[None]) ** 2, axis=-1)
        logits = model.reward(params, z[None], a)[0, 0]
        miss = distributions.two_hot_cross_entropy(logits, reward, model.bins())
        return 20.0 * step + jnp.mean(miss)

    def learn(carry, key):
        params, state = carry
        value, gradient = jax.value_and_grad(loss)(params, key)
        change, state = adam.update(gradient, state)
        return (optax.apply_updates(params, change), state), value

    params = model.init(jax.random.key(0))
    keys = jax.random.split(jax.random.key(1), 300)
    (params, _), losses = jax.jit(lambda c: jax.lax.scan(learn, c, keys))(
        (params, adam.init(params))
    )
    assert losses[-50:].mean() < 0.8 * losses[:10].mean()

    def step(z, a):
        return model.step(params, z[None], a)[0]

    def cost(z, a):
        return -model.reward_mean(params, z[None, None], a[None])[0, 0, 0]

    start, actions = jnp.array([-0.7, 0.5]), jnp.zeros((6, 2))
    z, end = model.encode(params, start), model.encode(params, goal)
    of_action, of_end = lambda z, a: 1e-3 * a @ a, lambda z: 100.0 * jnp.sum((z - end) ** 2)
    found, costs = jax.jit(lambda: ilqr.solve(step, of_action, of_end, z, actions, iterations=20))()
    assert costs[-1] < 0.002 * costs[0], costs
    x = start
    for action in found:
        x = world(x, action)
    assert jnp.linalg.norm(x - goal) < 0.1 * jnp.linalg.norm(start - goal)
    both = jax.jit(lambda x: jnp.append(step(x[:16], x[16:]), cost(x[:16], x[16:]) / 10.0))
    at = jnp.append(z, found[0])
    with gradients.forward_mode():
        forward = jax.jit(jax.jacfwd(both))(at)

    def differences(size):
        shifts = size * np.eye(18, dtype=np.float32)
        return np.stack([(both(at + s) - both(at - s)) / (2 * size) for s in shifts], -1)

    # Richardson's extrapolation: central differences in float32 alone miss by 1e-3, of their own
    # curvature where the shift is large, of rounding where it is small.
    better = (4.0 * differences(1e-2) - differences(2e-2)) / 3.0
    assert np.abs(forward).max() > 1.0
    np.testing.assert_allclose(forward, better, atol=1e-3, rtol=0)


@pytest.mark.slow
def test_settings_side_by_side_in_ones_own_loop_are_those_one_by_one():
    rates, lambdas, curves = own_loop.main(steps=150)
    alone = jax.jit(lambda *x: own_loop.train(*x, jax.random.key(0), 150))(rates[3], lambdas[3])
    ready = np.flatnonzero(np.isfinite(alone))
    assert (ready[0], ready[-1]) == (own_loop.LENGTH + 1, 149)  # a window is LENGTH + 1 rows
    np.testing.assert_allclose(curves[3][ready], alone[ready], rtol=1e-3)
    assert len({float(curve[-1]) for curve in curves}) == len(curves)


def test_own_paper_learns_which_state_follows():
    """Of random walks, in updates of the agent that the example registers."""
    sizes = dict(num_values=3, num_bins=11)
    loss = dict(policy_loss="svg", value_target="td", horizon=1, num_heads=3, heads="infonce")
    config = tiny_config(agent="pessimistic", model=sizes, loss=loss | dict(consistency_coef=0.0))
    agent = build.build_agent(build.read(config), EnvSpec("toy:line", (2,), jnp.float32, 1, 50, 1))

    def store(carry, key):
        state, obs = carry
        obs = obs + 0.5 * jax.random.normal(key, (2, 2))
        row = dict(obs=obs, reward=obs[:, 0], action=obs[:, :1].clip(-1, 1))
        flags = dict.fromkeys(("is_first", "is_last", "terminated"), jnp.zeros(2, bool))
        return (replay.insert(state, row | flags), obs), None

    def update(carry, key):
        *carry, metrics = agent.update(*carry, key)
        return tuple(carry), metrics["loss/heads/infonce"]

    @jax.jit
    def run(key):
        state = replay.init(agent.example_row(), num_envs=2, capacity=60)
        keys = jax.random.split(key, 200)
        state, _ = jax.lax.scan(store, (state, jnp.zeros((2, 2))), keys)[0]
        return jax.lax.scan(update, (agent.init(key), state), keys)[1]

    losses = run(jax.random.key(0))
    assert own_paper.contrast.batch_loss is own_paper.infonce
    assert losses[-20:].mean() < 0.8 * losses[:10].mean(), losses


def test_own_sequences_are_imagined_better_than_standing_still():
    losses, found, still = own_sequences.main(steps=150)
    assert losses[-20:].mean() < 0.5 * losses[0] and (found < 0.6 * still).all()


@pytest.mark.slow
def test_own_review_trains_and_reports(tmp_path):
    config = tiny_config(train=dict(steps=40)) | {"agent": "tdmpc_reviewed"}
    result = run.train(config, str(tmp_path / "run"))
    rows = read_rows(os.path.join(result.workdir, "metrics.jsonl"))
    found = [row["norm/encoder"] for row in rows if row.get("norm/encoder") is not None]
    assert found and found[-1] > 0.0
    assert list((tmp_path / "run").rglob("*norms.json"))
    ones = {"a": {"x": jnp.ones((2, 2)), "y": jnp.zeros(3)}}
    assert float(own_review.norms(ones)["norm/a"]) == 2.0


def test_own_agent_in_own_environment(tmp_path):
    """One run for both: TD-MPC, which the environment's example trains, takes longer to compile."""
    config = to_dict(own_agent.Settings())
    config["env"] |= dict(name="mine:rail", episode_length=20)
    config["train"] |= dict(steps=400, seed_steps=40, pretrain_updates=10, log_interval=80)
    config["eval"] |= dict(interval=200, episodes=2)
    result = own_environment.main(str(tmp_path / "run"), config)
    rows = read_rows(os.path.join(result.workdir, "metrics.jsonl"))
    losses = [row["loss/model"] for row in rows if row.get("loss/model") is not None]
    assert losses[-1] < 0.5 * losses[0]
    assert [steps for steps, _ in result.evaluations] == [160, 320, 400]
    # One's own environment is checked by running it, so that no trace may be around that.
    newest, last = (run.load(result.workdir, which=which)[1] for which in ("latest", "400"))
    jax.tree.map(np.testing.assert_array_equal, newest.params, last.params)


def test_the_configuration_of_own_environment_fits_it():
    envs.register("mine", envs.Suite(raw=own_environment.rail))
    config = own_environment.configuration()
    environment = make_environment(build.read(config), config["env"]["num_envs"], seed=0)
    agent = build.build_agent(build.read(config), environment.spec)
    make_schedule(build.read(config).for_task(environment.spec), environment.spec)
    assert agent.example_row()["obs"].shape == (2,) and environment.spec.episode_length == 100
    by_its_file = envs.make(f"jax:{EXAMPLES}/own_environment.py:rail", 2)
    assert by_its_file.spec.obs_shape == (2,)


def test_the_configuration_of_own_world_is_one():
    config = own_world.configuration()
    settings = build.read(config)
    assert settings.env.name == "empo:corridor" and settings.model.kind == "tables"
    rows = own_world.MAP.strip().splitlines()
    assert len({len(row) for row in rows}) == 1 and own_world.GOALS[1] == [4, 2, 5, 2]


@pytest.mark.slow
def test_own_world_is_learned_and_walked_through(tmp_path, capsys):
    reached = own_world.main(str(tmp_path / "run"))
    assert reached["learned"] > reached["exact"] - 0.02 > reached["random"] + 0.3, reached
    told = capsys.readouterr().out
    # The rock is in the niche, and the human came through after four steps and three.
    assert told.count("human still") == 4 and told.count("human forward") == 3
    assert "arrived: True" in told.split("human forward")[-1]
