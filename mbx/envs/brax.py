"""Tasks of brax: brax:inverted_pendulum, brax:ant@mjx (backend after @; spring by default).

Only the bare environment is used: brax's episode wrapper loses the last observation, resets every
episode to the first state and fails with typed keys.
"""

from __future__ import annotations

import warnings
from typing import Any

import jax
import jax.numpy as jnp

from mbx.envs.base import RawEnvironment, Suite, unknown_task
from mbx.envs.render import Renderer, mujoco_drawing
from mbx.types import Array

_TIME_LIMIT = 1000
_BACKENDS = ("spring", "positional", "generalized", "mjx")


def make_renderer(task: str) -> Renderer:
    """Renderer of the task's model. Raises ValueError for unknown tasks or without a model."""
    env = _load(task)
    if not hasattr(env, "sys"):
        raise ValueError(f"env.name='brax:{task}' has no model to draw")
    view = lambda state: dict(qpos=state.pipeline_state.q)  # noqa: E731
    return Renderer(view, mujoco_drawing(env.sys.mj_model), float(env.dt))


def _load(task: str) -> Any:
    """The brax environment. Raises ValueError for an unknown task or backend."""
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
    """The brax task. Raises ValueError for an unknown task."""
    return adapt(f"brax:{task}", _load(task), _TIME_LIMIT)


def adapt(name: str, env: Any, time_limit: int, **fields: Any) -> RawEnvironment:
    """A `RawEnvironment` with further `fields` from the interface of brax and Playground."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        example = jax.eval_shape(env.reset, jax.random.PRNGKey(0)).obs
    # Images as they are, numbers float32.
    dtypes = jax.tree.map(lambda x: x.dtype if x.ndim == 3 else jnp.float32, example)
    shapes = jax.tree.map(lambda x: tuple(x.shape), example)

    def observe(obs: Any) -> Any:
        return jax.tree.map(jnp.asarray, obs, dtypes)

    def reset(key: Array) -> tuple[Any, Any]:
        state = env.reset(jax.random.key_data(key))
        return state, observe(state.obs)

    def step(key: Array, state: Any, action: Array) -> tuple:
        # They write into the dictionaries they are given.
        state = state.replace(info=dict(state.info), metrics=dict(state.metrics))
        new = env.step(state, action)
        new = jax.tree.map(lambda a, b: jnp.asarray(a, b.dtype), new, state)
        return new, observe(new.obs), jnp.asarray(new.reward, jnp.float32), new.done > 0.5

    return RawEnvironment(
        name,
        shapes,
        dtypes,
        int(env.action_size),
        time_limit,
        reset,
        step,
        **fields,
    )


SUITE = Suite(raw=raw, make_renderer=make_renderer)
