"""gymnax tasks: Pendulum-v1, Reacher-misc, CartPole-v1, Catch-bsuite, Breakout-MinAtar, …

gymnax resets by itself inside `step`; here its un-reset form is used, so that the final observation
and the time limit are ours.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from mbx import observations
from mbx.envs.base import RawEnvironment, Suite, unknown_task
from mbx.envs.render import Renderer

Array = jax.Array


# Tasks that only ever end by their time limit.
_ENDLESS = ("Pendulum-v1", "Reacher-misc", "Swimmer-misc")


def raw(task: str, **kwargs: Any) -> RawEnvironment:
    """The gymnax task. Raises ValueError for an unknown one."""
    import gymnax

    if task not in gymnax.registered_envs:
        raise unknown_task("gymnax", task, gymnax.registered_envs)
    env, params = gymnax.make(task, **kwargs)
    return adapt(f"gymnax:{task}", env, params, can_terminate=task not in _ENDLESS)


def adapt(name: str, env: Any, params: Any, *, can_terminate: bool = True) -> RawEnvironment:
    """An object of gymnax's interface as a raw environment.

    Args:
        name: SUITE:TASK.
        env: with `reset_env`, `step_env` (whose flag leaves the time limit out), `action_space`
            and `observation_space`.
        params: its parameters; `max_steps_in_episode` is the time limit.
        can_terminate: episodes may end before that.

    Raises:
        ValueError: for an action space that is neither a bounded Box nor Discrete.
    """
    from gymnax.environments import spaces

    space = env.action_space(params)
    discrete = isinstance(space, spaces.Discrete)
    if not discrete and not isinstance(space, spaces.Box):
        raise ValueError(f"env.name={name!r} has the action space {space}: not supported")
    if not discrete:
        low = jnp.broadcast_to(jnp.asarray(space.low, jnp.float32), space.shape).reshape(-1)
        high = jnp.broadcast_to(jnp.asarray(space.high, jnp.float32), space.shape).reshape(-1)
    seen = env.observation_space(params)
    shape: Any
    if isinstance(seen, spaces.Dict):  # its images as they are, the rest as float32
        parts = observations.flat({k: _leaves(one) for k, one in seen.spaces.items()})
        shape = {name: tuple(one.shape) for name, one in parts.items()}
        dtype = {n: one.dtype if len(one.shape) == 3 else jnp.float32 for n, one in parts.items()}
    else:
        shape, dtype = tuple(seen.shape or (1,)), jnp.float32

    def observe(obs: Any) -> Any:
        if not isinstance(shape, dict):
            return jnp.asarray(obs, jnp.float32).reshape(shape)
        return {n: jnp.asarray(x, dtype[n]) for n, x in observations.flat(obs).items()}

    def reset(key: Array) -> tuple:
        obs, state = env.reset_env(key, params)
        return state, observe(obs)

    def step(key: Array, state: object, action: Array) -> tuple:
        if discrete:
            real = jnp.argmax(action)
        else:
            real = (low + 0.5 * (action + 1.0) * (high - low)).reshape(space.shape)
        obs, new, reward, done, _ = env.step_env(key, state, real, params)
        new = jax.tree.map(lambda a, b: jnp.asarray(a, b.dtype).reshape(b.shape), new, state)
        # Without the time limit, which the wrapper keeps.
        flag = env.is_terminated(new, params) if hasattr(env, "is_terminated") else done
        terminated = jnp.asarray(flag, bool).reshape(())
        return new, observe(obs), jnp.asarray(reward, jnp.float32).reshape(()), terminated

    return RawEnvironment(
        name,
        shape,
        dtype,
        int(space.n if discrete else low.size),
        int(params.max_steps_in_episode),
        reset,
        step,
        discrete,
        can_terminate=can_terminate,
        action_low=() if discrete else tuple(map(float, low)),
        action_high=() if discrete else tuple(map(float, high)),
    )


def _leaves(space: Any) -> Any:
    """A space, or the spaces that a Dict holds, as dictionaries."""
    inner = getattr(space, "spaces", None)
    return {k: _leaves(one) for k, one in inner.items()} if isinstance(inner, dict) else space


def _make_renderer(task: str) -> Renderer:
    from mbx.envs import gymnax_pictures

    return gymnax_pictures.make_renderer(task)


SUITE = Suite(raw=raw, make_renderer=_make_renderer, takes_kwargs=True)
