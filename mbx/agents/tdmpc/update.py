"""One learner step of the TD-MPC agent, as a function of its batch and its random numbers.

Order as in the reference: model and values first, then the policy on the detached latents with the
updated values, then the target networks. Axes: B batch, T transitions of a window, S = T+1 states,
N planner actions, H dynamics heads, L latent dims, A action dims.
"""

from __future__ import annotations

import functools
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import optax

from mbx import returns
from mbx.agents.base import Metrics
from mbx.agents.tdmpc import model_loss as losses
from mbx.agents.tdmpc import optimizers as optim
from mbx.agents.tdmpc import planning, value_targets
from mbx.agents.tdmpc import policy_loss as policies
from mbx.agents.tdmpc.config import TDMPCConfig
from mbx.agents.tdmpc.value_targets import Batch, Draws
from mbx.world_model import Params, WorldModel

Array = jax.Array


@flax.struct.dataclass
class TrainState:
    """All that learning changes; fields that the settings have no use for are None.

    params: the world model's, with a second policy "optimist" where asked for. target_value,
    target_aux, target_policy: EMA copies. opt_state, policy_opt_state, optimist_opt_state: of model
    and value, of the policies. scale: running range of values; kl_scale, trust_scale: of those
    losses. return_ema: percentiles of values. step: int32, updates made.
    """

    params: Params
    target_value: Params
    target_aux: Params | None
    target_policy: Params | None
    opt_state: Any
    policy_opt_state: Any
    optimist_opt_state: Any
    scale: returns.RunningScale
    kl_scale: returns.RunningScale
    trust_scale: returns.RunningScale
    return_ema: returns.ReturnEMA
    step: Array


_POLICIES = ("policy", "optimist")


def init_state(config: TDMPCConfig, model: WorldModel, key: Array) -> TrainState:
    """A fresh train state; target networks start as copies."""
    params = model.init(key)
    if config.optimist:
        params["optimist"] = model.init(jax.random.fold_in(key, 1))["policy"]
    optimizer, policy_optimizer = optim.make_optimizers(config)

    def copy(name: str, wanted: bool) -> Params | None:
        return jax.tree.map(jnp.copy, params[name]) if wanted else None

    return TrainState(
        params=params,
        target_value=copy("value", True),
        target_aux=copy("aux_value", bool(config.aux_gammas)),
        target_policy=copy("policy", config.uses_target_policy),
        opt_state=optimizer.init(_trained(params)),
        policy_opt_state=policy_optimizer.init(params["policy"]),
        optimist_opt_state=policy_optimizer.init(params["optimist"]) if config.optimist else None,
        scale=returns.init_running_scale(),
        kl_scale=returns.init_running_scale(),
        trust_scale=returns.init_running_scale(),
        return_ema=returns.init_return_ema(),
        step=jnp.int32(0),
    )


def _trained(params: Params) -> Params:
    """The components that the model's optimiser trains: all but the policies."""
    return {name: p for name, p in params.items() if name not in _POLICIES}


ValueScales = tuple[returns.RunningScale, returns.ReturnEMA]


def move_value_scale(
    config: TDMPCConfig, scales: ValueScales, values: Array
) -> tuple[Array, ValueScales]:
    """Move the value scale with `values` `[n]`: (scale in use, (running scale, ReturnEMA))."""
    running, ema = scales
    if config.value_scale == "return_ema":
        ema = returns.update_return_ema(ema, values)
        return returns.return_ema_offset_scale(ema)[1], (running, ema)
    running = returns.update_running_scale(running, values, tau=config.tau)
    return running.value, (running, ema)


def weigh_actions(
    config: TDMPCConfig, scales: ValueScales, batch: Batch
) -> tuple[Array | None, ValueScales]:
    """Weights of the planner actions of a batch, `[T+1, B, N]`, and the value scales moved on."""
    if not config.uses_actions:
        return None, scales
    scale = scales[0].value
    if config.advantage_scale == "range":
        scale, scales = move_value_scale(config, scales, batch.target_values[0].reshape(-1))
    weights = value_targets.planner_weights(
        batch.target_values,
        temperature=config.awr_temperature,
        scale=scale,
        advantage_scale=config.advantage_scale,
        effective_samples=config.awr_effective_samples,
        mask=batch.target_valid,
    )
    return weights, scales


