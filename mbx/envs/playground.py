"""MuJoCo Playground's dm_control suite, in JAX: playground:CartpoleSwingup (extra `playground`).

Always with impl="jax", which runs everywhere. Action repeat 2 by default, as published TD-MPC2
results use on dm_control. Playground edits some models: scores are its own, not dm_control's.
"""

from __future__ import annotations

import difflib
import warnings
from typing import Any

import jax
import jax.numpy as jnp

from mbx.envs.base import JaxEnvironment, RawEnvironment, episodic
from mbx.envs.render import Renderer, mujoco_drawing

Array = jax.Array


def make(
    task: str,
    num_envs: int,
    *,
    action_repeat: int | None = None,
    episode_length: int | None = None,
    seed: int = 0,
) -> JaxEnvironment:
    """The Playground task, batched. Raises ValueError for an unknown one."""
    raw = _raw(task)
    return episodic(
        raw,
        num_envs,
        action_repeat=2 if action_repeat is None else action_repeat,
        episode_length=episode_length,
    )


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
            close = difflib.get_close_matches(task, suite.ALL_ENVS, n=3, cutoff=0.4)
            raise ValueError(
                f"env.name='playground:{task}' is unknown: did you mean one of {close}?"
            )
        return suite.load(task, config_overrides={"impl": "jax"})


def _raw(task: str) -> RawEnvironment:
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
    )
