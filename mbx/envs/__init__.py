"""Environments by name: `make("gymnax:Pendulum-v1", num_envs=4)`.

    gymnax:Pendulum-v1            JAX, fast
    brax:inverted_pendulum        JAX (backend after an @: brax:ant@mjx)
    playground:CartpoleSwingup    JAX, MuJoCo Playground's dm_control suite   (extra `playground`)
    gym:HalfCheetah-v5            host, Gymnasium
    dmc:cartpole-swingup          host, dm_control                            (extra `dmc`)
    empo:grid_rock_1h1r           JAX, robots among humans, for the agent `empo`
    multi:gymnax:Pendulum-v1+brax:inverted_pendulum      several of the above, trained together

`register` adds suites of your own. `make_renderer` draws pictures of their states.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator
from typing import Any

from mbx.envs.base import (
    EnvSpec,
    HostEnvironment,
    JaxEnvironment,
    RawEnvironment,
    Timestep,
    episodic,
)
from mbx.envs.render import NoRenderer, Renderer

__all__ = [
    "EnvSpec",
    "HostEnvironment",
    "JaxEnvironment",
    "NoRenderer",
    "RawEnvironment",
    "Renderer",
    "Timestep",
    "episodic",
    "make",
    "make_renderer",
    "num_tasks",
    "register",
]

Environment = JaxEnvironment | HostEnvironment
Factory = Callable[..., Environment]

_SUITES: dict[str, str | Factory] = {
    "gymnax": "mbx.envs.gymnax",
    "brax": "mbx.envs.brax",
    "playground": "mbx.envs.playground",
    "gym": "mbx.envs.gymnasium",
    "dmc": "mbx.envs.dmc",
    "empo": "mbx.envs.empo",
    "multi": "mbx.envs.multi",
}
_RENDERERS: dict[str, str | Callable[[str], Renderer]] = {
    "gymnax": "mbx.envs.gymnax_pictures",
    "brax": "mbx.envs.brax",
    "playground": "mbx.envs.playground",
    "empo": "mbx.envs.empo",
}
_EXTRAS = {"playground": "playground", "dmc": "dmc"}


def register(
    suite: str, factory: Factory, make_renderer: Callable[[str], Renderer] | None = None
) -> None:
    """Add a suite: factory(task, num_envs, *, action_repeat, episode_length, seed) -> environment.

    action_repeat and episode_length are None where the user left them to the suite.
    make_renderer(task) -> `Renderer`, for videos; None: there are none.
    """
    _SUITES[suite] = factory
    _RENDERERS.pop(suite, None)
    if make_renderer is not None:
        _RENDERERS[suite] = make_renderer


def num_tasks(name: str) -> int:
    """Tasks that an environment's name stands for: 1, or those of a `multi:` one."""
    return name.count("+") + 1 if name.startswith("multi:") else 1


def make(
    name: str,
    num_envs: int,
    *,
    action_repeat: int | None = None,
    episode_length: int | None = None,
    seed: int = 0,
    **extra: Any,
) -> Environment:
    """The environment `SUITE:TASK`, `num_envs` times.

    action_repeat: None for the suite's default (2 for playground and dmc, else 1). episode_length:
    agent steps, None for the task's own limit. seed: of host environments; JAX ones take keys.
    extra: what a suite understands besides.

    Raises ValueError for an unknown suite or task, a count below one, or an action space that is
    not a bounded box, and ImportError naming the extra to install where a suite is missing.
    """
    suite, colon, task = name.partition(":")
    if not colon or suite not in _SUITES:
        raise ValueError(
            f"env.name={name!r}: write SUITE:TASK with a suite of {tuple(_SUITES)}, for example "
            "gymnax:Pendulum-v1"
        )
    factory = _SUITES[suite]
    if isinstance(factory, str):
        factory = importlib.import_module(factory).make
    with _missing_package_told(name):
        return factory(
            task,
            num_envs,
            action_repeat=action_repeat,
            episode_length=episode_length,
            seed=seed,
            **extra,
        )


def make_renderer(name: str) -> Renderer:
    """What draws the states of the environment `SUITE:TASK`.

    Raises ValueError where its states are not drawn, NoRenderer where this machine has nothing to
    draw them with, and ImportError naming the extra to install where a suite is missing.
    """
    suite, _, task = name.partition(":")
    if suite not in _RENDERERS:
        raise ValueError(
            f"env.name={name!r}: pictures are made of the suites {tuple(_RENDERERS)}; give "
            "`mbx.envs.register` a make_renderer for your own"
        )
    maker = _RENDERERS[suite]
    with _missing_package_told(name):
        if isinstance(maker, str):
            maker = importlib.import_module(maker).make_renderer
        return maker(task)


@contextlib.contextmanager
def _missing_package_told(name: str) -> Iterator[None]:
    """Raise the ImportError of a missing suite with what to install."""
    suite = name.partition(":")[0]
    try:
        yield
    except ImportError as error:
        remedy = f"pip install -e '.[{_EXTRAS[suite]}]'" if suite in _EXTRAS else "pip install -e ."
        raise ImportError(f"env.name={name!r} needs {error.name}: {remedy}") from error
