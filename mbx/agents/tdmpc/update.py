"""One learner step of the TD-MPC agent, as a function of its batch and its random numbers.

In: a train state, a batch of windows (`types.Batch`) and every random number (`types.Noise`). Out:
the next train state and metrics. `update_from_batch` reads from top to bottom, in the reference's
order: encode, targets, model loss, step, policy loss on detached latents with the updated values,
step, move the targets. On several devices (`fast.collectives`) each has a part of the batch: losses
are weighted sums, and every step exchanges gradients and metrics once.

Axes: B batch, T transitions of a window, S = T+1 states, N planner actions, H dynamics heads, L
latent dims, A action dims.
Sources: TD-MPC2 (arXiv 2310.16828) and its reference code; docs/sources.md, entry ensembles.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import optax

from mbx import distributions as dist
from mbx import returns
from mbx.agents.tdmpc import losses, variant
from mbx.agents.tdmpc.types import (
    Batch,
    Noise,
    PolicyInputs,
    Scales,
    TrainState,
    ValueScales,
    ValueTarget,
    Weights,
)
from mbx.agents.tdmpc.value_targets import value_targets
from mbx.fast import collectives, rng
from mbx.types import Array, Mean, Metrics, Params, streams
from mbx.world_model import WorldModel, WorldModelConfig, choose_heads

if TYPE_CHECKING:
    from mbx.agents.tdmpc.settings import Settings

# Components that the model's optimiser does not train.
_OTHERS = ("policy", "optimist", "statistics")
POLICY_EPS = 1e-5  # Adam's for the policy, TD-MPC2's


def update_from_batch(
    settings: Settings, model: WorldModel, state: TrainState, batch: Batch, noise: Noise
) -> tuple[TrainState, Metrics]:
    """One learner step on `batch` with given random numbers."""
    state = state.replace(params=model.see(state.params, batch.obs))
    weights = losses.step_weights(settings, model.config.critic, batch)
    for_policy, for_values = weigh_plans(settings, batch.plan_values)
    shares = batch_metrics(batch, weights, state.step + 1)
    z = encode(model, state.params, batch.obs)
    targets = value_targets(settings, model, state, z, batch, noise, for_values)
    state, zs, metrics = learn_model(
        settings, model, state, batch, z, targets, weights, noise, shares
    )
    inputs = losses.policy_inputs(zs, batch, weights, for_policy, noise)
    learn = functools.partial(learn_policy, settings, model, inputs=inputs, noise=noise)
    state, more = when(policy_due(settings, state.step), learn, state)
    return move_targets(settings, state), metrics | more


def encode(model: WorldModel, params: Params, obs: Array) -> Array:
    """Latents of a window without gradient, `[T+1, B, ...] -> [T+1, B, L]`.

    The first state is encoded separately so that XLA shares it with the rollout.
    """
    params = jax.lax.stop_gradient(params)
    return jnp.concatenate([model.encode(params, obs[0])[None], model.encode(params, obs[1:])])


def policy_due(settings: Settings, step: Array) -> Array | None:
    """Whether the policy learns in this update; None: always."""
    first = settings.train.pretrain_updates
    return step >= first if first and not settings.train.pretrain_policy else None


def when(
    due: Array | None, learn: Callable[[TrainState], tuple[TrainState, Metrics]], state: TrainState
) -> tuple[TrainState, Metrics]:
    """`learn(state)` where `due` (None: always); metrics average over due updates only."""
    if due is None:
        return learn(state)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(learn, state)[1])
    state, metrics = jax.lax.cond(due, learn, lambda s: (s, zeros), state)
    return state, {name: Mean(value, due.astype(jnp.float32)) for name, value in metrics.items()}


def weigh_plans(settings: Settings, values: Array | None) -> tuple[Array | None, Array | None]:
    """Weights of planner actions by their values `[S, B, N]`, for the policy and for value targets.

    They are softmax(values / temperature); None where no loss reads them.
    """
    if not settings.weighs_plans:
        return None, None
    assert values is not None  # a batch has plans where a loss reads them
    weights = dist.awr_weights(values, settings.loss.awr_temperature, mode="divide")
    if settings.weighs_values and settings.loss.value_temperature:
        return weights, dist.awr_weights(values, settings.loss.value_temperature, mode="divide")
    return weights, weights


def batch_metrics(batch: Batch, weights: Weights, step: Array) -> Metrics:
    """This device's shares of batch metrics; `targets/age` is still to be divided by valid."""
    metrics = {"batch/mask": collectives.mean_share(batch.mask)}
    if batch.plan_step is not None:
        valid = batch.plan_valid[:-1]
        metrics["targets/age"] = weights.rows.even(valid * (step - batch.plan_step[:-1]))
        metrics["targets/valid"] = weights.rows.even(valid)
    return metrics


