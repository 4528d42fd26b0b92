"""Multi-task environments: `multi:gymnax:Pendulum-v1+brax:inverted_pendulum`.

Environments are in equal blocks, one a task. Observations are padded with zeros to the longest and
end in the one-hot task; actions are as long as the longest, and a task reads its first dimensions.
All tasks are JAX environments, or all are on the host. Source: TD-MPC2 (arXiv 2310.16828), section
3.3.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mbx.envs import snapshot as snapshots
from mbx.envs.base import EnvSpec, HostEnvironment, JaxEnvironment, Suite, Timestep
from mbx.observations import is_packed
from mbx.types import pad

Array = jax.Array


def make(
    tasks: str,
    num_envs: int,
    *,
    action_repeat: int | None = None,
    episode_length: int | None = None,
    seed: int = 0,
    min_sizes: tuple[int, int] = (0, 0),
    reset_solved: int | None = 0,
    first: int = 0,
) -> JaxEnvironment | HostEnvironment:
    """`num_envs` environments, num_envs / K of each of K tasks "SUITE:TASK+SUITE:TASK+…".
    min_sizes are minimum observation and action dims (of a model to be fine-tuned); further
    arguments are those of `mbx.envs.make`. Raises ValueError where num_envs is not a multiple of K,
    tasks repeat, differ in action repeat, have discrete actions or images, or mix JAX and host
    environments.
    """
    from mbx import envs

    names = tasks.split("+")
    label = f"env.name='multi:{tasks}'"
    if len(set(names)) < len(names):
        raise ValueError(f"{label} names a task twice: name each once")
    if num_envs % len(names) or num_envs < 1:
        raise ValueError(
            f"env.num_envs={num_envs} is no multiple of the {len(names)} tasks of {label}: "
            f"choose {len(names)}, {2 * len(names)}, …"
        )
    more = dict(action_repeat=action_repeat, episode_length=episode_length)
    more |= dict(reset_solved=reset_solved, first=first // len(names))
    with contextlib.ExitStack() as opened:
        members = []
        for i, one in enumerate(names):
            members.append(envs.make(one, num_envs // len(names), seed=seed + i, **more))
            if isinstance(members[-1], HostEnvironment):
                opened.callback(members[-1].close)
        spec = _joint_spec(f"multi:{tasks}", [member.spec for member in members], min_sizes)
        if all(isinstance(member, JaxEnvironment) for member in members):
            return _together(spec, members)
        if all(isinstance(member, HostEnvironment) for member in members):
            opened.pop_all()  # it closes them
            return MultiHost(spec, members)
    raise ValueError(f"{label} mixes JAX and host environments: choose tasks of one kind")


def _joint_spec(name: str, specs: Sequence[EnvSpec], min_sizes: tuple[int, int]) -> EnvSpec:
    label = f"env.name={name!r}"
    for spec in specs:
        if spec.discrete or len(spec.obs_shape) != 1 or is_packed(spec.parts):
            what = "discrete actions" if spec.discrete else "images"
            raise ValueError(
                f"{label}: {spec.name} has {what}; tasks trained together need vectors and "
                "continuous actions"
            )
    repeats = {spec.name: spec.action_repeat for spec in specs}
    if len(set(repeats.values())) > 1:
        raise ValueError(
            f"{label}: action repeats differ, {repeats}: set one with --config.env.action_repeat=1"
        )
    ranges = [spec.reward_range for spec in specs]
    return EnvSpec(
        name=name,
        obs_shape=(max(min_sizes[0], *(spec.obs_shape[0] for spec in specs)) + len(specs),),
        obs_dtype=np.float32,
        action_dim=max(min_sizes[1], *(spec.action_dim for spec in specs)),
        episode_length=max(spec.episode_length for spec in specs),
        action_repeat=specs[0].action_repeat,
        tasks=tuple(specs),
        can_terminate=any(spec.can_terminate for spec in specs),
        reward_range=(min(ranges)[0], max(high for _, high in ranges)) if all(ranges) else (),
    )


def _label(spec: EnvSpec, index: int, obs: Any) -> Any:
    """A task's observations `[E, ...]`, padded, then the one-hot task."""
    xp = np if isinstance(obs, np.ndarray) else jnp
    num = len(spec.tasks)
    one_hot = xp.broadcast_to(xp.eye(num, dtype=np.float32)[index], (obs.shape[0], num))
    padded = pad(obs.astype(np.float32), spec.obs_shape[0] - num)
    return xp.concatenate([padded, one_hot], axis=-1)


def _join(spec: EnvSpec, steps: Sequence[Timestep]) -> Timestep:
    xp = np if isinstance(steps[0].obs, np.ndarray) else jnp
    labelled = [
        step._replace(
            obs=_label(spec, i, step.obs),
            final_obs=_label(spec, i, step.final_obs),
            metrics={},  # of single tasks only
        )
        for i, step in enumerate(steps)
    ]
    return jax.tree.map(lambda *fields: xp.concatenate(fields), *labelled)


def _blocks(spec: EnvSpec, action: Any) -> list[Any]:
    """Each task's rows and dimensions of joint actions `[E, A]`."""
    rows = action.reshape(len(spec.tasks), -1, spec.action_dim)
    return [rows[i, :, : task.action_dim] for i, task in enumerate(spec.tasks)]


def _together(spec: EnvSpec, members: Sequence[JaxEnvironment]) -> JaxEnvironment:
    def reset(key: Array) -> tuple[Any, Array]:
        keys = jax.random.split(key, len(members))
        begun = [member.reset(one) for member, one in zip(members, keys, strict=True)]
        obs = [_label(spec, i, x) for i, (_, x) in enumerate(begun)]
        return tuple(state for state, _ in begun), jnp.concatenate(obs)

    def step(state: Any, action: Array, key: Array) -> tuple[Any, Timestep]:
        keys = jax.random.split(key, len(members))
        inputs = zip(members, state, _blocks(spec, action), keys, strict=True)
        states, steps = zip(*(member.step(*given) for member, *given in inputs), strict=True)
        return states, _join(spec, steps)

    return JaxEnvironment(spec, sum(member.num_envs for member in members), reset, step)


class MultiHost(HostEnvironment):
    """Host environments of several tasks as one."""

    def __init__(self, spec: EnvSpec, members: Sequence[HostEnvironment]) -> None:
        self.spec, self._members = spec, list(members)
        self.num_envs = sum(member.num_envs for member in members)

    def reset(self, seed: int) -> np.ndarray:
        begun = [member.reset(seed + i) for i, member in enumerate(self._members)]
        return np.concatenate([_label(self.spec, i, x) for i, x in enumerate(begun)])

    def step(self, action: np.ndarray) -> Timestep:
        blocks = _blocks(self.spec, action)
        return _join(self.spec, [m.step(a) for m, a in zip(self._members, blocks, strict=True)])

    def get_state(self) -> bytes | None:
        members = [member.get_state() for member in self._members]
        return None if None in members else snapshots.encode(members)

    def set_state(self, snapshot: bytes) -> None:
        with snapshots.fitting(self.spec.name):
            for member, own in zip(self._members, snapshots.decode(snapshot), strict=True):
                member.set_state(own)

    def close(self) -> None:
        for member in self._members:
            member.close()


SUITE = Suite(whole=make)