def learn_model(
    config: TDMPCConfig,
    model: WorldModel,
    state: TrainState,
    batch: Batch,
    draws: Draws,
    weights: Array | None,
) -> tuple[TrainState, Array, Metrics]:
    """One step on world model and values: (state, latents `[T+1, H, B, L]`, metrics)."""
    frozen = jax.lax.stop_gradient(state.params)
    z = jnp.concatenate(
        [model.encode(frozen, batch.obs[0])[None], model.encode(frozen, batch.obs[1:])]
    )
    acting = state.target_policy if config.td_ema_policy else frozen["policy"]
    pairs = (z[:-1], z[1:])
    target = value_targets.value_target(
        model, frozen, state.target_value, acting, pairs, batch, draws, config, weights
    )
    aux = None
    if config.aux_gammas:
        aux = value_targets.aux_targets(
            model, frozen, state.target_aux, pairs, batch, draws, config
        )
    due = (state.step % config.value_every == 0).astype(jnp.float32)

    def loss(trained: Params) -> tuple[Array, dict[str, Any]]:
        return losses.model_loss(
            {**frozen, **trained},
            model,
            batch,
            z[1:],
            target,
            aux,
            draws,
            config,
            progress=_progress(config, state.step),
            value_due=1.0 if config.value_every == 1 else due,
        )

    old = _trained(state.params)
    (_, out), grads = jax.value_and_grad(loss, has_aux=True)(old)
    optimizer, _ = optim.make_optimizers(config)
    updates, opt_state = optimizer.update(grads, state.opt_state, old)
    new = model.project(optax.apply_updates(old, updates))
    if config.value_every > 1:
        values = ("value", "aux_value")
        new = optim.hold(new, old, values, due == 0.0)
        opt_state = optim.hold(opt_state, state.opt_state, values, due == 0.0)
    metrics = {**out["metrics"], "grad_norm/model": optax.tree.norm(grads)}
    state = state.replace(params={**state.params, **new}, opt_state=opt_state)
    return state, jax.lax.stop_gradient(out["zs"]), metrics


def learn_policy(
    config: TDMPCConfig,
    model: WorldModel,
    state: TrainState,
    inputs: policies.PolicyInputs,
    optimist_eps: Array | None,
) -> tuple[TrainState, Metrics]:
    """One step on the policy, and on the optimistic one, with the updated model and values."""
    entropy_coef = policies.entropy_coefficient(config, _progress(config, state.step))
    _, optimizer = optim.make_optimizers(config)
    scales = policies.Scales((state.scale, state.return_ema), state.kl_scale, state.trust_scale)

    def loss(policy: Params) -> tuple[Array, dict[str, Any]]:
        return policies.policy_loss(
            policy,
            model,
            state.params,
            state.target_policy,
            inputs,
            scales,
            functools.partial(move_value_scale, config),
            config,
            entropy_coef,
        )

    old = state.params["policy"]
    (value, out), grads = jax.value_and_grad(loss, has_aux=True)(old)
    updates, opt_state = optimizer.update(grads, state.policy_opt_state, old)
    params = {**state.params, "policy": optax.apply_updates(old, updates)}
    metrics = {"loss/policy": value, "grad_norm/policy": optax.tree.norm(grads)}
    metrics |= {f"policy/{name}": jnp.mean(x) for name, x in out["metrics"].items()}
    moved = out["scales"]
    state = state.replace(
        policy_opt_state=opt_state,
        scale=moved.value[0],
        return_ema=moved.value[1],
        kl_scale=moved.kl,
        trust_scale=moved.trust,
    )
    if config.optimist:
        unit = state.scale.value if config.entropy_scale == "value" else 1.0
        value, grads = jax.value_and_grad(policies.optimist_loss)(
            params["optimist"],
            model,
            state.params,
            inputs._replace(eps=optimist_eps),
            state.scale.value,
            config,
            entropy_coef / unit,
        )
        updates, opt_state = optimizer.update(grads, state.optimist_opt_state, params["optimist"])
        params["optimist"] = optax.apply_updates(params["optimist"], updates)
        state = state.replace(optimist_opt_state=opt_state)
        metrics["loss/optimist"] = value
    return state.replace(params=params), metrics


