"""TD-MPC on planner-made targets: the agent as a tuple of pure functions.

In: settings and a task (`EnvSpec`). Out: `make_agent`'s `Agent`, the training loop's interface.
Read on in `update` (one learner step), `losses`, `value_targets` and `planning`.

    act        encode, plan with warm start and policy proposals, return the first action
    update     sample windows, step model and values, step the policy, move the targets
    targets    encode, refine actions with the training planner, return them with their values
    reanalyze  refresh stored targets of some replay rows with the current model

`configs/tdmpc2.py` makes it TD-MPC2, `configs/bmpc.py` BMPC; `configs/tdmpc_ensemble.py` adds
ensembles with random priors. Axes: E environments, B batch, T transitions of a window, N planner
actions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from mbx import mppi, networks, observations, replay
from mbx.agents.base import Agent, MakeTargets, See, Store
from mbx.agents.tdmpc import planning
from mbx.agents.tdmpc.diagnostics import make_review
from mbx.agents.tdmpc.reanalyze import reanalyze, reanalyze_batch
from mbx.agents.tdmpc.task import resolve as resolve
from mbx.agents.tdmpc.task import world_config as world_config
from mbx.agents.tdmpc.types import BATCH_AXES, ActorState, Batch, KeptPlan, TrainState, make_batch
from mbx.agents.tdmpc.update import draw, init_state, update_from_batch
from mbx.fast import collectives
from mbx.heads import make_heads
from mbx.types import Array, EnvSpec, Metrics, Part, carry_over, streams
from mbx.world_model import WorldModel, make_world_model, masked

if TYPE_CHECKING:
    from mbx.agents.tdmpc.settings import Settings


def make_agent(
    settings: Settings,
    spec: EnvSpec,
    *,
    value: Callable[[Array], Array] | None = None,
    sample: Callable[..., replay.Sample] | None = None,
) -> Agent:
    """The agent for a task.

    Args:
        value: a reduction `[V, ...] -> [...]` over the value heads in use, for targets, plans and
            SVG (`lambda values: values.min(0)`); None: as the settings say.
        sample: draws the windows of an update, with `replay.sample`'s arguments and result; None:
            as `replay.half_life` says.

    Raises:
        ValueError: settings that this task, or the model's size, cannot have; names the setting,
            its value and the remedy.
    """
    settings = resolve(settings, spec)
    model = make_world_model(world_config(settings, spec))
    model = model._replace(heads=make_heads(settings.loss.head_terms, spec), reduce_values=value)
    make_targets = functools.partial(targets, settings, model)
    half_life = settings.replay.half_life
    sample = sample or (replay.by_age(half_life) if half_life else replay.sample)
    return Agent(
        init=functools.partial(init_state, settings, model),
        init_actor=functools.partial(init_actor, settings, model),
        act=functools.partial(act, settings, model),
        update=functools.partial(update, settings, model, make_targets, sample),
        example_row=functools.partial(example_row, model),
        store=make_store(settings, model, make_targets) if settings.stores_plans else None,
        start_from=functools.partial(start_from, spec),
        act_without_planner=functools.partial(act_without_planner, model),
        review=make_review(settings, model) if settings.eval.model else None,
        watched=lambda see: functools.partial(act, settings, model, see=see),
    )


def init_actor(settings: Settings, model: WorldModel, num_envs: int) -> Any:
    """What acting carries between steps: the plan's mean `[E, T, A]`, an `ActorState` or a
    `KeptPlan`."""
    mean = jnp.zeros((num_envs, settings.planner.horizon, model.config.action_dim))
    if settings.follows_plans:
        latent = jnp.zeros((num_envs, model.config.latent_dim))
        return KeptPlan(mean, mean, latent, jnp.zeros(num_envs, jnp.int32))
    if not settings.acts_as_expert:
        return mean
    expert = jnp.zeros((num_envs, 2, model.config.action_dim))
    return ActorState(mean, expert, jnp.zeros(num_envs, bool))


def act(
    settings: Settings,
    model: WorldModel,
    train: TrainState,
    actor: Any,
    obs: Array,
    is_first: Array,
    key: Array,
    evaluate: bool,
    see: See | None = None,
) -> tuple[Array, Any]:
    """`Agent.act`: plan from the encoded observation; with `see`, `Agent.watched`."""
    z = model.encode(train.params, obs)
    how: dict[str, Any] = dict(evaluate=evaluate, step=train.step, see=see)
    if settings.follows_plans:
        return planning.follow_or_plan(
            settings, model, train.params, z, actor, is_first, key, **how
        )
    mean = mppi.warm_start(actor.mean if settings.acts_as_expert else actor, is_first)
    plan = planning.plan_to_act(settings, model, train.params, z, mean, key, **how)
    if not settings.acts_as_expert:
        return plan.action, plan.mean
    # The elite itself: what exploration adds is not to be imitated (BMPC).
    chosen = plan.mean[:, 0] if settings.loss.expert_mean == "final" else plan.chosen
    expert = jnp.stack([chosen, plan.std[:, 0]], axis=1)
    return plan.action, ActorState(plan.mean, expert, jnp.ones_like(is_first))


def act_without_planner(
    model: WorldModel,
    train: TrainState,
    actor: Any,
    obs: Array,
    is_first: Array,
    key: Array,
    evaluate: bool,
) -> tuple[Array, Any]:
    """`Agent.act_without_planner`: the policy's mean; in training with its noise."""
    z = model.encode(train.params, obs)
    mean, log_std = model.policy(train.params, z)
    eps = jnp.zeros_like(mean) if evaluate else jax.random.normal(key, mean.shape)
    return masked(model, model.act(mean, log_std, eps), z), actor


