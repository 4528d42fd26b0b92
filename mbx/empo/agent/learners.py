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
from mbx.empo.power.worlds import goal_distribution
from mbx.fast import collectives
from mbx.types import Array, Metrics, Params


def init_state(problem: Problem, key: Array) -> TrainState:
    """A fresh train state; tables count their visits where networks keep an optimiser's state."""
    params, model = problem.model.init(key), problem.settings.model
    opt_state = {name: jnp.zeros_like(params[name]) for name in model.held("table")}
    for name in model.held("network"):
        opt_state[name] = _optimizer(1.0, problem).init(params[name])
    copies = max(problem.target_intervals.values()) > 1 or problem.target_rate > 0.0
    target = jax.tree.map(jnp.copy, params) if copies else None
    return TrainState(params, target, opt_state, jnp.int32(0))


def learn(
    problem: Problem, train: TrainState, *given: Any, shares: Metrics, drop_key: Array | None = None
) -> tuple[TrainState, Metrics]:
    """One step of all networks and tables; given: states, targets and mask of `learn_networks`."""
    held, metrics = problem.settings.model.held, shares
    if held("network"):
        train, metrics = learn_networks(problem, train, *given, metrics, drop_key)
    if held("table"):
        train, own = learn_tables(problem, train, *given, drop_key)
        metrics = metrics | own
    return train, metrics


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
    states: `[B, ...]`. mask: `[B]` bool, rows that exist. shares: metrics of the caller's, which
    come back summed with the losses. drop_key: for dropout, and for goals that are drawn.
    """
    codes = problem.model.encode(states)
    on = _active(problem, train.step)

    def loss(own: Params) -> tuple[Array, Metrics]:
        """Of networks that are trained: others' losses reach an encoder that they share."""
        each = losses(problem, train.params | own, codes, targets, mask, drop_key)
        network = {name: name.removeprefix("loss/") for name in each} | {"loss/advantage": "q_r"}
        return sum(on[network[name]] * value for name, value in each.items()), each

    networks = problem.settings.model.held("network")
    networks = {name: own for name, own in train.params.items() if name in networks}
    gradients, metrics = jax.grad(loss, has_aux=True)(networks)
    gradients, metrics = collectives.psum((gradients, metrics | (shares or {})))
    settings, params, opt_state = problem.settings.optimizer, {}, {}
    for name, own in networks.items():
        base = settings.learning_rate_v if name == "v_h_e" else settings.learning_rate_q
        rate = power.curriculum.learning_rate(problem.curriculum, train.step, base)
        # As in the authors' trainer, whose norms are for a rate of 1e-4.
        clip = settings.grad_clip_norm * (rate / 1e-4 if settings.scale_clip else 1.0)
        optimizer = _optimizer(clip, problem)
        updates, state = optimizer.update(gradients[name], train.opt_state[name], own)
        keep = functools.partial(jnp.where, on[name])
        params[name] = jax.tree.map(lambda w, u, r=rate, k=keep: k(w - r * u, w), own, updates)
        opt_state[name] = jax.tree.map(keep, state, train.opt_state[name])
        metrics[f"grad_norm/{name}"] = optax.tree.norm(gradients[name])
    params, opt_state = train.params | params, train.opt_state | opt_state
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
    whole, settings = problem.model, problem.settings.loss
    networks = problem.settings.model.held("network")
    model = whole.dropping(drop_key) if whole.dropping and drop_key is not None else whole
    coverage, known = targets.coverage * mask[:, None, None], targets.known & mask[:, None]
    all_known = jnp.all(known, axis=1, keepdims=True)
    counted = (jnp.sum(coverage + 1e-9), jnp.sum(mask), jnp.sum(known), jnp.sum(all_known))
    covered, *numbers = collectives.psum(tuple(x.astype(jnp.float32) for x in counted))
    rows, pairs, states = (jnp.maximum(x, 1.0) for x in numbers)
    latents = model.trunk(params, codes)
    v = power.soft_clamp(model.v_h_e(params, latents), 0.0, 1.0)
    q = model.q_r(params, latents)
    found = {}
    if "v_h_e" in networks:
        found["loss/v_h_e"] = jnp.sum(coverage * jnp.square(v - targets.v_h_e)) / covered
    if "q_r" in networks:
        found["loss/q_r"] = jnp.sum(q_errors(settings.q_loss, q, targets.q_r) * known) / pairs
    if "q_r" in networks and settings.advantage_coef:
        error = jnp.square(log_advantage(q) - log_advantage(targets.q_r))
        error = jnp.sum(jnp.where(all_known, error, 0.0))
        found["loss/advantage"] = settings.advantage_coef * error / (states * q.shape[1])
    if "x_h" in networks:
        # Targets are of the whole network.
        want = ability(problem, v if model is whole else whole.v_h_e(params, latents), drop_key)
        x = power.soft_clamp(model.x_h(params, latents), power.ABILITY_FLOOR, 1.0)
        found["loss/x_h"] = jnp.sum(jnp.square(x - want) * mask[:, None]) / (rows * x.shape[1])
    if "u_r" in networks:
        error = jnp.square(model.y(params, latents) - targets.y)
        found["loss/u_r"] = jnp.sum(error * mask) / rows
    if "v_r" in networks:
        error = q_errors(settings.q_loss, model.v_r(params, latents), targets.v_r)
        found["loss/v_r"] = jnp.sum(error * mask) / rows
    return found