def move_targets(config: TDMPCConfig, state: TrainState) -> TrainState:
    """The target networks one step closer to the online ones."""

    def ema(new: Params, old: Params | None, tau: float) -> Params | None:
        return None if old is None else optax.incremental_update(new, old, tau)

    params = state.params
    return state.replace(
        target_value=ema(params["value"], state.target_value, config.tau),
        target_aux=ema(params.get("aux_value"), state.target_aux, config.tau),
        target_policy=ema(params["policy"], state.target_policy, config.policy_tau),
        step=state.step + 1,
    )


def update_from_batch(
    config: TDMPCConfig, model: WorldModel, state: TrainState, batch: Batch, draws: Draws
) -> tuple[TrainState, Metrics]:
    """One learner step on `batch` with given draws: the deterministic core of `update`.

    Order as in the reference: model and value first, then the policy on the detached latents with
    the updated value heads, then the target networks.
    """
    before = (state.scale, state.return_ema)
    weights, (scale, ema) = weigh_actions(config, before, batch)
    state = state.replace(scale=scale, return_ema=ema)
    state, zs, metrics = learn_model(config, model, state, batch, draws, weights)
    inputs = policy_inputs(config, zs, batch, weights, draws)

    def learn(state: TrainState) -> tuple[TrainState, Metrics]:
        return learn_policy(config, model, state, inputs, draws.optimist_eps)

    if config.policy_every == 1:
        state, extra = learn(state)
    else:
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(learn, state)[1])
        due = state.step % config.policy_every == 0
        state, extra = jax.lax.cond(due, learn, lambda s: (s, zeros), state)
    return move_targets(config, state), metrics | extra


def policy_inputs(
    config: TDMPCConfig, zs: Array, batch: Batch, weights: Array | None, draws: Draws
) -> policies.PolicyInputs:
    """What the policy losses read, repeated where several dynamics heads feed them."""
    strategy, heads = config.head_strategy, zs.shape[1]
    copied = losses.feed_copies(
        dict(
            mask=losses.state_mask(batch.mask),
            actions=batch.target_actions,
            weights=weights,
            valid=batch.target_valid,
            expert=batch.target_expert,
            behaviour=batch.action,
        ),
        strategy,
        heads,
    )
    return policies.PolicyInputs(
        zs=losses.feed_heads(zs, strategy), eps=draws.policy_eps, heads=draws.policy_heads, **copied
    )


def draw(config: TDMPCConfig, key: Array, batch_size: int) -> Draws:
    """The random numbers of one update."""
    world = config.world
    keys = jax.random.split(key, 5)
    shape = (config.horizon, batch_size, world.action_dim)
    copies = world.num_dynamics if config.head_strategy == "concat" else 1
    states = (shape[0] + 1, copies * batch_size, world.action_dim)
    imagined = config.value_target == "td" and world.critic == "v"
    rollouts = (config.td_horizon, *shape[:2], config.td_rollouts, world.action_dim)
    local = config.value_reduction == "local"
    value_heads = functools.partial(planning.choose_heads, num_values=world.num_values)

    def extra(i: int) -> Array:
        return jax.random.fold_in(key, i)

    return Draws(
        target_eps=jax.random.normal(keys[0], shape),
        target_heads=None if local else value_heads(keys[1], num_used=config.num_heads),
        policy_eps=jax.random.normal(keys[2], states),
        policy_heads=value_heads(keys[3], num_used=config.num_heads),
        dropout=keys[4] if world.dropout > 0.0 else None,
        rollout_eps=jax.random.normal(extra(1), rollouts) if imagined else None,
        dynamics_head=None
        if config.td_all_dynamics or world.num_dynamics == 1
        else jax.random.randint(extra(2), (), 0, world.num_dynamics),
        optimist_eps=jax.random.normal(extra(3), states) if config.optimist else None,
    )


def _progress(config: TDMPCConfig, step: Array) -> Array | float:
    """Share of the run's updates that are done; 0 where no schedule asks for it, so that runs of
    different lengths are one program."""
    return step / config.total_updates if config.scheduled else 0.0
