"""No setting of Dreamer is silent: it is read, or refused by name where it has no effect."""

from __future__ import annotations

import dataclasses
import functools
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mbx import replay
from mbx.agents.dreamer import agent as dreamer
from mbx.agents.dreamer import diagnostics
from mbx.agents.dreamer.settings import Optimizer, Settings
from mbx.config import presets
from mbx.replay_sequences import Selection
from mbx.settings import describe, flatten, from_dict, inactive, to_dict
from mbx.types import EnvSpec
from tests.helpers import other_value, recorded

VECTOR = EnvSpec("x:vector", (3,), jnp.float32, 2, 50, 1)
IMAGE = EnvSpec("x:image", (10, 10, 2), jnp.float32, 3, 50, 1, discrete=True)

# Read by whoever trains (mbx.training) or when the shapes are made, not by the agent's functions.
GENERAL = {"agent", "seed", "num_seeds", "imports", "resume", "matmul_precision", "gpu_compiler"}
GENERAL |= {"model.size", "loss.heads"}
GENERAL_SECTIONS = {"distributed", "env", "train", "eval", "log", "checkpoint"}
STORAGE = {"replay.capacity", "replay.save", "replay.shards"}
SMALL = dict(
    env=dict(num_envs=2),
    loss=dict(batch_size=2, batch_length=4),
    imagination=dict(rows=2, horizon=2),
    replay=dict(capacity=40),
    model=dict(
        deter=8, hidden=6, stoch=2, classes=3, units=8, depth=2, num_bins=9, decoder_blocks=1
    ),
)


def trace(settings, spec):
    """All that the agent does, as text: its programs, traced."""
    agent, key = dreamer.build_agent(settings), jax.random.key(0)
    train = jax.eval_shape(agent.init, key)
    state = jax.eval_shape(lambda: replay.init(agent.example_row(), num_envs=2, capacity=80))
    actor, obs, first = agent.init_actor(2), jnp.zeros((2, *spec.obs_shape)), jnp.zeros(2, bool)
    programs = [jax.make_jaxpr(agent.init)(key)]
    for evaluate in (False, True):
        programs.append(
            jax.make_jaxpr(lambda t, e=evaluate: agent.act(t, actor, obs, first, key, e))(train)
        )
    programs.append(jax.make_jaxpr(agent.update)(train, state, key))
    programs.append(
        jax.make_jaxpr(lambda *x: diagnostics.open_loop(settings, *x))(train, state, key)
    )
    return "\n".join(f"{program}\n{program.consts}" for program in programs)


@pytest.mark.parametrize("name", ["dreamer", "dreamerv3"])
def test_exactly_the_settings_that_have_an_effect_are_read(name):
    config = importlib.import_module(f"configs.{name}").get_config().to_dict()
    settings, read = from_dict(Settings(), config), set()
    for spec in (VECTOR, IMAGE):
        noted = recorded(dreamer.resolve(settings, spec), now := set())
        now.clear()  # what was read to make it
        trace(noted, spec)
        read |= now
    names = {
        name
        for name, _ in flatten(to_dict(settings))
        if name not in GENERAL | STORAGE and name.partition(".")[0] not in GENERAL_SECTIONS
    } | {"eval.action"}
    idle = set(inactive(settings))
    assert names - idle - read == set()
    # Looked at where it must be False, and handed on together.
    given = {"optimizer.anneal", *(f"replay.{name}" for name in Selection._fields)}
    assert read & idle <= {"critic.replay_gradient", *given}


NAMES = [
    declared
    for declared in describe(Settings())
    if "." in declared.name
    and declared.name.partition(".")[0] not in GENERAL_SECTIONS
    and declared.name not in STORAGE
]


def small(changes, spec):
    """Small networks for a task; sizes of image networks only where there are images."""
    sections = {name: SMALL.get(name, {}) | changes.get(name, {}) for name in {*SMALL, *changes}}
    if len(spec.obs_shape) == 1:
        own = changes.get("model", {})
        sections["model"] = {
            name: value
            for name, value in sections["model"].items()
            if name not in ("depth", "decoder_blocks") or name in own
        }
    return from_dict(Settings(), sections)


def others(spec):
    """Other values of settings whose default is automatic."""
    return {
        "actor.gradient": "reparam" if spec.discrete else "reinforce",
        "optimizer.clips": (0.5, 0.6, 0.7),
        "optimizer.epsilons": (1e-3, 1e-4, 1e-6),
    }


def resolved_trace(settings, spec):
    return trace(dreamer.resolve(settings, spec), spec)


@functools.cache
def base_trace(spec):
    return resolved_trace(small({}, spec), spec)


