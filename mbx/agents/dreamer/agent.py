"""DreamerV3 as a tuple of pure functions: a world model learned from replay, behaviour imagined.

`configs/dreamer.py` learns the world model first, imagines with the updated one, takes the real
first continue and hard ones after it; `configs/dreamerv3.py` has the official code's choices (one
joint gradient, continue probabilities that hold the discount).
Axes: E environments, A action dims.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mbx import observations, replay, returns
from mbx.agents.base import Agent
from mbx.agents.dreamer import encoders, policy, rssm
from mbx.agents.dreamer import networks as nets
from mbx.agents.dreamer.behaviour import action_limit, norm_kinds
from mbx.agents.dreamer.diagnostics import make_diagnostics
from mbx.agents.dreamer.networks import ModelConfig
from mbx.agents.dreamer.optimizers import make_optimizers
from mbx.agents.dreamer.settings import Model, Settings
from mbx.agents.dreamer.types import ActorState, State, TrainState
from mbx.agents.dreamer.update import make_update, observe_dict, selection, stored
from mbx.heads import make_heads
from mbx.types import Array, EnvSpec, Params


def make_agent(settings: Settings, spec: EnvSpec) -> Agent:
    """The agent for a task. Raises ValueError for settings that do not fit it."""
    return build_agent(resolve(settings, spec))


def resolve(settings: Settings, spec: EnvSpec) -> Settings:
    """`settings` with what depends on the task: the model's shapes and the actor's gradient.
    What is no image is observed as a flat vector.
    """
    if spec.tasks:
        raise ValueError(
            f"config.env.name={spec.name!r} holds several tasks, but agent='dreamer' learns one: "
            "choose one of them, or agent tdmpc (configs/tdmpc.py)"
        )
    if spec.action_dim < 1:
        raise ValueError(
            f"config.env.name={spec.name!r}: its action space is empty, of shape "
            f"({spec.action_dim},): there is nothing to choose; give it at least one action"
        )
    gradient = settings.actor.gradient
    if gradient == "auto":
        gradient = "reinforce" if spec.discrete else "reparam"
    if gradient == "reparam" and spec.discrete:
        raise ValueError(
            "config.actor.gradient='reparam' needs continuous actions, but those of "
            f"{spec.name} are discrete: use 'reinforce' or 'auto'"
        )
    shape, parts = tuple(spec.obs_shape), tuple(spec.parts)
    seen: dict[str, Any] = dict(action_dim=spec.action_dim)
    if observations.is_packed(parts):
        image, size = observations.layout(parts)
        seen |= dict(image_shape=image, vector_dim=size, parts=parts)
    elif len(shape) == 3:
        integers = np.issubdtype(np.dtype(spec.obs_dtype), np.integer)
        seen |= dict(image_shape=shape, image_scale=255.0 if integers else 1.0)
    else:
        seen |= dict(vector_dim=math.prod(shape), vector_shape=shape, parts=parts)
    own = {f.name: getattr(settings.model, f.name) for f in dataclasses.fields(Model)}
    heads = make_heads(settings.loss.head_terms, spec)
    factors = (spec.action_dim,) if spec.discrete else ()
    model = ModelConfig(**own, **seen, factors=factors, heads=heads)
    _check_effects(settings, model, spec)
    actor = dataclasses.replace(settings.actor, gradient=gradient)
    return dataclasses.replace(settings, model=model, actor=actor)


_NEEDS = {  # settings that something of the task gives an effect
    "continuous actions": ("model.init_std", "model.min_std", "model.max_std", "actor.action_clip"),
    "discrete actions": ("model.policy_unimix",),
    "images": ("model.depth", *(f"model.{x}" for x in vars(Model) if x.startswith("image_"))),
    "images and a decoder": ("model.decoder_blocks",),
    "a vector": ("model.encoder_layers",),
    "a vector and a decoder": ("model.decoder_layers",),
}


def _check_effects(settings: Settings, model: ModelConfig, spec: EnvSpec) -> None:
    """Raises ValueError for a changed setting that has no effect in this task."""
    has = {
        "continuous actions": not spec.discrete,
        "discrete actions": spec.discrete,
        "images": model.image_shape is not None,
        "a vector": bool(model.vector_dim),
    }
    decodes = settings.loss.representation == "decoder"
    has |= {f"{what} and a decoder": has[what] and decodes for what in ("images", "a vector")}
    for needed, name in ((x, name) for x, names in _NEEDS.items() for name in names):
        value, normal = (operator.attrgetter(name)(x) for x in (settings, Settings()))
        same = (normal, 0.0) if name == "model.policy_unimix" else (normal,)  # 0: true of all
        if not has[needed] and (isinstance(value, jax.Array) or value not in same):
            raise ValueError(
                f"config.{name}={value!r} has no effect with env.name={spec.name!r}: it needs "
                f"{needed}; leave it at {normal!r}"
            )


def build_agent(settings: Settings) -> Agent:
    """The agent for resolved settings."""
    context, marks = settings.replay.context, selection(settings).row

    def extras(actor: ActorState) -> dict[str, Array]:
        blank = {n: jnp.zeros(actor.deter.shape[:1], x.dtype) for n, x in marks.items()}
        return blank | (stored(State(actor.deter, actor.stoch)) if context else {})

    return Agent(
        init=functools.partial(init_state, settings),
        init_actor=functools.partial(init_actor, settings.model),
        act=functools.partial(act, settings),
        update=make_update(settings),
        example_row=functools.partial(example_row, settings),
        after_action=lambda actor, action: actor.replace(action=action),
        replay_extras=extras if context or marks else None,
        diagnostics=make_diagnostics(settings),
        start_from=start_from,
    )


def init_params(net: ModelConfig, key: Array, decoder: bool = True) -> Params:
    """Parameters of everything; reward and value start as exact zeros."""
    names = ("encoder", "rssm", "decoder", "reward", "continue", "actor", "critic")
    keys = dict(zip(names, jax.random.split(key, len(names)), strict=True))

    def head(name: str, layers: int, out: int, scale: float = 1.0) -> Params:
        return nets.init_head(keys[name], net, layers, out, scale)

    width, tokens = net.feature_dim, encoders.token_dim(net)
    model = {
        "encoder": encoders.init_encoder(keys["encoder"], net),
        "rssm": rssm.init(keys["rssm"], net, tokens),
        **(
            {"decoder": encoders.init_decoder(keys["decoder"], net)}
            if decoder
            else {"projector": nets.init_linear(keys["decoder"], width, width, tokens, bias=False)}
        ),
        "reward": head("reward", net.reward_layers, net.num_bins, scale=0.0),
        "continue": head("continue", net.continue_layers, 1),
    }
    if net.heads is not None:  # a key that the split above has not given away
        own = jax.random.split(key, len(names) + 1)[-1]
        model["heads"] = net.heads.init(own, net.feature_dim, net.obs_shape)
    actor = head("actor", net.policy_layers, policy.output_dim(net), scale=0.01)
    critic = head("critic", net.value_layers, net.num_bins, scale=0.0)
    return {"model": model, "actor": actor, "critic": critic}


def init_state(settings: Settings, key: Array) -> TrainState:
    """The train state before the first update; the slow critic starts as a copy."""
    params = init_params(settings.model, key, settings.loss.representation == "decoder")
    solvers = make_optimizers(settings.optimizer, settings.model)
    return TrainState(
        params=params,
        slow_critic=jax.tree.map(jnp.copy, params["critic"]),
        opt_state={name: solver.init(params[name]) for name, solver in solvers.items()},
        ema=returns.init_return_ema(),
        step=jnp.int32(0),
        norms={name: returns.init_running_norm() for name in norm_kinds(settings)} or None,
    )


def start_from(train: TrainState, old: TrainState, _: EnvSpec) -> TrainState:
    """`Agent.start_from`: the parameters of another run, and what its critic's outputs mean; the
    slow critic is a copy."""
    norms = train.norms and {n: (old.norms or {}).get(n, x) for n, x in train.norms.items()}
    slow = jax.tree.map(jnp.copy, old.params["critic"])
    return train.replace(params=old.params, slow_critic=slow, norms=norms)


def init_actor(net: ModelConfig, num: int) -> ActorState:
    """Zeros; the first row of an episode replaces them by the initial state."""
    return ActorState(*rssm.zeros(net, (num,)), jnp.zeros((num, net.action_dim)))


def act(
    settings: Settings,
    train: TrainState,
    actor: ActorState,
    obs: Array,
    is_first: Array,
    key: Array,
    evaluate: bool,
) -> tuple[Array, ActorState]:
    """`Agent.act`: one posterior step and an action."""
    net, model, lead = settings.model, train.params["model"], is_first.shape
    latent_key, action_key = jax.random.split(key)
    tokens = encoders.encode(net, model["encoder"], observe_dict(net, obs))
    draw = jax.random.uniform(latent_key, (*lead, net.stoch))
    state = State(actor.deter, actor.stoch)
    state = rssm.observe_step(net, model["rssm"], state, actor.action, tokens, is_first, draw)
    out = nets.head(train.params["actor"], rssm.features(state), net.dtype)
    net, out = policy.possible(net, out, observations.action_mask(net, obs))
    if evaluate and settings.eval.action == "mode":
        action = policy.mode(net, out)
    else:
        action = policy.sample(net, out, policy.draw(net, action_key, lead))
    action = jnp.clip(policy.bound(net, action, action_limit(settings)), -1.0, 1.0)
    return action, ActorState(state.deter, state.stoch, action)


def example_row(settings: Settings) -> dict[str, Any]:
    """One un-batched replay row, as shapes, with the fields that settings of the replay need."""
    net = settings.model
    shape = jax.ShapeDtypeStruct
    dtype = jnp.uint8 if net.image_shape and net.image_scale == 255.0 else jnp.float32
    row = replay.example_row(net.obs_shape, net.action_dim, dtype) | selection(settings).row
    if settings.replay.context:
        row |= dict(deter=shape((net.deter,), jnp.float32), stoch=shape((net.stoch,), jnp.int8))
    return row
