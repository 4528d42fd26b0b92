"""Environment interfaces, and the wrapper that makes a JAX environment vectorized and episodic.

Everything is batched over E environments. Continuous actions are in [-1, 1]; a discrete action is a
one-hot vector (its largest entry counts). A JAX environment is a record of pure functions; a host
environment (Gymnasium, dm_control) is an object with the same meaning and NumPy arrays.
Termination is not truncation. Where an episode ended, `final_obs` is its true last observation and
`obs` is the first one of the next episode.
"""

from __future__ import annotations

import abc
import contextlib
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
from mbx.types import Array, EnvSpec, Part, Record, strongly_typed


class Timestep(NamedTuple):
    """Result of a step, all leading `[E]`."""

    obs: Any
    final_obs: Any  # the true next observation, equal to obs where no episode ended
    reward: Any  # float32, summed over the action repeat
    terminated: Any
    truncated: Any  # bool, cut off, for example by the time limit
    episode_return: Any  # including this step
    episode_length: Any  # agent steps, this one included
    fault: Any  # Observation or reward was not finite: the episode is truncated, the reward 0.
    # Episode means of `EnvSpec.metrics` by name, newest values as NAME_last; NaN for an episode
    # that ended without them.
    metrics: Any = {}  # noqa: RUF012


class JaxEnvironment(NamedTuple):
    """E environments as pure functions; an episode that ends is followed by a random reset."""

    spec: EnvSpec
    num_envs: int
    reset: Callable[[Array], tuple[Any, Array]]  # key -> (state, obs `[E, ...]`)
    step: Callable[[Any, Array, Array], tuple[Any, Timestep]]  # (state, action `[E, A]`, key)


class HostEnvironment(contextlib.AbstractContextManager):
    """E environments stepped in Python; NumPy in, NumPy out."""

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
        """A snapshot that `set_state` continues from bit for bit, None where there is none.
        Reading it must not execute anything (`mbx.envs.snapshot`).
        """

    @abc.abstractmethod
    def set_state(self, snapshot: bytes) -> None:
        """Continue from a snapshot; raises ValueError for one of another environment."""

    @abc.abstractmethod
    def close(self) -> None:
        """Free resources; may be called twice."""

    def __exit__(self, *_: object) -> None:
        self.close()


class RawEnvironment(NamedTuple):
    """One JAX environment that is not vectorized, without time limit and automatic reset.
    Where observations are dictionaries (`mbx.observations`), so are `obs_shape` and `obs_dtype`.
    """

    name: str  # SUITE:TASK
    obs_shape: tuple[int, ...] | Mapping[str, tuple[int, ...]]
    obs_dtype: Any
    action_dim: int
    time_limit: int  # environment steps of an episode
    reset: Callable[[Array], tuple[Any, Any]]  # key -> (state, obs)
    # (key, state, action `[A]`) -> (state, obs, reward, terminated), and a dictionary of `metrics`
    # if there are any. Actions are in [-1, 1], or one-hot where discrete.
    step: Callable[[Array, Any, Array], tuple]
    discrete: bool = False
    can_terminate: bool = True  # episodes may end before their time limit
    metrics: tuple[str, ...] = ()  # names of further logged numbers (success, cost)
    action_low: tuple[float, ...] = ()  # as in `EnvSpec`, where `step` rescales actions
    action_high: tuple[float, ...] = ()
    reward_range: tuple[float, ...] = ()
    repeats: bool = True  # actions can be repeated


class Suite(NamedTuple):
    """A family of tasks, made by name with exactly one of `raw`, `host` and `whole`."""

    raw: Callable[..., RawEnvironment] | None = None  # task -> one JAX task
    host: Callable[..., Any] | None = None  # (task, seed) -> `mbx.envs.host.Task`
    # (task, num_envs, *, action_repeat, episode_length, seed) -> a vectorized environment
    whole: Callable[..., Any] | None = None
    default_repeat: int | Callable[[str], int] = 1  # action repeat, or task -> repeat
    make_renderer: Callable[[str], Any] | None = None
    extra: str = ""  # extra of the package that installs the suite's dependencies
    takes_kwargs: bool = False  # `env.kwargs`
    gives_info: bool = False  # host tasks keep the last step's numbers as `info` (`env.metrics`)
    # Host tasks draw themselves. `host` takes `images` (`Images` or None), with `pixels` of which
    # they have `picture()`, and `film`, with which they have `render()` and `seconds` (of a step).
    # Pictures are uint8 [height, width, 3].
    draws: bool = False


