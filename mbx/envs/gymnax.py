"""gymnax tasks: Pendulum-v1, Reacher-misc, CartPole-v1, Catch-bsuite, Breakout-MinAtar, …

gymnax resets by itself inside `step`; here its un-reset form is used, so that the final observation
and the time limit are ours.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from mbx.envs.base import RawEnvironment, Suite, strongly_typed, unknown_task
from mbx.envs.render import Renderer

Array = jax.Array


# Tasks that only ever end by their time limit.
_ENDLESS = ("Pendulum-v1", "Reacher-misc", "Swimmer-misc")


def raw(task: str) -> RawEnvironment:
    """The gymnax task. Raises ValueError for an unknown one."""
    import gymnax
    from gymnax.environments import spaces

    if task not in gymnax.registered_envs:
        raise unknown_task("gymnax", task, gymnax.registered_envs)
    env, params = gymnax.make(task)
    space = env.action_space(params)
    discrete = isinstance(space, spaces.Discrete)
    if not discrete and not isinstance(space, spaces.Box):
        raise ValueError(f"env.name='gymnax:{task}' has the action space {space}: not supported")
    if not discrete:
        low = jnp.broadcast_to(jnp.asarray(space.low, jnp.float32), space.shape).reshape(-1)
        high = jnp.broadcast_to(jnp.asarray(space.high, jnp.float32), space.shape).reshape(-1)
    shape = env.observation_space(params).shape or (1,)

    def observe(obs: Array) -> Array:
        return jnp.asarray(obs, jnp.float32).reshape(shape)

    def reset(key: Array) -> tuple:
        obs, state = env.reset_env(key, params)
        return strongly_typed(state), observe(obs)

    def step(key: Array, state: object, action: Array) -> tuple:
        if discrete:
            real = jnp.argmax(action)
        else:
            real = (low + 0.5 * (action + 1.0) * (high - low)).reshape(space.shape)
        obs, new, reward, _, _ = env.step_env(key, state, real, params)
        new = jax.tree.map(lambda a, b: jnp.asarray(a, b.dtype).reshape(b.shape), new, state)
        # `is_terminal` without the time limit, which the wrapper keeps.
        terminated = jnp.asarray(env.is_terminated(new, params), bool).reshape(())
        return new, observe(obs), jnp.asarray(reward, jnp.float32).reshape(()), terminated

    return RawEnvironment(
        f"gymnax:{task}",
        tuple(shape),
        jnp.float32,
        int(space.n if discrete else low.size),
        int(params.max_steps_in_episode),
        reset,
        step,
        discrete,
        can_terminate=task not in _ENDLESS,
    )


def _make_renderer(task: str) -> Renderer:
    from mbx.envs import gymnax_pictures

    return gymnax_pictures.make_renderer(task)


SUITE = Suite(raw=raw, make_renderer=_make_renderer)
