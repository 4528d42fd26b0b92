"""What an environment is here, and the wrapper that makes a JAX one batched and episodic.

Everything is batched over E environments. Continuous actions are in [-1, 1]; a discrete one is a
one-hot vector, of which the largest entry counts. A JAX environment is a record of pure functions;
a host environment (Gymnasium, dm_control) is an object with the same meaning and NumPy arrays.
Termination is not truncation, and `final_obs` is the true next observation also where an episode
ended and `obs` is already the first of the next one.
"""

from __future__ import annotations

import abc
import difflib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from mbx import observations
from mbx.envs.images import Images, Stack, observed, see
from mbx.fast import collectives
from mbx.types import Array, EnvSpec, Part, Record


class Timestep(NamedTuple):
    """What a step returns, all leading `[E]`.

    Attributes:
        obs: observation to act on next.
        final_obs: the true next observation, equal to obs where no episode ended.
        reward: float32, summed over the action repeat.
        terminated: bool, the episode ended by itself.
        truncated: bool, it was cut off (by its time limit).
        episode_return: of the episode including this step.
        episode_length: agent steps of the episode, this one included.
        fault: the observation or the reward was not finite; the episode is then truncated, the
            reward 0 and `final_obs` as it came.
        metrics: by name, of the episode including this step: the mean of each of `EnvSpec.metrics`
            over its environment steps, and as NAME_last its newest value; NaN of an episode that
            ended without it.
    """

    obs: Any
    final_obs: Any
    reward: Any
    terminated: Any
    truncated: Any
    episode_return: Any
    episode_length: Any
    fault: Any
    metrics: Any = {}  # noqa: RUF012


class JaxEnvironment(NamedTuple):
    """E environments as pure functions.

    Attributes:
        spec: shapes and units.
        num_envs: E.
        reset: key -> (state, obs `[E, ...]`).
        step: (state, action `[E, A]`, key) -> (state, Timestep); an episode that ends is followed
            by a fresh random reset.
    """

    spec: EnvSpec
    num_envs: int
    reset: Callable[[Array], tuple[Any, Array]]
    step: Callable[[Any, Array, Array], tuple[Any, Timestep]]


class HostEnvironment(abc.ABC):
    """E environments stepped in Python; numpy in, numpy out.

    `get_state` gives bytes that `set_state` continues from bit for bit, or None where the
    simulator cannot be saved (a resumed run then begins new episodes). Reading them must not
    execute anything (`mbx.envs.snapshot`); those of something else are a ValueError.
    """

    spec: EnvSpec
    num_envs: int

    @abc.abstractmethod
    def reset(self, seed: int) -> np.ndarray:
        """Start a new episode in every environment: observations `[E, ...]`."""

    @abc.abstractmethod
    def step(self, action: np.ndarray) -> Timestep:
        """One agent step with actions `[E, A]` in [-1, 1]."""

    @abc.abstractmethod
    def get_state(self) -> bytes | None:
        """A snapshot, or None."""

    @abc.abstractmethod
    def set_state(self, snapshot: bytes) -> None:
        """Continue from a snapshot; never called where there are none."""

    @abc.abstractmethod
    def close(self) -> None:
        """Free what the environments hold; a second time there is nothing left to do."""

    def __enter__(self) -> HostEnvironment:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class RawEnvironment(NamedTuple):
    """One un-batched JAX environment without time limit and automatic reset.

    Attributes:
        name: SUITE:TASK.
        obs_shape, obs_dtype: of an observation; dictionaries of these where an observation is a
            dictionary (`mbx.observations`).
        action_dim: entries of an action.
        time_limit: environment steps of an episode.
        reset: key -> (state, obs).
        step: (key, state, action `[A]`) -> (state, obs, reward, terminated); actions in [-1, 1], or
            one-hot where discrete. With `metrics` a fifth value is a dictionary of these numbers.
        discrete: actions are one-hot.
        can_terminate: episodes may end before their time limit.
        action_low, action_high: as in `EnvSpec`, where `step` rescales actions to other units.
        reward_range: as in `EnvSpec`.
        metrics: names of further numbers of a step, for the log (success, cost).
    """

    name: str
    obs_shape: tuple[int, ...] | Mapping[str, tuple[int, ...]]
    obs_dtype: Any
    action_dim: int
    time_limit: int
    reset: Callable[[Array], tuple[Any, Any]]
    step: Callable[[Array, Any, Array], tuple]
    discrete: bool = False
    can_terminate: bool = True
    metrics: tuple[str, ...] = ()
    action_low: tuple[float, ...] = ()
    action_high: tuple[float, ...] = ()
    reward_range: tuple[float, ...] = ()


