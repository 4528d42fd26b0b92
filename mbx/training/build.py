"""From settings to environments, for training or evaluation, and to the agent they ask for."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TypeVar

from mbx import envs, observations
from mbx.agents.base import Agent
from mbx.agents.settings import RunSettings
from mbx.config import load as read  # noqa: F401
from mbx.config.agents import maker
from mbx.config.agents import register as register
from mbx.config.agents import settings_class as settings_class
from mbx.envs.base import EnvSpec, HostEnvironment, JaxEnvironment
from mbx.training.agent_check import checked

Environment = TypeVar("Environment", bound=JaxEnvironment | HostEnvironment)


def build_agent(settings: RunSettings, spec: EnvSpec) -> Agent:
    """The agent that settings ask for, for an environment.

    Its functions check what they return while they are traced (`mbx.training.agent_check`). Raises
    ValueError, naming the setting, its value and the remedy, for those that do not fit.

    Examples:
        >>> spec = mbx.types.EnvSpec("toy:small", (3,), jnp.float32, 2, 50, 1)
        >>> agent = build.build_agent(build.settings_class("tdmpc")(), spec)
        >>> agent.act_without_planner is None
        False
    """
    observations.check_mask(spec)
    return checked(maker(settings.agent)(settings, spec), settings.agent, spec)


def make_environment(
    settings: RunSettings,
    num_envs: int,
    *,
    seed: int,
    training: bool = True,
    film: bool = False,
    first: int = 0,
) -> JaxEnvironment | HostEnvironment:
    """The environment that settings name, `num_envs` times, for training or to evaluate.

    film: one on the host draws itself. first: number of the first, where several processes step
    those of a run.
    """
    env = settings.env
    several = {"min_sizes": env.pad_to} if settings.several_tasks else {}
    return envs.make(
        env.name,
        num_envs,
        action_repeat=env.action_repeat or None,
        episode_length=env.episode_length or None,
        seed=seed,
        kwargs=env.kwargs,
        metrics=_names(env.metrics),
        observe=_names(env.observe),
        images=envs.Images(env.pixels, env.image_size, env.grey, env.frame_stack, env.shadows),
        workers=env.workers if num_envs > 1 else 0,  # one alone is not worth a process
        film=film,
        first=first,
        **several,
        **settings.environment_options(training),
    )


def _names(given: Sequence[str]) -> list[str]:
    """The command line gives "a,b" as one name."""
    return [one.strip() for name in given for one in name.split(",") if one.strip()]


def evaluation_environment(
    settings: RunSettings, episodes: int, *, seed: int
) -> JaxEnvironment | HostEnvironment:
    """Environments for an evaluation of `episodes` episodes of every task."""
    num_envs = episodes * envs.num_tasks(settings.env.name)
    return make_environment(settings, num_envs, seed=seed, training=False)


def environment_spec(settings: RunSettings) -> EnvSpec:
    """The spec of the environment that settings name."""
    return _probe(settings).spec


def on_host(settings: RunSettings) -> bool:
    """Whether that environment is stepped in Python."""
    return isinstance(_probe(settings), HostEnvironment)


def _probe(settings: RunSettings) -> JaxEnvironment | HostEnvironment:
    """One environment of each task, closed again where it holds something."""
    with opened(evaluation_environment(settings, 1, seed=0)) as environment:
        return environment


@contextlib.contextmanager
def opened(environment: Environment) -> Iterator[Environment]:
    """The environment, closed at the end where it holds something.

    Whatever `close()` raises is a warning: the work is done by then.
    """
    try:
        yield environment
    finally:
        # The fourth call from the warning is what the `with` stands in.
        envs.custom.close(environment.spec.name, environment, stacklevel=4)
