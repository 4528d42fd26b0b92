"""What several parts share: types of arrays and parameters, what a task is, random keys by name.

Several tasks in one model: what a task is travels with its observation and its latent.

    observation   [ padded observation | one-hot task ]
    latent        [ latent | task embedding | one-hot task ]

So every function of a latent knows its task: heads read the embedding as further inputs, padded
action dimensions are masked where an action enters the model, and discounts are looked up. Axes: K
tasks, D embedding dims, A padded action dims, `...` free.
Source: TD-MPC2 (arXiv 2310.16828), section 3.3 and its reference code.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

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


class ActionPart(NamedTuple):
    """A part of an environment's own action, with the first number and the count of each choice."""

    name: str  # as of observations: arm/angle, 0 in a tuple, "" of an array alone
    shape: tuple[int, ...]
    dtype: str
    choices: tuple[tuple[int, int], ...] = ()  # () where it is continuous


class Mean(NamedTuple):
    """A metric that only some updates have: the log divides by their number, not by all updates.

    Attributes:
        total: the value, 0 in an update that has none; summed over updates.
        count: 1 in an update that has a value, else 0.
    """

    total: Array
    count: Array


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
        action_shape, action_dtype: of the action that the environment itself takes; None: `[A]`.
        action_parts: of such an action with several parts; the agent's discrete action is one
            choice of all their combinations, its continuous action all their values.
        reward_range: the lowest and the highest reward of an environment step; () where the suite
            does not say.
        metrics: names of the numbers that its steps give besides, averaged over episodes.
        parts: of an observation that was a dictionary, which `mbx.observations` joins to one array;
            () for one that is an array by itself.
        choices: names of the parts that are one-hot ("" where there are no parts), with the first
            number and how many there are of each choice that the environment itself gives.
        reset_solved: agent steps in a row with nearly the highest reward after which environments
            begin another episode, where that is left to the task (`envs.base.solved`); 0: never.
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
    choices: tuple[tuple[str, tuple[tuple[int, int], ...]], ...] = ()
    reward_range: tuple[float, ...] = ()
    reset_solved: int = 0
    action_shape: tuple[int, ...] | None = None
    action_dtype: str = "float32"
    action_parts: tuple[ActionPart, ...] = ()


def streams(key: Array, *names: str) -> dict[str, Array]:
    """Independent keys, one a name, in the order given.

    Split a key once, by all the names that are needed, and use it for nothing else: folding numbers
    into a key that is split as well gives the same streams again (`fold_in(key, i)` is
    `split(key, n)[i]`).

    Raises:
        ValueError: a name given twice.

    Examples:
        >>> found = types.streams(jax.random.key(0), "act", "learn")
        >>> sorted(found), bool(found["act"] == found["learn"])
        (['act', 'learn'], False)
    """
    if len(set(names)) != len(names):
        raise ValueError(f"streams {names}: give every one a name of its own")
    return dict(zip(names, jax.random.split(key, len(names)), strict=True))


@dataclasses.dataclass(frozen=True)
class TaskSet:
    """The tasks of a model: their names, action dims, and the embedding's dims D.

    Raises ValueError for a task without a name or actions, names given twice, or no embedding.
    """

    names: tuple[str, ...]
    action_dims: tuple[int, ...]
    embedding_dim: int = 96

    def __post_init__(self) -> None:
        if len(self.names) != len(self.action_dims) or len(set(self.names)) != len(self.names):
            raise ValueError(
                f"tasks {self.names} with action_dims={self.action_dims}: give every task one "
                "name of its own and one number of actions"
            )
        if min(self.action_dims, default=0) < 1 or self.embedding_dim < 1:
            raise ValueError(
                f"action_dims={self.action_dims}, embedding_dim={self.embedding_dim}: all must be "
                "at least 1"
            )

    @property
    def num(self) -> int:
        """How many tasks there are, K."""
        return len(self.names)

    @property
    def extra(self) -> int:
        """What a latent is longer by: D + K."""
        return self.embedding_dim + self.num

    def init(self, key: Array) -> Array:
        """Embeddings `[K, D]`, uniform in [-1, 1] and then of norm 1 at most."""
        shape = (self.num, self.embedding_dim)
        return limit_norm(jax.random.uniform(key, shape, jnp.float32, -1.0, 1.0))

    def split(self, obs: Array) -> tuple[Array, Array]:
        """Padded observation and one-hot task `[..., K]`."""
        return obs[..., : -self.num], obs[..., -self.num :]

    def attach(self, z: Array, tail: Array) -> Array:
        """A latent with the tail `[..., D + K]` of another one, repeated where `z` is larger."""
        return jnp.concatenate([z, jnp.broadcast_to(tail, (*z.shape[:-1], self.extra))], axis=-1)

    def tail(self, z: Array) -> Array:
        """Embedding and one-hot task of a latent, `[..., D + K]`."""
        return z[..., -self.extra :]

    def inputs(self, z: Array) -> Array:
        """What networks read of a latent: all but the one-hot task."""
        return z[..., : -self.num]

    def one_hot(self, z: Array) -> Array:
        """The one-hot task of a latent or an observation, `[..., K]`."""
        return z[..., -self.num :]

    def action_mask(self, z: Array, action_dim: int) -> Array:
        """`[..., A]`: 1 where the task has that action, else 0."""
        table = np.arange(action_dim) < np.asarray(self.action_dims)[:, None]
        return self.one_hot(z) @ jnp.asarray(table, jnp.float32)

    def look_up(self, values: Sequence[float], z: Array) -> Array:
        """One number a task, for every latent: `[...]`."""
        return self.one_hot(z) @ jnp.asarray(values, jnp.float32)


def strongly_typed(tree: Any) -> Any:
    """The tree without weak types, which Python numbers leave.
    A first state with weak types would make the program compile a second time for all later ones.
    """

    def strong(x: Any) -> Array:
        x = jnp.asarray(x)
        return jax.lax.convert_element_type(x, x.dtype) if jax.typeof(x).weak_type else x

    return jax.tree.map(strong, tree)


def limit_norm(embedding: Array) -> Array:
    """Embeddings `[..., D]` shortened to norm 1 where they are longer."""
    norm = jnp.linalg.norm(embedding, axis=-1, keepdims=True)
    return embedding / jnp.maximum(norm, 1.0)


def pad(x: Any, size: int) -> Any:
    """The last axis filled up with zeros to `size`; numpy in, numpy out."""
    xp = np if isinstance(x, np.ndarray) else jnp
    return xp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, size - x.shape[-1])])


def carry_over(old: Array, old_names: Sequence[str], new_names: Sequence[str]) -> Array:
    """Embeddings `[K', D]` of new tasks from those of old ones `[K, D]`.

    A task of the same name keeps its own; a new one starts from the mean of all old ones.
    """
    known = {name: i for i, name in enumerate(old_names)}
    mean = jnp.mean(old, axis=0)
    return jnp.stack([old[known[name]] if name in known else mean for name in new_names])