class Suite(NamedTuple):
    """A family of tasks, each made from its name; one of `raw`, `host` and `whole` is given.

    Attributes:
        raw: task -> one JAX task.
        host: (task, seed) -> one task stepped in Python, a `mbx.envs.host.Task`.
        whole: (task, num_envs, *, action_repeat, episode_length, seed) -> a whole environment.
        default_repeat: environment steps of an agent step unless a run says otherwise; or a
            function of the task's name.
        make_renderer: task -> what draws its states, None without pictures.
        draws: tasks on the host draw themselves. `host` takes the keywords `images` (`Images`, or
            None), then `picture() -> uint8 [height, width, 3]` is what is seen; and `film`, then
            `render()` gives such pictures, `seconds` the time of an environment step.
        extra: the extra of the package that installs what the suite needs.
        takes_kwargs: tasks take further arguments by name (`env.kwargs`).
        gives_info: a host task keeps its last step's dictionary of numbers as `info`
            (`env.metrics`).
        reads: task -> another file that the task's own file names, '' for none.
    """

    raw: Callable[..., RawEnvironment] | None = None
    host: Callable[..., Any] | None = None
    whole: Callable[..., Any] | None = None
    default_repeat: int | Callable[[str], int] = 1
    make_renderer: Callable[[str], Any] | None = None
    extra: str = ""
    takes_kwargs: bool = False
    gives_info: bool = False
    draws: bool = False
    reads: Callable[[str], str] | None = None


def unknown_task(suite: str, task: str, known: Iterable[str]) -> ValueError:
    """The error for a task that a suite does not have, with those of similar names."""
    close = difflib.get_close_matches(task.partition("@")[0], list(known), n=3, cutoff=0.4)
    return ValueError(f"env.name='{suite}:{task}' is unknown: did you mean one of {close}?")


@flax.struct.dataclass
class EpisodeState(Record):
    """The wrapper's state: raw `[E, ...]`; length, episode_return and sums of metrics `[E]` so far
    (None without metrics); the newest images `[E, K, H, W, C]` where they are stacked; steps in a
    row `[E]` as of `solved`, where they count."""

    raw: Any
    length: Array
    episode_return: Array
    metrics: Any = None
    frames: Any = None
    solved: Any = None


class Plan(NamedTuple):
    """How a task is run, in JAX or on the host.

    `parts` are those that an observation is joined of, not yet stacked. An episode's last agent
    step has `last` environment steps, fewer than the action repeat where the task's own limit is in
    force and the repeat does not divide it: 100 steps at repeat 3 are 33 agent steps and 1 more.
    """

    spec: EnvSpec
    parts: tuple[Part, ...]
    stack: Stack | None
    last: int
    enough: Solved | None


