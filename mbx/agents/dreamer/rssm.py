"""The recurrent state-space model: a recurrent state and categorical latents, observed or imagined.

On its own it is `mbx.rssm`. `observe` scans over tokens, `imagine` over a policy's actions:

    config = rssm.ModelConfig(vector_dim=3, action_dim=2)
    params = rssm.init(key, config, token_dim=3)
    start = rssm.initial(config, params, (batch,))
    seen = rssm.observe(config, params, start, tokens, actions, is_first, draws)
    later, _ = rssm.imagine(config, params, last, policy, action_draws, latent_draws)

What does not depend on the carried state (projections of tokens and of known actions, the prior of
observed states) is computed outside the scans, on all rows at once. Draws are arguments: uniform
numbers, or `Given` latents.
Axes: T time, B batch, D deter, S latents of K classes, E tokens, A actions, H imagined steps.
Source: DreamerV3 (arXiv 2301.04104) and its official code; `core="dense"` is sheeprl's cell.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from mbx.agents.dreamer import networks as nets
from mbx.agents.dreamer.networks import ModelConfig
from mbx.agents.dreamer.types import Given, Observed, State
from mbx.categorical import mixed_logits, straight_through
from mbx.types import Array, Params

# Categorical latents


def sample_one_hot(mixed: Array, draw: Array | Given) -> Array:
    """The one-hot `[..., K]` that uniform numbers `[...]` in [0, 1) select (inverse sums)."""
    if isinstance(draw, Given):
        return draw.sample
    num = mixed.shape[-1]
    probs = jnp.exp(jax.lax.stop_gradient(mixed))
    sums = jnp.matmul(probs, jnp.triu(jnp.ones((num, num), probs.dtype)), precision="highest")
    index = jnp.sum(sums[..., :-1] <= draw[..., None], axis=-1)
    return jax.nn.one_hot(index, num, dtype=jnp.float32)


def mode_one_hot(logits: Array) -> Array:
    """One-hot of the largest logit, the first one on ties."""
    return jax.nn.one_hot(jnp.argmax(logits, axis=-1), logits.shape[-1], dtype=jnp.float32)


def kl_losses(posterior: Array, prior: Array, free_nats: float) -> tuple[Array, Array, Array]:
    """(dynamics loss, representation loss, raw KL), each `[...]`, of log-probabilities.
    Those, `[..., S, K]`, are `categorical.mixed_logits(logits, config.unimix)` of the logits in
    `Observed`.
    dynamics moves the prior towards the posterior and representation the reverse; both are floored
    at `free_nats` for every row by itself, after the sum over latents.
    Source: DreamerV3, section "World model learning".
    """
    stop = jax.lax.stop_gradient

    def divergence(p: Array, q: Array) -> Array:
        return jnp.sum(jnp.exp(p) * (p - q), axis=(-2, -1))

    dynamics, representation = (
        divergence(stop(posterior), prior),
        divergence(posterior, stop(prior)),
    )
    floored = jnp.maximum(dynamics, free_nats), jnp.maximum(representation, free_nats)
    return *floored, stop(representation)


# Parameters and states


def init(key: Array, config: ModelConfig, token_dim: int) -> Params:
    """Parameters of the RSSM for tokens `[..., token_dim]`."""
    core_key, prior_key, posterior_key, rest_key = jax.random.split(key, 4)
    deter, hidden, flat = config.deter, config.hidden, config.stoch * config.classes
    kind, seen = config.norm, config.deter + token_dim
    prior, out = jax.random.split(prior_key)
    keys = jax.random.split(posterior_key, 3)
    params = _init_core(core_key, config, flat) | {
        "prior": nets.init_mlp(prior, kind, deter, hidden, config.prior_layers)
        | {"out": nets.init_linear(out, hidden, hidden, flat)},
        "posterior": {
            "deter": nets.init_linear(keys[0], seen, deter, hidden, bias=False),
            "tokens": nets.init_linear(keys[1], seen, token_dim, hidden, bias=kind == "rms"),
            "norm": nets.init_norm(kind, hidden),
            "rest": nets.init_mlp(rest_key, kind, hidden, hidden, config.posterior_layers - 1),
            "out": nets.init_linear(keys[2], hidden, hidden, flat),
        },
    }
    return params | ({"initial": jnp.zeros(deter)} if config.initial == "learned" else {})


def _init_core(key: Array, config: ModelConfig, flat: int) -> Params:
    keys = jax.random.split(key, 6 + config.core_layers)
    deter, hidden, blocks, kind = config.deter, config.hidden, config.blocks, config.norm
    actions, linear, bias = config.action_dim, nets.init_linear, config.norm == "rms"
    if config.core == "dense":
        width = flat + actions
        return {
            "in_z": linear(keys[0], width, flat, hidden, bias=False),
            "in_a": linear(keys[1], width, actions, hidden, bias=bias),
            "in_norm": nets.init_norm(kind, hidden),
            "gru": linear(keys[2], deter + hidden, deter + hidden, 3 * deter, bias=bias),
            "gru_norm": nets.init_norm(kind, 3 * deter),
        }
    # The fan-in counts the three inputs once for every block, as the official code does.
    fan_in, width = deter + 3 * hidden * blocks, deter // blocks
    params = {
        "in_h": nets.init_layer(keys[0], kind, deter, hidden),
        "in_z": nets.init_layer(keys[1], kind, flat, hidden),
        "in_a": nets.init_layer(keys[2], kind, actions, hidden),
        "hidden_h": linear(keys[3], fan_in, blocks, width, width, bias=False),
        "hidden_x": linear(keys[4], fan_in, 2 * hidden, deter, bias=False),
        "hidden_a": linear(keys[5], fan_in, hidden, deter, bias=bias),
        "hidden_norm": nets.init_norm(kind, deter),
        "gru": linear(keys[6], deter, blocks, width, 3 * width),
    }
    if config.core_layers > 1:
        params["hidden_rest"] = {
            f"layer_{i}": linear(key, deter, blocks, width, width, bias=bias)
            | {"norm": nets.init_norm(kind, deter)}
            for i, key in enumerate(keys[7:])
        }
    return params


def zeros(config: ModelConfig, lead: tuple[int, ...]) -> State:
    """A state of zeros, `[*lead, ...]`."""
    return State(jnp.zeros((*lead, config.deter)), jnp.zeros((*lead, config.stoch, config.classes)))


def initial(config: ModelConfig, params: Params, lead: tuple[int, ...]) -> State:
    """The state before an episode's first row, `[*lead, ...]`: zeros, or learned.
    The learned one is tanh of a parameter, with the mode of the prior there, through which no
    gradient flows (sheeprl).
    """
    if config.initial == "zeros":
        return zeros(config, lead)
    deter = jnp.tanh(params["initial"])
    stoch = jax.lax.stop_gradient(mode_one_hot(prior_logits(config, params, deter)))
    return State(*(jnp.broadcast_to(x, (*lead, *x.shape)) for x in (deter, stoch)))


def _flat(stoch: Array) -> Array:
    """`[..., S, K] -> [..., S K]`."""
    return stoch.reshape(*stoch.shape[:-2], -1)


def features(state: State) -> Array:
    """What heads read: `[..., D + S K]`."""
    return jnp.concatenate([state.deter, _flat(state.stoch)], axis=-1)


# One step


def squash_action(action: Array, limit: float = 1.0) -> Array:
    """action / max(1, |action| / limit), elementwise, the divisor without gradient."""
    return action / jax.lax.stop_gradient(jnp.maximum(1.0, jnp.abs(action) / limit))


def action_input(config: ModelConfig, params: Params, action: Array) -> Array:
    """The part of the recurrent step that depends on the action alone, `[..., A] -> [..., X]`."""
    if config.core == "dense":  # takes actions as they are: sheeprl bounds them in the policy
        return nets.linear(params["in_a"], action, config.dtype)
    x = nets.layer(params["in_a"], squash_action(action), config.dtype)
    return nets.linear(params["hidden_a"], x, config.dtype)


def recur(config: ModelConfig, params: Params, state: State, action_part: Array) -> Array:
    """deter `[..., D]` after an action, whose part is `action_input`'s result."""
    dtype, deter, flat = config.dtype, state.deter, _flat(state.stoch)
    if config.core == "dense":
        x = nets.linear(params["in_z"], flat, dtype) + action_part
        x = nets.norm_silu(params["in_norm"], x)
        gates = nets.linear(params["gru"], jnp.concatenate([deter, x], axis=-1), dtype)
        gates = nets.norm(params["gru_norm"], gates)
        reset, candidate, update = jnp.split(gates, 3, axis=-1)
    else:
        inputs = [nets.layer(params["in_h"], deter, dtype), nets.layer(params["in_z"], flat, dtype)]
        x = nets.block_linear(params["hidden_h"], deter, dtype) + action_part
        x = x + nets.linear(params["hidden_x"], jnp.concatenate(inputs, axis=-1), dtype)
        x = nets.norm_silu(params["hidden_norm"], x)
        for extra in params.get("hidden_rest", {}).values():
            x = nets.norm_silu(extra["norm"], nets.block_linear(extra, x, dtype))
        gates = nets.block_linear_parts(params["gru"], x, 3, dtype)
        reset, candidate, update = (gate.astype(jnp.float32) for gate in gates)
    candidate = jnp.tanh(jax.nn.sigmoid(reset) * candidate)
    update = jax.nn.sigmoid(update - 1.0)
    return update * candidate + (1.0 - update) * deter


