"""DreamerV3 as a tuple of pure functions: a world model learned from replay, behaviour from dreams.

    act      move the latent state with the observation, sample (or take the mode of) the policy
    update   sample sequences, one step on world model, actor and critic, move the slow critic

`configs/dreamer.py` follows documents 002 and 003 (world model first, dreams with the updated one,
real first continue, hard continues), `configs/dreamerv3.py` the official code (one joint gradient,
continue probabilities that hold the discount). Losses live in `losses`.
Axes: E environments, T time, B batch, N dreams, H imagined steps, A action dims.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import optax

from mbx import replay, returns
from mbx.agents.base import Agent, Metrics
from mbx.agents.dreamer import encoders as observations
from mbx.agents.dreamer import losses, optimizers, policy, rssm, sequences
from mbx.agents.dreamer import networks as nets
from mbx.agents.dreamer.config import DreamerConfig
from mbx.agents.dreamer.losses import Batch, Chooser, Draws
from mbx.agents.dreamer.networks import ModelConfig

Array = jax.Array
Params = dict[str, Any]


@flax.struct.dataclass
class TrainState:
    """All that learning changes.

    params: "model" (encoder, rssm, decoder, reward, continue), "actor", "critic". slow: averaged
    critic. opt_state: by group. ema: percentiles of imagined returns. step: int32, updates made.
    """

    params: Params
    slow: Params
    opt_state: Params
    ema: returns.ReturnEMA
    step: Array


@flax.struct.dataclass
class ActorState:
    """Latent state and the action taken at it, `[E, ...]`."""

    deter: Array
    stoch: Array
    action: Array


def init_params(config: ModelConfig, key: Array) -> Params:
    """Parameters of everything; reward and value start as exact zeros."""
    names = ("encoder", "rssm", "decoder", "reward", "continue", "actor", "critic")
    keys = dict(zip(names, jax.random.split(key, len(names)), strict=True))
    net, bins = config, config.num_bins
    model = {
        "encoder": observations.init_encoder(keys["encoder"], net),
        "rssm": rssm.init(keys["rssm"], net, observations.token_dim(net)),
        "decoder": observations.init_decoder(keys["decoder"], net),
        "reward": nets.init_head(keys["reward"], net, net.reward_layers, bins, scale=0.0),
        "continue": nets.init_head(keys["continue"], net, net.continue_layers, 1),
    }
    out = policy.output_dim(net)
    actor = nets.init_head(keys["actor"], net, net.policy_layers, out, scale=0.01)
    critic = nets.init_head(keys["critic"], net, net.value_layers, bins, scale=0.0)
    return {"model": model, "actor": actor, "critic": critic}


def make_optimizers(config: DreamerConfig) -> dict[str, optax.GradientTransformation]:
    """An optimiser for each group of parameters."""
    result = {}
    for i, name in enumerate(("model", "actor", "critic")):
        rate, clip, eps = config.learning_rates[i], config.clips[i], config.epsilons[i]
        make = optimizers.laprop if config.optimizer == "laprop" else optimizers.adam
        result[name] = make(rate, clip=clip, eps=eps, warmup=config.warmup)
    return result


def init_state(config: DreamerConfig, key: Array) -> TrainState:
    """A fresh train state; the slow critic starts as a copy."""
    params = init_params(config.model, key)
    opt_state = {name: opt.init(params[name]) for name, opt in make_optimizers(config).items()}
    return TrainState(
        params=params,
        slow=jax.tree.map(jnp.copy, params["critic"]),
        opt_state=opt_state,
        ema=returns.init_return_ema(),
        step=jnp.int32(0),
    )


# -------------------------------------------------------------------------------------------------
# Learning


def draw(config: DreamerConfig, key: Array) -> Draws:
    """The random numbers of one update."""
    keys = jax.random.split(key, 3)
    net, (length, batch) = config.model, (config.batch_length, config.batch_size)
    num = (config.dream_rows or length) * batch
    return Draws(
        posterior=jax.random.uniform(keys[0], (length, batch, net.stoch)),
        prior=jax.random.uniform(keys[1], (config.horizon, num, net.stoch)),
        action=policy.draw(net, keys[2], (config.horizon + 1, num)),
    )


def gradients(
    config: DreamerConfig,
    state: TrainState,
    batch: Batch,
    carry: rssm.State,
    draws: Draws,
    chooser: Chooser = Chooser(),  # noqa: B008
) -> tuple[Params, losses.ModelOutput, losses.Behaviour, dict[str, Array]]:
    """Gradients of the one total loss ("joint"), and what was computed on the way."""

    def total(params: Params) -> tuple[Array, Any]:
        output = losses.world_model(
            config, params["model"], batch, carry, draws.posterior, chooser.latent
        )
        terms, result = losses.behaviour_losses(
            config,
            params["model"],
            params["actor"],
            params["critic"],
            state.slow,
            output,
            batch,
            state.ema,
            draws,
            chooser,
        )
        loss = losses.scaled_sum(config, output.losses) + behaviour_sum(config, terms)
        return loss, (output, result, terms)

    grads, aux = jax.grad(total, has_aux=True)(state.params)
    return grads, *aux


def behaviour_sum(config: DreamerConfig, terms: dict[str, Array]) -> Array:
    """Mean losses of actor and critic, the replay loss by its coefficient."""
    scales = {"replay_value": config.replay_coef}
    return sum(scales.get(name, 1.0) * jnp.mean(loss) for name, loss in terms.items())


class Step(NamedTuple):
    """What one learner step computed: gradients, moved parameters and optimiser states by group,
    the world model's output, the behaviour's result and its losses by name."""

    grads: Params
    params: Params
    opt_state: Params
    output: losses.ModelOutput
    result: losses.Behaviour
    terms: dict[str, Array]


def step_gradients(
    config: DreamerConfig,
    state: TrainState,
    batch: Batch,
    carry: rssm.State,
    draws: Draws,
    chooser: Chooser = Chooser(),  # noqa: B008
) -> Step:
    """Gradients and parameters of one step: all at once, or the world model first ("sequential").

    In sequence, dreams run in the updated model from posteriors computed before, without gradient
    to it.
    """
    solvers = make_optimizers(config)

    def apply(grads: Params) -> tuple[Params, Params]:
        params, opt_state = {}, {}
        for name, grad in grads.items():
            old = state.params[name]
            updates, opt_state[name] = solvers[name].update(grad, state.opt_state[name], old)
            params[name] = optax.apply_updates(old, updates)
        return params, opt_state

    if config.updates == "joint":
        grads, output, result, terms = gradients(config, state, batch, carry, draws, chooser)
        return Step(grads, *apply(grads), output, result, terms)

    def model_loss(model: Params) -> tuple[Array, losses.ModelOutput]:
        output = losses.world_model(config, model, batch, carry, draws.posterior, chooser.latent)
        return losses.scaled_sum(config, output.losses), output

    model_grads, output = jax.grad(model_loss, has_aux=True)(state.params["model"])
    params, opt_state = apply({"model": model_grads})

    def behaviour_loss(own: Params) -> tuple[Array, Any]:
        terms, result = losses.behaviour_losses(
            config,
            params["model"],
            own["actor"],
            own["critic"],
            state.slow,
            output,
            batch,
            state.ema,
            draws,
            chooser,
        )
        return behaviour_sum(config, terms), (terms, result)

    own = {name: state.params[name] for name in ("actor", "critic")}
    grads, (terms, result) = jax.grad(behaviour_loss, has_aux=True)(own)
    moved, moved_opt = apply(grads)
    return Step(
        {"model": model_grads, **grads},
        params | moved,
        opt_state | moved_opt,
        output,
        result,
        terms,
    )


def update_from_batch(
    config: DreamerConfig,
    state: TrainState,
    batch: Batch,
    carry: rssm.State,
    draws: Draws,
    chooser: Chooser = Chooser(),  # noqa: B008
) -> tuple[TrainState, Metrics, rssm.State]:
    """One learner step with given draws: the deterministic core of `update`.

    Returns the new state, metrics and the posterior states `[T, B, ...]` of the batch.
    """
    step = step_gradients(config, state, batch, carry, draws, chooser)
    count = state.step + 1
    slow = move_slow(config, step.params["critic"], state.slow, count)
    state = TrainState(step.params, slow, step.opt_state, step.result.ema, count)
    metrics = make_metrics(step.output, step.result, step.terms, step.grads)
    return state, metrics, step.output.observed.states


def move_slow(config: DreamerConfig, critic: Params, slow: Params, step: Array) -> Params:
    """The slow critic after update number `step`: every `critic_every` a part `critic_tau` on."""
    tau = jnp.where(step % config.critic_every == 0, config.critic_tau, 0.0)
    return jax.tree.map(lambda new, old: tau * new + (1.0 - tau) * old, critic, slow)


def make_metrics(
    output: losses.ModelOutput, result: losses.Behaviour, terms: dict[str, Array], grads: Params
) -> Metrics:
    """Scalars to log: document 003, section 8, and the world model's."""
    metrics = {f"loss/{name}": jnp.mean(loss) for name, loss in output.losses.items()}
    names = {"policy": "actor_loss", "value": "critic_loss", "replay_value": "replay_critic_loss"}
    metrics |= {names[name]: jnp.mean(loss) for name, loss in terms.items()}
    metrics |= {f"grad_norm/{name}": optax.tree.norm(grad) for name, grad in grads.items()}
    return metrics | output.metrics | result.metrics


