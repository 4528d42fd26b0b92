"""Numbers among the settings may be traced: what comes out is what the same constants give."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mbx.agents.tdmpc import planning, policy_loss, scoring, update, value_targets
from mbx.agents.tdmpc.agent import resolve
from mbx.agents.tdmpc.settings import Settings
from mbx.planners import cem
from mbx.settings import flatten
from mbx.world_model import make_world_model
from tests.agents.tdmpc_helpers import (
    SPEC,
    VARIANTS,
    A,
    B,
    T,
    make_batch,
    make_settings,
    make_world,
    replaced,
    toy_model,
)

SECTIONS = ("loss", "optimizer", "planner", "training_planner")
# It decides how many elites are kept, which is a size.
SIZES = {"planner.keep_elites", "training_planner.keep_elites"}
# Where nothing of what 0 or a sign switches is in use; each may be traced, too.
OFF = {
    "loss.final_rho": 0.0,
    "loss.encoder_consistency_coef": 0.0,
    "loss.encoder_consistency_warmup": 0.0,
    "loss.value_temperature": 0.0,
    "loss.trust_region_coef": 0.0,
    "loss.awr_effective_samples": 0.0,
    "loss.entropy_coef_end": -1.0,
    "loss.jacobian": 0.0,
    "loss.policy_std_coef": 0.0,
    "loss.optimist_std_coef": 0.0,
    "loss.td_std_coef": 0.0,
    "loss.discount": 0.0,
    "optimizer.encoder_lr_step_at": 1.0,
    "optimizer.encoder_lr_step_scale": 1.0,
    "optimizer.weight_decay": 0.0,
    "planner.proposal_noise": 0.0,
    "planner.smoothing": 0.0,
    **{f"{p}.{n}": 0.0 for p in SECTIONS[2:] for n in ("std_coef", "disagreement", "discount")},
    "planner.evaluation_std_coef": 0.0,
}
# The variants of other tests, with what they leave off.
ON = {
    "ensemble": dict(
        planner=dict(evaluation_std_coef=-1.0, name="icem", horizon=4, discount=0.8),
        training_planner=dict(
            discount=0.7, search="acting", proposal_log_std=(-1.5, 0.2), num_proposals=2
        ),
        loss=dict(optimist_std_coef=0.5, encoder_consistency_warmup=0.2, entropy_coef=1e-3),
        train=dict(steps=4, seed_steps=0, pretrain_updates=0, utd_ratio=1.0),
    ),
    "concat": dict(
        model=dict(policy="squashed"),
        loss=dict(awr_effective_samples=2.5, value_temperature=0.3),
    ),
    "lambda": dict(optimizer=dict(weight_decay=0.1), loss=dict(awr_effective_samples=2.0)),
}


def settings_of(name):
    return replaced(make_settings(**VARIANTS[name]), **ON[name])


def numbers(settings) -> dict[str, float | tuple[float, ...]]:
    """The real numbers of `SECTIONS` by dotted name, without those that are sizes."""
    every = {s: dataclasses.asdict(getattr(settings, s)) for s in SECTIONS}
    real = {n: x for n, x in flatten(every) if isinstance(x, float) or (x and type(x) is tuple)}
    return {name: x for name, x in real.items() if name not in SIZES}


def given(settings, values):
    """The settings with numbers by dotted name replaced."""
    sections: dict[str, dict] = {}
    for name, value in values.items():
        section, _, own = name.partition(".")
        sections.setdefault(section, {})[own] = value
    return resolve(replaced(settings, **sections), SPEC)


def everything(settings, values, evaluations=(False, True)):
    """Parameters and metrics of two updates, plans while training and evaluating, targets."""
    settings = given(settings, values)
    model = make_world_model(make_world(settings))
    state, rng = update.init_state(settings, model, jax.random.key(0)), np.random.default_rng(0)
    params = jax.tree.map(lambda x: x + 0.3 * rng.normal(size=x.shape), state.params)
    gaussian = 0.2 + 0.3 * rng.uniform(size=(T + 1, B, 2, A))
    batch = make_batch(expert=jnp.asarray(gaussian, jnp.float32))

    def step(state, key):
        noise = update.draw(settings, model, key)
        return update.update_from_batch(settings, model, state, batch, noise)

    keys = jax.random.split(jax.random.key(1), 2)
    state, metrics = jax.lax.scan(step, state.replace(params=params), keys)
    z, mean = model.encode(state.params, batch.obs[0]), jnp.zeros((B, settings.planner.horizon, A))
    plans = [
        planning.plan_to_act(settings, model, state.params, z, mean, keys[0], evaluate=evaluate)
        for evaluate in evaluations
    ]
    targets = planning.plan_targets(settings, model, state.params, z, keys[0])
    return state.params, metrics, plans, targets


def test_every_number_may_be_traced_but_sizes():
    """All of them at once, in one program."""
    settings, names = settings_of("ensemble"), numbers(Settings())
    assert OFF.keys() <= names.keys() and len(names) > 55
    assert SIZES <= {
        f"{s}.{f.name}" for s in SECTIONS for f in dataclasses.fields(getattr(settings, s))
    }
    jax.eval_shape(lambda x: everything(settings, x, evaluations=(True,)), numbers(settings))


VALUES = jnp.asarray([[[0.3, -1.0, 2.0, 0.5]], [[1.0, 1.5, -0.5, 0.0]]])
COUNTS = jnp.arange(9)


def weights(settings):
    return value_targets.plan_weights(
        settings, VALUES, 1.0, temperature=settings.loss.value_temperature
    )


def score(settings):
    coef, heads = settings.planner.std_coef, VALUES[:, None]
    estimate = scoring.trajectory_estimate([heads], [heads + 1.0], [1.0, 0.9], std_coef=coef)
    return estimate.value + coef * estimate.std


def entropy(settings):
    settings = replaced(settings, loss=dict(entropy_coef=0.1))
    return policy_loss.policy_entropy(
        settings, MODEL, VALUES, VALUES - 1.0, 0.3 * VALUES
    ) * policy_loss.entropy_coefficient(settings, 0.25)


def plan_discount(settings):
    return scoring.plan_discount(settings, MODEL, settings.planner, VALUES)


def rate(settings):
    found = update.encoder_rate(settings)
    return jax.vmap(found)(COUNTS) if callable(found) else jnp.full(COUNTS.shape, found)


CONFIG = dict(
    model=dict(policy="squashed"),
    train=dict(steps=8, seed_steps=0, pretrain_updates=0, utd_ratio=1.0),
    optimizer=dict(encoder_lr_step_at=0.5, encoder_lr_step_scale=0.1),
)
SMALL = replaced(make_settings(), **CONFIG)
MODEL = toy_model(SMALL)
PARTS = {
    "loss.final_rho": (lambda s: s.loss.time_weight, (0.0, 0.125)),
    "loss.discount": (lambda s: jnp.asarray(s.loss.discount), (0.0, 0.8)),
    "loss.value_temperature": (weights, (0.0, 0.2, 2.0)),
    "loss.awr_effective_samples": (weights, (0.0, 1.5, 3.0)),
    "loss.jacobian": (entropy, (0.0, 0.4)),
    "loss.entropy_coef_end": (entropy, (-1.0, 0.0, 0.3)),
    "planner.std_coef": (score, (-0.5, 0.0, 1.0)),
    "planner.discount": (plan_discount, (0.0, 0.7)),
    "planner.noise_beta": (lambda s: cem.noise_matrix(6, s.planner.noise_beta), (0.0, 1.5)),
    "optimizer.encoder_lr_step_at": (rate, (0.25, 0.9, 1.0)),
    "optimizer.encoder_lr_step_scale": (rate, (0.0, 0.3)),
}


@pytest.mark.parametrize("name", list(PARTS))
def test_a_traced_number_chooses_as_a_constant_does(name):
    part, values = PARTS[name]
    found = jax.jit(jax.vmap(lambda x: part(given(SMALL, {name: x}))))(jnp.asarray(values))
    wanted = [part(given(SMALL, {name: x})) for x in values]
    np.testing.assert_allclose(found, np.stack(wanted), rtol=1e-4, atol=1e-6)
    assert len({np.asarray(x).tobytes() for x in found}) == len(values)


def test_the_encoders_rate_steps_at_its_update():
    """Of eight updates the third is the first with a tenth of the rate."""
    found = rate(given(SMALL, {"optimizer.encoder_lr_step_at": 0.25}))
    wanted = 1e-3 * 0.3 * np.array([1.0, 1.0, *[0.1] * 7])
    np.testing.assert_allclose(found, wanted, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", list(VARIANTS))
def test_traced_numbers_give_what_constants_give(name):
    """One program of traced numbers, with values that switch on and with those that switch off."""
    settings = settings_of(name)
    program = jax.jit(lambda values: everything(settings, values))
    on = numbers(settings)
    off = on | OFF
    assert {n: x for n, x in on.items() if off[n] != x}
    for values in (on, off):
        found, wanted = program(values), jax.jit(lambda v=values: everything(settings, v))()
        # A term that is off in one is there, times 0, in the other.
        extra = found[1].keys() - wanted[1].keys()
        assert extra <= {"loss/encoder_consistency", "policy/trust"}
        for key in extra:
            del found[1][key]
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), found, wanted
        )
