"""From a configuration to its environments: for training, for evaluation, or only their spec."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mbx import envs
from mbx.envs.base import EnvSpec, HostEnvironment, JaxEnvironment

Config = Mapping[str, Any]


def make_environment(
    config: Config, num_envs: int, *, seed: int
) -> JaxEnvironment | HostEnvironment:
    """The configuration's environment, `num_envs` times."""
    env = config["env"]
    several = env["name"].startswith("multi:")
    options = {"min_sizes": tuple(env.get("pad_to", (0, 0)))} if several else {}
    return envs.make(
        env["name"],
        num_envs,
        action_repeat=env["action_repeat"] or None,
        episode_length=env["episode_length"] or None,
        seed=seed,
        **options,
    )


def evaluation_environment(
    config: Config, episodes: int, *, seed: int
) -> JaxEnvironment | HostEnvironment:
    """Environments for an evaluation of `episodes` episodes of every task."""
    return make_environment(config, episodes * envs.num_tasks(config["env"]["name"]), seed=seed)


def environment_spec(config: Config) -> EnvSpec:
    """The spec of a configuration's environment."""
    return _looked_at(config).spec


def on_host(config: Config) -> bool:
    """Whether a configuration's environment is stepped in Python."""
    return isinstance(_looked_at(config), HostEnvironment)


def _looked_at(config: Config) -> JaxEnvironment | HostEnvironment:
    """The environment as small as can be, closed again."""
    environment = evaluation_environment(config, 1, seed=0)
    if isinstance(environment, HostEnvironment):
        environment.close()
    return environment
