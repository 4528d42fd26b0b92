"""MuJoCo Playground's dm_control suite, in JAX: playground:CartpoleSwingup (extra `playground`).

Always with impl="jax", which runs everywhere. Action repeat 2 by default, as published TD-MPC2
results use on dm_control. Playground edits some models: scores are its own, not dm_control's.
"""

from __future__ import annotations

import warnings
from typing import Any

import jax
import jax.numpy as jnp

from mbx.envs.base import RawEnvironment, Suite, unknown_task
from mbx.envs.render import Renderer, mujoco_drawing

Array = jax.Array


def make_renderer(task: str) -> Renderer:
    """Pictures of the task's model. Raises ValueError for an unknown task."""
    env = _load(task)
    fields = ("qpos", "mocap_pos", "mocap_quat")
    return Renderer(
        lambda state: {name: getattr(state.data, name) for name in fields},
        mujoco_drawing(env.mj_model),
        float(env.dt),
    )


def _load(task: str) -> Any:
    """Playground's own environment. Raises ValueError for an unknown task."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecations inside mjx and brax
        from mujoco_playground import dm_control_suite as suite

        if task not in suite.ALL_ENVS:
            raise unknown_task("playground", task, suite.ALL_ENVS)
        return suite.load(task, config_overrides={"impl": "jax"})


def raw(task: str) -> RawEnvironment:
    """The Playground task. Raises ValueError for an unknown one."""
    env = _load(task)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        example = jax.eval_shape(env.reset, jax.random.PRNGKey(0))
    if not hasattr(example.obs, "shape"):
        raise ValueError(f"env.name='playground:{task}' has dictionary observations: not supported")

    def reset(key: Array) -> tuple[Any, Array]:
        state = env.reset(jax.random.key_data(key))
        return state, jnp.asarray(state.obs, jnp.float32)

    def step(key: Array, state: Any, action: Array) -> tuple:
        state = state.replace(info=dict(state.info), metrics=dict(state.metrics))
        new = env.step(state, action)
        new = jax.tree.map(lambda a, b: jnp.asarray(a, b.dtype), new, state)
        obs = jnp.asarray(new.obs, jnp.float32)
        return new, obs, jnp.asarray(new.reward, jnp.float32), new.done > 0.5

    return RawEnvironment(
        f"playground:{task}",
        tuple(example.obs.shape),
        jnp.float32,
        int(env.action_size),
        int(env._config.episode_length),
        reset,
        step,
        can_terminate=False,
    )


SUITE = Suite(raw=raw, default_repeat=2, make_renderer=make_renderer, extra="playground")