def targets(
    settings: Settings, model: WorldModel, train: TrainState, actor: Any, obs: Array, key: Array
) -> replay.Targets:
    """`Store.targets`: the training planner's actions, values and, for distillation, its expert.

    Where the acting planner is the expert and no loss reads more, only its mean is stored, without
    a value (NaN), and the training planner does not plan.
    """
    planned = functools.partial(plan_row, settings, model, train, actor, obs, key)
    if not (isinstance(actor, ActorState) and settings.reads_expert_alone):
        return planned()
    shapes = jax.eval_shape(planned)

    def acted() -> replay.Targets:
        return replay.Targets(
            actions=jnp.broadcast_to(actor.gaussian[:, :1], shapes.actions.shape),
            values=jnp.full_like(shapes.values, jnp.nan),
            step=jnp.full_like(shapes.step, train.step),
            valid=jnp.ones_like(shapes.valid),
            expert=actor.gaussian,
        )

    return jax.lax.cond(jnp.all(actor.planned), acted, planned)


def plan_row(
    settings: Settings, model: WorldModel, train: TrainState, actor: Any, obs: Array, key: Array
) -> replay.Targets:
    """Targets of observations from the training planner."""
    z = model.encode(train.params, obs)
    plan = planning.plan_targets(settings, model, train.params, z, key)
    expert = None
    if settings.uses_expert:
        chosen = plan.mean if settings.loss.expert_mean == "final" else plan.action
        expert = jnp.stack([chosen, plan.std], axis=1)
        if isinstance(actor, ActorState):
            expert = jnp.where(actor.planned[:, None, None], actor.gaussian, expert)
    lead = plan.values.shape[:1]
    step, valid = jnp.full(lead, train.step, jnp.int32), jnp.ones(lead, bool)
    return replay.Targets(plan.actions, plan.values, step, valid, expert)


def make_store(settings: Settings, model: WorldModel, make_targets: MakeTargets) -> Store:
    """`Agent.store`: how the replay keeps planner targets, and how they are refreshed."""
    spec = replay.TargetSpec(
        settings.training_planner.num_samples,
        model.config.action_dim,
        settings.replay.keep_targets or None,
        settings.replay.values_dtype,
        settings.replay.actions_dtype,
        settings.uses_expert,
    )
    refresh = functools.partial(reanalyze, settings, make_targets)
    return Store(spec, make_targets, refresh, settings.reanalyze.batch_size)


def update(
    settings: Settings,
    model: WorldModel,
    make_targets: MakeTargets,
    draw_windows: Callable[..., replay.Sample],
    train: TrainState,
    state: replay.ReplayState,
    key: Array,
) -> tuple[TrainState, replay.ReplayState, Metrics]:
    """`Agent.update`: sample windows and make one learner step on them.

    With `reanalyze.current_batch` the batch's own targets are refreshed first when that is due.
    """
    keys, loss = streams(key, "sample", "learn", "plan"), settings.loss
    sample = draw_windows(state, keys["sample"], batch_size=loss.batch_size, length=loss.horizon)
    passed: Metrics = {}
    if settings.refreshes_batch:
        state, sample, passed = reanalyze_batch(
            settings, make_targets, train, state, sample, keys["plan"]
        )
    train, metrics = learn(settings, model, train, sample, keys["learn"])
    return train, state, metrics | passed


