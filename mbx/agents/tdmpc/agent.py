"""TD-MPC on planner-made targets: the agent as a tuple of pure functions.

    act      encode, plan with warm start and policy proposals, return the first action
    targets  encode, refine actions with the training planner, return them with their values
    update   sample windows, one step on model and value, one on the policy, move the target network
    refresh  recompute stored targets of some replay rows with today's model (reanalyze)

With `critic="q", policy_loss="svg", value_target="td"` this is TD-MPC2; with `critic="v"`,
`policy_loss="awr"` and planner targets it is document 000; with ensembles, priors and
`policy_loss="kl"` document 001. Settings live in `config`, the learner step in
`update`, value targets in `value_targets`, losses in `model_loss` and `policy_loss`,
planning in `planning`, reanalyze in `reanalyze`. Axes: E environments, B
batch, T transitions of a window, N planner actions.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from mbx import mppi, networks, replay
from mbx.agents.base import Agent, Metrics, Store
from mbx.agents.tdmpc import planning, reanalyze
from mbx.agents.tdmpc.config import Scoring, TDMPCConfig
from mbx.agents.tdmpc.update import (
    TrainState,
    draw,
    init_state,
    update_from_batch,
    weigh_actions,
)
from mbx.agents.tdmpc.value_targets import Batch, Draws
from mbx.world_model import WorldModel, make_world_model

__all__ = [
    "Batch",
    "Draws",
    "Scoring",
    "TDMPCConfig",
    "TrainState",
    "draw",
    "init_state",
    "make_agent",
    "update_from_batch",
    "weigh_actions",
]

Array = jax.Array


@flax.struct.dataclass
class Expert:
    """The acting planner's Gaussian, carried to where targets are stored: its warm start `mean`
    `[E, T, A]`, `gaussian` `[E, 2, A]` (mean, std) and whether it was planned at all, `[E]`."""

    mean: Array
    gaussian: Array
    planned: Array


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
            model,
            train.params,
            model.encode(train.params, obs),
            mean,
            key,
            config=planner,
            num_proposals=config.num_proposals,
            outlook=looking,
            proposal_noise=config.proposal_noise,
            prior=prior,
        )
        if not carries_expert:
            return plan.action, plan.mean
        chosen = plan.mean[:, 0] if config.expert_mean == "final" else plan.action
        gaussian = jnp.stack([chosen, plan.std[:, 0]], axis=1)
        return plan.action, Expert(plan.mean, gaussian, jnp.ones_like(is_first))

    return act


def make_targets(config: TDMPCConfig, model: WorldModel) -> Any:
    """`Store.targets`: the training planner's actions, values and, for distillation, its expert."""
    outlook = planning.Outlook(
        config.discount, config.num_heads, config.termination, config.target_scoring
    )

    def targets(train: TrainState, actor: Any, obs: Array, key: Array) -> replay.Targets:
        plan = planning.plan_targets(
            model,
            train.params,
            model.encode(train.params, obs),
            key,
            config=config.training_planner,
            outlook=outlook,
            horizon=config.target_horizon,
        )
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


def make_batch(sample: replay.Sample) -> Batch:
    """Windows of rows, in which reward and flags arrive with the row, as a learner's batch."""
    rows, targets = sample.rows, sample.targets
    planned: dict[str, Array | None] = {}
    if targets is not None:
        planned = dict(
            target_actions=targets.actions,
            target_values=targets.values,
            target_valid=targets.valid,
            target_expert=targets.expert,
        )
    return Batch(
        obs=rows["obs"],
        action=rows["action"][:-1],
        reward=rows["reward"][1:],
        terminated=rows["terminated"][1:].astype(jnp.float32),
        mask=sample.mask.astype(jnp.float32),
        **planned,
    )


def make_update(config: TDMPCConfig, model: WorldModel, targets: Any) -> Any:
    """`Agent.update`: sample, and one learner step.

    With `reanalyze.current_batch` the batch's own targets are made again when that is due.
    """
    learn = make_learn(config, model)

    def update(
        train: TrainState, state: replay.ReplayState, key: Array
    ) -> tuple[Any, replay.ReplayState, Metrics]:
        sample_key, learn_key = jax.random.split(key)
        train, metrics = learn(train, _sample(config, state, sample_key), learn_key)
        return train, state, metrics

    def update_and_reanalyze(
        train: TrainState, state: replay.ReplayState, key: Array
    ) -> tuple[Any, replay.ReplayState, Metrics]:
        sample_key, learn_key, plan_key = jax.random.split(key, 3)
        sample = _sample(config, state, sample_key)
        state, sample = reanalyze.refresh_batch(config, targets, train, state, sample, plan_key)
        train, metrics = learn(train, sample, learn_key)
        return train, state, metrics

    return update_and_reanalyze if config.reanalyze_current else update


def _sample(config: TDMPCConfig, state: replay.ReplayState, key: Array) -> replay.Sample:
    return replay.sample(state, key, batch_size=config.batch_size, length=config.horizon)


def make_learn(config: TDMPCConfig, model: WorldModel) -> Any:
    """`learn(train, sample, key) -> (train, metrics)`: one learner step on sampled windows."""
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

    def learn(train: TrainState, sample: replay.Sample, key: Array) -> tuple[Any, Metrics]:
        draw_key, shift_key, legacy_key = jax.random.split(key, 3)
        batch = make_batch(sample)
        if config.world.pixels:
            batch = batch._replace(obs=shift_images(batch.obs, shift_key))
        if config.uses_actions and not config.stores_targets:
            batch = legacy_targets(train, batch, legacy_key)
        new, metrics = update_from_batch(
            config, model, train, batch, draw(config, draw_key, config.batch_size)
        )
        if config.stores_targets:
            valid = sample.targets.valid[:-1] & sample.mask
            age = jnp.where(valid, new.step - sample.targets.step[:-1], 0)
            metrics["targets/age"] = jnp.sum(age) / jnp.maximum(jnp.sum(valid), 1)
            metrics["targets/valid"] = jnp.sum(valid) / jnp.maximum(jnp.sum(sample.mask), 1)
        metrics["batch/mask"] = jnp.mean(batch.mask)
        return new, metrics

    return learn


def shift_images(obs: Array, key: Array, pad: int = 3) -> Array:
    """Random shift of every image of `[T+1, B, H, W, C]`; acting sees images whole."""
    flat = obs.reshape(-1, *obs.shape[2:])
    shift = jax.random.randint(key, (flat.shape[0], 2), 0, 2 * pad + 1)
    return networks.random_shift(flat, shift, pad).reshape(obs.shape)


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
        config.training_planner.num_samples,
        world.action_dim,
        config.keep_targets,
        config.target_values_dtype,
        config.target_actions_dtype,
        config.uses_expert,
    )
    store = Store(
        spec, targets, reanalyze.make_reanalyze(config, targets), reanalyze.num_rows(config)
    )
    return Agent(
        init=functools.partial(init_state, config, model),
        init_actor=init_actor,
        act=make_act(config, model),
        update=make_update(config, model, targets),
        example_row=functools.partial(example_row, config),
        store=store if config.stores_targets else None,
    )