def plan(
    task: Any,
    time_limit: int | None,
    numbers: Sequence[int],
    action_repeat: int,
    episode_length: int | None,
    observe: Sequence[str],
    images: Images,
    reset_solved: int | None,
    **fields: Any,
) -> Plan:
    """How a task is run that has fields of `EnvSpec`, with observations as they come, or is given
    them; further arguments are those of `mbx.envs.make`.

    Raises ValueError for counts below one, and as `observed`, `solved`.
    """
    own = {name: getattr(task, name) for name in EnvSpec._fields if hasattr(task, name)}
    task = EnvSpec(**own | dict(episode_length=0, action_repeat=action_repeat) | fields)
    check_counts(task.name, len(numbers), action_repeat, episode_length)
    check_metrics(task.name, task.metrics)
    shape, dtype, parts = observed(task.name, task.obs_shape, task.obs_dtype, observe, images)
    stack, shape, stacked = Stack.of(images.stack, shape, parts)
    whole = episode_length is not None or time_limit is None
    spec = task._replace(
        obs_shape=shape,
        obs_dtype=dtype,
        parts=stacked,
        episode_length=episode_length or -(-time_limit // action_repeat),
        metrics=tuple(task.metrics),
        action_low=tuple(map(float, task.action_low)),
        action_high=tuple(map(float, task.action_high)),
        reward_range=check_reward_range(task.name, task.reward_range),
    )
    spec, enough = solved(spec, reset_solved, numbers)
    last = action_repeat if whole else (time_limit - 1) % action_repeat + 1
    return Plan(spec, parts, stack, last, enough)


def episodic(
    raw: RawEnvironment,
    num_envs: int,
    *,
    action_repeat: int = 1,
    episode_length: int | None = None,
    observe: Sequence[str] = (),
    images: Images = Images(),  # noqa: B008
    reset_solved: int | None = 0,
) -> JaxEnvironment:
    """Batch a raw environment and give it action repeat, a time limit and fresh resets.

    episode_length is in agent steps (default: the task's limit divided by the repeat, rounded up);
    reset_solved as of `solved`.
    Within an action repeat nothing moves and no reward counts once the episode has terminated or
    the task's limit is reached, which a repeat need not divide. A step whose observation or reward
    is not finite is a fault (`Timestep`). All environments are reset together
    under one `lax.cond`, so that ordinary steps pay for no reset. observe: as `env.observe`, of
    observations that are dictionaries. images: what is done with those that it observes.
    """
    if not images.shadows:
        raise ValueError(
            f"env.shadows=False: {raw.name} is not drawn, it observes what it is: leave it out"
        )
    numbers, limit = range(num_envs), raw.time_limit
    spec, parts, stack, last, enough = plan(
        raw, limit, numbers, action_repeat, episode_length, observe, images, reset_solved
    )
    length = spec.episode_length

    def seen(obs: Any) -> Array:
        """One array, of images as they are to be seen and not yet stacked."""
        obs = see(images, obs)
        if not parts:
            return obs
        return observations.join(parts, jax.tree.map(jnp.asarray, observations.flat(obs)))

    def first_of(keys: Array) -> tuple[Any, Any, Array]:
        def begin(key: Array) -> tuple[Any, Array]:
            state, obs = raw.reset(key)
            return state, seen(obs)

        state, obs = strongly_typed(jax.vmap(begin)(keys))
        # A task's state may be its observation: donating one would then delete the other.
        obs = jnp.copy(obs)
        frames = None if stack is None else stack.begin(obs)
        return state, frames, obs if stack is None else stack.join(frames, obs)

    def reset(key: Array) -> tuple[EpisodeState, Array]:
        state, frames, obs = first_of(jax.random.split(key, num_envs))
        sums = {name: jnp.zeros(num_envs) for name in raw.metrics} or None
        lengths, returns = jnp.zeros(num_envs, jnp.int32), jnp.zeros(num_envs)
        count = None if enough is None else jnp.zeros(num_envs, jnp.int32)
        return EpisodeState(state, lengths, returns, sums, frames, count), obs

    advance = _advance(raw, seen, action_repeat, length, last)

    def step(state: EpisodeState, action: Array, key: Array) -> tuple[EpisodeState, Timestep]:
        step_key, reset_key = jax.random.split(key)
        keys = jax.random.split(step_key, num_envs)
        result = advance(keys, state, jnp.clip(action, -1.0, 1.0))
        new, final_obs, reward, terminated, values, repeats = result
        fault = ~is_finite(observations.numbers(parts, final_obs), reward)
        reward, terminated = jnp.where(fault, 0.0, reward), terminated & ~fault
        frames = None
        if stack is not None:
            frames = stack.push(state.frames, final_obs)
            final_obs = stack.join(frames, final_obs)
        count = state.length + 1
        total = state.episode_return + reward
        ended, in_a_row = count >= length, None
        if enough is not None:
            in_a_row = enough.so_far(state.solved, reward)
            ended |= in_a_row >= enough.after
        truncated = (ended & ~terminated) | fault
        done = terminated | truncated

        def renewed(done: Array, keys: Array, *now: Any) -> tuple[Any, Any, Array]:
            def renew(_: None) -> tuple[Any, Any, Array]:
                return _where_each(done, first_of(keys), now)

            return jax.lax.cond(jnp.any(done), renew, lambda _: now, None)

        # Of several devices each looks at its own environments.
        given = done, jax.random.split(reset_key, num_envs), new, frames, final_obs
        after, frames, obs = collectives.shard_map(renewed, (0, 0, 0, 0, 0), *given, out=0)
        sums = {name: state.metrics[name] + value for name, (value, _) in values.items()}
        behind = state.length * action_repeat + repeats  # only the last agent step is shorter
        metrics = {name: value / behind for name, value in sums.items()}
        metrics |= {f"{name}_last": value for name, (_, value) in values.items()}
        timestep = Timestep(
            obs, final_obs, reward, terminated, truncated, total, count, fault, metrics
        )
        sums = {name: jnp.where(done, 0.0, value) for name, value in sums.items()} or None
        in_a_row = None if in_a_row is None else jnp.where(done, 0, in_a_row)
        lengths, returns = jnp.where(done, 0, count), jnp.where(done, 0.0, total)
        next_state = EpisodeState(after, lengths, returns, sums, frames, in_a_row)
        return next_state, timestep

    return JaxEnvironment(spec, num_envs, reset, step)


def _advance(
    raw: RawEnvironment, seen: Callable, action_repeat: int, length: int, last: int
) -> Callable[[Array, EpisodeState, Array], tuple]:
    """One agent step of all environments: (raw state, obs, reward, terminated, metrics, environment
    steps), each `[E, ...]`; metrics are pairs of a sum over these steps and the newest.

    Args:
        raw: one of them.
        seen: what becomes of its observations.
        action_repeat: environment steps of an agent step.
        length: agent steps of an episode.
        last: environment steps of the last of these.
    """

    def single(key: Array, state: Any, action: Array) -> tuple:
        state, obs, reward, terminated, *rest = raw.step(key, state, action)
        metrics = {name: (jnp.asarray(rest[0][name], jnp.float32),) * 2 for name in raw.metrics}
        reward, terminated = jnp.asarray(reward, jnp.float32), jnp.asarray(terminated, bool)
        return state, seen(obs), reward, terminated, metrics, 1

    def repeated(key: Array, state: Any, action: Array, steps: Array) -> tuple:
        def again(i: Array, carry: Any) -> Any:
            key, state, obs, reward, terminated, metrics, done = carry
            key, now = jax.random.split(key)
            new = single(now, state, action)
            stop = terminated | (i >= steps)
            sums = {name: (metrics[name][0] + x, x) for name, (x, _) in new[4].items()}
            state, obs, metrics = _where(stop, (state, obs, metrics), (*new[:2], sums))
            reward = reward + jnp.where(stop, 0.0, new[2])
            terminated = jnp.where(stop, terminated, new[3])
            return key, state, obs, reward, terminated, metrics, done + ~stop

        key, now = jax.random.split(key)
        *first, done = single(now, state, action)
        return jax.lax.fori_loop(1, action_repeat, again, (key, *first, jnp.int32(done)))[1:]

    def advance(keys: Array, state: EpisodeState, action: Array) -> tuple:
        if action_repeat == 1:
            return jax.vmap(single, out_axes=(0, 0, 0, 0, 0, None))(keys, state.raw, action)
        steps = jnp.where(state.length == length - 1, last, action_repeat)
        return jax.vmap(repeated)(keys, state.raw, action, steps)

    return advance


class Solved(NamedTuple):
    """When environments truncate an episode in which nothing is left to be learned.

    Once an agent can do a task, most of a long episode shows it the same few states, while each
    reset shows it another beginning (docs/notes/learning_history.md).

    Attributes:
        reward: of an agent step that counts, nine tenths of the way to the highest.
        after: agent steps in a row `[E]` with that reward.
    """

    reward: float
    after: np.ndarray

    def so_far(self, count: Any, reward: Any) -> Any:
        """Such steps in a row `[E]`, with one that earned `reward`, of `count` before it."""
        return (count + 1) * (reward >= self.reward)


def solved(
    spec: EnvSpec, reset_solved: int | None, numbers: Sequence[int]
) -> tuple[EnvSpec, Solved | None]:
    """A task's spec with `reset_solved` where that is left to it, and when episodes are cut.

    They are in three environments of four; numbers 0, 4, 8, … still see what only a whole episode
    shows. Left to the task, after 50 agent steps where rewards are known and an episode is at least
    four times as long; never where a task ends an episode that fails, since it asks for a high
    reward that lasts.

    Raises ValueError for a task without a range of rewards, or whose episodes are over before.
    """
    if reset_solved is None:
        known = bool(spec.reward_range) and not spec.can_terminate
        reset_solved = 50 if known and spec.episode_length >= 200 else 0
        spec = spec._replace(reset_solved=reset_solved)
    if not reset_solved:
        return spec, None
    if not spec.reward_range:
        raise ValueError(
            f"train.reset_solved={reset_solved}: {spec.name} does not say what its rewards can be "
            "(EnvSpec.reward_range), leave it 0"
        )
    if reset_solved >= spec.episode_length:
        raise ValueError(
            f"train.reset_solved={reset_solved}: an episode of {spec.name} is over after "
            f"{spec.episode_length} agent steps, lower it or leave it 0"
        )
    low, high = spec.reward_range
    whole = np.asarray(numbers) % 4 == 0
    after = np.where(whole, np.iinfo(np.int32).max, reset_solved).astype(np.int32)
    return spec, Solved((low + 0.9 * (high - low)) * spec.action_repeat, after)


def strongly_typed(tree: Any) -> Any:
    """The tree without weak types, which a Python number leaves where it becomes an array.

    A program's first state would otherwise differ in type from all later ones, and the program be
    compiled a second time for them.
    """

    def strong(x: Any) -> Array:
        x = jnp.asarray(x)
        return jax.lax.convert_element_type(x, x.dtype) if jax.typeof(x).weak_type else x

    return jax.tree.map(strong, tree)


def check_reward_range(name: str, given: Sequence[float]) -> tuple[float, ...]:
    """A task's `reward_range` as numbers. Raises ValueError where it is no range."""
    found = tuple(map(float, given))
    if found and not (len(found) == 2 and -math.inf < found[0] <= found[1] < math.inf):
        raise ValueError(
            f"env.name={name!r}: reward_range={given!r} must be (lowest, highest) reward of a "
            "step, both finite, or () where it is not known"
        )
    return found


def is_finite(obs: Any, reward: Any) -> Any:
    """`[E]` bool: whether a step's observation `[E, ...]` and reward `[E]` are numbers."""
    xp = np if isinstance(obs, np.ndarray) else jnp
    return xp.all(xp.isfinite(obs), axis=tuple(range(1, obs.ndim))) & xp.isfinite(reward)


def in_units(spec: EnvSpec, action: Any) -> Any:
    """Actions `[E, A]` as the environment takes them: in its space, of its shape and type.

    Returns:
        `[E, *action_shape]`; `[E]` numbers of actions where they are discrete. What JAX traces is
        float32 `[E, A]` still: `in_space` does the rest with NumPy.
    """
    xp = np if isinstance(action, np.ndarray) else jnp
    if spec.discrete:
        first = int(spec.action_low[0]) if spec.action_low else 0
        chosen = xp.argmax(action, axis=-1).astype(np.int64 if xp is np else np.int32)
        return chosen + chosen.dtype.type(first)
    action = xp.clip(action, -1.0, 1.0)
    if spec.action_high:
        low, high = (np.asarray(x, np.float32)[None] for x in (spec.action_low, spec.action_high))
        action = xp.clip(low + 0.5 * (action + 1.0) * (high - low), low, high)
    return in_space(spec, action) if xp is np else action


def in_space(spec: EnvSpec, action: np.ndarray) -> np.ndarray:
    """Continuous actions `[E, A]` in the environment's units, of its own type and shape.

    Whole numbers are rounded; a number that rounding took beyond a bound is that bound.
    """
    dtype = np.dtype(spec.action_dtype)
    action = (np.rint(action) if dtype.kind in "iu" else action).astype(dtype)
    if spec.action_high:
        low, high = (np.asarray(x).astype(dtype) for x in (spec.action_low, spec.action_high))
        action = np.clip(action, low, high)
    shape = spec.action_shape
    return action if shape is None else action.reshape(len(action), *shape)


def random_actions(spec: EnvSpec, key: Array, num_envs: int) -> Array:
    """Uniformly random actions `[E, A]` of a task."""
    if spec.discrete:
        chosen = jax.random.randint(key, (num_envs,), 0, spec.action_dim)
        return jax.nn.one_hot(chosen, spec.action_dim)
    return jax.random.uniform(key, (num_envs, spec.action_dim), minval=-1.0, maxval=1.0)


def wide_actions(spec: EnvSpec, key: Array, num_envs: int) -> Array:
    """Random actions `[E, A]` of which six in ten are at a bound: N(0, 2), clipped to [-1, 1].

    Discrete ones are uniformly random.
    """
    if spec.discrete:
        return random_actions(spec, key, num_envs)
    shape = (num_envs, spec.action_dim)
    return jnp.clip(2.0 * jax.random.normal(key, shape), -1.0, 1.0)


def check_counts(name: str, num_envs: int, action_repeat: int, episode_length: int | None) -> None:
    """Raise ValueError for counts below one."""
    for field, value in (
        ("num_envs", num_envs),
        ("action_repeat", action_repeat),
        ("episode_length", episode_length),
    ):
        if value is not None and value < 1:
            raise ValueError(f"env.{field}={value} for {name}: must be at least 1")


def check_metrics(name: str, metrics: Sequence[str]) -> None:
    """Raise ValueError for names of metrics that are given twice or taken."""
    logged = [*metrics, *(f"{one}_last" for one in metrics), "return", "length"]
    twice = sorted({one for one in logged if logged.count(one) > 1})
    if twice:
        raise ValueError(
            f"env.metrics={tuple(metrics)} of {name}: {twice[0]!r} stands twice in the log "
            "(of each there is NAME and NAME_last, next to return and length): choose other names"
        )


def _where(condition: Array, yes: Any, no: Any) -> Any:
    """Choose between two trees by one scalar; random keys pass through `jnp.where` as they are."""
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), yes, no)


def _where_each(condition: Array, yes: Any, no: Any) -> Any:
    """Choose between two batched trees by `[E]`."""

    def choose(a: Array, b: Array) -> Array:
        return jnp.where(condition.reshape(condition.shape + (1,) * (a.ndim - 1)), a, b)

    return jax.tree.map(choose, yes, no)
