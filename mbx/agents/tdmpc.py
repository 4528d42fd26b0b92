"""TD-MPC on planner-made targets: the agent as a tuple of pure functions.

    act      encode, plan with warm start and policy proposals, return the first action
    targets  encode, refine actions with the training planner, return them with their values
    update   sample windows, one step on model and value, one on the policy, move the target network
    refresh  recompute stored targets of some replay rows with today's model (reanalyze)

With `critic="q", policy_loss="svg", value_target="td"` this is TD-MPC2; with `critic="v"`,
`policy_loss="awr"` and planner targets it is document 000; with ensembles, priors and
`policy_loss="kl"` document 001. Settings live in `tdmpc_config`, value targets in `tdmpc_targets`,
losses in `tdmpc_losses` and `tdmpc_policy`, planning in `tdmpc_planning`. Axes: E environments, B
batch, T transitions of a window, N planner actions.
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
from mbx.agents import tdmpc_optim as optim
from mbx.agents import tdmpc_planning as planning
from mbx.agents import tdmpc_policy as policies
from mbx.agents import tdmpc_targets as value_targets
from mbx.agents.base import Agent, Metrics
from mbx.agents.tdmpc_config import Scoring, TDMPCConfig
from mbx.agents.tdmpc_targets import Batch, Draws
from mbx.world_model import Params, WorldModel, make_world_model

__all__ = ["Batch", "Draws", "Scoring", "TDMPCConfig", "TrainState", "make_agent"]

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


@flax.struct.dataclass
class Expert:
    """The acting planner's Gaussian, carried to where targets are stored: its warm start `mean`
    `[E, T, A]`, `gaussian` `[E, 2, A]` (mean, std) and whether it was planned at all, `[E]`."""

    mean: Array
    gaussian: Array
    planned: Array


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
        batch.target_values, temperature=config.awr_temperature, scale=scale,
        advantage_scale=config.advantage_scale,
    )  # fmt: skip
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
            {**frozen, **trained}, model, batch, z[1:], target, aux, draws, config,
            progress=_progress(config, state.step),
            value_due=1.0 if config.value_every == 1 else due,
        )  # fmt: skip

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
            policy, model, state.params, state.target_policy, inputs, scales,
            functools.partial(move_value_scale, config), config, entropy_coef,
        )  # fmt: skip

    old = state.params["policy"]
    (value, out), grads = jax.value_and_grad(loss, has_aux=True)(old)
    updates, opt_state = optimizer.update(grads, state.policy_opt_state, old)
    params = {**state.params, "policy": optax.apply_updates(old, updates)}
    metrics = {"loss/policy": value, "grad_norm/policy": optax.tree.norm(grads)}
    metrics |= {f"policy/{name}": jnp.mean(x) for name, x in out["metrics"].items()}
    moved = out["scales"]
    state = state.replace(
        policy_opt_state=opt_state, scale=moved.value[0], return_ema=moved.value[1],
        kl_scale=moved.kl, trust_scale=moved.trust,
    )  # fmt: skip
    if config.optimist:
        value, grads = jax.value_and_grad(policies.optimist_loss)(
            params["optimist"], model, state.params, inputs._replace(eps=optimist_eps),
            state.scale.value, config, entropy_coef,
        )  # fmt: skip
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
            mask=losses.state_mask(batch.mask), actions=batch.target_actions, weights=weights,
            valid=batch.target_valid, expert=batch.target_expert, behaviour=batch.action,
        ),
        strategy, heads,
    )  # fmt: skip
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


def make_batch(sample: replay.Sample) -> Batch:
    """Windows of rows, in which reward and flags arrive with the row, as a learner's batch."""
    rows, targets = sample.rows, sample.targets
    planned: dict[str, Array | None] = {}
    if targets is not None:
        planned = dict(
            target_actions=targets.actions, target_values=targets.values,
            target_valid=targets.valid, target_expert=targets.expert,
        )  # fmt: skip
    return Batch(
        obs=rows["obs"],
        action=rows["action"][:-1],
        reward=rows["reward"][1:],
        terminated=rows["terminated"][1:].astype(jnp.float32),
        mask=sample.mask.astype(jnp.float32),
        **planned,
    )


def make_act(config: TDMPCConfig, model: WorldModel) -> Any:
    """`Agent.act`: plan from the encoded observation."""
    outlook = planning.Outlook(
        config.discount, config.num_heads, config.termination, config.scoring
    )
    carries_expert = config.uses_expert and config.expert_source == "acting"

    def act(
        train: TrainState, actor: Any, obs: Array, is_first: Array, key: Array, evaluate: bool
    ) -> tuple[Array, Any]:
        planner, looking = config.planner, outlook
        if evaluate:
            selection = config.evaluation_selection
            planner = dataclasses.replace(planner, action_noise=0.0, selection=selection)
            looking = outlook._replace(scoring=config.evaluation_scoring)
        mean = mppi.warm_start(actor.mean if carries_expert else actor, is_first)
        prior = None
        if config.prior_updates:
            prior = planning.prior_weight(train.step, config.prior_start, config.prior_updates)
        plan = planning.plan_to_act(
            model, train.params, model.encode(train.params, obs), mean, key, config=planner,
            num_proposals=config.num_proposals, outlook=looking,
            proposal_noise=config.proposal_noise, prior=prior,
        )  # fmt: skip
        if not carries_expert:
            return plan.action, plan.mean
        chosen = plan.mean[:, 0] if config.expert_mean == "final" else plan.action
        gaussian = jnp.stack([chosen, plan.std[:, 0]], axis=1)
        return plan.action, Expert(plan.mean, gaussian, jnp.ones_like(is_first))

    return act


