"""EMPO phase 2 as an agent: a robot policy that softly maximises human power.

    act      the power-law policy of Q_r, with a share of uniformly random actions while learning
    update   sample states, enumerate the successors of every joint robot action, learn V_h^e
             (eq. 6), X_h (eq. 7) and Q_r (eq. 4) from frozen copies, by stages of warm-up

The replay holds states; successors are recomputed inside the update, so the human prior and the
robot's policy in the targets are always today's. Source: arXiv 2508.00159 for the equations,
docs/sources.md#empo for the aggregation. Axes: E environments, B states, H humans, G goals, R joint
robot actions.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from mbx import replay
from mbx.agents.base import Agent, Update
from mbx.empo import power
from mbx.empo.agent import targets as empo_targets
from mbx.empo.agent.acting import make_act, params_at
from mbx.empo.agent.diagnostics import make_diagnostics
from mbx.empo.agent.learners import init_state, learn_networks, learn_tables
from mbx.empo.agent.models import network_model, table_model
from mbx.empo.agent.settings import Settings
from mbx.empo.agent.types import Problem, TrainState
from mbx.empo.power.codec import make_codec, make_records
from mbx.empo.power.curriculum import RAMP_STAGE, Curriculum
from mbx.empo.power.equations import PowerParams
from mbx.empo.power.named import NamedWorld
from mbx.empo.power.worlds import World
from mbx.fast import collectives
from mbx.types import Array, EnvSpec, Metrics

MAX_LOST = 0.01  # share of robot actions that may lack successors in a run


def make_agent(settings: Settings, spec: EnvSpec) -> Agent:
    """The agent as pure functions.

    Raises:
        ValueError: for an environment without a world (`empo:` ones have one), for goal weights
            that do not sum to one, and for settings that do not go with the world; see `resolve`.
    """
    problem = resolve(settings, spec)
    totals = jnp.sum(problem.world.goal_weight, axis=-1)
    if not bool(jnp.all(jnp.abs(totals - 1.0) < 1e-4)):
        raise ValueError(
            f"goal_weight sums to {totals.tolist()} per human: divide each row by its sum"
        )
    episodes = settings.eval.review_episodes
    return Agent(
        init=functools.partial(init_state, problem),
        init_actor=lambda num: jnp.zeros((num, 0)),
        act=make_act(problem),
        update=_make_update(problem),
        example_row=functools.partial(_example_row, problem),
        diagnostics=make_diagnostics(problem, episodes, spec.episode_length) if episodes else None,
        check=functools.partial(_check_metrics, settings),
    )


def resolve(settings: Settings, spec: EnvSpec) -> Problem:
    """Settings and world as what is learned and how.

    Raises:
        ValueError: for an environment without a world, and for settings that the world leaves
            without effect or cannot serve.
    """
    if spec.world is None:
        raise ValueError(
            f"env.name={spec.name!r}: agent 'empo' needs a world that lists its successors, for "
            "example empo:grid_rock_1h1r"
        )
    _check_world(settings, spec)
    world, stored = spec.world.world, spec.name.endswith("@stored")
    params = _power_params(settings, spec.world, spec.name)
    if stored and (settings.loss.human_expectation, settings.loss.human_samples) != ("fresh", 1):
        raise ValueError(
            f"loss.human_expectation={settings.loss.human_expectation!r}, loss.human_samples="
            f"{settings.loss.human_samples} with env.name={spec.name!r}: what is stored are the "
            "successors of one draw of human actions, choose fresh and 1"
        )
    tables = settings.model.kind == "tables"
    return Problem(
        settings=settings,
        world=world,
        params=params,
        curriculum=_curriculum(settings),
        model=table_model(world) if tables else network_model(world, settings.model),
        capacity=_capacity(settings, world),
        target_interval=settings.loss.target_interval or (1 if tables else 20),
        stored=stored,
        held_out=spec.world.held_out,
        target_rate=0.0 if tables else settings.loss.target_rate,
    )


def _check_world(settings: Settings, spec: EnvSpec) -> None:
    """Raises ValueError for a changed setting that has no effect in the world of `spec`.

    What other settings leave without effect is declared with them (`mbx.settings`).
    """
    assert spec.world is not None
    for section, name, why in _without_effect(settings, spec):
        own = getattr(settings, section)
        value, normal = getattr(own, name), getattr(type(own)(), name)
        if value != normal:
            raise ValueError(
                f"{section}.{name}={value!r} has no effect with env.name={spec.name!r}: {why}; "
                f"leave it {normal!r}"
            )


def _without_effect(settings: Settings, spec: EnvSpec) -> Iterator[tuple[str, str, str]]:
    """Section, name and reason of every setting that does nothing in this world."""
    found: Any = spec.world
    if settings.loss.room > (most := found.world.max_successors):
        yield "loss", "room", f"a joint action has at most {most} successors there"
    prior = found.prior or "exact"  # what custom humans read is unknown
    if prior != "exact":
        for name in ("beta_h", "optimistic"):
            yield "power", name, f"its humans are {prior!r}, and only exact ones are of eq. (2)"
    if prior in ("uniform", "file"):
        yield "power", "nu_h", f"its humans are {prior!r}, which are taken as they are"
    if found.prior and prior != "paths":
        yield "humans", "beta", f"its humans are {prior!r}, not 'paths'"
    if not spec.name.startswith("empo:multigrid/"):
        yield "humans", "max_states", "it is for empo:multigrid/MAP"


def _power_params(settings: Settings, found: NamedWorld, name: str) -> PowerParams:
    """The world's own parameters, or those of the settings."""
    values = {f.name: getattr(settings.power, f.name) for f in dataclasses.fields(settings.power)}
    source = values.pop("source")
    if found.params is None:
        return PowerParams(**values)
    normal = type(settings.power)()
    for field, value in values.items():
        own = getattr(found.params, field)
        if value != own and source == "config":
            raise ValueError(
                f"config.power.{field}={value!r}, but {name} was made with {field}={own}: make the "
                "environment with the same power.* (`mbx.empo.make`)"
            )
        if value != own and value != getattr(normal, field):
            raise ValueError(
                f"config.power.{field}={value!r} has no effect: {name} brings parameters of its "
                f"own ({field}={own}); set power.source=config to use those of the configuration "
                "instead"
            )
    return found.params