def prior_logits(config: ModelConfig, params: Params, deter: Array) -> Array:
    """Raw logits `[..., S, K]` of the latents given deter alone."""
    x = nets.mlp(params["prior"], deter, config.dtype)
    return _logits(config, params["prior"]["out"], x)


def token_input(config: ModelConfig, params: Params, tokens: Array) -> Array:
    """The part of the posterior that depends on the tokens alone, `[..., E] -> [..., hidden]`."""
    return nets.linear(params["posterior"]["tokens"], tokens, config.dtype)


def posterior_logits(config: ModelConfig, params: Params, deter: Array, token_part: Array) -> Array:
    """Raw logits `[..., S, K]` of the latents given deter and `token_input`'s result."""
    own = params["posterior"]
    x = nets.linear(own["deter"], deter, config.dtype) + token_part
    x = nets.mlp(own["rest"], nets.norm_silu(own["norm"], x), config.dtype)
    return _logits(config, own["out"], x)


def _logits(config: ModelConfig, params: Params, x: Array) -> Array:
    logits = nets.linear(params, x, config.dtype).astype(jnp.float32)
    return logits.reshape(*logits.shape[:-1], config.stoch, config.classes)


def observe_step(
    config: ModelConfig,
    params: Params,
    state: State,
    action: Array,
    tokens: Array,
    is_first: Array,
    draw: Array | Given,
) -> State:
    """One posterior step outside of a sequence (acting): all arguments lead with `[E]`."""
    step, inputs = _posterior(config, params, tokens, action, is_first, draw)
    return step(state, inputs)[0]