def make_batch(config: DreamerConfig, rows: dict[str, Any]) -> tuple[Batch, rssm.State | None]:
    """T + 1 replay rows as a batch of T, and the stored state before it (None: none is stored).

    The first row only supplies the previous action and the stored latents. Without those every
    sequence begins as an episode does.
    """
    after = {name: x[1:] for name, x in rows.items()}
    is_first, carry = after["is_first"], None
    if config.replay_context:
        stoch = jax.nn.one_hot(rows["stoch"][0], config.model.classes, dtype=jnp.float32)
        carry = rssm.State(rows["deter"][0].astype(jnp.float32), stoch)
    else:
        is_first = is_first.at[0].set(True)
    batch = Batch(
        obs=observe_dict(config.model, after["obs"]),
        action=rows["action"][:-1],
        reward=after["reward"],
        is_first=is_first,
        is_last=after["is_last"],
        terminated=after["terminated"],
    )
    return batch, carry


def observe_dict(config: ModelConfig, obs: Array) -> observations.Observation:
    """An environment's observation `[..., *shape]` as what the encoder takes."""
    if config.image_shape is not None:
        return {"image": obs}
    return {"vector": obs.reshape(*obs.shape[: obs.ndim - config.obs_ndim], config.vector_dim)}


def make_update(config: DreamerConfig) -> Any:
    """`Agent.update`: sample, one learner step, write fresh latents back."""

    def update(
        train: TrainState, state: replay.ReplayState, key: Array
    ) -> tuple[TrainState, replay.ReplayState, Metrics]:
        sample_key, draw_key = jax.random.split(key)
        sample = sequences.sample(
            state,
            sample_key,
            batch_size=config.batch_size,
            length=config.batch_length + 1,
            fresh=config.fresh,
        )
        batch, carry = make_batch(config, sample.rows)
        if carry is None:
            carry = rssm.initial(config.model, train.params["model"]["rssm"], (config.batch_size,))
        train, metrics, states = update_from_batch(
            config, train, batch, carry, draw(config, draw_key)
        )
        if config.replay_context:
            index = jax.tree.map(lambda x: x[1:], sample.index)
            state = sequences.write(state, index, _stored(states))
        return train, state, metrics

    return update


