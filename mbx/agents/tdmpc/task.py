"""Settings resolved for a task, and the world model's shapes.

In: `Settings` and an `EnvSpec`. Out: settings with what is left to the task filled in, and a
`WorldModelConfig`. What does not fit is refused here, before anything is compiled.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np

from mbx import observations, planners
from mbx.types import EnvSpec, TaskSet
from mbx.world_model import WorldModelConfig, config_for_size

if TYPE_CHECKING:
    from mbx.agents.tdmpc.settings import Settings


def resolve(settings: Settings, spec: EnvSpec) -> Settings:
    """The settings with what the task decides filled in.

    Raises:
        ValueError: settings without effect in this task, unknown planners, a decay without a final
            learning rate, automatic bins for unknown rewards or with bounds given, too.
    """
    _check_planners(settings)
    if spec.discrete:
        _check_discrete(settings, spec)
    if settings.model.episodic == "auto" and not spec.can_terminate:
        _refuse(settings, _TERMINATING, f"env.name={spec.name!r} has no terminations,")
    chosen = settings.for_task(spec)
    if not chosen.rate_falls:
        rate = chosen.optimizer.learning_rate
        here = f"the learning rate of env.name={spec.name!r} stays at {rate}"
        _refuse(settings, _FALLING, f"{here}; give optimizer.final_learning_rate as well, or")
    if settings.model.bins == "auto" and not spec.reward_range:
        raise ValueError(
            f"model.bins='auto': env.name={spec.name!r} does not say what its rewards can be "
            "(EnvSpec.reward_range); set model.bins='fixed'"
        )
    for name in ("bin_min", "bin_max"):
        given, default = getattr(settings.model, name), getattr(type(settings.model)(), name)
        if given not in (default, now := getattr(chosen.model, name)):
            raise ValueError(
                f"model.{name}={given}: with model.bins='auto' it follows from the rewards of "
                f"env.name={spec.name!r}, {now:.3f}; set model.bins='fixed', or leave it at "
                f"{default}"
            )
    return chosen


def _check_planners(settings: Settings) -> None:
    """Raises ValueError for unknown planners, or one that cannot start from a policy."""
    planners.find(settings.planner.name)
    training = settings.training_planner
    if not (settings.reads_plans and training.enabled):
        return
    if not planners.find(training.name).begins and training.search == "policy":
        raise ValueError(
            f"training_planner.name={training.name!r} makes candidates of its own and cannot begin "
            "with those of a policy: set training_planner.search='acting', or choose another name"
        )


# Settings without effect in some tasks, with the values that shipped configurations, which fit any
# task, give them in place of the default.
_CONTINUOUS: dict[str, tuple[Any, ...]] = {
    "loss.entropy_action_dim_power": (),
    "loss.jacobian": (),
    "model.policy": ("squashed",),
    "model.log_std_min": (-10.0,),
    "model.log_std_max": (2.0,),
    "planner.max_std": (1.0,),
    "training_planner.max_std": (2.0,),
    "training_planner.proposal_log_std": ((-2.0, 1.0),),
}


_TERMINATING: dict[str, tuple[Any, ...]] = {
    "loss.termination": ("hard",),
    "loss.termination_coef": (),
}


_FALLING: dict[str, tuple[Any, ...]] = {
    "optimizer.lr_decay_start": (),
    "optimizer.lr_decay_updates": (),
}


def _refuse(settings: Settings, names: dict[str, tuple[Any, ...]], here: str) -> None:
    """Raises ValueError for changed settings among `names`, which have no effect `here`."""
    for full, published in names.items():
        section, _, name = full.partition(".")
        own = getattr(settings, section)
        value, default = getattr(own, name), getattr(type(own)(), name)
        if value not in (default, *published):
            raise ValueError(f"{full}={value} has no effect: {here} leave it at {default}")


def _check_discrete(settings: Settings, spec: EnvSpec) -> None:
    """Raises ValueError for settings that need continuous actions."""
    here = f"env.name={spec.name!r} has discrete actions"
    if spec.tasks:
        raise ValueError(f"{here}, which several tasks in one model cannot have: train each alone")
    for section in ("planner", "training_planner"):
        own = getattr(settings, section)
        used = section == "planner" or settings.reads_plans
        if used and planners.find(own.name).discrete is None:
            raise ValueError(
                f"{section}.name={own.name!r} plans continuous actions alone and {here}: leave it "
                "at 'mppi', or register your planner with discrete="
            )
    _refuse(settings, _CONTINUOUS, f"{here},")
    for name in ("proposal_noise", "action_noise"):
        value = getattr(settings.planner, name)
        if value > 1.0:
            raise ValueError(f"planner.{name}={value}: {here}, it is a share of them: 1 at most")


def _check_image(spec: EnvSpec) -> None:
    """Raises ValueError for images that the encoder does not read."""
    image = observations.layout(spec.parts).image_shape or tuple(spec.obs_shape)
    if len(image) != 3 or _is_board(spec):
        return
    if image[:2] != (64, 64):
        raise ValueError(
            f"env.name={spec.name!r}: images of {list(image)} are observed, and the pixel encoder "
            "takes 64x64xC: env.image_size=64 resizes them"
        )
    if np.dtype(spec.obs_dtype) != np.uint8:
        raise ValueError(
            f"env.name={spec.name!r}: images of {np.dtype(spec.obs_dtype)} are observed, the pixel "
            "encoder takes uint8: let the environment give 0 to 255 (env.pixels=True casts those "
            "of a task in JAX)"
        )


def world_config(settings: Settings, spec: EnvSpec) -> WorldModelConfig:
    """The world model of a task.

    Raises:
        ValueError: value heads in use that the model does not have.
    """
    model, loss = settings.model, settings.loss
    _check_image(spec)
    tasks = None
    if spec.tasks:
        names, dims = zip(*((task.name, task.action_dim) for task in spec.tasks), strict=True)
        tasks = TaskSet(names, dims, model.task_dim)
    known, own = ({f.name for f in dataclasses.fields(x)} for x in (WorldModelConfig, model))
    fields = {name: getattr(model, name) for name in known & own}
    fields |= dict(
        obs_shape=tuple(spec.obs_shape),
        action_dim=spec.action_dim,
        num_values=model.num_values or None,
        num_aux=len(loss.aux_gammas),
        aux_joint=loss.aux_joint,
        episodic=model.episodic == "True" or (model.episodic == "auto" and spec.can_terminate),
        tasks=tasks,
        flat=_is_board(spec),
        parts=tuple(spec.parts),
        policy="categorical" if spec.discrete else model.policy,
    )
    world = config_for_size(model.size, **fields)
    # A V critic may have one head: the default's two must not refuse it.
    chosen = world.critic == "q" or loss.num_heads != type(loss)().num_heads
    if chosen and loss.num_heads > world.num_values:
        raise ValueError(
            f"config.loss.num_heads={loss.num_heads} value heads are used at a time but the model "
            f"has {world.num_values}: lower it or raise model.num_values"
        )
    if loss.value_reduction == "local" and loss.num_heads < world.num_values:
        raise ValueError(
            f"config.loss.num_heads={loss.num_heads}: loss.value_reduction='local' uses all "
            f"{world.num_values} value heads, set it to their number"
        )
    return world


def _is_board(spec: EnvSpec) -> bool:
    """Whether observations have several axes but are no image for convolutions."""
    shape = tuple(spec.obs_shape)
    image = len(shape) == 3 and shape[:2] == (64, 64)
    return len(shape) > 1 and not image and np.dtype(spec.obs_dtype) != np.uint8