def _posterior(
    config: ModelConfig, params: Params, tokens: Array, actions: Array, is_first: Array, draws: Any
) -> Any:
    """A posterior step as `jax.lax.scan` takes it, and its inputs.
    The step gives the next state, from the initial one where an episode begins, and raw logits.
    """
    action_parts = action_input(config, params, jnp.where(is_first[..., None], 0.0, actions))
    token_parts = token_input(config, params, tokens)
    start = initial(config, params, is_first.shape[-1:])

    def step(state: State, inputs: Any) -> tuple[State, tuple[State, Array]]:
        action_part, token_part, first, draw = inputs
        deter = jnp.where(first[..., None], start.deter, state.deter)
        stoch = jnp.where(first[..., None, None], start.stoch, state.stoch)
        deter = recur(config, params, State(deter, stoch), action_part)
        logits = posterior_logits(config, params, deter, token_part)
        state = _sampled(config, deter, logits, draw)
        return state, (state, logits)

    return step, (action_parts, token_parts, is_first, draws)


def _sampled(config: ModelConfig, deter: Array, logits: Array, draw: Array | Given) -> State:
    mixed = mixed_logits(logits, config.unimix)
    return State(deter, straight_through(mixed, sample_one_hot(mixed, draw)))


# Sequences


def observe(
    config: ModelConfig,
    params: Params,
    carry: State,
    tokens: Array,
    actions: Array,
    is_first: Array,
    draws: Array | Given,
) -> Observed:
    """Posterior states of a sequence. Raises ValueError for an argument of another shape or type.

    Args:
      carry: state `[B, ...]` before row 0.
      tokens: `[T, B, E]`.
      actions: `[T, B, A]`, the action that led *to* row t; ignored where is_first.
      is_first: `[T, B]` bool; state and action are reset there.
      draws: `[T, B, S]` uniform numbers, or given latents.
    """
    rows = dict(tokens=tokens, actions=actions, is_first=is_first, draws=draws)
    _check_sequence(config, params, carry, **rows)
    step, inputs = _posterior(config, params, tokens, actions, is_first, draws)
    _, (states, posterior) = jax.lax.scan(step, carry, inputs, unroll=config.unroll)
    return Observed(states, posterior, prior_logits(config, params, states.deter))