def learn_model(
    settings: Settings,
    model: WorldModel,
    state: TrainState,
    batch: Batch,
    z: Array,
    targets: tuple[ValueTarget, Array | None],
    weights: Weights,
    noise: Noise,
    shares: Metrics | None = None,
) -> tuple[TrainState, Array, Metrics]:
    """One step on world model and values: the state, latents `[S, H, B, L]`, metrics.

    Args:
        z: latents of the batch's states, `[T+1, B, L]`.
        targets: of the value heads, and of the auxiliary ones.
        shares: further metrics, summed over devices together with these.
    """
    frozen = jax.lax.stop_gradient(state.params)

    def loss(trained: Params) -> tuple[Array, tuple[Array, Metrics]]:
        return losses.model_loss(
            settings,
            model,
            {**frozen, **trained},
            batch,
            z[1:],
            targets,
            weights,
            noise,
            progress=progress(settings, state.step),
            value_due=values_due(settings, state.step),
        )

    (_, (zs, metrics)), grads = jax.value_and_grad(loss, has_aux=True)(_trained(state.params))
    grads, metrics = collectives.psum((grads, metrics | (shares or {})))
    if "targets/age" in metrics:
        metrics["targets/age"] /= jnp.maximum(metrics["targets/valid"], 1e-9)
    state = step_model(settings, model, state, grads)
    zs = jax.lax.stop_gradient(zs)
    return state, zs, metrics | {"grad_norm/model": optax.tree.norm(grads)}


def values_due(settings: Settings, step: Array) -> Array | float:
    """1 in updates in which the values learn, else 0."""
    every = settings.optimizer.value_every
    return 1.0 if every == 1 else (step % every == 0).astype(jnp.float32)


def step_model(
    settings: Settings, model: WorldModel, state: TrainState, grads: Params
) -> TrainState:
    """The state after a step of world model and values along the whole batch's gradients."""
    old, (optimizer, _) = _trained(state.params), make_optimizers(settings, model.config)
    updates, opt_state = optimizer.update(grads, state.opt_state, old)
    if settings.rate_falls:
        updates = optax.tree.scale(rate_share(settings, state.step), updates)
    new = model.project(optax.apply_updates(old, updates))
    if settings.optimizer.value_every > 1:
        held, values = values_due(settings, state.step) == 0.0, ("value", "aux_value")
        new = keep_where(held, new, old, values)
        opt_state = keep_where(held, opt_state, state.opt_state, values)
    return state.replace(params={**state.params, **new}, opt_state=opt_state)


def learn_policy(
    settings: Settings, model: WorldModel, state: TrainState, inputs: PolicyInputs, noise: Noise
) -> tuple[TrainState, Metrics]:
    """One step on the policy (and the optimist) with the updated model and values."""
    share, params = progress(settings, state.step), state.params
    units = ValueScales(state.scale, state.return_ema)
    scales = Scales(units, state.kl_scale, state.trust_scale)

    def loss(policy: Params) -> tuple[Array, tuple[Scales, Metrics]]:
        target = state.target_policy
        return losses.policy_loss(settings, model, policy, params, target, inputs, scales, share)

    (value, (scales, found)), grads = jax.value_and_grad(loss, has_aux=True)(params["policy"])
    metrics = {f"policy/{name}": collectives.mean_share(x) for name, x in found.items()}
    grads, metrics = collectives.psum((grads, {"loss/policy": value} | metrics))
    new, opt_state = step_policy(settings, model, params["policy"], grads, state.policy_opt_state)
    state = state.replace(
        params={**params, "policy": new},
        policy_opt_state=opt_state,
        scale=scales.value.running,
        return_ema=scales.value.ema,
        kl_scale=scales.kl,
        trust_scale=scales.trust,
    )
    metrics["grad_norm/policy"] = optax.tree.norm(grads)
    if settings.loss.optimist:
        state, more = learn_optimist(settings, model, state, inputs, noise)
        metrics |= more
    return state, metrics


