"""One learner step, read top to bottom: sample, losses, optimisers, slow critic, write-back.

"sequential": the world model moves first and behaviour is imagined in the updated one. "joint": one
gradient of the sum of all losses, as in the official code.
Axes: T time, B batch, N imagined trajectories, H imagined steps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from mbx import observations, replay, replay_sequences
from mbx.agents.dreamer import policy, rssm
from mbx.agents.dreamer.behaviour import behaviour_losses
from mbx.agents.dreamer.networks import ModelConfig
from mbx.agents.dreamer.optimizers import make_optimizers
from mbx.agents.dreamer.settings import Settings
from mbx.agents.dreamer.types import (
    Batch,
    Behaviour,
    Losses,
    ModelOutput,
    Noise,
    Observation,
    State,
    Step,
    TrainState,
)
from mbx.agents.dreamer.world_model import model_losses
from mbx.fast import collectives
from mbx.replay_sequences import Selection
from mbx.types import Array, Metrics, Params

NOISE_AXES = Noise(posterior=1, prior=2, action=2)  # which is the batch's in `draw_noise`


def make_update(settings: Settings) -> Callable:
    """`Agent.update`: sample, one learner step of every part, write new latents back.
    The parts of a sequence are learned from in turn. Each begins with the state that the one before
    it ended in, through which no gradient flows. Metrics are means over the parts.
    """
    size, length, parts = settings.loss.batch_size, settings.loss.batch_length, settings.loss.parts

    def learn_apart(train: TrainState, batch: Batch, state: State, noise: Noise) -> Any:
        return update_from_batch(settings, train, batch, state, by_trajectory(noise))

    def learn(carry: tuple[TrainState, State], part: tuple[Batch, Array]) -> Any:
        (train, state), (batch, key) = carry, part
        noise = draw_noise(settings, key)
        train, metrics, *rows = collectives.shard_map(
            learn_apart,
            (None, 1, 0, NOISE_AXES),
            train,
            batch,
            state,
            noise,
            out=(None, None, 1, 1),
        )
        return (train, jax.tree.map(lambda x: x[-1], rows[0])), (metrics, rows)

    def update(
        train: TrainState, state: replay.ReplayState, key: Array
    ) -> tuple[TrainState, replay.ReplayState, Metrics]:
        sample_key, draw_key = jax.random.split(key)
        rules, rows = selection(settings), settings.loss.sequence
        sample, state = replay_sequences.select(
            state, sample_key, rules, batch_size=size, length=rows + 1
        )
        batch, carry = make_batch(settings, sample.rows)
        keys = jax.random.split(draw_key, parts) if parts > 1 else draw_key[None]
        batches = jax.tree.map(lambda x: x.reshape(parts, length, *x.shape[1:]), batch)
        (train, _), (metrics, learned) = jax.lax.scan(
            learn, (train, carry), (batches, keys), unroll=parts == 1
        )
        states, priority = jax.tree.map(lambda x: x.reshape(rows, *x.shape[2:]), learned)
        fields = stored(states) if settings.replay.context else {}
        if priority is not None:
            fields |= replay_sequences.priority_field(priority)
        if fields:
            index = jax.tree.map(lambda x: x[1:], sample.index)
            state = replay_sequences.write(state, index, fields)
        return train, state, jax.tree.map(lambda x: jnp.mean(x, axis=0), metrics)

    return update


def selection(settings: Settings) -> Selection:
    """The rules by which batches are drawn."""
    return Selection(**{name: getattr(settings.replay, name) for name in Selection._fields})


def make_batch(settings: Settings, rows: dict[str, Any]) -> tuple[Batch, State]:
    """T + 1 replay rows as a batch of T, and the state before it.
    The first row only supplies the previous action and the stored latents. Without those every
    sequence begins as an episode does.
    """
    net, first = settings.model, rows["is_first"][1:]
    if settings.replay.context:
        stoch = jax.nn.one_hot(rows["stoch"][0], net.classes, dtype=jnp.float32)
        carry = State(rows["deter"][0].astype(jnp.float32), stoch)
    else:
        first, carry = first.at[0].set(True), rssm.zeros(net, first.shape[1:])
    arrived = {name: rows[name][1:] for name in ("reward", "is_last", "terminated")}
    obs = observe_dict(net, rows["obs"][1:])
    return Batch(obs, rows["action"][:-1], is_first=first, **arrived), carry


def observe_dict(net: ModelConfig, obs: Array) -> Observation:
    """An environment's observation `[..., *shape]` as what the encoder takes."""
    if observations.is_packed(net.parts):
        return observations.split(net.parts, obs)
    if net.image_shape is not None:
        return {"image": obs}
    return {"vector": obs.reshape(*obs.shape[: obs.ndim - len(net.obs_shape)], net.vector_dim)}


def stored(state: State) -> dict[str, Array]:
    """A state as replay fields: deter, and the latents' class numbers."""
    return {"deter": state.deter, "stoch": jnp.argmax(state.stoch, axis=-1).astype(jnp.int8)}


def draw_noise(settings: Settings, key: Array) -> Noise:
    """The random numbers of one update, of imagined trajectories by the rows they start in."""
    keys = jax.random.split(key, 3)
    net, length, batch = settings.model, settings.loss.batch_length, settings.loss.batch_size
    starts, horizon = (settings.imagination.rows or length, batch), settings.imagination.horizon
    return Noise(
        posterior=jax.random.uniform(keys[0], (length, batch, net.stoch)),
        prior=jax.random.uniform(keys[1], (horizon, *starts, net.stoch)),
        action=policy.draw(net, keys[2], (horizon + 1, *starts)),
    )