@pytest.mark.slow
@pytest.mark.parametrize("spec", [VECTOR, IMAGE], ids=lambda spec: spec.name)
@pytest.mark.parametrize("declared", NAMES, ids=lambda declared: declared.name)
def test_every_setting_changes_a_program_or_is_refused(declared, spec):
    section, _, name = declared.name.partition(".")
    now = SMALL.get(section, {}).get(name, declared.default)
    value = others(spec).get(declared.name, other_value(declared._replace(default=now)))
    assert value != now
    try:
        settings = small({section: {name: value}}, spec)
        assert resolved_trace(settings, spec) != base_trace(spec)
    except ValueError as error:
        assert name in str(error)


CONTINUOUS = EnvSpec("x:arm", (3,), np.float32, 2, 50, 1)
DISCRETE = CONTINUOUS._replace(discrete=True)
IMAGES = CONTINUOUS._replace(obs_shape=(8, 8, 3), obs_dtype=np.uint8)


@pytest.mark.parametrize(
    ("spec", "section", "change", "needed"),
    [
        (DISCRETE, "actor", dict(action_clip=0.5), "continuous actions"),
        (DISCRETE, "model", dict(init_std=1.0), "continuous actions"),
        (DISCRETE, "model", dict(min_std=0.2), "continuous actions"),
        (DISCRETE, "model", dict(max_std=2.0), "continuous actions"),
        (CONTINUOUS, "model", dict(policy_unimix=0.1), "discrete actions"),
        (CONTINUOUS, "model", dict(depth=8), "images"),
        (CONTINUOUS, "model", dict(decoder_blocks=2), "images"),
        (CONTINUOUS, "model", dict(image_outer=True), "images"),
        (CONTINUOUS, "model", dict(image_kernel=3), "images"),
        (IMAGES, "model", dict(encoder_layers=2), "a vector"),
        (IMAGES, "model", dict(decoder_layers=2), "a vector"),
    ],
)
def test_settings_without_effect_in_the_task_are_refused(spec, section, change, needed):
    settings = from_dict(Settings(), {section: change})
    name, value = f"{section}.{list(change)[0]}", list(change.values())[0]
    with pytest.raises(ValueError, match=f"config.{name}={value} has no effect .*{needed}"):
        dreamer.resolve(settings, spec)
    others = {DISCRETE: CONTINUOUS, CONTINUOUS: DISCRETE, IMAGES: CONTINUOUS}
    suited = IMAGES if needed == "images" else others[spec]
    dreamer.resolve(settings, suited)


@pytest.mark.parametrize("preset", ["dreamer", "dreamer_small", "dreamerv3"])
@pytest.mark.parametrize("spec", [CONTINUOUS, DISCRETE, IMAGES])
def test_presets_suit_every_task(preset, spec):
    dreamer.resolve(from_dict(Settings(), presets.load(preset).to_dict()), spec)


def test_an_empty_action_space_is_refused():
    with pytest.raises(ValueError, match=r"x:arm.*action space is empty"):
        dreamer.resolve(Settings(), CONTINUOUS._replace(action_dim=0))


def test_what_is_automatic_follows_the_optimizer():
    """The name alone gives the official optimiser, or Adam's numbers."""
    official = Optimizer(name="laprop").resolved()
    assert (official.clips, official.epsilons) == ((0.3,) * 3, (1e-20,) * 3)
    assert official.warmup == 1_000
    own = Optimizer(name="adam").resolved()
    assert (own.clips, own.epsilons, own.warmup) == ((1.0,) * 3, (1e-8, 1e-5, 1e-5), 0)
    given = Optimizer(name="laprop", clips=(1.0, 2.0, 3.0), warmup=0).resolved()
    assert given.clips == (1.0, 2.0, 3.0) and given.warmup == 0
    shipped = from_dict(Settings(), presets.load("dreamerv3").to_dict()).optimizer
    assert shipped.resolved() == dataclasses.replace(official, learning_rates=(4e-5,) * 3)


def test_evaluations_that_would_be_played_twice_are_played_once():
    """By the policy's samples, evaluations are those of the exploring agent (`job.evaluate`)."""
    assert "eval.exploring" in inactive(from_dict(Settings(), dict(eval=dict(action="sample"))))
    assert "eval.exploring" not in inactive(Settings())


def test_numbers_that_are_traced_are_refused_only_where_they_have_no_effect():
    """As `mbx.train_fn` gives them."""

    def resolved(limit, spec):
        actor = dataclasses.replace(Settings().actor, action_clip=limit)
        settings = dataclasses.replace(Settings(), actor=actor)
        return dreamer.resolve(settings, spec).actor.action_clip

    assert jax.eval_shape(lambda x: resolved(x, CONTINUOUS), jnp.float32(0.5)).shape == ()
    with pytest.raises(ValueError, match="config.actor.action_clip=.* has no effect"):
        jax.eval_shape(lambda x: resolved(x, DISCRETE), jnp.float32(0.5))