# -------------------------------------------------------------------------------------------------
# Acting


def _stored(state: rssm.State) -> dict[str, Array]:
    """A state as replay fields: deter, and the latents' class numbers."""
    return {"deter": state.deter, "stoch": jnp.argmax(state.stoch, axis=-1).astype(jnp.int8)}


def make_act(config: DreamerConfig) -> Any:
    """`Agent.act`: one posterior step and an action."""
    net = config.model

    def act(
        train: TrainState,
        actor: ActorState,
        obs: Array,
        is_first: Array,
        key: Array,
        evaluate: bool,
    ) -> tuple[Array, ActorState]:
        latent_key, action_key = jax.random.split(key)
        model, lead = train.params["model"], is_first.shape
        tokens = observations.encode(net, model["encoder"], observe_dict(net, obs))
        state = rssm.observe_step(
            net,
            model["rssm"],
            rssm.State(actor.deter, actor.stoch),
            actor.action,
            tokens,
            is_first,
            jax.random.uniform(latent_key, (*lead, net.stoch)),
        )
        out = nets.head(train.params["actor"], rssm.features(state), net.dtype)
        if evaluate and config.evaluation == "mode":
            action = policy.mode(net, out)
        else:
            action = policy.sample(net, out, policy.draw(net, action_key, lead))
        action = jnp.clip(action, -1.0, 1.0)
        return action, ActorState(state.deter, state.stoch, action)

    return act


def init_actor(config: DreamerConfig, num: int) -> ActorState:
    """Zeros; the first row of an episode replaces them by the initial state."""
    net = config.model
    return ActorState(
        jnp.zeros((num, net.deter)),
        jnp.zeros((num, net.stoch, net.classes)),
        jnp.zeros((num, net.action_dim)),
    )


def example_row(config: DreamerConfig) -> dict[str, Any]:
    """One un-batched replay row, as shapes; with replay_context the latents beside it."""
    net = config.model
    shape = jax.ShapeDtypeStruct
    dtype = jnp.uint8 if net.image_shape and net.image_scale == 255.0 else jnp.float32
    row = dict(
        obs=shape(net.obs_shape, dtype),
        action=shape((net.action_dim,), jnp.float32),
        reward=shape((), jnp.float32),
        is_first=shape((), jnp.bool_),
        is_last=shape((), jnp.bool_),
        terminated=shape((), jnp.bool_),
    )
    if config.replay_context:
        row |= dict(deter=shape((net.deter,), jnp.float32), stoch=shape((net.stoch,), jnp.int8))
    return row


def make_agent(config: DreamerConfig) -> Agent:
    """The agent for `config` (see the module's first lines)."""

    def latents(actor: ActorState) -> dict[str, Array]:
        return _stored(rssm.State(actor.deter, actor.stoch))

    return Agent(
        init=functools.partial(init_state, config),
        init_actor=functools.partial(init_actor, config),
        act=make_act(config),
        update=make_update(config),
        example_row=functools.partial(example_row, config),
        replay_extras=latents if config.replay_context else None,
    )
