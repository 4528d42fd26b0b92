"""Evaluation without exploration noise, on environments of its own.

An evaluation takes the train state and a key and gives back the returns of whole episodes. It reads
neither the training environments nor training's random stream.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mbx import threefry
from mbx.envs.base import EnvSpec, HostEnvironment, JaxEnvironment, random_actions
from mbx.training.sharding import ONE_DEVICE, Partition

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
    """

    returns: np.ndarray
    lengths: np.ndarray
    tasks: tuple[str, ...] = ()
    exploring: np.ndarray | None = None
    metrics: Mapping[str, np.ndarray] = {}  # noqa: RUF012

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
        each |= {f"episode/{name}": float(np.mean(x)) for name, x in self.metrics.items()}
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
    make = _make_fused if isinstance(environment, JaxEnvironment) else _make_host
    return make(act, init_actor, environment, partition)


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


def make_episodes(
    act: Callable,
    init_actor: Callable,
    environment: JaxEnvironment,
    partition: Partition = ONE_DEVICE,
) -> Callable[[Any, Array], tuple[Array, Array, dict[str, Array]]]:
    """`evaluation(train, key)`, pure: returns, lengths and metrics `[E]` of one episode an
    environment."""
    num = environment.num_envs

    def evaluation(train: Any, key: Array) -> tuple[Array, Array, dict[str, Array]]:
        reset_key, step_key = jax.random.split(key)
        env_state, obs = partition.divided(environment.reset(reset_key))

        def step(carry: Any) -> Any:
            i, env_state, obs, actor, active, total, length, metrics = carry
            act_key, env_key = jax.random.split(jax.random.fold_in(step_key, i))
            is_first = jnp.full(num, i == 0)
            action, actor = act(train, actor, obs, is_first, threefry.unrolled(act_key), True)
            env_state, timestep = environment.step(env_state, action, env_key)
            reward = jnp.where(timestep.fault, jnp.nan, timestep.reward)
            total = total + jnp.where(active, reward, 0.0)
            length = length + active
            metrics = {n: jnp.where(active, timestep.metrics[n], x) for n, x in metrics.items()}
            active = active & ~(timestep.terminated | timestep.truncated)
            return i + 1, env_state, timestep.obs, actor, active, total, length, metrics

        start = (
            jnp.int32(0),
            env_state,
            obs,
            init_actor(num),
            jnp.ones(num, bool),
            jnp.zeros(num),
            jnp.zeros(num, jnp.int32),
            {name: jnp.zeros(num) for name in logged_metrics(environment.spec)},
        )
        result = jax.lax.while_loop(lambda carry: jnp.any(carry[4]), step, start)
        return result[5:]

    return evaluation


def _make_fused(
    act: Callable, init_actor: Callable, environment: JaxEnvironment, partition: Partition
) -> Callable[[Any, Array], Evaluation]:
    compiled = partition.compile(make_episodes(act, init_actor, environment, partition))

    def evaluate(train: Any, key: Array) -> Evaluation:
        returns, lengths, metrics = jax.device_get(compiled(train, key))
        return Evaluation(returns, lengths, task_names(environment), metrics=metrics)

    return evaluate


def _beside(tree: Any, other: Any) -> Any:
    """`tree` bound to the one device where `other` lies, as what a program makes of both will be.

    Unbound, it would make a program's first call another program than all later ones.
    """
    places = {x.sharding for x in jax.tree.leaves(other)}
    alone = len(places) == 1 and all(len(place.device_set) == 1 for place in places)
    return jax.device_put(tree, places.pop()) if alone else tree


def _make_host(
    act: Callable, init_actor: Callable, environment: HostEnvironment, partition: Partition
) -> Callable[[Any, Array], Evaluation]:
    num = environment.num_envs

    @jax.jit
    def evaluation(train: Any, actor: Any, obs: Array, first: Array, key: Array) -> tuple:
        return act(train, actor, obs, first, threefry.unrolled(key), True)

    def evaluate(train: Any, key: Array) -> Evaluation:
        train = partition.copy_here(train)
        if partition.processes > 1:
            key = jax.random.fold_in(key, jax.process_index())
        seed_key, step_key = jax.random.split(key)
        obs = environment.reset(int(jax.random.randint(seed_key, (), 0, 2**31 - 1)))
        actor = _beside(init_actor(num), train)
        active, total = np.ones(num, bool), np.zeros(num, np.float32)
        length, i = np.zeros(num, np.int32), 0
        metrics = {name: np.zeros(num) for name in logged_metrics(environment.spec)}
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
            active &= ~(timestep.terminated | timestep.truncated)
            obs, i = timestep.obs, i + 1
        everywhere = partition.gathered(total), partition.gathered(length)
        metrics = {name: partition.gathered(x) for name, x in metrics.items()}
        return Evaluation(*everywhere, task_names(environment), metrics=metrics)

    return evaluate
