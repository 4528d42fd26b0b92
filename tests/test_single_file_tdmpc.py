"""The default agent in one file makes the package's learner step, and learns."""

from __future__ import annotations

import ast
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from examples import single_file_tdmpc as one
from mbx import config, networks
from mbx.agents.tdmpc import update as package
from mbx.agents.tdmpc.agent import resolve, world_config
from mbx.agents.tdmpc.scoring import score_function
from mbx.agents.tdmpc.types import Batch, Noise
from mbx.training.build import environment_spec
from mbx.world_model import make_world_model

SOURCE = pathlib.Path(one.__file__)
T, B, V = one.HORIZON, one.BATCH, one.HEADS


def test_it_is_short_and_imports_nothing_of_the_project():
    text = SOURCE.read_text()
    assert len(text.splitlines()) <= 400
    imports = [x for x in ast.walk(ast.parse(text)) if isinstance(x, ast.Import | ast.ImportFrom)]
    names = {getattr(x, "module", None) or x.names[0].name for x in imports}
    assert names <= {"functools", "sys", "collections", "jax", "jax.numpy", "optax", "gymnax"}


def layers(component, head=False):
    """The package's parameters of a network as the file's; `head`: of the only head."""
    found = []
    for name in sorted(component, key=lambda name: (name == "out", name)):
        layer = component[name]
        dense, norm = layer.get("dense", layer), layer.get("norm", {})
        own = {"kernel": dense["kernel"], "bias": dense["bias"]}
        if norm:
            own |= {"scale": norm["scale"], "shift": norm["bias"]}
        found.append(jax.tree.map(lambda x: x[0], own) if head else own)
    return found


def converted(params):
    return {name: layers(p, head=name in ("dynamics", "reward")) for name, p in params.items()}


@pytest.fixture(autouse=True)
def as_users_run_it():
    with jax.numpy_rank_promotion("allow"):
        yield


def warmed(optimizer, square=1e-4):
    """Adam after some steps: its first one is the sign of a gradient, however small that is.

    square: of past gradients; small enough for the policy's, whose entropy has a small one.
    """

    def warm(state):
        nu = jax.tree.map(lambda x: np.full_like(x, square), state.nu)
        return state._replace(count=jnp.int32(100), nu=nu)

    def is_adam(x):
        return isinstance(x, optax.ScaleByAdamState)

    return jax.tree.map(lambda x: warm(x) if is_adam(x) else x, optimizer, is_leaf=is_adam)


@pytest.fixture(scope="module")
def made():
    """Both learners from the same, perturbed parameters, with a batch and noise."""
    settings = config.load("tdmpc")
    spec = environment_spec(settings)
    settings = resolve(settings, spec)
    model = make_world_model(world_config(settings, spec))
    state = package.init_state(settings, model, jax.random.key(0))
    rng = np.random.default_rng(0)

    def normal(*shape, scale=1.0):
        return (scale * rng.normal(size=shape)).astype(np.float32)

    def moved(tree):
        return jax.tree.map(lambda x: np.asarray(x) + normal(*x.shape, scale=0.1), tree)

    params, slow = moved(state.params), moved(state.target_value)
    state = state.replace(
        params=params,
        target_value=slow,
        step=jnp.int32(17_500),
        opt_state=warmed(state.opt_state),
        policy_opt_state=warmed(state.policy_opt_state, 1e-8),
    )
    mask = (rng.uniform(size=(T, B)) < 0.9).astype(np.float32)
    batch = dict(
        obs=normal(T + 1, B, 3),
        action=np.tanh(normal(T, B, 1)),
        reward=normal(T, B, scale=5.0),
        mask=np.cumprod(mask, axis=0),
        plan_actions=np.tanh(normal(T + 1, B, 8, 1)),
        plan_values=normal(T + 1, B, 8),
    )
    keep = {n: rng.uniform(size=(n, B, one.WIDTH)) < 0.5 for n in (T, T + 1)}
    learner = one.init_learner(converted(params))
    learner = learner._replace(
        target_value=layers(slow),
        step=jnp.int32(17_500),
        model_state=warmed(learner.model_state),
        policy_state=warmed(learner.policy_state, 1e-8),
    )
    return settings, model, state, learner, batch, normal(T + 1, B, 1), keep


