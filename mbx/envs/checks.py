"""Validation of custom environments before anything is compiled.

Every error names the environment, the field, its value and what is expected. In contrast,
`gymnasium.utils.env_checker` rejects environments that train well (float64 in a float32 Box,
simulators that are not deterministic) and does not name the environment.
"""

from __future__ import annotations

import functools
import inspect
import math
import numbers
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Space, Tuple

from mbx import observations
from mbx.envs import custom
from mbx.envs.base import RawEnvironment
from mbx.types import ActionPart

_STEPS = 5
_MOST_COMBINATIONS = 1024  # of a discrete action's parts
_TRIED_STEPS = 2_000  # in search of a time limit that nothing declares
_SUCCESS = ("success", "is_success", "solved")  # what `info` calls it
# Largest numbers that are learned from, and what to do; TD-MPC's bins end at symexp(10).
_LARGE = {
    "rewards": (22_025.0, "what lies beyond 22,025 is cut off: scale them"),
    "observations": (10_000.0, "scale them to be of order 1"),
}
_SINCE = "(Gymnasium's interface since 0.26)"
NUMBERS = Box | Discrete | MultiBinary | MultiDiscrete  # spaces of numbers, not of text or graphs


class _Check:
    """Errors about one environment, and the numbers it returned."""

    def __init__(self, name: str, remedy: str = "") -> None:
        self.name, self._remedy = name, remedy
        self.seen: dict[str, list[np.ndarray]] = {what: [] for what in _LARGE}

    def refuse(self, what: str, wanted: str) -> NoReturn:
        raise ValueError(f"env.name={self.name!r}: {what}, wanted {wanted}{self._remedy}")

    def number(self, kind: str, what: str, value: Any) -> None:
        """Note a reward or an observation; refuse one that is not finite."""
        array = np.asarray(value).astype(float)
        if not np.isfinite(array).all():
            text = " ".join(np.array2string(array, threshold=20).split())
            self.refuse(f"{what}={text}", "finite numbers")
        self.seen[kind].append(array)

    def warn_of_sizes(self) -> None:
        """Warn of numbers that are too large to learn from."""
        for what, (limit, remedy) in _LARGE.items():
            largest = max((float(np.abs(x).max(initial=0)) for x in self.seen[what]), default=0.0)
            if largest > limit:
                self.warn(f"{what} of {largest:.3g}: {remedy}")

    def warn(self, words: str) -> None:
        warnings.warn(f"env.name={self.name!r}: {words}", stacklevel=3)


# -------------------------------------------------------------------------------------------------
# Gymnasium's interface


def check_first(name: str, kwargs: Mapping[str, Any]) -> tuple[str, ...]:
    """Make a custom environment, reset and step it; the entries of `info` that tell success.
    Raises ValueError for defects.
    """
    env = custom.make(name, kwargs)
    try:
        _check_api(name, env)
        check_spaces(name, env)
        info = _check_steps(_Check(name), env)
        found = {one: np.asarray(info.get(one)) for one in _SUCCESS}
        return tuple(one for one, x in found.items() if not x.ndim and x.dtype.kind in "biuf")
    finally:
        custom.close(name, env)


def _check_api(name: str, env: Any) -> None:
    """Raise ValueError where an object lacks Gymnasium's current interface."""
    what, interface = "", ("reset", "step", "observation_space", "action_space")
    if isinstance(env, gymnasium.vector.VectorEnv):
        what = ", a vector environment: give one that env.num_envs makes copies of"
    elif lacking := [field for field in interface if not hasattr(env, field)]:
        what = f" without {lacking[0]}: give a gymnasium.Env or a function making one"
    if what:
        raise ValueError(f"env.name={name!r} is a {type(env).__name__}{what}")
    try:
        inspect.signature(env.reset).bind(seed=0)
    except TypeError as error:
        raise ValueError(
            f"env.name={name!r}: reset{inspect.signature(env.reset)} takes no seed: write it as "
            f"reset(self, *, seed=None, options=None) -> (observation, info) {_SINCE}"
        ) from error