def make_targets(config: TDMPCConfig, model: WorldModel) -> Any:
    """`Agent.targets`: the training planner's actions, values and, for distillation, its expert."""
    outlook = planning.Outlook(
        config.discount, config.num_heads, config.termination, config.target_scoring
    )

    def targets(train: TrainState, actor: Any, obs: Array, key: Array) -> replay.Targets | None:
        if not config.stores_targets:
            return None
        plan = planning.plan_targets(
            model, train.params, model.encode(train.params, obs), key,
            config=config.training_planner, outlook=outlook, horizon=config.target_horizon,
        )  # fmt: skip
        expert = None
        if config.uses_expert:
            chosen = plan.mean if config.expert_mean == "final" else plan.action
            expert = jnp.stack([chosen, plan.std], axis=1)
            if isinstance(actor, Expert):
                expert = jnp.where(actor.planned[:, None, None], actor.gaussian, expert)
        lead = plan.values.shape[:1]
        step, valid = jnp.full(lead, train.step, jnp.int32), jnp.ones(lead, bool)
        return replay.Targets(plan.actions, plan.values, step, valid, expert)

    return targets


def make_update(config: TDMPCConfig, model: WorldModel) -> Any:
    """`Agent.update`: sample, and one learner step."""
    world = config.world
    once = dataclasses.replace(config.training_planner, iterations=1)
    outlook = planning.Outlook(
        config.discount, config.num_heads, config.termination, config.target_scoring
    )

    def legacy_targets(train: TrainState, batch: Batch, key: Array) -> Batch:
        flat = batch.obs.reshape(-1, *batch.obs.shape[2:])
        z = model.encode(train.params, flat)
        plan = planning.plan_targets(model, train.params, z, key, config=once, outlook=outlook)
        lead = batch.obs.shape[:2]
        actions, values = jax.lax.stop_gradient((plan.actions, plan.values))
        return batch._replace(
            target_actions=actions.reshape(*lead, *actions.shape[1:]),
            target_values=values.reshape(*lead, *values.shape[1:]),
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

    return update


def make_refresh(config: TDMPCConfig, targets: Any) -> Any:
    """`Agent.refresh`: choose rows, plan for them anew, write the targets back by index."""
    num = config.reanalyze_batch

    def choose(train: TrainState, state: replay.ReplayState, key: Array) -> replay.Index:
        if config.reanalyze_slices:
            length = config.horizon
            windows = replay.sample(state, key, batch_size=-(-num // (length + 1)), length=length)
            return jax.tree.map(lambda x: x.reshape(-1)[:num], windows.index)
        if config.stale_exponent > 0.0:
            return replay.sample_stale(
                state, key, train.step, batch_size=num, exponent=config.stale_exponent
            )[1]
        return replay.sample_rows(state, key, batch_size=num)[1]

    def refresh(
        train: TrainState, state: replay.ReplayState, key: Array, sweep: Array
    ) -> tuple[replay.ReplayState, Metrics]:
        rows_key, plan_key = jax.random.split(key)
        chosen = choose(train, state, rows_key)
        swept, held = replay.refresh_index(state, sweep * num, num)
        index = jax.tree.map(functools.partial(jnp.where, sweep >= 0), swept, chosen)
        rows = replay.row_at(state, index)
        mask = (held | (sweep < 0)) & ~rows["is_last"]
        old = replay.targets_at(state, index)
        new = targets(train, None, rows["obs"], plan_key)
        # What is written depends, by nothing, on what was read there: so the compiler knows that
        # the read comes first and writes in place instead of copying the whole storage.
        best_before = jnp.nan_to_num(jnp.max(old.values, axis=-1))
        nothing = 0.0 * (best_before + old.step + old.valid)
        if old.expert is not None:
            nothing = nothing + 0.0 * jnp.nan_to_num(old.expert[:, 0, 0])
            new = new.replace(expert=new.expert + nothing[:, None, None])
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

    return refresh


def example_row(config: TDMPCConfig) -> dict[str, Any]:
    """One un-batched replay row, as shapes."""
    world = config.world
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


def make_agent(config: TDMPCConfig) -> Agent:
    """The agent for `config` (see the module's first lines)."""
    model = make_world_model(config.world)
    world = config.world
    targets = make_targets(config, model)

    def init_actor(num: int) -> Any:
        mean = jnp.zeros((num, config.planner_horizon, world.action_dim))
        if config.uses_expert and config.expert_source == "acting":
            return Expert(mean, jnp.zeros((num, 2, world.action_dim)), jnp.zeros(num, bool))
        return mean

    spec = replay.TargetSpec(
        config.training_planner.num_samples, world.action_dim, config.keep_targets,
        config.target_values_dtype, config.target_actions_dtype, config.uses_expert,
    )  # fmt: skip
    return Agent(
        init=functools.partial(init_state, config, model),
        init_actor=init_actor,
        act=make_act(config, model),
        targets=targets,
        update=make_update(config, model),
        refresh=make_refresh(config, targets) if config.stores_targets else None,
        example_row=functools.partial(example_row, config),
        target_spec=spec if config.stores_targets else None,
        refresh_chunk=config.reanalyze_batch,
    )


def shift_images(obs: Array, key: Array, pad: int = 3) -> Array:
    """Random shift of every image of `[T+1, B, H, W, C]`; acting sees images whole."""
    flat = obs.reshape(-1, *obs.shape[2:])
    shift = jax.random.randint(key, (flat.shape[0], 2), 0, 2 * pad + 1)
    return networks.random_shift(flat, shift, pad).reshape(obs.shape)


def _progress(config: TDMPCConfig, step: Array) -> Array | float:
    """Share of the run's updates that are done; 0 where no schedule asks for it."""
    return step / config.total_updates if config.total_updates else 0.0