def seeds_of(seed: int, num_envs: int) -> np.ndarray:
    """Seeds of single environments `[E]`."""
    return np.random.SeedSequence(seed).generate_state(num_envs)


def unknown_task(suite: str, task: str, known: Iterable[str]) -> ValueError:
    """Error for an unknown task, with suggestions of similar names."""
    close = difflib.get_close_matches(task.partition("@")[0], list(known), n=3, cutoff=0.4)
    return ValueError(f"env.name='{suite}:{task}' is unknown: did you mean one of {close}?")


@flax.struct.dataclass
class EpisodeState(Record):
    """State of `episodic`; length, episode_return, sums of metrics and `solved` are `[E]`."""

    raw: Any
    length: Array
    episode_return: Array
    metrics: Any = None
    frames: Any = None  # newest images `[E, K, H, W, C]` where they are stacked
    solved: Any = None


class Plan(NamedTuple):
    """How a task is observed and when its episodes end, in JAX or on the host."""

    spec: EnvSpec
    images: Images
    parts: tuple[Part, ...]  # parts of an observation before stacking
    stack: Stack
    # Environment steps of an episode's last agent step, fewer than the repeat where the repeat does
    # not divide the task's own limit: 100 steps at repeat 3 are 33 agent steps and 1 more.
    last: int
    enough: Solved | None

    def seen(self, obs: Any) -> Any:
        """A task's observation as one array, with images processed and not yet stacked."""
        obs = see(self.images, obs)
        return observations.join(self.parts, observations.flat(obs)) if self.parts else obs

    def count(self, before: tuple, obs: Any, reward: Any, terminated: Any, cut: Any = False) -> Any:
        """`Timestep` of one more agent step, `[E]`, and the numbers that the next one continues.
        These are length, return and, with `enough`, solved steps in a row; `cut` is a truncation by
        the task itself. Where an episode ends they are 0, and `obs` is still the final one.
        """
        length, total, in_a_row = before
        xp = np if isinstance(obs, np.ndarray) else jnp
        is_finite = xp.isfinite(observations.numbers(self.spec.parts, obs))
        fault = ~(xp.all(is_finite, axis=tuple(range(1, is_finite.ndim))) & xp.isfinite(reward))
        reward = xp.where(fault, xp.float32(0.0), reward)
        length, total, terminated = length + 1, total + reward, terminated & ~fault
        over = (length >= self.spec.episode_length) | cut
        if self.enough is not None:
            in_a_row = (in_a_row + 1) * (reward >= self.enough.reward)
            over |= in_a_row >= self.enough.after
        truncated = (over & ~terminated) | fault
        done = terminated | truncated
        step = Timestep(obs, obs, reward, terminated, truncated, total, length, fault)
        zeroed = lambda x: xp.where(done, xp.zeros_like(x), x)  # noqa: E731
        return step, jax.tree.map(zeroed, (length, total, in_a_row))


