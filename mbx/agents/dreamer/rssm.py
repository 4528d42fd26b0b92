"""The recurrent state-space model: a recurrent state and categorical latents, observed or imagined.

On its own it is `mbx.rssm`:

    config = rssm.ModelConfig(vector_dim=3, action_dim=2)
    params = rssm.init(key, config, token_dim=3)
    start = rssm.initial(config, params, (batch,))
    seen = rssm.observe(config, params, start, tokens, actions, is_first, draws)
    later, _ = rssm.imagine(config, params, last, policy, action_draws, latent_draws)

    observe   posterior states of a sequence of tokens, a scan with resets at `is_first`
    imagine   states that follow from a policy's actions and the prior, a scan without observations

Everything that does not depend on the carried state (projections of tokens and of known actions,
the prior of observed states) is computed outside the scans, on all rows at once. Draws are
arguments: uniform numbers, or `Given` latents.
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


def categorical_kl(p: Array, q: Array) -> Array:
    """KL(p || q), summed over the latents, of normalised log-probabilities `[..., S, K]`."""
    return jnp.sum(jnp.exp(p) * (p - q), axis=(-2, -1))


def kl_losses(posterior: Array, prior: Array, free_nats: float) -> tuple[Array, Array, Array]:
    """(dynamics loss, representation loss, raw KL), each `[...]`, of log-probabilities.
    Those, `[..., S, K]`, are `categorical.mixed_logits(logits, config.unimix)` of the logits in
    `Observed`.
    dynamics moves the prior towards the posterior and representation the reverse; both are floored
    at `free_nats` for every row by itself, after the sum over latents.
    Source: DreamerV3, section "World model learning".
    """
    stop = jax.lax.stop_gradient
    dynamics = categorical_kl(stop(posterior), prior)
    representation = categorical_kl(posterior, stop(prior))

    floored = jnp.maximum(dynamics, free_nats), jnp.maximum(representation, free_nats)
    return *floored, stop(representation)


# Parameters and states


def init(key: Array, config: ModelConfig, token_dim: int) -> Params:
    """Parameters of the RSSM for tokens `[..., token_dim]`."""
    core_key, prior_key, posterior_key, rest_key = jax.random.split(key, 4)
    deter, hidden, flat = config.deter, config.hidden, config.stoch * config.classes
    bias = config.norm == "rms"
    prior, out = jax.random.split(prior_key)
    params = _init_core(core_key, config, flat)
    params["prior"] = nets.init_mlp(prior, config.norm, deter, hidden, config.prior_layers)
    params["prior"]["out"] = nets.init_linear(out, hidden, hidden, flat)
    keys = jax.random.split(posterior_key, 3)
    params["posterior"] = {
        "deter": nets.init_linear(keys[0], deter + token_dim, deter, hidden, bias=False),
        "tokens": nets.init_linear(keys[1], deter + token_dim, token_dim, hidden, bias=bias),
        "norm": nets.init_norm(config.norm, hidden),
        "rest": nets.init_mlp(rest_key, config.norm, hidden, hidden, config.posterior_layers - 1),
        "out": nets.init_linear(keys[2], hidden, hidden, flat),
    }
    if config.initial == "learned":
        params["initial"] = jnp.zeros(deter)
    return params


def _init_core(key: Array, config: ModelConfig, flat: int) -> Params:
    keys = jax.random.split(key, 6 + config.core_layers)
    deter, hidden, blocks = config.deter, config.hidden, config.blocks
    bias = config.norm == "rms"
    if config.core == "dense":
        width = flat + config.action_dim
        return {
            "in_z": nets.init_linear(keys[0], width, flat, hidden, bias=False),
            "in_a": nets.init_linear(keys[1], width, config.action_dim, hidden, bias=bias),
            "in_norm": nets.init_norm(config.norm, hidden),
            "gru": nets.init_linear(keys[2], deter + hidden, deter + hidden, 3 * deter, bias=bias),
            "gru_norm": nets.init_norm(config.norm, 3 * deter),
        }
    # The fan-in counts the three inputs once for every block, as the official code does.
    fan_in = deter + 3 * hidden * blocks
    params = {
        "in_h": nets.init_layer(keys[0], config.norm, deter, hidden),
        "in_z": nets.init_layer(keys[1], config.norm, flat, hidden),
        "in_a": nets.init_layer(keys[2], config.norm, config.action_dim, hidden),
        "hidden_h": nets.init_linear(
            keys[3], fan_in, blocks, deter // blocks, deter // blocks, bias=False
        ),
        "hidden_x": nets.init_linear(keys[4], fan_in, 2 * hidden, deter, bias=False),
        "hidden_a": nets.init_linear(keys[5], fan_in, hidden, deter, bias=bias),
        "hidden_norm": nets.init_norm(config.norm, deter),
        "gru": nets.init_linear(keys[6], deter, blocks, deter // blocks, 3 * deter // blocks),
    }
    if config.core_layers > 1:
        width = deter // blocks
        params["hidden_rest"] = {
            f"layer_{i}": nets.init_linear(key, deter, blocks, width, width, bias=bias)
            | {"norm": nets.init_norm(config.norm, deter)}
            for i, key in enumerate(keys[7:])
        }
    return params


def initial(config: ModelConfig, params: Params, lead: tuple[int, ...]) -> State:
    """The state before an episode's first row, `[*lead, ...]`: zeros, or learned.
    The learned one is tanh of a parameter, with the mode of the prior there, through which no
    gradient flows (sheeprl).
    """
    shape = (*lead, config.stoch, config.classes)
    if config.initial == "zeros":
        return State(jnp.zeros((*lead, config.deter)), jnp.zeros(shape))
    deter = jnp.tanh(params["initial"])
    stoch = jax.lax.stop_gradient(mode_one_hot(prior_logits(config, params, deter)))
    return State(jnp.broadcast_to(deter, (*lead, config.deter)), jnp.broadcast_to(stoch, shape))


def features(state: State) -> Array:
    """What heads read: `[..., D + S K]`."""
    stoch = state.stoch.reshape(*state.stoch.shape[:-2], -1)
    return jnp.concatenate([state.deter, stoch], axis=-1)


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
    dtype, deter = config.dtype, state.deter
    flat = state.stoch.reshape(*state.stoch.shape[:-2], -1)
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
    action = action_input(config, params, jnp.where(is_first[..., None], 0.0, action))
    tokens, start = token_input(config, params, tokens), initial(config, params, is_first.shape)
    return _posterior_step(config, params, start, state, (action, tokens, is_first, draw))[0]


def _posterior_step(
    config: ModelConfig, params: Params, start: State, state: State, inputs: Any
) -> tuple[State, Array]:
    """The next state, from `start` where an episode begins, and its posterior's raw logits."""
    action_part, token_part, first, draw = inputs
    deter = jnp.where(first[..., None], start.deter, state.deter)
    stoch = jnp.where(first[..., None, None], start.stoch, state.stoch)
    deter = recur(config, params, State(deter, stoch), action_part)
    logits = posterior_logits(config, params, deter, token_part)
    return _sampled(config, deter, logits, draw), logits


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
    """Posterior states of a sequence.

    Args:
      carry: state `[B, ...]` before row 0.
      tokens: `[T, B, E]`.
      actions: `[T, B, A]`, the action that led *to* row t; ignored where is_first.
      is_first: `[T, B]` bool; state and action are reset there.
      draws: `[T, B, S]` uniform numbers, or given latents.

    Raises:
      ValueError: an argument of another shape or type; names it.
    """
    _check_sequence(config, params, carry, tokens, actions, is_first, draws)
    actions = jnp.where(is_first[..., None], 0.0, actions)
    action_part = action_input(config, params, actions)
    token_part = token_input(config, params, tokens)
    start = initial(config, params, is_first.shape[1:])

    def step(state: State, inputs: Any) -> tuple[State, tuple[State, Array]]:
        state, logits = _posterior_step(config, params, start, state, inputs)
        return state, (state, logits)

    _, (states, posterior) = jax.lax.scan(step, carry, (action_part, token_part, is_first, draws))
    return Observed(states, posterior, prior_logits(config, params, states.deter))


