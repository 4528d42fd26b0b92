"""TD-MPC on planner-made targets: the agent as a tuple of pure functions.

    act      encode, plan with warm start and policy proposals, return the first action
    targets  encode, refine single actions with the training planner, return them with their values
    update   sample windows, one step on model and value, one on the policy, move the target network
    refresh  recompute stored targets of some replay rows with today's model (reanalyze)

With `critic="q", policy_loss="svg", value_target="td"` this is TD-MPC2; with `critic="v"`,
`policy_loss="awr"` and planner targets it is document 000. Losses live in `tdmpc_losses`, planning
in `tdmpc_planning`. Axes: E environments, B batch, T transitions of a window, N planner actions.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import optax

from mbx import mppi, networks, replay, returns
from mbx.agents import tdmpc_losses as losses
from mbx.agents import tdmpc_planning as planning
from mbx.agents.base import Agent, Metrics
from mbx.world_model import Params, WorldModel, WorldModelConfig, make_world_model

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class TDMPCConfig:
    """Settings of the agent. Coefficients default to TD-MPC2's, targets to document 000's.

    horizon: transitions T of a training window. planner_horizon: look-ahead of the acting planner.
    num_heads: value heads used at a time in targets, planning and the policy loss.
    value_reduction: "min" | "mean" over those heads in value targets.
    value_target: "td" (Q critic only: the replay's reward, the policy's next action) | "planner".
    stored_targets: keep planner targets in the replay (document 000); False is the legacy path, raw
        policy samples evaluated afresh in every loss.
    advantage_scale, awr_temperature: see `losses.planner_weights`.
    value_scale: "running" (TD-MPC2's percentile range) | "return_ema" (DreamerV3's), for SVG and
        for advantage_scale="range".
    stale_exponent: 0 chooses the rows to reanalyze uniformly, > 0 stale ones first.
    """

    world: WorldModelConfig
    discount: float
    planner: mppi.MPPIConfig = mppi.MPPIConfig()
    training_planner: mppi.MPPIConfig = mppi.MPPIConfig()
    horizon: int = 3
    planner_horizon: int = 3
    num_proposals: int = 24
    evaluation_selection: str = "sample"
    stored_targets: bool = True
    keep_targets: int | None = None
    target_actions_dtype: str = "float32"
    target_values_dtype: str = "float32"
    batch_size: int = 256
    rho: float = 0.5
    consistency_coef: float = 20.0
    reward_coef: float = 0.1
    value_coef: float = 0.1
    termination_coef: float = 1.0
    num_heads: int = 2
    value_reduction: str = "min"
    value_target: str = "planner"
    value_weighting: str = "weighted"
    value_best_n: int = 16
    value_scale: str = "running"
    policy_loss: str = "awr"
    awr_temperature: float = 0.5
    advantage_scale: str = "none"
    entropy_coef: float = 1e-4
    entropy_action_dim_power: float = 1.0
    termination: str = "hard"
    learning_rate: float = 3e-4
    encoder_lr_scale: float = 0.3
    policy_lr_scale: float = 1.0
    policy_adam_eps: float = 1e-5
    grad_clip_norm: float = 20.0
    tau: float = 0.01
    reanalyze_batch: int = 256
    stale_exponent: float = 0.0

    def __post_init__(self) -> None:
        for field, choices in (
            ("value_reduction", ("min", "mean")),
            ("value_target", ("td", "planner")),
            ("value_weighting", losses.VALUE_WEIGHTINGS),
            ("value_scale", ("running", "return_ema")),
            ("policy_loss", ("awr", "svg")),
            ("advantage_scale", losses.ADVANTAGE_SCALES),
            ("evaluation_selection", mppi.SELECTIONS),
            ("termination", planning.TERMINATIONS),
        ):
            if getattr(self, field) not in choices:
                raise ValueError(f"{field}={getattr(self, field)!r}: choose one of {choices}")
        if self.world.critic == "v" and self.value_target == "td":
            raise ValueError(
                "value_target='td' needs critic='q'; a V critic learns from planner actions "
                "(training_planner.enabled=False gives it raw policy samples)"
            )
        for field in ("horizon", "planner_horizon", "batch_size", "reanalyze_batch", "num_heads"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field}={getattr(self, field)}: must be at least 1")
        if not 0 <= self.num_proposals < self.planner.num_samples:
            raise ValueError(
                f"num_proposals={self.num_proposals} must be less than planner.num_samples="
                f"{self.planner.num_samples}: lower it or raise num_samples"
            )
        if self.world.critic == "q" and self.num_heads > self.world.num_values:
            raise ValueError(
                f"num_heads={self.num_heads} value heads are used at a time but the model has "
                f"{self.world.num_values}: lower num_heads or raise num_values"
            )

    @property
    def uses_actions(self) -> bool:
        """Whether a loss reads planner actions at all (TD-MPC2's own losses do not)."""
        return "planner" == self.value_target or self.policy_loss == "awr"

    @property
    def stores_targets(self) -> bool:
        """Whether the replay holds planner targets."""
        return self.stored_targets and self.uses_actions


@flax.struct.dataclass
class TrainState:
    """All that learning changes.

    params: the world model's. target_value: EMA copy of the value heads. opt_state,
    policy_opt_state: of model and value, of the policy. scale: running range of values.
    return_ema: percentiles of values. step: int32, updates made.
    """

    params: Params
    target_value: Params
    opt_state: Any
    policy_opt_state: Any
    scale: returns.RunningScale
    return_ema: returns.ReturnEMA
    step: Array


def make_optimizers(
    config: TDMPCConfig,
) -> tuple[optax.GradientTransformation, optax.GradientTransformation]:
    """Optimisers of the model (one global-norm clip, Adam, a rate a group) and of the policy."""

    def labels(params: Params) -> dict[str, str]:
        return {name: "encoder" if name == "encoder" else "model" for name in params}

    lr = config.learning_rate
    rates = {
        "encoder": optax.scale_by_learning_rate(lr * config.encoder_lr_scale),
        "model": optax.scale_by_learning_rate(lr),
    }
    model = optax.chain(
        optax.clip_by_global_norm(config.grad_clip_norm),
        optax.scale_by_adam(),
        optax.partition(rates, labels),
    )
    policy = optax.chain(
        optax.clip_by_global_norm(config.grad_clip_norm),
        optax.adam(lr * config.policy_lr_scale, eps=config.policy_adam_eps),
    )
    return model, policy


def init_state(config: TDMPCConfig, model: WorldModel, key: Array) -> TrainState:
    """A fresh train state; the target network starts as a copy of the value heads."""
    params = model.init(key)
    optimizer, policy_optimizer = make_optimizers(config)
    trained = {name: p for name, p in params.items() if name != "policy"}
    return TrainState(
        params=params,
        target_value=jax.tree.map(jnp.copy, params["value"]),
        opt_state=optimizer.init(trained),
        policy_opt_state=policy_optimizer.init(params["policy"]),
        scale=returns.init_running_scale(),
        return_ema=returns.init_return_ema(),
        step=jnp.int32(0),
    )


def update_scale(config: TDMPCConfig, state: TrainState, values: Array) -> tuple[Array, Any, Any]:
    """Move the value scale with `values` `[n]`: (scale in use, running scale, ReturnEMA)."""
    if config.value_scale == "return_ema":
        ema = returns.update_return_ema(state.return_ema, values)
        return returns.return_ema_offset_scale(ema)[1], state.scale, ema
    scale = returns.update_running_scale(state.scale, values, tau=config.tau)
    return scale.value, scale, state.return_ema


def update_from_batch(
    config: TDMPCConfig,
    model: WorldModel,
    state: TrainState,
    batch: losses.Batch,
    draws: losses.Draws,
) -> tuple[TrainState, Metrics]:
    """One learner step on `batch` with given draws: the deterministic core of `update`.

    Order as in the reference: model and value first, then the policy on the detached latents with
    the updated value heads, then the target network.
    """
    optimizer, policy_optimizer = make_optimizers(config)
    mask = losses.state_mask(batch.mask)
    weights, kept = None, (state.scale, state.return_ema)
    if config.uses_actions:
        scale = state.scale.value
        if config.advantage_scale == "range":
            scale, *kept = update_scale(config, state, batch.target_values[0].reshape(-1))
        weights = losses.planner_weights(
            batch.target_values, temperature=config.awr_temperature, scale=scale,
            advantage_scale=config.advantage_scale,
        )  # fmt: skip

    def model_loss(trained: Params) -> tuple[Array, dict[str, Any]]:
        params = {**trained, "policy": state.params["policy"]}
        value_weights = weights if config.value_target == "planner" else None
        return losses.model_loss(
            params, model, state.target_value, batch, draws, config, value_weights
        )

    trained = {name: p for name, p in state.params.items() if name != "policy"}
    (_, aux), grads = jax.value_and_grad(model_loss, has_aux=True)(trained)
    updates, opt_state = optimizer.update(grads, state.opt_state, trained)
    trained = optax.apply_updates(trained, updates)
    metrics = dict(aux["metrics"])
    metrics["grad_norm/model"] = optax.tree.norm(grads)

    zs = jax.lax.stop_gradient(aux["zs"])
    if config.policy_loss == "svg":

        def q_scale(q: Array) -> tuple[Array, Any]:
            scale, *new = update_scale(config, state, q)
            return scale, new

        def policy_loss(policy: Params) -> tuple[Array, dict[str, Any]]:
            return losses.svg_loss(policy, model, trained, zs, q_scale, mask, draws, config)
    else:

        def policy_loss(policy: Params) -> tuple[Array, dict[str, Any]]:
            return losses.awr_loss(policy, model, trained, zs, batch, weights, mask, draws, config)

    policy = state.params["policy"]
    (loss, policy_aux), grads = jax.value_and_grad(policy_loss, has_aux=True)(policy)
    updates, policy_opt_state = policy_optimizer.update(grads, state.policy_opt_state, policy)
    params = {**trained, "policy": optax.apply_updates(policy, updates)}
    kept = policy_aux.pop("kept", kept)
    metrics["loss/policy"] = loss
    metrics["grad_norm/policy"] = optax.tree.norm(grads)
    metrics |= {f"policy/{name}": jnp.mean(x) for name, x in policy_aux.items()}

    state = state.replace(
        params=params,
        target_value=optax.incremental_update(params["value"], state.target_value, config.tau),
        opt_state=opt_state,
        policy_opt_state=policy_opt_state,
        scale=kept[0],
        return_ema=kept[1],
        step=state.step + 1,
    )
    return state, metrics


def draw(config: TDMPCConfig, key: Array, batch_size: int) -> losses.Draws:
    """The random numbers of one update."""
    world = config.world
    keys = jax.random.split(key, 5)
    shape = (config.horizon, batch_size, world.action_dim)
    return losses.Draws(
        target_eps=jax.random.normal(keys[0], shape),
        target_heads=planning.choose_heads(keys[1], world.num_values, config.num_heads),
        policy_eps=jax.random.normal(keys[2], (shape[0] + 1, *shape[1:])),
        policy_heads=planning.choose_heads(keys[3], world.num_values, config.num_heads),
        dropout=keys[4] if world.dropout > 0.0 else None,
    )


def make_batch(sample: replay.Sample) -> losses.Batch:
    """Windows of rows, in which reward and flags arrive with the row, as a learner's batch."""
    rows, targets = sample.rows, sample.targets
    return losses.Batch(
        obs=rows["obs"],
        action=rows["action"][:-1],
        reward=rows["reward"][1:],
        terminated=rows["terminated"][1:].astype(jnp.float32),
        mask=sample.mask.astype(jnp.float32),
        target_actions=None if targets is None else targets.actions,
        target_values=None if targets is None else targets.values,
        target_valid=None if targets is None else targets.valid,
    )


def make_agent(config: TDMPCConfig) -> Agent:
    """The agent for `config` (see the module's first lines)."""
    model = make_world_model(config.world)
    world = config.world
    plan_targets = functools.partial(
        planning.plan_targets, model, discount=config.discount, num_heads=config.num_heads,
        termination=config.termination,
    )  # fmt: skip

    def act(
        train: TrainState, actor: Array, obs: Array, is_first: Array, key: Array, evaluate: bool
    ) -> tuple[Array, Array]:
        planner = config.planner
        if evaluate:
            selection = config.evaluation_selection
            planner = dataclasses.replace(planner, action_noise=0.0, selection=selection)
        mean = mppi.warm_start(actor, is_first)
        plan = planning.plan_to_act(
            model, train.params, model.encode(train.params, obs), mean, key, config=planner,
            num_proposals=config.num_proposals, discount=config.discount,
            num_heads=config.num_heads, termination=config.termination,
        )  # fmt: skip
        return plan.action, plan.mean

    def make_targets(train: TrainState, obs: Array, key: Array) -> replay.Targets | None:
        if not config.stores_targets:
            return None
        z = model.encode(train.params, obs)
        actions, values = plan_targets(train.params, z, key, config=config.training_planner)
        lead = values.shape[:1]
        return replay.Targets(
            actions, values, jnp.full(lead, train.step, jnp.int32), jnp.ones(lead, bool)
        )

    def legacy_targets(train: TrainState, batch: losses.Batch, key: Array) -> losses.Batch:
        flat = batch.obs.reshape(-1, *batch.obs.shape[2:])
        once = dataclasses.replace(config.training_planner, iterations=1)
        z = model.encode(train.params, flat)
        actions, values = plan_targets(train.params, z, key, config=once)
        lead = batch.obs.shape[:2]
        return batch._replace(
            target_actions=jax.lax.stop_gradient(actions).reshape(*lead, *actions.shape[1:]),
            target_values=jax.lax.stop_gradient(values).reshape(*lead, *values.shape[1:]),
            target_valid=jnp.ones(lead, bool),
        )

    def update(train: TrainState, state: replay.ReplayState, key: Array) -> tuple[Any, Metrics]:
        sample_key, draw_key, shift_key, legacy_key = jax.random.split(key, 4)
        sample = replay.sample(
            state, sample_key, batch_size=config.batch_size, length=config.horizon
        )
        batch = make_batch(sample)
        if world.pixels:
            batch = batch._replace(obs=shift_images(batch.obs, shift_key))
        if config.uses_actions and not config.stores_targets:
            batch = legacy_targets(train, batch, legacy_key)
        train, metrics = update_from_batch(
            config, model, train, batch, draw(config, draw_key, config.batch_size)
        )
        if config.stores_targets:
            valid = sample.targets.valid[:-1] & sample.mask
            age = jnp.where(valid, train.step - sample.targets.step[:-1], 0)
            metrics["targets/age"] = jnp.sum(age) / jnp.maximum(jnp.sum(valid), 1)
            metrics["targets/valid"] = jnp.sum(valid) / jnp.maximum(jnp.sum(sample.mask), 1)
        metrics["batch/mask"] = jnp.mean(batch.mask)
        return train, metrics

    def refresh(
        train: TrainState, state: replay.ReplayState, key: Array, sweep: Array
    ) -> tuple[replay.ReplayState, Metrics]:
        rows_key, plan_key = jax.random.split(key)
        num = config.reanalyze_batch
        if config.stale_exponent > 0.0:
            _, chosen = replay.sample_stale(
                state, rows_key, train.step, batch_size=num, exponent=config.stale_exponent
            )
        else:
            _, chosen = replay.sample_rows(state, rows_key, batch_size=num)
        swept, held = replay.refresh_index(state, sweep * num, num)
        index = jax.tree.map(functools.partial(jnp.where, sweep >= 0), swept, chosen)
        rows = replay.row_at(state, index)
        mask = (held | (sweep < 0)) & ~rows["is_last"]
        old = replay.targets_at(state, index)
        new = make_targets(train, rows["obs"], plan_key)
        # What is written depends, by nothing, on what was read there: so the compiler knows that
        # the read comes first and writes in place instead of copying the whole storage.
        best_before = jnp.nan_to_num(jnp.max(old.values, axis=-1))
        nothing = 0.0 * (best_before + old.step + old.valid)
        new = new.replace(
            values=new.values + nothing[:, None],
            step=new.step + nothing.astype(jnp.int32),
            valid=new.valid & (nothing == 0.0),
        )
        known = old.valid & mask
        count = jnp.maximum(jnp.sum(known), 1)
        age = jnp.where(known, train.step - old.step, 0)
        change = jnp.max(new.values, axis=-1) - best_before
        metrics = {
            "reanalyze/age": jnp.sum(age) / count,
            "reanalyze/value_change": jnp.sum(jnp.where(known, jnp.abs(change), 0.0)) / count,
            "reanalyze/share": jnp.sum(mask) / jnp.maximum(replay.num_transitions(state), 1),
        }
        return replay.update_targets(state, index, new, mask), metrics

    def example_row() -> dict[str, Any]:
        scalar = functools.partial(jax.ShapeDtypeStruct, ())
        obs_dtype = jnp.uint8 if world.pixels else jnp.float32
        return dict(
            obs=jax.ShapeDtypeStruct(world.obs_shape, obs_dtype),
            action=jax.ShapeDtypeStruct((world.action_dim,), jnp.float32),
            reward=scalar(jnp.float32),
            is_first=scalar(jnp.bool_),
            is_last=scalar(jnp.bool_),
            terminated=scalar(jnp.bool_),
        )

    spec = replay.TargetSpec(
        config.training_planner.num_samples, world.action_dim, config.keep_targets,
        config.target_values_dtype, config.target_actions_dtype,
    )  # fmt: skip
    return Agent(
        init=functools.partial(init_state, config, model),
        init_actor=lambda num: jnp.zeros((num, config.planner_horizon, world.action_dim)),
        act=act,
        targets=make_targets,
        update=update,
        refresh=refresh if config.stores_targets else None,
        example_row=example_row,
        target_spec=spec if config.stores_targets else None,
        refresh_chunk=config.reanalyze_batch,
    )


def shift_images(obs: Array, key: Array, pad: int = 3) -> Array:
    """Random shift of every image of `[T+1, B, H, W, C]`; acting sees images whole."""
    flat = obs.reshape(-1, *obs.shape[2:])
    shift = jax.random.randint(key, (flat.shape[0], 2), 0, 2 * pad + 1)
    return networks.random_shift(flat, shift, pad).reshape(obs.shape)