def ability(problem: Problem, v: Array, key: Array | None) -> Array:
    """X_h `[B, H]` that follows from V_h^e `[B, H, G]`, eq. (7), without a gradient.
    With `loss.x_h_goals` an estimate: the mean over goals drawn by their probabilities p of
    (w / p) V^zeta.
    """
    clean, weight = jnp.clip(jax.lax.stop_gradient(v), 0.0, 1.0), problem.world.goal_weight[None]
    if number := problem.settings.loss.x_h_goals:
        prob = goal_distribution(problem.world)
        key, shape = jax.random.fold_in(key, 9), (number, *v.shape[:2])
        drawn = jax.random.categorical(key, jnp.log(prob)[None, None], shape=shape)
        counts = jnp.sum(jax.nn.one_hot(drawn, v.shape[-1]), axis=0)
        weight = weight * counts / (number * jnp.maximum(prob, 1e-9)[None])
    return power.aggregate_ability(clean, weight, problem.params.zeta)


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
    key: Array | None = None,
) -> tuple[TrainState, Metrics]:
    """Move entries by their adaptive rates; a state met often in a batch moves once."""
    model, codes, metrics = problem.model, problem.model.encode(states), {}
    params, counts = dict(train.params), dict(train.opt_state)
    if model.grow is not None:
        params["rows"], lost = model.grow(params["rows"], codes, mask)
        metrics["lost_states"] = lost / jnp.maximum(jnp.sum(mask), 1.0)
    latents = model.trunk(params, codes)
    index = jnp.where(mask, model.row(latents), jnp.iinfo(jnp.int32).max)  # others are dropped
    every = jnp.ones(targets.x_h.shape)
    wanted = {
        "v_h_e": (targets.v_h_e, targets.coverage),
        "q_r": (targets.q_r, targets.known.astype(jnp.float32)),
        "u_r": (targets.y, every[:, 0]),
        "v_r": (targets.v_r, every[:, 0]),
    }
    if "x_h" in train.opt_state:
        wanted["x_h"] = (ability(problem, model.v_h_e(params, latents), key), every)
    on = _active(problem, train.step)
    # What is written depends, by nothing, on all that was read of the tables: so the compiler knows
    # that the reads come first and writes in place instead of copying whole tables.
    nothing = 0.0 * jnp.sum(targets.policy)
    for name in problem.settings.model.held("table"):
        table, (target, there) = params[name], wanted[name]
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
    return train.replace(params=params, opt_state=counts), metrics


def _optimizer(clip: Array | float, problem: Problem) -> optax.GradientTransformation:
    return optax.chain(
        optax.clip_by_global_norm(clip),
        optax.scale_by_adam(),
        optax.add_decayed_weights(problem.settings.optimizer.weight_decay),
    )


def _active(problem: Problem, step: Array) -> dict[str, Array]:
    flags = power.curriculum.active(problem.curriculum, step)
    return dict(zip(power.curriculum.NETWORKS, flags, strict=True))