def learn_optimist(
    settings: Settings, model: WorldModel, state: TrainState, inputs: PolicyInputs, noise: Noise
) -> tuple[TrainState, Metrics]:
    """One step on the optimistic policy."""
    inputs = inputs._replace(eps=noise.optimist_eps, dropout=noise.optimist_dropout)
    share, params = progress(settings, state.step), state.params
    units = ValueScales(state.scale, state.return_ema)

    def loss(optimist: Params) -> tuple[Array, ValueScales]:
        return variant.optimist_loss(settings, model, optimist, params, inputs, units, share)

    (value, units), grads = jax.value_and_grad(loss, has_aux=True)(params["optimist"])
    value, grads = collectives.psum((value, grads))
    old, old_state = params["optimist"], state.optimist_opt_state
    new, opt_state = step_policy(settings, model, old, grads, old_state)
    state = state.replace(
        params={**params, "optimist": new},
        optimist_opt_state=opt_state,
        scale=units.running,
        return_ema=units.ema,
    )
    return state, {"loss/optimist": value}


def step_policy(
    settings: Settings, model: WorldModel, policy: Params, grads: Params, opt_state: Any
) -> tuple[Params, Any]:
    """A policy and its optimiser's state after a step along the whole batch's gradients."""
    _, optimizer = make_optimizers(settings, model.config)
    updates, opt_state = optimizer.update(grads, opt_state, policy)
    return optax.apply_updates(policy, updates), opt_state


def move_targets(settings: Settings, state: TrainState) -> TrainState:
    """The state with its target networks one EMA step closer to the online ones."""

    def ema(new: Params, old: Params | None, tau: float) -> Params | None:
        return None if old is None else optax.incremental_update(new, old, tau)

    params, tau = state.params, settings.optimizer.tau
    return state.replace(
        target_value=ema(params["value"], state.target_value, tau),
        target_aux=ema(params.get("aux_value"), state.target_aux, tau),
        target_policy=ema(params["policy"], state.target_policy, settings.optimizer.policy_tau),
        step=state.step + 1,
    )


def progress(settings: Settings, step: Array) -> Array | float:
    """Share of the run's updates that are done.

    0 where no schedule reads it, so that runs of different lengths share one program.
    """
    return step / settings.total_updates() if settings.follows_progress else 0.0


def init_state(settings: Settings, model: WorldModel, key: Array) -> TrainState:
    """A fresh train state; target networks start as copies."""
    keys = streams(key, "model", "optimist", *(["heads"] if model.heads else []))
    params, optimist = model.init(keys["model"]), settings.loss.optimist
    if model.heads:
        world, tasks = model.config, model.config.tasks
        latent = world.latent + (tasks.embedding_dim if tasks else 0)
        params["heads"] = model.heads.init(keys["heads"], latent, world.obs_shape)
    if optimist:
        params["optimist"] = model.init(keys["optimist"])["policy"]
    optimizer, policy_optimizer = make_optimizers(settings, model.config)

    def copy(name: str, wanted: bool) -> Params | None:
        return jax.tree.map(jnp.copy, params[name]) if wanted else None

    return TrainState(
        params=params,
        target_value=copy("value", True),
        target_aux=copy("aux_value", bool(settings.loss.aux_gammas)),
        target_policy=copy("policy", settings.keeps_target_policy),
        opt_state=optimizer.init(_trained(params)),
        policy_opt_state=policy_optimizer.init(params["policy"]),
        optimist_opt_state=policy_optimizer.init(params["optimist"]) if optimist else None,
        scale=returns.init_running_scale(),
        kl_scale=returns.init_running_scale(),
        trust_scale=returns.init_running_scale(),
        return_ema=returns.init_return_ema(),
        step=jnp.int32(0),
    )


def _trained(params: Params) -> Params:
    """The components that the model's optimiser trains."""
    return {name: p for name, p in params.items() if name not in _OTHERS}


