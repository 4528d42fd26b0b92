"""EMPO phase 2 as an agent: a robot policy that softly maximises human power.

    act      the power-law policy of Q_r, with a share of uniformly random actions while learning
    update   sample states, enumerate the successors of every joint robot action, learn V_h^e
             (eq. 6), X_h (eq. 7) and Q_r (eq. 4) from frozen copies, by stages of warm-up

The replay holds states; successors are recomputed inside the update, so the human prior and the
robot's policy in the targets are always today's. Networks or tables: `models`; targets:
`targets`. Source: document 004. Axes: E environments, B states, H humans, G goals, R joint
robot actions.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import optax

from mbx import power, replay
from mbx.agents.base import Agent, Metrics
from mbx.agents.empo import targets as empo_targets
from mbx.agents.empo.models import Q_FLOOR, Model, Params, network_model, table_model
from mbx.power.codec import make_codec, make_records
from mbx.power.curriculum import Curriculum
from mbx.power.equations import PowerParams
from mbx.power.worlds import World

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class EmpoConfig:
    """Settings of the agent.

    kind: "networks" | "tables". hidden, encoder, q_head, x_h: of networks, see `network_model`.
    q_loss: "gamma" (relative errors, exact in the mean; head "exp") | "mse" (the original's).
    human_expectation: over human actions in the targets. "exact": all joint ones; "fresh":
        human_samples draws a state of goals and actions, anew in every update; "rollout": the
        goals and actions of the rollout, whose goals persist, which biases Q_r (for parity).
    stored_successors: use the successors that the observation holds (environment
        `empo:NAME@stored`, human actions drawn once, when the state was seen) instead of
        enumerating them anew.
    capacity: room for successors of a batch (0: every slot). unique: room for distinct ones, each
        evaluated once (0: no search for them).
    ability_floor: X_h counts as at least this in the targets; how often that happens is counted
        (`zero_ability`). Networks begin with V_h^e about 0, where U_r would be astronomical.
    target_interval: updates between hard copies. table_rate_power, table_min_rate: a table entry
        moves by max(n^-power, min_rate) of the way to its n-th target.
    """

    params: PowerParams
    curriculum: Curriculum
    kind: str = "networks"
    hidden: int = 256
    encoder: str = "mlp"
    q_head: str = "exp"
    q_loss: str = "gamma"
    x_h: str = "sum"
    human_expectation: str = "exact"
    human_samples: int = 1
    batch_size: int = 32
    stored_successors: bool = False
    capacity: int = 0
    unique: int = 0
    ability_floor: float = 1e-3
    target_interval: int = 100
    table_rate_power: float = 1.0
    table_min_rate: float = 0.0
    learning_rate_v: float = 1e-3
    learning_rate_q: float = 1e-4
    weight_decay: float = 1e-4
    grad_clip_norm: float = 10.0

    def __post_init__(self) -> None:
        choices = {
            "kind": ("networks", "tables"),
            "q_loss": ("gamma", "mse"),
            "human_expectation": empo_targets.EXPECTATIONS,
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name}={getattr(self, name)!r}: choose one of {allowed}")
        for name in ("hidden", "human_samples", "batch_size", "target_interval"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: must be at least 1")
        if not 0.0 <= self.table_min_rate <= 1.0:
            raise ValueError(f"table_min_rate={self.table_min_rate}: must lie in [0, 1]")
        if self.stored_successors and self.human_expectation != "fresh":
            raise ValueError(
                f"human_expectation={self.human_expectation!r}: stored successors are those of "
                "drawn human actions, choose fresh"
            )
        noisy = self.human_expectation != "exact"
        if self.kind == "tables" and noisy and self.table_min_rate > 0.5:
            raise ValueError(
                f"table_min_rate={self.table_min_rate} with human_expectation="
                f"{self.human_expectation!r}: drawn targets are noisy, lower it (0.02, say)"
            )
        if self.kind == "tables" and self.x_h != "sum":
            raise ValueError(f"model.x_h={self.x_h!r}: tables have the sum over goals only")
        if self.q_loss == "gamma" and self.q_head == "z":
            raise ValueError("q_loss='gamma' needs q_head exp or softplus: use mse with a z head")


@flax.struct.dataclass
class TrainState:
    """All that learning changes.

    params, target: "v_h_e", "q_r" and perhaps "x_h"; target is the frozen copy, None where
    target_interval is 1: params themselves. opt_state: of the
    optimisers, or the visit counts of tables. step: int32, updates made.
    """

    params: Params
    target: Params
    opt_state: Any
    step: Array


def make_model(config: EmpoConfig, world: World) -> Model:
    """The configured networks or tables."""
    if config.kind == "tables":
        return table_model(world)
    return network_model(
        world,
        hidden=config.hidden,
        encoder=config.encoder,
        q_head=config.q_head,
        x_h=config.x_h,
        eta=float(config.params.eta),
        xi=float(config.params.xi),
    )


def now(config: EmpoConfig, step: Array) -> tuple[PowerParams, Array]:
    """Parameters with the discounts in force at a step, and beta_r there."""
    plan, p = config.curriculum, config.params
    p = p._replace(
        gamma_h=power.curriculum.gamma_h(plan, step, p.gamma_h),
        gamma_r=power.curriculum.gamma_r(plan, step, p.gamma_r),
    )
    return p, power.curriculum.beta_r(plan, step, p.beta_r)


def make_agent(config: EmpoConfig, world: World) -> Agent:
    """The agent as pure functions.

    Raises ValueError for goal weights that do not sum to one. Targets that a z head cannot
    represent (Q_r > -1, near termination) are told in the metrics (`z_unrepresentable`).
    """
    totals = jnp.sum(world.goal_weight, axis=-1)
    if not bool(jnp.all(jnp.abs(totals - 1.0) < 1e-4)):
        raise ValueError(
            f"goal_weight sums to {totals.tolist()} per human: divide each row by its sum"
        )
    model = make_model(config, world)
    return Agent(
        init=functools.partial(init_state, config, model),
        init_actor=lambda num: jnp.zeros((num, 0)),
        act=_make_act(config, model, world),
        update=_make_update(config, model, world),
        example_row=functools.partial(_example_row, config, world),
    )


def init_state(config: EmpoConfig, model: Model, key: Array) -> TrainState:
    """A fresh train state; tables count their visits where networks keep an optimiser's state."""
    params = model.init(key)
    if config.kind == "tables":
        opt_state = {
            "v_h_e": jnp.zeros_like(params["v_h_e"]),
            "q_r": jnp.zeros(params["q_r"].shape[0]),
        }
    else:
        optimizer = _optimizer(config)
        opt_state = {name: optimizer.init(own) for name, own in params.items()}
    target = jax.tree.map(jnp.copy, params) if config.target_interval > 1 else None
    return TrainState(params, target, opt_state, jnp.int32(0))


def _make_act(config: EmpoConfig, model: Model, world: World) -> Any:
    unpack, num_robot_actions = jax.vmap(make_codec(world).unpack), _robot_actions(world)

    def act(
        train: TrainState, actor: Array, obs: Array, is_first: Array, key: Array, evaluate: bool
    ) -> tuple[Array, Array]:
        policy = policy_of(config, model, train, unpack(obs)[0])
        if not evaluate:
            epsilon = power.curriculum.epsilon(config.curriculum, train.step)
            policy = (1.0 - epsilon) * policy + epsilon / num_robot_actions
        chosen = jax.random.categorical(key, jnp.log(policy))
        return jax.nn.one_hot(chosen, num_robot_actions), actor

    return act


def _make_update(config: EmpoConfig, model: Model, world: World) -> Any:
    learn = _learn_tables if config.kind == "tables" else _learn_networks

    def update(
        train: TrainState, buffer: replay.ReplayState, key: Array
    ) -> tuple[TrainState, replay.ReplayState, Metrics]:
        sample_key, human_key = jax.random.split(key)
        batch = replay.sample(buffer, sample_key, batch_size=config.batch_size, length=1)
        states, human, listed = _experience(config, world, batch.rows["obs"], human_key)
        p, beta_r = now(config, train.step)
        frozen = train.params if train.target is None else train.target
        targets, metrics = empo_targets.make_targets(
            model,
            world,
            frozen,
            states,
            human,
            p,
            beta_r,
            batch.mask[0],
            capacity=config.capacity or None,
            unique=config.unique,
            ability_floor=config.ability_floor,
            listed=listed,
        )
        train, losses = learn(config, model, world, train, states, targets, batch.mask[0], p)
        step = train.step + 1
        copied = train.target
        if copied is not None:
            due = step % config.target_interval == 0
            copied = jax.tree.map(functools.partial(jnp.where, due), train.params, copied)
        metrics |= losses | _progress(config, train.step, beta_r, targets)
        return train.replace(target=copied, step=step), buffer, metrics

    return update


def _progress(
    config: EmpoConfig, step: Array, beta_r: Array, targets: empo_targets.Targets
) -> Metrics:
    """Where the curriculum stands, and the targets' means."""
    metrics = {
        "beta_r": beta_r,
        "epsilon": power.curriculum.epsilon(config.curriculum, step),
        "stage": power.curriculum.stage(config.curriculum, step).astype(jnp.float32),
        "q_r": jnp.mean(targets.q_r),
        "v_h_e": jnp.mean(targets.v_h_e),
    }
    if config.q_head == "z":
        metrics["z_unrepresentable"] = jnp.mean((targets.q_r > -1.0).astype(jnp.float32))
    return metrics


def _robot_actions(world: World) -> int:
    return world.num_actions**world.num_robots


def _example_row(config: EmpoConfig, world: World) -> dict[str, Any]:
    stored = make_records(world).size if config.stored_successors else 0
    scalar = functools.partial(jax.ShapeDtypeStruct, ())
    return dict(
        obs=jax.ShapeDtypeStruct((make_codec(world).size + stored,), jnp.int32),
        action=jax.ShapeDtypeStruct((_robot_actions(world),), jnp.float32),
        reward=scalar(jnp.float32),
        is_first=scalar(jnp.bool_),
        is_last=scalar(jnp.bool_),
        terminated=scalar(jnp.bool_),
    )


def _experience(
    config: EmpoConfig, world: World, obs: Array, key: Array
) -> tuple[Any, empo_targets.Profiles, tuple[Any, Array] | None]:
    """States of a batch, the human actions to average over, and successors where they are stored.

    obs: `[2, B, W]`, of the states and of the rows that follow them.
    """
    codec = make_codec(world)
    states, goals, _ = jax.vmap(codec.unpack)(obs[0])
    if config.stored_successors:
        record = jax.vmap(make_records(world).unpack)(obs[0][:, codec.size :])
        human = empo_targets.drawn_profiles(world, record.goals[:, None], record.actions[:, None])
        listed = jax.tree.map(lambda x: x[:, None], (record.states, record.prob))
        return states, human, listed
    if config.human_expectation == "exact":
        return states, empo_targets.exact_profiles(world, states), None
    if config.human_expectation == "fresh":
        num = config.human_samples
        return states, empo_targets.fresh_profiles(world, states, key, num), None
    actions = jax.vmap(codec.unpack)(obs[1])[2]  # taken at `states`, seen with the next row
    human = empo_targets.drawn_profiles(world, goals[:, None], actions[:, None])
    return states, human, None


def policy_of(config: EmpoConfig, model: Model, train: TrainState, states: Any) -> Array:
    """pi_r `[N, R]` of states at the learner's beta_r."""
    params = train.params if train.target is None else train.target
    q = model.q_r(params, model.trunk(params, model.encode(states)))
    return power.robot_policy(q, now(config, train.step)[1])


def _optimizer(config: EmpoConfig) -> optax.GradientTransformation:
    return optax.chain(
        optax.clip_by_global_norm(config.grad_clip_norm),
        optax.scale_by_adam(),
        optax.add_decayed_weights(config.weight_decay),
    )


def _active(config: EmpoConfig, step: Array) -> dict[str, Array]:
    flags = power.curriculum.active(config.curriculum, step)
    return dict(zip(power.curriculum.NETWORKS, flags, strict=True))


def _q_loss(config: EmpoConfig, q: Array, target: Array) -> Array:
    """Loss of each entry. Targets no better than Q_FLOOR ask only to lie beyond it."""
    if config.q_loss == "mse":
        return jnp.square(q - target)
    # Gamma deviance: its minimum over q is the mean of the targets, and errors count relatively,
    # as they do in a power-law policy.
    size = jnp.maximum(-target, Q_FLOOR)
    ratio = size / -q
    return ratio - jnp.log(ratio) - 1.0


def _learn_networks(
    config: EmpoConfig,
    model: Model,
    world: World,
    train: TrainState,
    states: Any,
    targets: empo_targets.Targets,
    mask: Array,
    p: PowerParams,
) -> tuple[TrainState, Metrics]:
    """One step of each network that this stage trains. mask: `[B]` rows that exist."""
    codes = model.encode(states)
    coverage = targets.coverage * mask[:, None, None]
    rows = jnp.maximum(jnp.sum(mask), 1)

    def loss(params: Params) -> tuple[Array, Metrics]:
        latents = model.trunk(params, codes)
        v = power.soft_clamp(model.v_h_e(params, latents), 0.0, 1.0)
        v_loss = jnp.sum(coverage * jnp.square(v - targets.v_h_e)) / jnp.sum(coverage + 1e-9)
        q = model.q_r(params, latents)
        q_loss = jnp.sum(_q_loss(config, q, targets.q_r) * mask[:, None]) / (rows * q.shape[1])
        losses = {"loss/v_h_e": v_loss, "loss/q_r": q_loss}
        if model.x_h is not None:
            clean = jnp.clip(jax.lax.stop_gradient(v), 0.0, 1.0)
            want = power.aggregate_ability(clean, world.goal_weight[None], p.zeta)
            x = power.soft_clamp(model.x_h(params, latents), power.ABILITY_FLOOR, 1.0)
            error = jnp.square(x - want) * mask[:, None]
            losses["loss/x_h"] = jnp.sum(error) / (rows * x.shape[1])
        return sum(losses.values()), losses

    gradients, metrics = jax.grad(loss, has_aux=True)(train.params)
    optimizer, on = _optimizer(config), _active(config, train.step)
    params, opt_state = {}, {}
    for name, own in train.params.items():
        base = config.learning_rate_v if name == "v_h_e" else config.learning_rate_q
        rate = power.curriculum.learning_rate(config.curriculum, train.step, base)
        updates, state = optimizer.update(gradients[name], train.opt_state[name], own)
        keep = functools.partial(jnp.where, on[name])
        params[name] = jax.tree.map(lambda w, u, r=rate, k=keep: k(w - r * u, w), own, updates)
        opt_state[name] = jax.tree.map(keep, state, train.opt_state[name])
        metrics[f"grad_norm/{name}"] = optax.tree.norm(gradients[name])
    return train.replace(params=params, opt_state=opt_state), metrics


def _learn_tables(
    config: EmpoConfig,
    model: Model,
    world: World,
    train: TrainState,
    states: Any,
    targets: empo_targets.Targets,
    mask: Array,
    p: PowerParams,
) -> tuple[TrainState, Metrics]:
    """Move entries by their adaptive rates; a state met often in a batch moves once."""
    index = jnp.where(mask, model.encode(states), world.num_states)  # past the end: dropped
    weights = {
        "v_h_e": targets.coverage,
        "q_r": jnp.ones(index.shape),
    }
    wanted = {"v_h_e": targets.v_h_e, "q_r": targets.q_r}
    on = _active(config, train.step)
    params, counts, metrics = {}, {}, {}
    # What is written depends, by nothing, on all that was read of the tables: so the compiler knows
    # that the reads come first and writes in place instead of copying whole tables.
    nothing = 0.0 * jnp.sum(targets.policy)
    for name, table in train.params.items():
        before = train.opt_state[name][index]
        weight = jnp.where(on[name], weights[name], 0.0) + 0.0 * before
        counts[name] = train.opt_state[name].at[index].add(weight, mode="drop")
        times = counts[name][index]
        rate = jnp.maximum(times, 1.0) ** -config.table_rate_power
        rate = jnp.maximum(rate, config.table_min_rate)
        share = rate * weight / jnp.maximum(times - before, 1e-9)
        share = share.reshape(share.shape + (1,) * (table.ndim - share.ndim))
        error = wanted[name] - table[index] + nothing
        params[name] = table.at[index].add(share * error, mode="drop")
        metrics[f"loss/{name}"] = jnp.sum(
            jnp.where(mask.reshape((-1,) + (1,) * (error.ndim - 1)), jnp.square(error), 0.0)
        ) / jnp.maximum(jnp.sum(mask) * error[0].size, 1)
    return train.replace(params=params, opt_state=counts), metrics
