"""brax tasks: brax:inverted_pendulum, brax:ant@mjx (the backend after an @; spring by default).

brax's own episode wrapper loses the last observation, resets every episode to the first state and
fails with typed keys; here only the bare environment is used.
"""

from __future__ import annotations

import warnings
from typing import Any

import jax
import jax.numpy as jnp

from mbx.envs.base import RawEnvironment, Suite, unknown_task
from mbx.envs.render import Renderer, mujoco_drawing

Array = jax.Array

_TIME_LIMIT = 1000
_BACKENDS = ("spring", "positional", "generalized", "mjx")


def make_renderer(task: str) -> Renderer:
    """Pictures of the task's model. Raises ValueError for an unknown task and for one without."""
    env = _load(task)
    if not hasattr(env, "sys"):
        raise ValueError(f"env.name='brax:{task}' has no model to draw")
    return Renderer(
        lambda state: dict(qpos=state.pipeline_state.q),
        mujoco_drawing(env.sys.mj_model),
        float(env.dt),
    )


def _load(task: str) -> Any:
    """brax's own environment. Raises ValueError for an unknown task or backend."""
    with warnings.catch_warnings():
        # "Brax environments are not actively maintained", and deprecations inside mjx.
        warnings.simplefilter("ignore")
        from brax import envs

        name, _, backend = task.partition("@")
        if name not in envs._envs:
            raise unknown_task("brax", task, envs._envs)
        backends = () if name == "fast" else _BACKENDS
        if backend and backend not in backends:
            raise ValueError(
                f"env.name='brax:{task}' asks for the backend {backend!r}: {name} has "
                f"{backends or 'none to choose'}"
            )
        options = {} if name == "fast" else {"backend": backend or "spring"}
        return envs.get_environment(name, **options)


def raw(task: str) -> RawEnvironment:
    """The brax task. Raises ValueError for an unknown one."""
    env = _load(task)
    obs_size = int(env.observation_size)

    def reset(key: Array) -> tuple[Any, Array]:
        state = env.reset(jax.random.key_data(key))
        return state, _observe(state, obs_size)

    def step(key: Array, state: Any, action: Array) -> tuple:
        # brax writes into the dicts it is given.
        state = state.replace(info=dict(state.info), metrics=dict(state.metrics))
        new = env.step(state, action)
        new = jax.tree.map(lambda a, b: jnp.asarray(a, b.dtype), new, state)
        reward = jnp.asarray(new.reward, jnp.float32)
        return new, _observe(new, obs_size), reward, new.done > 0.5

    return RawEnvironment(
        f"brax:{task}", (obs_size,), jnp.float32, int(env.action_size), _TIME_LIMIT, reset, step
    )


def _observe(state: Any, size: int) -> Array:
    return jnp.asarray(state.obs, jnp.float32).reshape(size)


SUITE = Suite(raw=raw, make_renderer=make_renderer)