def draw(settings: Settings, model: WorldModel, key: Array) -> Noise:
    """The random numbers of one update."""
    world, loss = model.config, settings.loss
    keys = streams(key, *Noise._fields)
    shape = (loss.horizon, loss.batch_size, world.action_dim)
    states = (loss.horizon + 1, *shape[1:])
    imagined = loss.value_target == "td" and world.critic == "v"
    local = loss.value_target != "lambda" and loss.value_reduction == "local"
    value_heads = functools.partial(
        choose_heads, num_values=world.num_values, num_used=loss.num_heads
    )

    def drops(name: str, used: bool) -> Array | None:
        return keys[name] if used and world.dropout > 0.0 else None

    def normal(name: str, shape: tuple[int, ...]) -> Array:
        return rng.normal(keys[name], shape)

    def rollouts() -> Array:
        starts = loss.horizon + loss.value_last_state
        steps = (loss.td_horizon, starts, loss.batch_size, loss.td_rollouts, world.action_dim)
        return normal("rollout_eps", steps)

    def one_head() -> Array:
        return jax.random.randint(keys["dynamics_head"], (), 0, world.num_dynamics)

    every_head = world.num_dynamics == 1 or loss.td_all_dynamics
    return Noise(
        target_eps=normal("target_eps", shape),
        target_heads=None if local else value_heads(keys["target_heads"]),
        policy_eps=normal("policy_eps", states),
        policy_heads=value_heads(keys["policy_heads"]),
        dropout=drops("dropout", True),
        rollout_eps=rollouts() if imagined else None,
        dynamics_head=None if every_head else one_head(),
        optimist_eps=normal("optimist_eps", states) if loss.optimist else None,
        policy_dropout=drops("policy_dropout", settings.uses_svg),
        optimist_dropout=drops("optimist_dropout", loss.optimist),
    )


# -------------------------------------------------------------------------------------------------
# Optimisers: one clip of the global norm, Adam, and a learning rate a component


def learning_rates(settings: Settings, world: WorldModelConfig) -> dict[str, float]:
    """The rate of every component except the encoder; "model" is the rest.

    Ensembles may get higher rates, since their losses are means over heads.
    """
    lr = settings.optimizer.learning_rate
    if not settings.optimizer.ensemble_lr_scaling:
        return dict(model=lr)
    return dict(
        model=lr,
        dynamics=lr * world.num_dynamics,
        reward=lr * world.num_rewards,
        value=lr * world.num_values / 5,
        aux_value=lr * max(world.num_aux, 1) / 5,
    )


def rate_share(settings: Settings, step: Array) -> Array:
    """Factor of the model's rates after `step` updates, float32.

    1 until `lr_decay_start`, then linear to final_learning_rate / learning_rate over
    `lr_decay_updates`, then constant.
    """
    own = settings.optimizer
    done = jnp.clip((step - own.lr_decay_start) / own.lr_decay_updates, 0.0, 1.0)
    return 1.0 + (own.final_learning_rate / own.learning_rate - 1.0) * done


def encoder_rate(settings: Settings) -> float | optax.Schedule:
    """The encoder's rate: constant, or scaled after `encoder_lr_step_at` of the run."""
    own = settings.optimizer
    lr = own.learning_rate * own.encoder_lr_scale
    if not settings.steps_encoder_rate:
        return lr
    step = own.encoder_lr_step_at * settings.total_updates()
    return lambda count: lr * jnp.where(count < int(step), 1.0, own.encoder_lr_step_scale)


def make_optimizers(
    settings: Settings, world: WorldModelConfig
) -> tuple[optax.GradientTransformation, optax.GradientTransformation]:
    """Optimisers of the model (values included) and of a policy; priors stay frozen."""
    rates, own = learning_rates(settings, world), settings.optimizer

    def labels(params: Params) -> Any:
        def label(path: tuple, _: Array) -> str:
            names = [entry.key for entry in path]
            if "prior" in names:
                return "prior"
            return names[0] if names[0] in ("encoder", *rates) else "model"

        return jax.tree_util.tree_map_with_path(label, params)

    decay = optax.add_decayed_weights(own.weight_decay)

    def group(rate: float | optax.Schedule) -> optax.GradientTransformation:
        scale = optax.scale_by_learning_rate(rate)
        return optax.chain(decay, scale) if own.weight_decay else scale

    groups = {name: group(rate) for name, rate in rates.items()}
    groups |= dict(encoder=group(encoder_rate(settings)), prior=optax.set_to_zero())
    clip = optax.clip_by_global_norm(own.grad_clip_norm)
    rate = own.learning_rate * own.policy_lr_scale
    model = optax.chain(clip, optax.scale_by_adam(), optax.partition(groups, labels))
    adam = optax.adam(rate, eps=POLICY_EPS)
    if own.weight_decay:
        adam = optax.adamw(rate, eps=POLICY_EPS, weight_decay=own.weight_decay)
    return model, optax.chain(clip, adam)


def keep_where(held: Array, new: Any, old: Any, components: tuple[str, ...]) -> Any:
    """`new`, but `old` in the leaves of `components` where `held`."""

    def choose(path: tuple, a: Array, b: Array) -> Array:
        names = [getattr(entry, "key", None) for entry in path]
        return jnp.where(held, b, a) if set(components) & set(names) else a

    return jax.tree_util.tree_map_with_path(choose, new, old)
