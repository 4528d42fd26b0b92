"""EMPO phase 2 as an agent: a robot policy that softly maximises human power.

The replay holds states; successors are recomputed inside the update, so the human prior and the
robot's policy in the targets are always today's. Source: arXiv 2508.00159 for the equations,
docs/sources.md#empo for the aggregation. Axes: E environments, B states, H humans, G goals, R joint
robot actions."""

from __future__ import annotations

import dataclasses
import functools
import math
import warnings
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from mbx import replay
from mbx.agents.base import Agent, Update
from mbx.empo import power
from mbx.empo.agent import targets as empo_targets
from mbx.empo.agent.acting import make_act
from mbx.empo.agent.diagnostics import make_diagnostics
from mbx.empo.agent.learners import init_state, learn
from mbx.empo.agent.models import make_model
from mbx.empo.agent.profile import make_profile
from mbx.empo.agent.settings import Settings
from mbx.empo.agent.types import Problem, TrainState
from mbx.empo.power.codec import make_codec, make_records
from mbx.empo.power.curriculum import Curriculum
from mbx.empo.power.equations import PowerParams
from mbx.empo.power.worlds import World
from mbx.fast import collectives
from mbx.types import Array, EnvSpec, Metrics

MAX_LOST = 0.01  # share of robot actions that may lack successors in a run


def make_agent(settings: Settings, spec: EnvSpec) -> Agent:
    """The agent as pure functions.
    Raises ValueError for a network of X_h where goal weights do not sum to one, and as `resolve`.
    """
    problem = resolve(settings, spec)
    totals = jnp.sum(problem.world.goal_weight, axis=-1)
    if not bool(jnp.all(jnp.abs(totals - 1.0) < 1e-4)):
        words = f"goal_weight sums to {totals.tolist()} per human"
        if problem.model.x_h is not None:
            raise ValueError(f"{words}, model.x_h=network has at most 1: divide rows by their sum")
        warnings.warn(f"{words}: X_h may exceed 1, as the paper's plain sum does", stacklevel=2)
    episodes, experience = settings.eval.review_episodes, functools.partial(_experience, problem)
    diagnostics = make_diagnostics(problem, episodes, spec.episode_length) if episodes else None
    if settings.eval.profile:
        diagnostics = make_profile(problem, experience, diagnostics)
    words = problem.codec.size + (problem.records.size if problem.records else 0)
    return Agent(
        init=functools.partial(init_state, problem),
        init_actor=lambda num: jnp.zeros((num, 0)),
        act=make_act(problem),
        update=_make_update(problem),
        example_row=lambda: replay.example_row((words,), problem.num_robot_actions, jnp.int32),
        diagnostics=diagnostics,
        check=functools.partial(_check_metrics, settings),
    )


def resolve(settings: Settings, spec: EnvSpec) -> Problem:
    """Settings and world as what is learned and how.
    Raises ValueError for an environment without a world, and for settings that do not go with it.
    """
    if spec.world is None:
        raise ValueError(
            f"env.name={spec.name!r}: agent 'empo' needs a world that lists its successors, for "
            "example empo:grid_rock_1h1r"
        )
    _check_world(settings, spec)
    world, loss, plan = spec.world.world, settings.loss, _values(settings.curriculum)
    stored = spec.name.endswith("@stored")
    if stored and (loss.human_expectation, loss.human_samples) != ("fresh", 1):
        raise ValueError(
            f"loss.human_expectation={loss.human_expectation!r}, loss.human_samples="
            f"{loss.human_samples} with env.name={spec.name!r}: what is stored are the successors "
            "of one draw of human actions, choose fresh and 1"
        )
    plan["steps"] = plan["steps"] or round(settings.train.steps * settings.train.utd_ratio)
    held = {name: what for what in ("network", "table") for name in settings.model.held(what)}
    intervals = {n: loss.target_interval or (1 if held[n] == "table" else 20) for n in held}
    own = dict(one.split("=") for one in loss.target_intervals)
    if missing := own.keys() - held:
        raise ValueError(
            f"loss.target_intervals names {sorted(missing)}: nothing holds it, choose of {[*held]}"
        )
    intervals |= {name: int(updates) for name, updates in own.items()}
    return Problem(
        settings=settings,
        world=world,
        params=_power_params(settings, spec),
        curriculum=Curriculum(**{f"use_{n}": n in held for n in ("x_h", "u_r", "v_r")}, **plan),
        model=make_model(world, settings.model),
        codec=make_codec(world),
        records=make_records(world) if stored else None,
        capacity=_capacity(settings, world),
        target_intervals=intervals,
        held_out=spec.world.held_out,
        target_rate=loss.target_rate if settings.model.kind == "networks" else 0.0,
    )


