"""One step of learning from given targets: of networks by gradients, of tables by averaging."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax

from mbx.empo import power
from mbx.empo.agent.models import Q_FLOOR
from mbx.empo.agent.targets import Targets
from mbx.empo.agent.types import Problem, TrainState
from mbx.fast import collectives
from mbx.types import Array, Metrics, Params


def init_state(problem: Problem, key: Array) -> TrainState:
    """A fresh train state; tables count their visits where networks keep an optimiser's state."""
    params = problem.model.init(key)
    tables = problem.settings.model.kind == "tables"
    init = functools.partial(jax.tree.map, jnp.zeros_like) if tables else _optimizer(problem).init
    opt_state = {name: init(own) for name, own in params.items()}
    copies = problem.target_interval > 1 or problem.target_rate > 0.0
    target = jax.tree.map(jnp.copy, params) if copies else None
    return TrainState(params, target, opt_state, jnp.int32(0))


def learn_networks(
    problem: Problem,
    train: TrainState,
    states: Any,
    targets: Targets,
    mask: Array,
    shares: Metrics | None = None,
    drop_key: Array | None = None,
) -> tuple[TrainState, Metrics]:
    """One optimiser step of each network that this stage trains.
    Of a part of a batch (`mbx.fast.collectives`) it is the step on the whole: gradients are summed.

    Args:
        states: `[B, ...]`.
        targets: of these states.
        mask: `[B]` bool, rows that exist.
        shares: metrics of the caller's, which come back summed with the losses.
        drop_key: for a model with dropout.
    """
    codes = problem.model.encode(states)
    on = _active(problem, train.step)

    def loss(params: Params) -> tuple[Array, Metrics]:
        """Of networks that are trained: others' losses reach an encoder that they share."""
        each = losses(problem, params, codes, targets, mask, drop_key)
        network = {name: name.removeprefix("loss/") for name in each} | {"loss/advantage": "q_r"}
        return sum(on[network[name]] * value for name, value in each.items()), each

    gradients, metrics = jax.grad(loss, has_aux=True)(train.params)
    gradients, metrics = collectives.psum((gradients, metrics | (shares or {})))
    settings, optimizer = problem.settings.optimizer, _optimizer(problem)
    params, opt_state = {}, {}
    for name, own in train.params.items():
        base = settings.learning_rate_v if name == "v_h_e" else settings.learning_rate_q
        rate = power.curriculum.learning_rate(problem.curriculum, train.step, base)
        updates, state = optimizer.update(gradients[name], train.opt_state[name], own)
        keep = functools.partial(jnp.where, on[name])
        params[name] = jax.tree.map(lambda w, u, r=rate, k=keep: k(w - r * u, w), own, updates)
        opt_state[name] = jax.tree.map(keep, state, train.opt_state[name])
        metrics[f"grad_norm/{name}"] = optax.tree.norm(gradients[name])
    return train.replace(params=params, opt_state=opt_state), metrics


def losses(
    problem: Problem,
    params: Params,
    codes: Array,
    targets: Targets,
    mask: Array,
    drop_key: Array | None = None,
) -> Metrics:
    """Every network's loss: mean squared errors, of Q_r by `q_loss`."""
    whole, world, settings = problem.model, problem.world, problem.settings.loss
    model = whole.dropping(drop_key) if whole.dropping and drop_key is not None else whole
    coverage, known = targets.coverage * mask[:, None, None], targets.known & mask[:, None]
    all_known = jnp.all(known, axis=1, keepdims=True)
    counted = (jnp.sum(coverage + 1e-9), jnp.sum(mask), jnp.sum(known), jnp.sum(all_known))
    covered, *numbers = collectives.psum(tuple(x.astype(jnp.float32) for x in counted))
    rows, pairs, states = (jnp.maximum(x, 1.0) for x in numbers)
    latents = model.trunk(params, codes)
    v = power.soft_clamp(model.v_h_e(params, latents), 0.0, 1.0)
    q = model.q_r(params, latents)
    found = {
        "loss/v_h_e": jnp.sum(coverage * jnp.square(v - targets.v_h_e)) / covered,
        "loss/q_r": jnp.sum(q_errors(settings.q_loss, q, targets.q_r) * known) / pairs,
    }
    if settings.advantage_coef:
        error = jnp.square(log_advantage(q) - log_advantage(targets.q_r))
        error = jnp.sum(jnp.where(all_known, error, 0.0))
        found["loss/advantage"] = settings.advantage_coef * error / (states * q.shape[1])
    if model.x_h is not None:
        # Targets are of the whole network.
        v = v if model is whole else whole.v_h_e(params, latents)
        clean = jnp.clip(jax.lax.stop_gradient(v), 0.0, 1.0)
        want = power.aggregate_ability(clean, world.goal_weight[None], problem.params.zeta)
        x = power.soft_clamp(model.x_h(params, latents), power.ABILITY_FLOOR, 1.0)
        found["loss/x_h"] = jnp.sum(jnp.square(x - want) * mask[:, None]) / (rows * x.shape[1])
    if model.y is not None:
        error = jnp.square(model.y(params, latents) - targets.y)
        found["loss/u_r"] = jnp.sum(error * mask) / rows
    if model.v_r is not None:
        error = q_errors(settings.q_loss, model.v_r(params, latents), targets.v_r)
        found["loss/v_r"] = jnp.sum(error * mask) / rows
    return found