def test_its_settings_are_the_defaults(made):
    settings, model, *_ = made
    of = settings.loss, settings.optimizer, settings.training_planner, settings.planner
    loss, optimizer, training, acting = of
    assert settings.train.utd_ratio == one.UPDATES and settings.train.seed_hold == one.HOLD
    assert (settings.train.seed_steps, settings.train.pretrain_updates) == (1_000, one.PRETRAIN)
    for planner, own in ((acting, one.ACTING), (training, one.TRAINING)):
        assert (planner.num_samples, planner.num_elites) == (own["samples"], own["elites"])
        assert (planner.max_std, planner.min_std) == (own["max_std"], one.MIN_STD)
        assert planner.iterations == one.ROUNDS
    assert (acting.temperature, acting.temperature_mode) == (one.ACTING["sharpness"], "multiply")
    assert (training.temperature, training.temperature_mode) == (0.5, "divide")
    assert (acting.horizon, acting.num_proposals) == (one.PLAN, one.PROPOSALS)
    coefficients = loss.consistency_coef, loss.reward_coef, loss.value_coef, loss.entropy_coef
    assert coefficients == (one.CONSISTENCY, one.REWARD, one.VALUE, one.ENTROPY)
    assert (loss.discount, loss.value_best_n, optimizer.tau) == (one.DISCOUNT, one.BEST, one.TAU)
    assert settings.replay.keep_targets == one.STORED
    assert (settings.reanalyze.interval, settings.reanalyze.batch_size) == (
        one.REANALYZE_EVERY,
        one.REANALYZE_ROWS,
    )
    assert model.config.latent == one.LATENT and model.config.num_values == one.HEADS


def test_its_update_is_the_packages(made, monkeypatch):
    """Parameters, target network and unit of values after a step, dropout included."""
    settings, model, state, learner, batch, eps, keep = made

    def kept(shape):
        return jnp.broadcast_to(keep[shape[-3]], shape)

    monkeypatch.setattr(networks, "_kept", lambda key, share, shape: kept(shape))
    noise = Noise(None, None, eps, None, jax.random.key(1), policy_dropout=jax.random.key(2))
    whole = Batch(**batch, terminated=jnp.zeros((T, B)), plan_valid=jnp.ones((T + 1, B), bool))
    wanted, _ = jax.jit(
        lambda state, batch, noise: package.update_from_batch(settings, model, state, batch, noise)
    )(state, whole, noise)
    masks = [jnp.broadcast_to(keep[n], (V, *keep[n].shape)) for n in (T, T + 1)]
    found = jax.jit(one.update)(learner, one.Batch(**batch), one.Noise(eps, *masks))
    pairs = (
        (learner.params, found.params, converted(wanted.params)),
        (learner.target_value, found.target_value, layers(wanted.target_value)),
    )
    for before, after, of_package in pairs:
        for old, new, other in zip(*map(jax.tree.leaves, (before, after, of_package)), strict=True):
            assert not np.array_equal(old, new)
            np.testing.assert_allclose(new, other, rtol=1e-5, atol=2e-6)
    np.testing.assert_allclose(found.scale, wanted.scale.value, rtol=1e-5)


def test_its_plans_are_scored_as_the_packages(made):
    settings, model, state, learner, batch, *_ = made
    obs, actions = batch["obs"][0, :5], np.tanh(batch["obs"][:, :25, :1].reshape(5, 5, 4, 1))
    actions = actions[:, :, : one.PLAN]

    @jax.jit
    def both(params, own, obs, actions):
        z, latent = model.encode(params, obs), one.apply(own["encoder"], obs)
        score = score_function(settings, model, params, z, settings.planner)
        scores = one.score(own, latent, actions), score(jax.random.key(0), actions)
        return scores, (latent, z)

    scores, latents = both(state.params, learner.params, obs, actions)
    np.testing.assert_allclose(*latents, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(*scores, rtol=2e-5, atol=1e-5)


@pytest.mark.slow
def test_it_swings_a_pendulum_up():
    """Random actions have about -1,200; the package's default -135 at 3,000 steps."""
    assert one.main(steps=4_000) > -400.0