def _values(section: Any) -> dict[str, Any]:
    return {field.name: getattr(section, field.name) for field in dataclasses.fields(section)}


def _check_world(settings: Settings, spec: EnvSpec) -> None:
    """Raises ValueError for a changed setting that has no effect in the world of `spec`.
    What other settings leave without effect is declared with them (`mbx.settings`).
    """
    found: Any = spec.world
    most, prior = found.world.max_successors, found.prior or "exact"  # "": custom humans
    others, solved = f"its humans are {prior!r}", prior in ("exact", "learned")
    of_many = not spec.name.startswith("empo:multigrid/")
    idle = [
        (found.world.num_states is not None, "model.table_rows", "its states are listed"),
        (settings.loss.room > most, "loss.room", f"a joint action has at most {most} successors"),
        (not solved, "power.beta_h", f"{others}, and only exact ones are of eq. (2)"),
        (not solved, "power.optimistic", f"{others}, and only exact ones are of eq. (2)"),
        (prior == "uniform", "power.nu_h", f"{others}, which are taken as they are"),
        (
            found.prior not in ("", "paths") and settings.humans.habit != "paths",
            "humans.beta",
            f"{others}, not 'paths'",
        ),
        (prior != "exact", "humans.habit", f"{others}, and only exact ones have a habit"),
        (not settings.power.nu_h, "humans.habit", "its share power.nu_h is 0"),
        (of_many, "humans.max_states", "it is for empo:multigrid/MAP"),
    ]
    for name, why in ((name, why) for without_effect, name, why in idle if without_effect):
        section, _, field = name.partition(".")
        own = getattr(settings, section)
        value, normal = getattr(own, field), getattr(type(own)(), field)
        if value != normal:
            raise ValueError(
                f"{name}={value!r} has no effect with env.name={spec.name!r}: {why}; leave it "
                f"{normal!r}"
            )


def _power_params(settings: Settings, spec: EnvSpec) -> PowerParams:
    """The world's own parameters, or those of the settings."""
    values, normal = _values(settings.power), _values(type(settings.power)())
    source, params = values.pop("source"), spec.world.params  # type: ignore[union-attr]
    if params is None:
        return PowerParams(**values)
    for field, value in values.items():
        own = getattr(params, field)
        if value != own and source == "config":
            raise ValueError(
                f"config.power.{field}={value!r}, but {spec.name} was made with {field}={own}: "
                "make the environment with the same power.* (`mbx.empo.make`)"
            )
        if value not in (own, normal[field]):
            raise ValueError(
                f"config.power.{field}={value!r} has no effect: {spec.name} brings parameters of "
                f"its own ({field}={own}); set power.source=config to use those of the "
                "configuration instead"
            )
    return params


def _capacity(settings: Settings, world: World) -> int | None:
    """Successors of a whole batch: `loss.room` a joint action; None where that is every slot."""
    loss = settings.loss
    if not loss.room or loss.room >= world.max_successors:
        return None
    profiles = loss.human_samples if loss.human_expectation == "fresh" else 1
    if loss.human_expectation == "exact":
        profiles = world.num_actions**world.num_humans
    return math.ceil(loss.room * loss.batch_size * profiles * world.num_actions**world.num_robots)


