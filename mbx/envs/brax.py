"""Tasks of brax (brax:inverted_pendulum) and of MuJoCo Playground (playground:CartpoleSwingup).

brax: the backend follows an @, brax:ant@mjx (spring by default). Only the bare environment is used:
brax's episode wrapper loses the last observation, resets every episode to the first state and fails
with typed keys.

Playground (extra `playground`): always with impl="jax", which runs everywhere. The default action
repeat is 2 on its dm_control suite, as in published TD-MPC2 results, else 1. Playground edits some
models: scores differ from dm_control's. Its robots (playground:Go1JoystickFlatTerrain) observe
`state` and `privileged_state`, the second only with `env.observe`; Playground downloads their
models.
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


def raw(task: str) -> RawEnvironment:
    """The brax task. Raises ValueError for an unknown task or backend."""
    return adapt(f"brax:{task}", _brax(task), _TIME_LIMIT)


def raw_playground(task: str, /, **kwargs: Any) -> RawEnvironment:
    """The Playground task; kwargs are entries of its configuration, such as impl, the simulator.
    Raises ValueError for an unknown task or entry.
    """
    env, ends = _playground(task, kwargs), not _is_of_dm_control(task)
    fields = dict(can_terminate=ends, repeats=kwargs.get("impl") != "warp")
    return adapt(f"playground:{task}", env, int(env._config.episode_length), **fields)


def make_renderer(task: str) -> Renderer:
    """Renderer of a brax task's model. Raises ValueError for unknown tasks or without a model."""
    env = _brax(task)
    if not hasattr(env, "sys"):
        raise ValueError(f"env.name='brax:{task}' has no model to draw")
    view = lambda state: dict(qpos=state.pipeline_state.q)  # noqa: E731
    return Renderer(view, mujoco_drawing(env.sys.mj_model), float(env.dt))


def make_playground_renderer(task: str) -> Renderer:
    """Renderer of a Playground task's model. Raises ValueError for an unknown task."""
    env, fields = _playground(task, {}), ("qpos", "mocap_pos", "mocap_quat")
    view = lambda state: {name: getattr(state.data, name) for name in fields}  # noqa: E731
    return Renderer(view, mujoco_drawing(env.mj_model), float(env.dt))


def _brax(task: str) -> Any:
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
        options = {"backend": backend or "spring"} if backends else {}
        return envs.get_environment(name, **options)


def _playground(task: str, kwargs: dict[str, Any]) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecations inside mjx and brax
        from mujoco_playground import registry

        if task not in registry.ALL_ENVS:
            raise unknown_task("playground", task, registry.ALL_ENVS)
        try:
            return registry.load(task, config_overrides={"impl": "jax"} | kwargs)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"env.kwargs={kwargs}: playground:{task}: {error}") from error


def _is_of_dm_control(task: str) -> bool:
    from mujoco_playground import dm_control_suite

    return task in dm_control_suite.ALL_ENVS


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
        new = jax.tree.map(_typed, new, state)
        return new, observe(new.obs), jnp.asarray(new.reward, jnp.float32), new.done > 0.5

    size = int(env.action_size)
    return RawEnvironment(name, shapes, dtypes, size, time_limit, reset, step, **fields)


def _typed(x: Any, like: Any) -> Any:
    """x of another array's type; itself where it has it, as MuJoCo Warp's buffers have to be."""
    same = getattr(x, "dtype", None) == like.dtype and not getattr(x, "weak_type", False)
    return x if same else jnp.asarray(x, like.dtype)


SUITE = Suite(raw=raw, make_renderer=make_renderer)
PLAYGROUND = Suite(
    raw=raw_playground,
    default_repeat=lambda task: 2 if _is_of_dm_control(task) else 1,
    make_renderer=make_playground_renderer,
    extra="playground",
    takes_kwargs=True,
)