def _check_sequence(config: ModelConfig, params: Params, carry: State, **rows: Any) -> None:
    """Raises ValueError for arguments of `observe` of another shape or type."""
    is_first, given = rows["is_first"], isinstance(rows["draws"], Given)
    if not jnp.issubdtype(jnp.result_type(is_first), bool):
        raise ValueError(f"is_first is {jnp.result_type(is_first)}: give bool [T, B]")
    rows |= {"draws": rows["draws"].sample} if given else {}
    rows |= {"carry.deter": carry.deter, "carry.stoch": carry.stoch}
    lead, latents = jnp.shape(is_first), (config.stoch, config.classes)
    width = params["posterior"]["tokens"]["kernel"].shape[0]
    for name, axes, want in (
        ("is_first", "[T, B]", lead[:2]),
        ("tokens", "[T, B, E]", (*lead, width)),
        ("actions", "[T, B, A]", (*lead, config.action_dim)),
        ("draws", "[T, B, S]", (*lead, *latents[: 1 + given])),
        ("carry.deter", "[B, D]", (*lead[1:], config.deter)),
        ("carry.stoch", "[B, S, K]", (*lead[1:], *latents)),
    ):
        found = jnp.shape(rows[name])
        if found != want:
            raise ValueError(f"{name} has shape {found}: give {axes} = {want}, time first")


def imagine(
    config: ModelConfig,
    params: Params,
    start: State,
    policy: Callable[[Array, Array], Array],
    action_draws: Array | Given,
    latent_draws: Array | Given,
) -> tuple[State, Array]:
    """A trajectory of H imagined steps from `start` `[N, ...]`.

    `policy` is `(features [N, F], draw) -> action [N, A]`. action_draws `[H + 1, N, ...]`: the last
    action only pads; latent_draws `[H, N, S]`: uniform numbers, or given latents. Returns states
    `[H + 1, N, ...]`, the first of which is `start`, and the actions chosen at them.
    """

    def step(state: State, draws: tuple[Array, Array]) -> tuple[State, tuple[State, Array]]:
        action = policy(features(state), draws[0])
        # The replay holds bounded actions alone, so the model is asked about such.
        part = action_input(config, params, squash_action(action))
        deter = recur(config, params, state, part)
        state = _sampled(config, deter, prior_logits(config, params, deter), draws[1])
        return state, (state, action)

    before, at_last = (jax.tree.map(lambda x, i=i: x[i], action_draws) for i in (slice(-1), -1))
    inputs = before, latent_draws
    last, (states, actions) = jax.lax.scan(step, start, inputs, unroll=config.unroll)
    states = jax.tree.map(lambda a, b: jnp.concatenate([a[None], b]), start, states)
    final = policy(features(last), at_last)
    return states, jnp.concatenate([actions, final[None]])