def _make_update(problem: Problem) -> Update:
    loss = problem.settings.loss
    tables = problem.settings.model.held("table")

    def update(
        train: TrainState, buffer: replay.ReplayState, key: Array
    ) -> tuple[TrainState, replay.ReplayState, Metrics]:
        sample_key, human_key = jax.random.split(key)
        batch = replay.sample(buffer, sample_key, batch_size=loss.batch_size, length=1)
        states, human, listed = _experience(problem, batch.rows["obs"], human_key)
        # Left out where nothing is drawn: the keys of all else stay what they are.
        draws = problem.model.dropping or (problem.model.x_h and loss.x_h_goals)
        drop_key = jax.random.fold_in(key, 2) if draws else None
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
        room = problem.capacity and -(-problem.capacity // collectives.axis_size())
        targets, shares = empo_targets.make_targets(
            problem, train, states, human, mask, capacity=room, unique=loss.unique, listed=listed
        )
        shares |= _progress(problem, problem.at(train.step), targets, mask)
        return learn(problem, train, states, targets, mask, shares=shares, drop_key=drop_key)

    return update


def _experience(
    problem: Problem, obs: Array, key: Array
) -> tuple[Any, empo_targets.Profiles, tuple[Any, Array] | None]:
    """States of a batch, the human actions to average over, and successors where they are stored.
    obs: `[2, B, W]`, of the states and of the rows that follow them.
    """
    world, loss, listed = problem.world, problem.settings.loss, None
    states, goals, _ = jax.vmap(problem.codec.unpack)(obs[0])
    if problem.records is not None:
        record = jax.vmap(problem.records.unpack)(obs[0][:, problem.codec.size :])
        goals, actions = record.goals, record.actions
        listed = jax.tree.map(lambda x: x[:, None], (record.states, record.prob))
    elif loss.human_expectation == "exact":
        return states, empo_targets.exact_profiles(world, states), None
    elif loss.human_expectation == "fresh":
        return states, empo_targets.fresh_profiles(world, states, key, loss.human_samples), None
    else:
        actions = jax.vmap(problem.codec.unpack)(obs[1])[2]  # at `states`, seen with the next row
    return states, empo_targets.drawn_profiles(world, goals[:, None], actions[:, None]), listed


def _advance(problem: Problem, train: TrainState) -> TrainState:
    """The next step; the copy of the parameters follows them, or is made anew where it is due."""
    step, target, rate = train.step + 1, train.target, problem.target_rate
    if target is not None and rate:
        target = jax.tree.map(lambda old, new: old + rate * (new - old), target, train.params)
    elif target is not None:
        target = {
            name: jax.tree.map(
                functools.partial(jnp.where, step % problem.target_intervals.get(name, 1) == 0),
                train.params[name],
                old,
            )
            for name, old in target.items()
        }
    return train.replace(target=target, step=step)


def _stage(problem: Problem, step: Array) -> Metrics:
    """Where the curriculum stands."""
    return {
        "beta_r": problem.at(step).beta_r,
        "epsilon": power.curriculum.epsilon(problem.curriculum, step),
        "stage": power.curriculum.stage(problem.curriculum, step).astype(jnp.float32),
    }


def _progress(
    problem: Problem, p: PowerParams, targets: empo_targets.Targets, mask: Array
) -> Metrics:
    """Means of a batch's targets; of a part of a batch its shares (see `glossary`)."""

    def mean(x: Array, weight: Array) -> Array:
        weight = weight.astype(jnp.float32) * mask.reshape((-1,) + (1,) * (x.ndim - 1))
        return jnp.sum(x * weight) / jnp.maximum(collectives.psum(jnp.sum(weight)), 1e-9)

    every, policy = jnp.ones(mask.shape), targets.policy
    u_r = power.intrinsic_reward(targets.x_h, p.xi, p.eta, reduce=p.reduce)
    metrics = {
        "q_r": mean(targets.q_r, targets.known),
        "v_h_e": mean(targets.v_h_e, targets.coverage),
        "u_r": mean(u_r, every),
        "v_r": mean(u_r + jnp.sum(policy * targets.q_r, axis=1), jnp.all(targets.known, axis=1)),
        "entropy": mean(-jnp.sum(jax.scipy.special.xlogy(policy, policy), axis=1), every),
    }
    for human in range(problem.world.num_humans):
        metrics[f"x_h_{human + 1}"] = mean(targets.x_h[:, human], every)
        metrics[f"w_h_{human + 1}"] = mean(jnp.log2(targets.x_h[:, human]), every)
    return metrics


def _check_metrics(settings: Settings, metrics: Mapping[str, float]) -> None:
    """Raises ValueError where successors, or rows of tables, are missing too often."""
    if metrics.get("lost_states", 0.0) > MAX_LOST:
        raise ValueError(
            f"model.table_rows={settings.model.table_rows}: {metrics['lost_states']:.1%} of a "
            "batch's states find no row, give tables more rows"
        )
    lost = metrics.get("lost_targets", 0.0)
    if lost > MAX_LOST:
        raise ValueError(
            f"loss.room={settings.loss.room}: the successors of {lost:.1%} of the robots' actions "
            f"do not fit, more than {MAX_LOST:.1%}; give room to more successors per joint action, "
            "or 0: to all that there can be"
        )