def learn(
    settings: Settings, model: WorldModel, train: TrainState, sample: replay.Sample, key: Array
) -> tuple[TrainState, Metrics]:
    """One learner step on sampled windows."""
    keys = streams(key, "draw", "shift", "plan")
    batch = make_batch(sample)
    if model.config.pixels:
        shifted = shift_images(batch.obs, keys["shift"], parts=model.config.parts)
        batch = batch._replace(obs=shifted)
    if settings.reads_plans and not settings.stores_plans:
        valid = ~sample.rows["is_last"]
        batch = plan_batch(settings, model, train, batch, valid, keys["plan"])
    noise = draw(settings, model, keys["draw"])
    if model.config.num_dynamics > 1:  # each head has its chunk of the whole batch
        return update_from_batch(settings, model, train, batch, noise)
    step = functools.partial(update_from_batch, settings, model)
    return collectives.shard_map(step, (None, 1, BATCH_AXES), train, batch, noise)


def plan_batch(
    settings: Settings, model: WorldModel, train: TrainState, batch: Batch, valid: Array, key: Array
) -> Batch:
    """A batch with policy samples, scored by the current model, in place of stored plans.

    Args:
        valid: `[T+1, B]`, False for the last row of an episode, in which nothing is planned.
    """
    z = model.encode(train.params, batch.obs.reshape(-1, *batch.obs.shape[2:]))
    plan = planning.plan_targets(settings, model, train.params, z, key)
    lead = batch.obs.shape[:2]
    actions, values = jax.lax.stop_gradient((plan.actions, plan.values))
    return batch._replace(
        plan_actions=actions.reshape(*lead, *actions.shape[1:]),
        plan_values=values.reshape(*lead, *values.shape[1:]),
        plan_valid=valid,
    )


def start_from(spec: EnvSpec, train: TrainState, old: TrainState, old_spec: EnvSpec) -> TrainState:
    """`Agent.start_from`: parameters of another run, and target networks as copies of them.

    Tasks of the same name keep their embedding; new ones get the mean of all. Old statistics of
    observations count as at most a hundred batches, so that a new task replaces them soon.
    """
    params = {name: old.params.get(name) for name in train.params}
    if "heads" in train.params:  # heads that the old run lacks start fresh
        params["heads"] = {**train.params["heads"], **(params["heads"] or {})}
        params["heads"] = {name: params["heads"][name] for name in train.params["heads"]}
    if spec.tasks and params.get("task") is not None:
        names = [[task.name for task in one.tasks] for one in (old_spec, spec)]
        params["task"] = carry_over(params["task"], *names)
    if "statistics" in params:
        known = params["statistics"]
        params["statistics"] = {**known, "count": jnp.minimum(known["count"], 100.0)}
    copies = {"target_value": "value", "target_aux": "aux_value", "target_policy": "policy"}
    moved = {
        field: jax.tree.map(jnp.copy, params[name])
        for field, name in copies.items()
        if getattr(train, field) is not None
    }
    return train.replace(params=params, **moved)


def shift_images(obs: Array, key: Array, pad: int = 3, parts: Sequence[Part] = ()) -> Array:
    """Random shift of every image of `[T+1, B, H, W, C]`; acting sees unshifted images.

    In packed rows (`mbx.observations`) only the images are shifted.
    """
    if observations.is_packed(parts):
        return observations.map_image(parts, obs, lambda images: shift_images(images, key, pad))
    flat = obs.reshape(-1, *obs.shape[2:])
    shift = jax.random.randint(key, (flat.shape[0], 2), 0, 2 * pad + 1)
    return networks.random_shift(flat, shift, pad).reshape(obs.shape)


def example_row(model: WorldModel) -> dict[str, Any]:
    """Shapes of one un-batched replay row."""
    world = model.config
    obs_dtype = jnp.uint8 if world.pixels else jnp.float32
    return replay.example_row(world.obs_shape, world.action_dim, obs_dtype)
