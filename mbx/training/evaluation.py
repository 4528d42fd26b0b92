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
        episodes: what was played; of several processes only by this one.
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
) -> Callable[[Any, Array], Evaluation]:
    """`evaluate(train_state, key) -> Evaluation`: one episode in each of the environments.

    Args:
        act, init_actor: an agent's own (`mbx.agents.base.Agent`).
        partition: a JAX environment's episodes are divided among its devices; of host environments
            every process plays its own.
    """
    if isinstance(environment, HostEnvironment):
        return _make_host(act, init_actor, environment, partition)
    compiled = partition.compile(make_episodes(act, init_actor, environment, partition))
    tasks = task_names(environment.spec)
    return lambda train, key: jax.device_get(compiled(train, key))._replace(tasks=tasks)


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
        return random_actions(spec, key, obs.shape[0], obs=obs), actor

    evaluate = make_evaluate(act, jnp.zeros, environment)
    return lambda key: evaluate(None, key)


def task_names(spec: EnvSpec) -> tuple[str, ...]:
    """Names of the tasks that an environment joins; () for a single one."""
    return tuple(task.name for task in spec.tasks)


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
) -> Callable[[Any, Array], Evaluation]:
    """`evaluation(train, key) -> Evaluation`, pure: one episode of each environment, without
    `tasks`, since text is no result of a program."""
    num = environment.num_envs

    def evaluation(train: Any, key: Array) -> Evaluation:
        train = collectives.replicate(train)
        reset_key, step_key = jax.random.split(key)
        env_state, obs = partition.divided(environment.reset(reset_key))

        def step(carry: Any) -> Any:
            i, env_state, obs, actor, active, found = carry
            act_key, env_key = jax.random.split(jax.random.fold_in(step_key, i))
            is_first = jnp.full(num, i == 0)
            action, actor = act(train, actor, obs, is_first, rng.unrolled(act_key), True)
            env_state, now = environment.step(env_state, action, env_key)
            return i + 1, env_state, now.obs, actor, *_with_step(jnp, active, found, i, obs, now)

        start = (jnp.int32(0), env_state, obs, init_actor(num), *_begun(jnp, environment.spec, obs))
        return jax.lax.while_loop(lambda carry: jnp.any(carry[4]), step, start)[-1]

    return evaluation


def _begun(xp: Any, spec: EnvSpec, obs: Any) -> tuple[Any, Evaluation]:
    """Environments whose episode lasts, and what is known of them before the first step, as arrays
    of NumPy or JAX (`xp`)."""
    num, seen = obs.shape[0], seen_steps(spec.episode_length)
    episodes = Episodes(
        rewards=xp.zeros((spec.episode_length, num), np.float32),
        lengths=xp.zeros(num, np.int32),
        terminated=xp.zeros(num, bool),
        steps=xp.array(seen),
        obs=xp.zeros((len(seen), *obs.shape), obs.dtype),
        last_obs=xp.array(obs),
    )
    names = [name + end for name in spec.metrics for end in ("", "_last")]
    metrics = {name: xp.zeros(num, np.float32) for name in names}
    zeros = xp.zeros(num, np.float32), xp.zeros(num, np.int32)
    return xp.ones(num, bool), Evaluation(*zeros, metrics=metrics, episodes=episodes)


def _with_step(
    xp: Any, active: Any, found: Evaluation, i: Any, obs: Any, now: Timestep
) -> tuple[Any, Evaluation]:
    """`_begun` after step i, which acted on `obs`."""
    kept, ends = found.episodes, active & (now.terminated | now.truncated)
    reward = xp.where(active, xp.where(now.fault, np.nan, now.reward), 0.0).astype(np.float32)
    num = len(kept.steps)
    slot = xp.min(xp.where(kept.steps == i, np.arange(num), num))
    lengths = found.lengths + active
    episodes = kept._replace(
        rewards=_put(kept.rewards, i, reward),
        lengths=lengths,
        terminated=kept.terminated | (ends & now.terminated),
        obs=_put(kept.obs, slot, obs),
        last_obs=xp.where(ends.reshape(-1, *[1] * (obs.ndim - 1)), now.final_obs, kept.last_obs),
    )
    metrics = {n: xp.where(active, now.metrics[n], x) for n, x in found.metrics.items()}
    changes = dict(lengths=lengths, metrics=metrics, episodes=episodes)
    return active & ~ends, found._replace(returns=found.returns + reward, **changes)


def _put(x: Any, i: Any, value: Any) -> Any:
    """`x` after `x[i] = value`, which does nothing beyond its end; a NumPy array itself changes."""
    if isinstance(x, jax.Array):
        return x.at[i].set(value, mode="drop")
    x[i : i + 1] = value
    return x


def _make_host(
    act: Callable, init_actor: Callable, environment: HostEnvironment, partition: Partition
) -> Callable[[Any, Array], Evaluation]:
    num, spec = environment.num_envs, environment.spec
    # Cores divide the episodes; the devices of several processes each play their process's own.
    on = partition if partition.cores else ONE_DEVICE

    @functools.partial(jax.jit, compiler_options=on.once)
    @on.traced
    def evaluation(train: Any, actor: Any, obs: Array, first: Array, key: Array) -> tuple:
        made = act(train, actor, on.divided(obs), first, rng.unrolled(key), True)
        return on.divided(made)

    def placed(actor: Any, train: Any) -> Any:
        """The acting state divided among cores, or bound to the one device of the parameters as
        what the program makes of both is: else its first call would be another program."""
        if partition.cores:
            return jax.tree.map(jax.device_put, actor, on.of_environments(actor))
        places = {x.sharding for x in jax.tree.leaves(train)}
        alone = len(places) == 1 and len(min(places, key=str).device_set) == 1
        return jax.device_put(actor, places.pop() if alone else None)

    def evaluate(train: Any, key: Array) -> Evaluation:
        train = partition.copy_here(train)
        if partition.processes > 1:
            key = jax.random.fold_in(key, jax.process_index())
        seed_key, step_key = jax.random.split(key)
        obs = environment.reset(int(jax.random.randint(seed_key, (), 0, 2**31 - 1)))
        actor = placed(init_actor(num), train)
        (active, found), i = _begun(np, spec, obs), 0
        while active.any():
            given = jnp.asarray(obs), jnp.full(num, i == 0), jax.random.fold_in(step_key, i)
            action, actor = evaluation(train, actor, *given)
            now = environment.step(np.asarray(action))
            active, found = _with_step(np, active, found, i, obs, now)
            obs, i = now.obs, i + 1
        returns, lengths, metrics = jax.tree.map(partition.gathered, found[:2] + (found.metrics,))
        return found._replace(
            returns=returns, lengths=lengths, metrics=metrics, tasks=task_names(spec)
        )

    return evaluate