def q_errors(kind: str, q: Array, target: Array) -> Array:
    """Loss of each entry of Q_r.
    kind: "mse", squared errors; "gamma", the deviance t/q - log(t/q) - 1 of a gamma distribution,
    whose minimum over q is the mean of the targets and in which errors count relatively, as they do
    in a power-law policy. q: below 0, any shape. target: of that shape; one no better than -Q_FLOOR
    asks only to be as good as that.
    """
    if kind == "mse":
        return jnp.square(q - target)
    ratio = jnp.maximum(-target, Q_FLOOR) / -q
    return ratio - jnp.log(ratio) - 1.0


def log_advantage(q: Array) -> Array:
    """log(-q) `[..., R]` less its mean over actions: all that the power-law policy reads."""
    size = jnp.log(jnp.maximum(-q, 2.0 * Q_FLOOR))
    return size - jnp.mean(size, axis=-1, keepdims=True)


def learn_tables(
    problem: Problem,
    train: TrainState,
    states: Any,
    targets: Targets,
    mask: Array,
    shares: Metrics | None = None,
    drop_key: None = None,
) -> tuple[TrainState, Metrics]:
    """Move entries by their adaptive rates; a state met often in a batch moves once."""
    index = jnp.where(mask, problem.model.encode(states), problem.world.num_states)  # else dropped
    wanted = {
        "v_h_e": (targets.v_h_e, targets.coverage),
        "q_r": (targets.q_r, targets.known.astype(jnp.float32)),
    }
    on = _active(problem, train.step)
    params, counts, metrics = {}, {}, {}
    # What is written depends, by nothing, on all that was read of the tables: so the compiler knows
    # that the reads come first and writes in place instead of copying whole tables.
    nothing = 0.0 * jnp.sum(targets.policy)
    for name, table in train.params.items():
        target, there = wanted[name]
        before = train.opt_state[name][index]
        weight = jnp.where(on[name], there, 0.0) + 0.0 * before
        counts[name] = train.opt_state[name].at[index].add(weight, mode="drop")
        times = counts[name][index]
        least = problem.settings.model.table_min_rate
        rate = jnp.maximum(1.0 / jnp.maximum(times, 1.0), least)
        share = rate * weight / jnp.maximum(times - before, 1e-9)
        error = jnp.where(there > 0.0, target - table[index], 0.0) + nothing
        params[name] = table.at[index].add(share * error, mode="drop")
        rows = mask.reshape((-1,) + (1,) * (error.ndim - 1))
        total = jnp.sum(jnp.where(rows, jnp.square(error), 0.0))
        metrics[f"loss/{name}"] = total / jnp.maximum(jnp.sum(mask) * error[0].size, 1)
    return train.replace(params=params, opt_state=counts), metrics | (shares or {})


def _optimizer(problem: Problem) -> optax.GradientTransformation:
    settings = problem.settings.optimizer
    return optax.chain(
        optax.clip_by_global_norm(settings.grad_clip_norm),
        optax.scale_by_adam(),
        optax.add_decayed_weights(settings.weight_decay),
    )


def _active(problem: Problem, step: Array) -> dict[str, Array]:
    flags = power.curriculum.active(problem.curriculum, step)
    return dict(zip(power.curriculum.NETWORKS, flags, strict=True))