def by_trajectory(noise: Noise) -> Noise:
    """`[H, K, B, ...] -> [H, N, ...]`, of a whole batch or of a part of it."""
    prior, action = (x.reshape(x.shape[0], -1, *x.shape[3:]) for x in noise[1:])
    return noise._replace(prior=prior, action=action)


def update_from_batch(
    settings: Settings, state: TrainState, batch: Batch, carry: State, noise: Noise
) -> tuple[TrainState, Metrics, State, Array | None]:
    """One learner step with given draws: the deterministic core of `update`.

    Returns:
        The new state, metrics, and of the batch its posterior states `[T, B, ...]` and priorities
        `[T, B]`, None where batches are not drawn by them.
    """
    step = step_gradients(settings, state, batch, carry, noise)
    count = state.step + 1
    slow = move_slow_critic(settings, step.params["critic"], state.slow_critic, count)
    moved = step.result.ema, count, step.result.norms
    state = TrainState(step.params, slow, step.opt_state, *moved)
    norms = {f"grad_norm/{name}": optax.tree.norm(grad) for name, grad in step.grads.items()}
    return state, step.metrics | norms, step.output.observed.states, row_priority(settings, step)


def row_priority(settings: Settings, step: Step) -> Array | None:
    """The signal by which rows are drawn: their losses of the world model, or of the critic."""
    if not settings.replay.priority_share:
        return None
    losses = step.output.losses
    shape = losses["dynamics"].shape
    if settings.replay.priority_signal == "td":
        return step.result.losses["value"][0].reshape(shape)
    names = ("dynamics", "representation", "vector", "image")
    return jax.lax.stop_gradient(sum(losses[name] for name in names if name in losses))


def step_gradients(
    settings: Settings, state: TrainState, batch: Batch, carry: State, noise: Noise
) -> Step:
    """Gradients and parameters of one step: all at once, or the world model first ("sequential").
    In sequence, behaviour is imagined in the updated model from posteriors computed before, without
    gradient to it. On several devices (`fast.collectives`) each step is that on the whole batch:
    they exchange gradients and metrics, and the imagined returns, whose percentiles scale the
    actor's loss.
    """

    def model_loss(params: Params) -> tuple[Array, ModelOutput]:
        output = model_losses(settings, params["model"], batch, carry, noise.posterior)
        return total_loss(settings, output.losses), output

    def behaviour_loss(params: Params, output: ModelOutput) -> tuple[Array, Behaviour]:
        result = behaviour_losses(
            settings, params, state.slow_critic, output, batch, state.ema, noise, state.norms
        )
        return total_loss(settings, result.losses), result

    def joint_loss(params: Params) -> tuple[Array, tuple[ModelOutput, Behaviour]]:
        model, output = model_loss(params)
        behaviour, result = behaviour_loss(params, output)
        return model + behaviour, (output, result)

    if settings.loss.updates == "joint":
        grads, (output, result) = jax.grad(joint_loss, has_aux=True)(state.params)
        grads, metrics = collectives.psum((grads, logged(output) | logged(result)))
        return Step(grads, *apply(settings, state, grads), output, result, metrics)

    grads, output = jax.grad(model_loss, has_aux=True)({"model": state.params["model"]})
    grads, metrics = collectives.psum((grads, logged(output)))
    params, opt_state = apply(settings, state, grads)
    more, result = jax.grad(lambda own: behaviour_loss(params | own, output), has_aux=True)(
        {name: state.params[name] for name in ("actor", "critic")}
    )
    more, measured = collectives.psum((more, logged(result)))
    moved, moved_opt = apply(settings, state, more)
    return Step(
        grads | more, params | moved, opt_state | moved_opt, output, result, metrics | measured
    )


def apply(settings: Settings, state: TrainState, grads: Params) -> tuple[Params, Params]:
    """Parameters and optimiser states of the groups that have gradients, one step on."""
    solvers = make_optimizers(settings.optimizer, settings.model)
    params, opt_state = {}, {}
    for name, grad in grads.items():
        old = state.params[name]
        updates, opt_state[name] = solvers[name].update(grad, state.opt_state[name], old)
        params[name] = optax.apply_updates(old, updates)
    return params, opt_state


def total_loss(settings: Settings, losses: Losses) -> Array:
    """Sum of the losses' means, each times its coefficient; of a part of a batch, its share."""
    own, heads = settings.loss, settings.model.heads
    coefs = {"dynamics": own.dynamics_coef, "representation": own.representation_coef}
    coefs["replay_value"] = settings.critic.replay_coef
    coefs |= {"barlow": own.barlow_coef} if own.representation == "barlow" else {}
    coefs |= {f"heads/{name}": coef for name, coef in heads.coefs.items()} if heads else {}
    return sum(coefs.get(name, 1.0) * collectives.mean_share(x) for name, x in losses.items())


def logged(found: ModelOutput | Behaviour) -> Metrics:
    """Scalars to log: mean losses and what else was measured; of a part of a batch, shares."""
    names = {"policy": "actor_loss", "value": "critic_loss", "replay_value": "replay_critic_loss"}
    losses = jax.tree.map(collectives.mean_share, found.losses)
    return {names.get(name, f"loss/{name}"): x for name, x in losses.items()} | found.metrics


def move_slow_critic(settings: Settings, critic: Params, slow: Params, step: Array) -> Params:
    """The slow critic after update number `step`: every `target_update_freq` a part `tau` on."""
    own = settings.critic
    tau = jnp.where(step % own.target_update_freq == 0, own.tau, 0.0)
    return optax.incremental_update(critic, slow, tau)
