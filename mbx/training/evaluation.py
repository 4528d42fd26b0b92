"""Evaluation without exploration noise, on environments of its own.

An evaluation takes the train state and a key and gives back the returns of whole episodes. It reads
neither the training environments nor training's random stream.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mbx.agents.base import Episodes
from mbx.envs.base import EnvSpec, HostEnvironment, JaxEnvironment, Timestep
from mbx.fast import collectives, rng
from mbx.training.devices import ONE_DEVICE, Partition
from mbx.training.loop import random_actions

Array = jax.Array


class Evaluation(NamedTuple):
    """Episodes of one evaluation.

    Attributes:
        returns: `[E]`, undiscounted; NaN where a step gave what is not finite.
        lengths: `[E]` agent steps.
        tasks: names, where E holds equal blocks of several tasks.
        exploring: returns `[E]` of the agent acting as in training, with its noise, where
            `eval.exploring` asks for them.
        metrics: `[E]` each, of `EnvSpec.metrics` by name: an episode's mean, and NAME_last.
        episodes: what was played, where that is recorded.
    """

    returns: np.ndarray
    lengths: np.ndarray
    tasks: tuple[str, ...] = ()
    exploring: np.ndarray | None = None
    metrics: Mapping[str, np.ndarray] = {}  # noqa: RUF012
    episodes: Episodes | None = None

    def summary(self) -> dict[str, float]:
        """Mean, spread and extremes of the returns; of several tasks, also the mean of each."""
        blocks = self.returns.reshape(len(self.tasks) or 1, -1)
        each = {
            f"return_mean/{n}": float(np.mean(b)) for n, b in zip(self.tasks, blocks, strict=False)
        }
        if self.exploring is not None:
            each["return_mean_exploring"] = float(np.mean(self.exploring))
        if np.isnan(self.returns).any():
            each["faulty_episodes"] = int(np.isnan(self.returns).sum())
        for name, x in self.metrics.items():  # NaN of an episode that ended without it
            there = x[~np.isnan(x)]
            each[f"episode/{name}"] = float(np.mean(there)) if there.size else math.nan
        return each | {
            "return_mean": float(np.mean(self.returns)),
            "return_std": float(np.std(self.returns)),
            "return_min": float(np.min(self.returns)),
            "return_max": float(np.max(self.returns)),
            "length_mean": float(np.mean(self.lengths)),
        }


def make_evaluate(
    act: Callable,
    init_actor: Callable,
    environment: JaxEnvironment | HostEnvironment,
    partition: Partition = ONE_DEVICE,
    *,
    record: bool = False,
) -> Callable[[Any, Array], Evaluation]:
    """`evaluate(train_state, key) -> Evaluation`: one episode in each of the environments.

    Args:
        act, init_actor: an agent's own (`mbx.agents.base.Agent`).
        partition: a JAX environment's episodes are divided among its devices; of host environments
            every process plays its own.
        record: also hand back what was played (of a single process).
    """
    if isinstance(environment, JaxEnvironment):
        return _make_fused(act, init_actor, environment, partition, record)
    return _make_host(act, init_actor, environment, partition, record)


def evaluation_key(key: Array, interval: int) -> Array:
    """The key of the evaluation after an interval, from the run's key, whose other streams it does
    not touch."""
    return jax.random.fold_in(jax.random.fold_in(key, 0xE7A1), interval)


def make_random(environment: JaxEnvironment | HostEnvironment) -> Callable[[Array], Evaluation]:
    """`evaluate(key)` of uniformly random actions: the yardstick a trained policy has to beat."""
    spec = environment.spec

    def act(
        train: None, actor: Array, obs: Array, is_first: Array, key: Array, evaluate: bool
    ) -> tuple[Array, Array]:
        return random_actions(spec, key, obs.shape[0]), actor

    evaluate = make_evaluate(act, jnp.zeros, environment)
    return lambda key: evaluate(None, key)


def task_names(environment: JaxEnvironment | HostEnvironment) -> tuple[str, ...]:
    """Names of the tasks that an environment joins; () for a single one."""
    return tuple(task.name for task in environment.spec.tasks)


def logged_metrics(spec: EnvSpec) -> list[str]:
    """Names in `Timestep.metrics`."""
    return [name + end for name in spec.metrics for end in ("", "_last")]


def seen_steps(episode_length: int) -> np.ndarray:
    """Steps of an episode whose observations are recorded: its first and those after a sixteenth,
    an eighth, a quarter and half of its longest, so that the rewards that follow are known.

    Examples:
        >>> evaluation.seen_steps(200)
        array([  0,  12,  25,  50, 100])
    """
    return np.unique([0, *(episode_length // 2**k for k in (1, 2, 3, 4))])


def make_episodes(
    act: Callable,
    init_actor: Callable,
    environment: JaxEnvironment,
    partition: Partition = ONE_DEVICE,
    *,
    record: bool = False,
) -> Callable[[Any, Array], tuple[Array, Array, dict[str, Array], dict[str, Array]]]:
    """`evaluation(train, key)`, pure: returns, lengths and metrics `[E]` of one episode an
    environment, and with `record` the arrays of `Episodes` but for `steps` and `lengths`."""
    num = environment.num_envs

    def evaluation(train: Any, key: Array) -> tuple:
        train = collectives.replicate(train)
        reset_key, step_key = jax.random.split(key)
        env_state, obs = partition.divided(environment.reset(reset_key))

        def step(carry: Any) -> Any:
            i, env_state, obs, actor, active, total, length, metrics, kept = carry
            act_key, env_key = jax.random.split(jax.random.fold_in(step_key, i))
            is_first = jnp.full(num, i == 0)
            action, actor = act(train, actor, obs, is_first, rng.unrolled(act_key), True)
            env_state, timestep = environment.step(env_state, action, env_key)
            reward = jnp.where(timestep.fault, jnp.nan, timestep.reward)
            total = total + jnp.where(active, reward, 0.0)
            length = length + active
            metrics = {n: jnp.where(active, timestep.metrics[n], x) for n, x in metrics.items()}
            kept = _with_step(kept, i, obs, active, timestep) if record else kept
            active = active & ~(timestep.terminated | timestep.truncated)
            return i + 1, env_state, timestep.obs, actor, active, total, length, metrics, kept

        start = (
            jnp.int32(0),
            env_state,
            obs,
            init_actor(num),
            jnp.ones(num, bool),
            jnp.zeros(num),
            jnp.zeros(num, jnp.int32),
            {name: jnp.zeros(num) for name in logged_metrics(environment.spec)},
            _empty_record(jnp, environment.spec, obs) if record else {},
        )
        result = jax.lax.while_loop(lambda carry: jnp.any(carry[4]), step, start)
        return result[5:]

    return evaluation


def _empty_record(xp: Any, spec: EnvSpec, obs: Any) -> dict[str, Any]:
    """What `Episodes` holds before the first step, as arrays of NumPy or JAX (`xp`)."""
    num, seen = obs.shape[0], seen_steps(spec.episode_length)
    return dict(
        rewards=xp.zeros((spec.episode_length, num), np.float32),
        terminated=xp.zeros(num, bool),
        obs=xp.zeros((len(seen), *obs.shape), obs.dtype),
        last_obs=xp.array(obs),
    )


def _with_step(
    kept: dict[str, Array], i: Array, obs: Array, active: Array, now: Timestep
) -> dict[str, Array]:
    """`kept` with step i of the `active` environments."""
    reward = jnp.where(now.fault, jnp.nan, now.reward)
    ends = active & (now.terminated | now.truncated)
    seen = seen_steps(len(kept["rewards"]))
    slot = jnp.min(jnp.where(seen == i, np.arange(len(seen)), len(seen)))
    wide = ends.reshape(-1, *[1] * (obs.ndim - 1))
    return dict(
        rewards=kept["rewards"].at[i].set(jnp.where(active, reward, 0.0)),
        terminated=kept["terminated"] | (ends & now.terminated),
        obs=kept["obs"].at[slot].set(obs, mode="drop"),
        last_obs=jnp.where(wide, now.final_obs, kept["last_obs"]),
    )


def as_evaluation(found: tuple, environment: JaxEnvironment | HostEnvironment) -> Evaluation:
    """What `make_episodes` found, as NumPy arrays, with names."""
    returns, lengths, metrics, kept = found
    episodes = None
    if kept:
        steps = seen_steps(environment.spec.episode_length)
        episodes = Episodes(lengths=lengths, steps=steps, **kept)
    return Evaluation(returns, lengths, task_names(environment), metrics=metrics, episodes=episodes)


def _make_fused(
    act: Callable,
    init_actor: Callable,
    environment: JaxEnvironment,
    partition: Partition,
    record: bool,
) -> Callable[[Any, Array], Evaluation]:
    episodes = make_episodes(act, init_actor, environment, partition, record=record)
    compiled = partition.compile(episodes)

    def evaluate(train: Any, key: Array) -> Evaluation:
        return as_evaluation(jax.device_get(compiled(train, key)), environment)

    return evaluate


def _write_step(
    kept: dict[str, np.ndarray], i: int, obs: np.ndarray, active: np.ndarray, now: Timestep
) -> None:
    """`_with_step` of a host environment: writes step i into the arrays of `kept`."""
    ends = active & (now.terminated | now.truncated)
    kept["rewards"][i, active] = np.where(now.fault, np.nan, now.reward)[active]
    kept["terminated"] |= ends & now.terminated
    kept["obs"][seen_steps(len(kept["rewards"])) == i] = obs
    kept["last_obs"][ends] = now.final_obs[ends]


def _place_of(tree: Any) -> jax.sharding.Sharding | None:
    """The one device where a tree lies; None for several.

    What a program is given beside the tree is to be bound to it, as what it makes of both will be:
    unbound, it would make a program's first call another program than all later ones.
    """
    places = {x.sharding for x in jax.tree.leaves(tree)}
    alone = len(places) == 1 and all(len(place.device_set) == 1 for place in places)
    return places.pop() if alone else None


def _make_host(
    act: Callable,
    init_actor: Callable,
    environment: HostEnvironment,
    partition: Partition,
    record: bool,
) -> Callable[[Any, Array], Evaluation]:
    num = environment.num_envs
    # Cores divide the episodes; the devices of several processes each play their process's own.
    on = partition if partition.cores else ONE_DEVICE

    @functools.partial(jax.jit, compiler_options=on.once)
    @on.traced
    def evaluation(train: Any, actor: Any, obs: Array, first: Array, key: Array) -> tuple:
        made = act(train, actor, on.divided(obs), first, rng.unrolled(key), True)
        return on.divided(made)

    def places(train: Any, actor: Any) -> Any:
        """Where the acting state lies: divided, or with the parameters."""
        if partition.cores:
            return on.of_environments(actor)
        place = _place_of(train)
        return jax.tree.map(lambda _: place, actor)

    def evaluate(train: Any, key: Array) -> Evaluation:
        train = partition.copy_here(train)
        if partition.processes > 1:
            key = jax.random.fold_in(key, jax.process_index())
        seed_key, step_key = jax.random.split(key)
        obs = environment.reset(int(jax.random.randint(seed_key, (), 0, 2**31 - 1)))
        actor = init_actor(num)
        actor = jax.tree.map(jax.device_put, actor, places(train, actor))
        active, total = np.ones(num, bool), np.zeros(num, np.float32)
        length, i = np.zeros(num, np.int32), 0
        metrics = {name: np.zeros(num) for name in logged_metrics(environment.spec)}
        kept = _empty_record(np, environment.spec, obs) if record else {}
        while active.any():
            first = jnp.full(num, i == 0)
            key_now = jax.random.fold_in(step_key, i)
            action, actor = evaluation(train, actor, jnp.asarray(obs), first, key_now)
            timestep = environment.step(np.asarray(action))
            reward = np.where(timestep.fault, np.nan, timestep.reward)
            total += np.where(active, reward, 0.0).astype(np.float32)
            for name, x in metrics.items():
                x[active] = timestep.metrics[name][active]
            length += active
            if record:
                _write_step(kept, i, obs, active, timestep)
            active &= ~(timestep.terminated | timestep.truncated)
            obs, i = timestep.obs, i + 1
        metrics = {name: partition.gathered(x) for name, x in metrics.items()}
        found = partition.gathered(total), partition.gathered(length), metrics, kept
        return as_evaluation(found, environment)

    return evaluate
