"""Tasks of MuJoCo Playground in JAX: playground:CartpoleSwingup (extra `playground`).

Always with impl="jax", which runs everywhere. The default action repeat is 2 on its dm_control
suite, as in published TD-MPC2 results, else 1. Playground edits some models: scores differ from
dm_control's. Its robots (playground:Go1JoystickFlatTerrain) observe `state` and `privileged_state`,
the second only with `env.observe`; Playground downloads their models.
"""

from __future__ import annotations

import warnings
from typing import Any

from mbx.envs.base import RawEnvironment, Suite, unknown_task
from mbx.envs.brax import adapt
from mbx.envs.render import Renderer, mujoco_drawing


def make_renderer(task: str) -> Renderer:
    """Renderer of the task's model. Raises ValueError for an unknown task."""
    env = _load(task)
    fields = ("qpos", "mocap_pos", "mocap_quat")
    return Renderer(
        lambda state: {name: getattr(state.data, name) for name in fields},
        mujoco_drawing(env.mj_model),
        float(env.dt),
    )


def _load(task: str) -> Any:
    """The Playground environment. Raises ValueError for an unknown task."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecations inside mjx and brax
        from mujoco_playground import registry

        if task not in registry.ALL_ENVS:
            raise unknown_task("playground", task, registry.ALL_ENVS)
        return registry.load(task, config_overrides={"impl": "jax"})


def _is_of_dm_control(task: str) -> bool:
    from mujoco_playground import dm_control_suite

    return task in dm_control_suite.ALL_ENVS


def raw(task: str) -> RawEnvironment:
    """The Playground task. Raises ValueError for an unknown task."""
    env, ends = _load(task), not _is_of_dm_control(task)
    limit = int(env._config.episode_length)
    return adapt(f"playground:{task}", env, limit, can_terminate=ends)


SUITE = Suite(
    raw=raw,
    default_repeat=lambda task: 2 if _is_of_dm_control(task) else 1,
    make_renderer=make_renderer,
    extra="playground",
)