def check_spaces(name: str, env: Any) -> None:
    """Raise ValueError for spaces on which no agent can be trained."""
    action, observation = env.action_space, env.observation_space
    # What a Dict holds is checked where its parts are chosen (`mbx.observations.choose`).
    seen = isinstance(observation, Dict | Tuple | NUMBERS)
    for field, space, needed in (
        ("action_space", action, _needed_action(action)),
        ("observation_space", observation, "" if seen else "numbers are needed"),
    ):
        kind = type(space)
        if not isinstance(space, Space):
            space = f"a {kind.__module__}.{kind.__name__}"
            needed = "one of gymnasium.spaces is needed"
        if needed:
            raise ValueError(f"env.name={name!r}: {field} is {space}: {needed}")


def _needed_action(space: Any) -> str:
    """What an action space lacks; "" where agents can act in it."""
    spaces = [one for _, one, _ in leaves(space, space)]
    if not spaces or not all(map(_is_bounded, spaces)):
        return "bounded Box or discrete spaces, or a Dict or Tuple of these, are needed"
    if len({isinstance(one, Box) for one in spaces}) > 1:
        return "all its parts must be Box, or all discrete: divide the Box in a wrapper"
    if (number := combinations(action_parts(space))) > _MOST_COMBINATIONS:
        return (
            f"its {number:,} combinations are one choice to agents, which take up to "
            f"{_MOST_COMBINATIONS:,}: leave out some in a wrapper"
        )
    return ""


def choices(space: Space) -> tuple[tuple[int, int], ...]:
    """First number and size of each choice in a space, as `EnvSpec.choices`."""
    if not isinstance(space, Discrete | MultiDiscrete):
        return ()
    sizes = space.n if isinstance(space, Discrete) else space.nvec
    return tuple(zip(np.ravel(space.start).tolist(), np.ravel(sizes).tolist(), strict=True))


def action_parts(space: Space) -> tuple[ActionPart, ...]:
    """The parts of an action space, in its order."""
    found = []
    for name, one, _ in leaves(space, space):
        binary = ((0, 2),) * (isinstance(one, MultiBinary) and math.prod(one.shape))
        found.append(ActionPart(name, one.shape, one.dtype.name, choices(one) or binary))
    return tuple(found)


def combinations(parts: Sequence[ActionPart]) -> int:
    """Number of actions of discrete parts together, 0 where they are continuous."""
    counts = [count for part in parts for _, count in part.choices]
    return math.prod(counts) if counts else 0


def _is_bounded(space: Any) -> bool:
    """Whether a space is discrete, or a Box that float32 represents (whole numbers to 2**24)."""
    if not isinstance(space, Box):
        return isinstance(space, NUMBERS)
    largest = 2**24 if space.dtype.kind in "iu" else np.finfo(np.float32).max / 2
    return bool((np.abs(np.array([space.low, space.high], np.float64)) <= largest).all())


def leaves(
    space: Any, value: Any, path: str = "", strict: bool = False
) -> Iterator[tuple[str, Any, Any]]:
    """Name (arm/angle, "" where it is alone), space and value of each space without parts.
    Raises ValueError where `value` lacks a part of a Dict or Tuple, or if strict has another one.
    """
    if not isinstance(space, Dict | Tuple):
        yield path, space, value
        return
    keys = list(space) if isinstance(space, Dict) else list(range(len(space)))
    many = isinstance(value, Sequence | np.ndarray)
    got = list(value) if isinstance(value, Mapping) else list(range(len(value))) if many else []
    if set(keys) - set(got) or (strict and set(got) - set(keys)):
        which = f"observation {path!r}" if path else "observation"
        raise ValueError(f"{which} with {got}, wanted {keys}, as observation_space declares")
    for key in keys:
        yield from leaves(space[key], value[key], f"{path}/{key}" if path else str(key), strict)


def _check_steps(check: _Check, env: Any) -> dict[str, Any]:
    """Compare what an environment gives with what it declares; the last step's `info`."""

    def called(where: str, wanted: str, function: Any, *args: Any, **kwargs: Any) -> tuple:
        with custom.own_code(check.name, where):
            result = function(*args, **kwargs)
        fields = re.findall("[a-z]+", wanted)
        if not isinstance(result, tuple) or len(result) != len(fields):
            several = isinstance(result, tuple)
            got = f"{len(result)} values" if several else f"a {type(result).__name__}"
            check.refuse(f"{where.partition(' ')[0]} gave {got}", f"{wanted} {_SINCE}")
        for field, value in zip(fields[1:], result[1:], strict=True):
            fits, needed = _RESULTS[field]
            if not fits(value):
                check.refuse(f"{where} gave {field}={value!r}", needed)
        _check_observation(check, env.observation_space, result[0], where)
        return result

    reset = functools.partial(called, "reset()", "(observation, info)", env.reset)
    obs = reset(seed=0)[0]
    env.action_space.seed(0)
    for i in range(1, _STEPS + 1):
        where, wanted = f"step() number {i}", "5: observation, reward, terminated, truncated, info"
        step = called(where, wanted, env.step, _random_action(env, obs))
        obs = step[0]
        check.number("rewards", f"{where} gave reward", step[1])
        if step[2] or step[3]:
            obs = reset()[0]
    check.warn_of_sizes()
    return step[4]