def _check_sequence(
    config: ModelConfig,
    params: Params,
    carry: State,
    tokens: Array,
    actions: Array,
    is_first: Array,
    draws: Array | Given,
) -> None:
    if not jnp.issubdtype(jnp.result_type(is_first), bool):
        raise ValueError(f"is_first is {jnp.result_type(is_first)}: give bool [T, B]")
    lead, latents = jnp.shape(is_first), (config.stoch, config.classes)
    given, drawn = isinstance(draws, Given), draws.sample if isinstance(draws, Given) else draws
    width = params["posterior"]["tokens"]["kernel"].shape[0]
    for name, x, axes, want in (
        ("is_first", is_first, "[T, B]", lead[:2]),
        ("tokens", tokens, "[T, B, E]", (*lead, width)),
        ("actions", actions, "[T, B, A]", (*lead, config.action_dim)),
        ("draws", drawn, "[T, B, S]", (*lead, *latents[: 1 + given])),
        ("carry.deter", carry.deter, "[B, D]", (*lead[1:], config.deter)),
        ("carry.stoch", carry.stoch, "[B, S, K]", (*lead[1:], *latents)),
    ):
        if jnp.shape(x) != want:
            raise ValueError(f"{name} has shape {jnp.shape(x)}: give {axes} = {want}, time first")


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
    last, (states, actions) = jax.lax.scan(step, start, (before, latent_draws))
    states = jax.tree.map(lambda a, b: jnp.concatenate([a[None], b]), start, states)
    final = policy(features(last), at_last)
    return states, jnp.concatenate([actions, final[None]])
