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
from mbx.agents.tdmpc import losses
from mbx.agents.tdmpc.policies import optimist_loss, policy_of
from mbx.agents.tdmpc.types import (
    Batch,
    Noise,
    PolicyInputs,
    Scales,
    TrainState,
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
    plans = weigh_plans(settings, batch.plan_values)
    z = encode(model, state.params, batch.obs)
    targets = value_targets(settings, model, state, z, batch, noise, plans)
    state, zs, metrics = learn_model(settings, model, state, batch, z, targets, weights, noise)
    inputs = losses.policy_inputs(zs, batch, weights, plans, noise)
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


def weigh_plans(settings: Settings, values: Array | None) -> Array | None:
    """Weights of planner actions by their values `[S, B, N]`, None where no loss reads them."""
    if not settings.weighs_plans:
        return None
    assert values is not None  # a batch has plans where a loss reads them
    return dist.awr_weights(values, settings.loss.awr_temperature)


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
) -> tuple[TrainState, Array, Metrics]:
    """One step on world model and values: the state, latents `[S, H, B, L]`, metrics.

    Args:
        z: latents of the batch's states, `[T+1, B, L]`.
        targets: of the value heads, and of the auxiliary ones.
    """
    frozen = jax.lax.stop_gradient(state.params)
    schedules = dict(
        progress=progress(settings, state.step), value_due=values_due(settings, state.step)
    )

    def loss(trained: Params) -> tuple[Array, tuple[Array, Metrics]]:
        given = {**frozen, **trained}, batch, z[1:], targets, weights, noise
        return losses.model_loss(settings, model, *given, **schedules)

    (_, (zs, metrics)), grads = jax.value_and_grad(loss, has_aux=True)(_trained(state.params))
    metrics |= batch_metrics(batch, weights, state.step + 1)
    grads, metrics = collectives.psum((grads, metrics))
    if "targets/age" in metrics:
        metrics["targets/age"] /= jnp.maximum(metrics["targets/valid"], 1e-9)
    state = step_model(settings, model, state, grads)
    return state, jax.lax.stop_gradient(zs), metrics | {"grad_norm/model": optax.tree.norm(grads)}


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

    def loss(policy: Params, scales: Scales) -> tuple[Array, tuple[Scales, Metrics]]:
        own = policy_of(settings, model, params, policy, inputs)
        return losses.policy_loss(own, state.target_policy, scales, share)

    def optimists(policy: Params, scales: Scales) -> tuple[Array, tuple[Scales, Metrics]]:
        given = inputs._replace(eps=noise.optimist_eps, dropout=noise.optimist_dropout)
        own = policy_of(settings, model, params, policy, given)
        value, scales = optimist_loss(own, scales, share)
        return value, (scales, {})

    state, metrics = step_policy(settings, model, state, "policy", loss)
    if settings.loss.optimist:
        state, more = step_policy(settings, model, state, "optimist", optimists)
        metrics |= {"loss/optimist": more["loss/optimist"]}
    return state, metrics


def step_policy(
    settings: Settings,
    model: WorldModel,
    state: TrainState,
    name: str,
    loss: Callable[[Params, Scales], tuple[Array, tuple[Scales, Metrics]]],
) -> tuple[TrainState, Metrics]:
    """The state after a step of one policy, "policy" or "optimist", along its loss's gradients."""
    scales = Scales(*(getattr(state, field) for field in Scales._fields))
    old, (_, optimizer) = state.params[name], make_optimizers(settings, model.config)
    (value, (scales, found)), grads = jax.value_and_grad(loss, has_aux=True)(old, scales)
    metrics = {f"{name}/{x}": collectives.mean_share(array) for x, array in found.items()}
    grads, metrics = collectives.psum((grads, {f"loss/{name}": value} | metrics))
    moments = f"{name}_opt_state"
    updates, opt_state = optimizer.update(grads, getattr(state, moments), old)
    params = {**state.params, name: optax.apply_updates(old, updates)}
    state = state.replace(params=params, **{moments: opt_state}, **scales._asdict())
    return state, metrics | {f"grad_norm/{name}": optax.tree.norm(grads)}


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
    keys = streams(key, "model", "optimist", "heads")
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
    states = (loss.horizon + 1, loss.batch_size, world.action_dim)
    imagined = loss.value_target == "td" and world.critic == "v"
    local = loss.value_target != "lambda" and loss.value_reduction == "local"
    every_head = world.num_dynamics == 1 or loss.td_all_dynamics

    def normal(name: str, *shape: int) -> Array:
        return rng.normal(keys[name], shape)

    def value_heads(name: str) -> Array | None:
        return choose_heads(keys[name], world.num_values, loss.num_heads)

    def drops(name: str, used: bool) -> Array | None:
        return keys[name] if used and world.dropout > 0.0 else None

    def rollouts() -> Array:
        starts = loss.horizon + loss.value_last_state, loss.batch_size, loss.td_rollouts
        return normal("rollout_eps", loss.td_horizon, *starts, world.action_dim)

    def one_head() -> Array:
        return jax.random.randint(keys["dynamics_head"], (), 0, world.num_dynamics)

    return Noise(
        target_eps=normal("target_eps", loss.horizon, *states[1:]),
        target_heads=None if local else value_heads("target_heads"),
        policy_eps=normal("policy_eps", *states),
        policy_heads=value_heads("policy_heads"),
        dropout=drops("dropout", True),
        rollout_eps=rollouts() if imagined else None,
        dynamics_head=None if every_head else one_head(),
        optimist_eps=normal("optimist_eps", *states) if loss.optimist else None,
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

    def label(path: tuple, _: Array) -> str:
        names = [entry.key for entry in path]
        if "prior" in names:
            return "prior"
        return names[0] if names[0] in ("encoder", *rates) else "model"

    def group(rate: float | optax.Schedule) -> optax.GradientTransformation:
        scale = optax.scale_by_learning_rate(rate)
        decay = optax.add_decayed_weights(own.weight_decay)
        return optax.chain(decay, scale) if own.weight_decay else scale

    groups = {name: group(rate) for name, rate in rates.items()}
    groups |= dict(encoder=group(encoder_rate(settings)), prior=optax.set_to_zero())
    parts = optax.partition(groups, functools.partial(jax.tree_util.tree_map_with_path, label))
    clip = optax.clip_by_global_norm(own.grad_clip_norm)
    model = optax.chain(clip, optax.scale_by_adam(), parts)
    rate = own.learning_rate * own.policy_lr_scale
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