def _curriculum(settings: Settings) -> Curriculum:
    """The schedules for the networks that exist."""
    own = settings.curriculum
    values = {field.name: getattr(own, field.name) for field in dataclasses.fields(own)}
    values["steps"] = values["steps"] or round(settings.train.steps * settings.train.utd_ratio)
    used = {f"use_{n}": getattr(settings.model, n) == "network" for n in ("x_h", "u_r", "v_r")}
    return Curriculum(**used, **values)


def _capacity(settings: Settings, world: World) -> int | None:
    """Successors of a whole batch: `loss.room` a joint action; None where that is every slot."""
    loss = settings.loss
    profiles = 1
    if loss.human_expectation == "exact":
        profiles = world.num_actions**world.num_humans
    elif loss.human_expectation == "fresh":
        profiles = loss.human_samples
    if not loss.room or loss.room >= world.max_successors:
        return None
    pairs = loss.batch_size * profiles * world.num_actions**world.num_robots
    return math.ceil(loss.room * pairs)


def _make_update(problem: Problem) -> Update:
    loss = problem.settings.loss
    tables = problem.settings.model.kind == "tables"

    def update(
        train: TrainState, buffer: replay.ReplayState, key: Array
    ) -> tuple[TrainState, replay.ReplayState, Metrics]:
        sample_key, human_key = jax.random.split(key)
        batch = replay.sample(buffer, sample_key, batch_size=loss.batch_size, length=1)
        states, human, listed = _experience(problem, batch.rows["obs"], human_key)
        # Left out where nothing is dropped: the keys of all else stay what they are.
        drop_key = jax.random.fold_in(key, 2) if problem.model.dropping else None
        given = train, states, human, listed, batch.mask[0], drop_key
        # Tables are written by the whole batch: a state that is met often moves once.
        axes = (None, 0, 0, 0, 0, None)
        new, metrics = own(*given) if tables else collectives.shard_map(own, axes, *given)
        return _advance(problem, new), buffer, metrics | _stage(problem, train.step)

    def own(
        train: TrainState,
        states: Any,
        human: empo_targets.Profiles,
        listed: tuple[Any, Array] | None,
        mask: Array,
        drop_key: Array | None,
    ) -> tuple[TrainState, Metrics]:
        p = params_at(problem, train.step)
        room = problem.capacity and -(-problem.capacity // collectives.axis_size())
        targets, shares = empo_targets.make_targets(
            problem.model,
            problem.world,
            train.frozen,
            states,
            human,
            p,
            mask,
            capacity=room,
            unique=loss.unique,
            listed=listed,
            use_v_r=power.curriculum.stage(problem.curriculum, train.step) >= RAMP_STAGE,
        )
        shares |= _progress(problem, p, targets, mask)
        if tables:
            return learn_tables(problem, train, states, targets, mask, shares)
        return learn_networks(problem, train, states, targets, mask, shares, drop_key)

    return update


def _advance(problem: Problem, train: TrainState) -> TrainState:
    """The next step; the copy of the parameters follows them, or is made anew where it is due."""
    step, target, rate = train.step + 1, train.target, problem.target_rate
    if target is not None and rate:
        target = jax.tree.map(lambda old, new: old + rate * (new - old), target, train.params)
    elif target is not None:
        due = step % problem.target_interval == 0
        target = jax.tree.map(functools.partial(jnp.where, due), train.params, target)
    return train.replace(target=target, step=step)


def _stage(problem: Problem, step: Array) -> Metrics:
    """Where the curriculum stands."""
    return {
        "beta_r": params_at(problem, step).beta_r,
        "epsilon": power.curriculum.epsilon(problem.curriculum, step),
        "stage": power.curriculum.stage(problem.curriculum, step).astype(jnp.float32),
    }


def _progress(
    problem: Problem, p: PowerParams, targets: empo_targets.Targets, mask: Array
) -> Metrics:
    """Means of a batch's targets; of a part of a batch its shares.

    `v_h_e` over pairs of human and goal that have a target, `q_r` over joint robot actions that
    have one, `x_h_1`, ... each human's ability, `u_r` and `v_r` of equations (8) and (9),
    `entropy` of pi_r in nats.
    """

    def mean(x: Array, weight: Array) -> Array:
        weight = weight.astype(jnp.float32) * mask.reshape((-1,) + (1,) * (x.ndim - 1))
        return jnp.sum(x * weight) / jnp.maximum(collectives.psum(jnp.sum(weight)), 1e-9)

    every = jnp.ones(mask.shape)
    u_r = power.intrinsic_reward(targets.x_h, p.xi, p.eta, reduce=p.reduce)
    policy = targets.policy
    metrics = {
        "q_r": mean(targets.q_r, targets.known),
        "v_h_e": mean(targets.v_h_e, targets.coverage),
        "u_r": mean(u_r, every),
        "v_r": mean(u_r + jnp.sum(policy * targets.q_r, axis=1), jnp.all(targets.known, axis=1)),
        "entropy": mean(-jnp.sum(jax.scipy.special.xlogy(policy, policy), axis=1), every),
    }
    for human in range(problem.world.num_humans):
        metrics[f"x_h_{human + 1}"] = mean(targets.x_h[:, human], every)
    return metrics


def _check_metrics(settings: Settings, metrics: Mapping[str, float]) -> None:
    """Raises ValueError where successors are missing too often."""
    lost = metrics.get("lost_targets", 0.0)
    if lost > MAX_LOST:
        raise ValueError(
            f"loss.room={settings.loss.room}: the successors of {lost:.1%} of the robots' actions "
            f"do not fit, more than {MAX_LOST:.1%}; give room to more successors per joint action, "
            "or 0: to all that there can be"
        )


def _example_row(problem: Problem) -> dict[str, Any]:
    stored = make_records(problem.world).size if problem.stored else 0
    size = make_codec(problem.world).size + stored
    return replay.example_row((size,), problem.num_robot_actions, jnp.int32)


def _experience(
    problem: Problem, obs: Array, key: Array
) -> tuple[Any, empo_targets.Profiles, tuple[Any, Array] | None]:
    """States of a batch, the human actions to average over, and successors where they are stored.

    obs: `[2, B, W]`, of the states and of the rows that follow them.
    """
    world, loss = problem.world, problem.settings.loss
    codec = make_codec(world)
    states, goals, _ = jax.vmap(codec.unpack)(obs[0])
    if problem.stored:
        record = jax.vmap(make_records(world).unpack)(obs[0][:, codec.size :])
        human = empo_targets.drawn_profiles(world, record.goals[:, None], record.actions[:, None])
        listed = jax.tree.map(lambda x: x[:, None], (record.states, record.prob))
        return states, human, listed
    if loss.human_expectation == "exact":
        return states, empo_targets.exact_profiles(world, states), None
    if loss.human_expectation == "fresh":
        return states, empo_targets.fresh_profiles(world, states, key, loss.human_samples), None
    actions = jax.vmap(codec.unpack)(obs[1])[2]  # taken at `states`, seen with the next row
    human = empo_targets.drawn_profiles(world, goals[:, None], actions[:, None])
    return states, human, None