def plan(
    task: Any,
    numbers: Sequence[int],
    *,
    action_repeat: int = 1,
    episode_length: int | None = None,
    observe: Sequence[str] = (),
    images: Images = Images(),  # noqa: B008
    reset_solved: int | None = 0,
    **fields: Any,
) -> Plan:
    """Resolve the settings of a task that has fields of `EnvSpec`; arguments as in `mbx.envs.make`.
    Raises ValueError for counts below one and names of metrics that are not unique, and as
    `observed`, `observations.check_mask` and `solved` do.
    """
    own = {name: getattr(task, name) for name in EnvSpec._fields if hasattr(task, name)}
    limit, longest = episode_length or task.time_limit, getattr(task, "ends_at", None)
    task = EnvSpec(**own | dict(episode_length=0, action_repeat=action_repeat) | fields)
    counts = dict(action_repeat=action_repeat, episode_length=episode_length)
    check_counts(task.name, num_envs=len(numbers), **counts)
    logged = [*task.metrics, *(f"{one}_last" for one in task.metrics), "return", "length"]
    if twice := sorted({one for one in logged if logged.count(one) > 1}):
        raise ValueError(
            f"env.metrics={tuple(task.metrics)} of {task.name}: {twice[0]!r} stands twice in the "
            "log (of each there is NAME and NAME_last, next to return and length): choose other "
            "names"
        )
    if limit is None:
        raise ValueError(f"env.name={task.name!r} has no time limit: set env.episode_length")
    if longest and episode_length and (episode_length - 1) * action_repeat >= longest:
        raise ValueError(
            f"env.episode_length={episode_length} with action_repeat={action_repeat} exceeds the "
            f"{longest} steps after which the simulator itself ends {task.name}: lower it"
        )
    if not images.shadows:
        raise ValueError(
            f"env.shadows=False: {task.name} is not drawn, it observes what it is: leave it out"
        )
    shape, dtype, parts = observed(task.name, task.obs_shape, task.obs_dtype, observe, images)
    stack, shape, stacked = Stack.of(images.stack, shape, parts)
    spec = task._replace(
        obs_shape=shape,
        obs_dtype=dtype,
        parts=stacked,
        episode_length=episode_length or -(-limit // action_repeat),
        metrics=tuple(task.metrics),
        action_low=tuple(map(float, task.action_low)),
        action_high=tuple(map(float, task.action_high)),
        reward_range=check_reward_range(task.name, task.reward_range),
    )
    observations.check_mask(spec)
    spec, enough = solved(spec, reset_solved, numbers)
    last = action_repeat if episode_length else (limit - 1) % action_repeat + 1
    return Plan(spec, images, parts, stack, last, enough)


def episodic(raw: RawEnvironment, num_envs: int, **options: Any) -> JaxEnvironment:
    """Vectorize a raw environment and add action repeat, time limit and random resets.
    options are action_repeat, episode_length, observe, images and reset_solved of `mbx.envs.make`.
    The default episode_length is the task's limit divided by the repeat, rounded up. An action
    repeat stops at termination and at the task's limit. Observations or rewards that are not finite
    are faults (`Timestep`).
    All environments are reset under one `lax.cond`, so that ordinary steps pay for no reset.
    """
    found = plan(raw, range(num_envs), **options)
    repeat = found.spec.action_repeat
    if repeat > 1 and not raw.repeats:
        raise ValueError(f"env.action_repeat={repeat}: {raw.name} with impl=warp takes 1, set it")

    def begin(keys: Array) -> tuple[Any, Any, Array]:
        """Raw states, stacked images (or None) and observations of new episodes, keys `[E]`."""

        def one(key: Array) -> tuple[Any, Array]:
            state, obs = raw.reset(key)
            return state, found.seen(jax.tree.map(jnp.asarray, obs))

        state, obs = strongly_typed(jax.vmap(one)(keys))
        # A task's state may be its observation: donating one would then delete the other.
        return state, *found.stack.begin(jnp.copy(obs))

    def reset(key: Array) -> tuple[EpisodeState, Array]:
        state, frames, obs = begin(jax.random.split(key, num_envs))
        sums = {name: jnp.zeros(num_envs) for name in raw.metrics} or None
        lengths, returns = jnp.zeros(num_envs, jnp.int32), jnp.zeros(num_envs)
        in_a_row = None if found.enough is None else jnp.zeros(num_envs, jnp.int32)
        return EpisodeState(state, lengths, returns, sums, frames, in_a_row), obs

    def step(state: EpisodeState, action: Array, key: Array) -> tuple[EpisodeState, Timestep]:
        step_key, reset_key = jax.random.split(key)
        keys = jax.random.split(step_key, num_envs)
        result = _advance(raw, found, keys, state, jnp.clip(action, -1.0, 1.0))
        new, obs, reward, terminated, values, repeats = result
        frames, obs = found.stack.push(state.frames, obs)
        before = state.length, state.episode_return, state.solved
        timestep, (length, total, in_a_row) = found.count(before, obs, reward, terminated)
        done, keys = timestep.terminated | timestep.truncated, jax.random.split(reset_key, num_envs)
        new, frames, obs = _renewed(begin, done, keys, new, frames, obs)
        sums = {name: state.metrics[name] + value for name, (value, _) in values.items()}
        steps = state.length * repeat + repeats
        metrics = {name: value / steps for name, value in sums.items()}
        metrics |= {f"{name}_last": value for name, (_, value) in values.items()}
        sums = jax.tree.map(lambda x: jnp.where(done, 0, x), sums) or None
        after = EpisodeState(new, length, total, sums, frames, in_a_row)
        return after, timestep._replace(obs=obs, metrics=metrics)

    return JaxEnvironment(found.spec, num_envs, reset, step)


def _renewed(begin: Callable, done: Array, keys: Array, *now: Any) -> tuple[Any, Any, Array]:
    """State, frames and observation, of new episodes for environments that are done."""

    def renewed(done: Array, keys: Array, *now: Any) -> tuple[Any, Any, Array]:
        renew = lambda _: _where(done, begin(keys), now)  # noqa: E731
        return jax.lax.cond(jnp.any(done), renew, lambda _: now, None)

    # Each of several devices checks its own environments only.
    return collectives.shard_map(renewed, (0, 0, 0, 0, 0), done, keys, *now, out=0)


def _advance(raw: RawEnvironment, found: Plan, keys: Array, state: Any, action: Array) -> tuple:
    """One agent step of all environments.
    Returns (raw state, obs, reward, terminated, metrics, environment steps), each `[E, ...]`;
    metrics are pairs of a sum over these steps and the newest value.
    """
    repeat = found.spec.action_repeat

    def single(key: Array, state: Any, action: Array) -> tuple:
        state, obs, reward, terminated, *rest = raw.step(key, state, action)
        metrics = {name: (jnp.asarray(rest[0][name], jnp.float32),) * 2 for name in raw.metrics}
        reward, terminated = jnp.asarray(reward, jnp.float32), jnp.asarray(terminated, bool)
        return state, found.seen(jax.tree.map(jnp.asarray, obs)), reward, terminated, metrics, 1

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
        return jax.lax.fori_loop(1, repeat, again, (key, *first, jnp.int32(done)))[1:]

    if repeat == 1:
        return jax.vmap(single, out_axes=(0, 0, 0, 0, 0, None))(keys, state.raw, action)
    steps = jnp.where(state.length == found.spec.episode_length - 1, found.last, repeat)
    return jax.vmap(repeated)(keys, state.raw, action, steps)


class Solved(NamedTuple):
    """Early truncation of episodes that a trained agent has solved.
    Most of a long solved episode repeats the same states, a reset shows new ones
    (docs/notes/learning_history.md).
    """

    reward: float  # of an agent step that counts: nine tenths of the way to the highest
    after: np.ndarray  # agent steps in a row `[E]` with that reward


def solved(
    spec: EnvSpec, reset_solved: int | None, numbers: Sequence[int]
) -> tuple[EnvSpec, Solved | None]:
    """A task's spec with `reset_solved` resolved, and the rule that truncates episodes.
    It applies to three environments of four; numbers 0, 4, 8, … still see whole episodes. With None
    it is 50 agent steps where the range of rewards is known and an episode is at least four times
    as long; never where failures terminate an episode, since the task then asks for a lasting
    reward.
    Raises ValueError for a task without a range of rewards, or with shorter episodes.
    """
    if reset_solved is None:
        known = bool(spec.reward_range) and not spec.can_terminate
        reset_solved = 50 if known and spec.episode_length >= 200 else 0
        spec = spec._replace(reset_solved=reset_solved)
    if not reset_solved:
        return spec, None
    given = f"train.reset_solved={reset_solved}"
    if not spec.reward_range:
        raise ValueError(
            f"{given}: {spec.name} does not say what its rewards can be (EnvSpec.reward_range), "
            "leave it 0"
        )
    if reset_solved >= spec.episode_length:
        raise ValueError(
            f"{given}: an episode of {spec.name} is over after {spec.episode_length} agent steps, "
            "lower it or leave it 0"
        )
    low, high = spec.reward_range
    whole = np.asarray(numbers) % 4 == 0
    after = np.where(whole, np.iinfo(np.int32).max, reset_solved).astype(np.int32)
    return spec, Solved((low + 0.9 * (high - low)) * spec.action_repeat, after)


def check_reward_range(name: str, given: Sequence[float]) -> tuple[float, ...]:
    """A task's `reward_range` as floats. Raises ValueError where it is not a range."""
    found = tuple(map(float, given))
    if found and not (len(found) == 2 and -math.inf < found[0] <= found[1] < math.inf):
        raise ValueError(
            f"env.name={name!r}: reward_range={given!r} must be (lowest, highest) reward of a "
            "step, both finite, or () where it is not known"
        )
    return found


def in_units(spec: EnvSpec, action: Any) -> Any:
    """Actions `[E, A]` in the environment's space: `[E, *action_shape]`, or `[E]` if discrete.
    Under JAX tracing they stay float32 `[E, A]` or `[E]`; `in_space` does the rest with NumPy.
    """
    xp = np if isinstance(action, np.ndarray) else jnp
    if spec.discrete:
        first = int(spec.action_low[0]) if spec.action_low else 0
        chosen = xp.argmax(action, axis=-1).astype(np.int64 if xp is np else np.int32)
        chosen = chosen + chosen.dtype.type(first)
        return in_space(spec, chosen) if xp is np else chosen
    action = xp.clip(action, -1.0, 1.0)
    if spec.action_high:
        low, high = (np.asarray(x, np.float32)[None] for x in (spec.action_low, spec.action_high))
        action = xp.clip(low + 0.5 * (action + 1.0) * (high - low), low, high)
    return in_space(spec, action) if xp is np else action


def in_space(spec: EnvSpec, action: np.ndarray) -> Any:
    """Continuous actions `[E, A]` or numbers `[E]` as the environment takes them.
    They are rounded and clipped for its type; with `action_parts` they are a tree of `[E, ...]`.
    """
    if spec.action_parts:
        return _parts_of(spec, action)
    if spec.discrete:
        return action
    dtype = np.dtype(spec.action_dtype)
    action = (np.rint(action) if dtype.kind in "iu" else action).astype(dtype)
    if spec.action_high:
        low, high = (np.asarray(x).astype(dtype) for x in (spec.action_low, spec.action_high))
        action = np.clip(action, low, high)
    shape = spec.action_shape
    return action if shape is None else action.reshape(len(action), *shape)


def _parts_of(spec: EnvSpec, action: np.ndarray) -> Any:
    """Actions as an array, a dictionary or a tuple, of all parts."""
    parts, start, found = spec.action_parts, 0, {}
    if spec.discrete:
        firsts, counts = zip(*(one for part in parts for one in part.choices), strict=True)
        action = np.stack(np.unravel_index(action, counts), axis=-1) + firsts
    for part in parts:
        here = slice(start, start := start + math.prod(part.shape))
        bounds = dict(action_low=spec.action_low[here], action_high=spec.action_high[here])
        own = dict(discrete=False, action_parts=(), action_shape=part.shape, **bounds)
        own = spec._replace(action_dtype=part.dtype, **own)
        found[part.name] = in_space(own, action[:, here])
    return observations.nested(found)


def check_counts(name: str, **counts: int | None) -> None:
    """Raise ValueError for a count below one; None is unset."""
    for field, value in counts.items():
        if value is not None and value < 1:
            raise ValueError(f"env.{field}={value} for {name}: must be at least 1")


def _where(condition: Array, yes: Any, no: Any) -> Any:
    """Choose between two trees by a scalar or, batched, by `[E]`; also takes random keys."""

    def choose(a: Array, b: Array) -> Array:
        if condition.ndim and a.shape[:1] != condition.shape:
            return b  # contacts of all environments together, in MuJoCo Warp
        shape = condition.shape + (1,) * (a.ndim - condition.ndim)
        return jnp.where(condition.reshape(shape), a, b)

    return jax.tree.map(choose, yes, no)