def _random_action(env: Any, obs: Any) -> Any:
    """A random action, possible in what is observed (`observations.action_mask`)."""
    space, mask = env.action_space, obs.get(observations.MASK) if isinstance(obs, Mapping) else None
    if isinstance(space, Discrete) and np.shape(mask) == (space.n,):
        return space.sample((np.asarray(mask) > 0).astype(np.int8))
    return space.sample()


def _is_flag(x: Any) -> bool:
    return np.shape(x) == () and np.asarray(x).dtype.kind in "biu"


_RESULTS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "reward": (lambda x: np.shape(x) == (), "a single number: return float(...)"),
    "terminated": (_is_flag, "True or False"),
    "truncated": (_is_flag, "True or False"),
    "info": (lambda x: isinstance(x, dict), "a dictionary"),
}


def _check_observation(check: _Check, space: Any, obs: Any, where: str) -> None:
    """Compare an observation with the declared space."""
    try:
        found = list(leaves(space, obs, strict=True))
    except ValueError as error:
        raise ValueError(f"env.name={check.name!r}: {where} gave {error}") from error
    declared = "as observation_space declares: change one of them"
    for name, one, value in found:
        if not isinstance(one, NUMBERS):
            continue
        array = np.asarray(value)
        what = f"{where} gave observation" + (f" {name!r}" if name else "")
        if array.dtype.kind not in "biuf":
            check.refuse(f"{what} of type {array.dtype}", "numbers")
        if array.shape != (one.shape or ()):
            check.refuse(f"{what} of shape {array.shape}", f"{one.shape or ()}, {declared}")
        if not isinstance(one, Box):
            if not one.contains(value):
                check.refuse(f"{what}={value!r}", f"one of {one}")
        elif one.dtype.kind in "iu" and array.dtype.kind == "f":
            check.refuse(f"{what} of type {array.dtype}", f"{one.dtype}, {declared}")
        elif one.dtype != np.uint8:
            check.number("observations", what, array)


def time_limit(env: Any) -> int | None:
    """Steps after which an environment says it truncates episodes, or None."""
    whole, limit = env, getattr(getattr(env, "spec", None), "max_episode_steps", None)
    while limit is None and env is not None:
        limit = vars(env).get("_max_episode_steps", getattr(type(env), "max_episode_steps", None))
        limit = vars(env).get("max_episode_steps", limit)
        env = vars(env).get("env")
    limit = _kept_limit(whole) if limit is None else limit
    return int(limit) if isinstance(limit, numbers.Integral) and limit > 0 else None


def _kept_limit(env: Any) -> Any:
    """Time limit that an environment keeps by itself: ALE's, highway-env's, MiniGrid's."""
    own, spec = getattr(env, "unwrapped", env), getattr(env, "spec", None)
    kwargs, config = getattr(spec, "kwargs", {}), getattr(own, "config", None)
    if frames := kwargs.get("max_num_frames_per_episode"):
        return frames // int(np.min(kwargs.get("frameskip", 1)))
    if isinstance(config, dict) and {"duration", "policy_frequency"} <= set(config):
        return math.ceil(config["duration"] * config["policy_frequency"])
    return getattr(own, "max_steps", None)


def tried_limit(name: str, kwargs: Mapping[str, Any]) -> int | None:
    """Length at which an environment itself truncates all episodes of random steps that do not
    terminate: at least two, up to five. None where lengths differ, as of leaving a field.
    """
    env, found, longest, count = custom.make(name, kwargs), list[int](), 0, 0
    try:
        with custom.own_code(name, "a random episode"):
            obs, _ = env.reset(seed=0)
            env.action_space.seed(0)
            for _ in range(_TRIED_STEPS):
                obs, _, terminated, truncated, _ = env.step(_random_action(env, obs))
                count += 1
                longest = max(longest, count)
                if truncated and not terminated:
                    found.append(count)
                if len(found) == 5:
                    break
                if terminated or truncated:
                    obs, _ = env.reset()
                    count = 0
        return longest if len(found) > 1 and set(found) == {longest} else None
    finally:
        custom.close(name, env)


