"""Types that several parts share: arrays, parameters, metrics, and what a task is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeAlias

import jax

Array: TypeAlias = jax.Array
Params: TypeAlias = dict[str, Any]
Metrics: TypeAlias = dict[str, Array]


class Record:
    """Base of `flax.struct.dataclass`es: tells type checkers of the `replace` that they get."""

    if TYPE_CHECKING:

        def replace(self, **changes: Any) -> Self:
            """The same with other values of some fields."""
            ...


class Part(NamedTuple):
    """A named part of an observation that is a dictionary: an image, uint8 `[H, W, C]`, where its
    shape has three axes, else numbers, float32."""

    name: str
    shape: tuple[int, ...]

    @property
    def is_image(self) -> bool:
        """Whether it is one."""
        return len(self.shape) == 3


class EnvSpec(NamedTuple):
    """Shapes and units of a task.

    Attributes:
        name: SUITE:TASK.
        obs_shape: of one observation.
        obs_dtype: of observations.
        action_dim: entries of an action.
        episode_length: agent steps, each `action_repeat` environment steps.
        action_repeat: environment steps of an agent step.
        discrete: actions are one-hot.
        tasks: specs of the single tasks where several are trained at once.
        can_terminate: episodes may end before their time limit.
        action_low, action_high: what -1 and 1 mean in the task's own units, A numbers each; ()
            where that is -1 and 1. Of discrete actions action_low is the number of the first.
        reward_range: the lowest and the highest reward of an environment step; () where the suite
            does not say.
        metrics: names of the numbers that its steps give besides, averaged over episodes.
        parts: of an observation that was a dictionary, which `mbx.observations` joins to one array;
            () for one that is an array by itself.
        reset_solved: agent steps in a row with nearly the highest reward after which environments
            begin another episode, where that is left to the task (`mbx.envs.solved`); 0: never.
        world: the task's own `mbx.power.NamedWorld`, where it has one: for agents that need its
            successors.
    """

    name: str
    obs_shape: tuple[int, ...]
    obs_dtype: Any
    action_dim: int
    episode_length: int
    action_repeat: int
    discrete: bool = False
    tasks: tuple[EnvSpec, ...] = ()
    can_terminate: bool = True
    metrics: tuple[str, ...] = ()
    action_low: tuple[float, ...] = ()
    action_high: tuple[float, ...] = ()
    world: Any = None
    parts: tuple[Part, ...] = ()
    reward_range: tuple[float, ...] = ()
    reset_solved: int = 0