# -------------------------------------------------------------------------------------------------
# JAX


def check_raw(raw: RawEnvironment) -> None:
    """Raise ValueError where the first reset and steps are not what the environment declares."""
    check = _Check(raw.name, ": change its code or what its RawEnvironment declares")
    key, action = jax.random.key(0), jnp.zeros(raw.action_dim).at[0].set(1.0)
    begun = jax.jit(raw.reset)(key)
    if not isinstance(begun, tuple) or len(begun) != 2:
        check.refuse(f"the result of reset() is {_kind(begun)}", "(state, observation)")
    state, obs = begun
    _check_declared(check, raw, obs, "the observation of reset()")
    step = jax.jit(raw.step)
    for i in range(1, 4):
        done = step(jax.random.fold_in(key, i), state, action)
        _check_result(check, raw, done, state)
        state, obs, reward, terminated, *_ = done
        _check_declared(check, raw, obs, "the observation of step()")
        check.number("rewards", f"reward of step() {i}", reward)
        if terminated:
            break
    check.warn_of_sizes()
    if any(x.ndim == 3 and not 0 <= x.min() <= x.max() <= 1 for x in check.seen["observations"]):
        check.warn(
            "its observation has three axes, an image from 0 to 1 to Dreamer, and other numbers: "
            "flatten it to a vector"
        )


def _check_result(check: _Check, raw: RawEnvironment, done: Any, state: Any) -> None:
    """Compare what a step gave with what is declared, and its state with the one before."""
    size = len(done) if isinstance(done, tuple) else 0
    found = done[4] if size == 5 else {}
    names = tuple(found) if isinstance(found, dict) else ("name",)
    if size != 4 + bool(raw.metrics):
        wanted = "(state, observation, reward, terminated" + (", metrics)" if raw.metrics else ")")
        if size == 5:
            wanted += f", or five with RawEnvironment(metrics={names}), which declares the fifth"
        check.refuse(f"the result of step() is {_kind(done)}", wanted)
    if not isinstance(found, dict) or set(names) != set(raw.metrics):
        got = list(names) if isinstance(found, dict) else _kind(found)
        check.refuse(f"the metrics of step() is {got}", f"a dictionary of {list(raw.metrics)}")
    new, _, reward, terminated = done[:4]
    for field, value in {"reward": reward, "terminated": terminated, **found}.items():
        if np.shape(value) != ():
            got = f"{field} of step() is of shape {np.shape(value)}"
            check.refuse(got, "a single number, shape ()")
    for of in (_types, jax.tree.structure):
        if (before := of(state)) != (after := of(new)):
            check.refuse(f"the state of step() is {after}", f"what reset() gives, {before}")


def _check_declared(check: _Check, raw: RawEnvironment, obs: Any, what: str) -> None:
    """Compare an observation with `obs_shape` and `obs_dtype`; its numbers have to be finite."""
    shapes, dtypes = observations.flat(raw.obs_shape), observations.flat(raw.obs_dtype)
    if set(shapes) != set(dtypes):
        check.refuse(f"obs_dtype is {raw.obs_dtype}", f"one of each of {list(shapes)}")
    sizes = {name: list(map(int, shape)) for name, shape in shapes.items()}
    declared = {name: f"{jnp.dtype(dtypes[name])}{sizes[name]}" for name in shapes}
    found = observations.flat(obs)
    got = {name: _type(x) for name, x in found.items()}
    if got != declared:
        wanted = f"{declared.get('', declared)} (obs_shape, obs_dtype)"
        check.refuse(f"{what} is {got.get('', got)}", wanted)
    for name, x in found.items():
        if jnp.issubdtype(x.dtype, jnp.floating):
            check.number("observations", f"{name!r} of {what}" if name else what, x)


def _kind(x: Any) -> str:
    return f"a tuple of {len(x)}" if isinstance(x, tuple) else f"a {type(x).__name__}"


def _type(x: Any) -> str:
    return f"{x.dtype}{list(x.shape)}" if hasattr(x, "dtype") else _kind(x)


def _types(tree: Any) -> dict[str, str]:
    found = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path): _type(x) for path, x in found}
