"""Environments by name: `make("gymnax:Pendulum-v1", num_envs=4)`.

    gymnax:Pendulum-v1            JAX, fast
    brax:inverted_pendulum        JAX (backend after an @: brax:ant@mjx)
    playground:CartpoleSwingup    JAX, MuJoCo Playground                      (extra `playground`)
    gym:HalfCheetah-v5            host, Gymnasium
    gym:path/to/file.py:Class     your own, Gymnasium's interface  (docs/own_environments.md)
    jax:path/to/file.py:make      your own, gymnax's interface or a RawEnvironment
    dmc:cartpole-swingup          host, dm_control                            (extra `dmc`)
    empo:grid_rock_1h1r           JAX, robots among humans, for the agent `empo`
    multi:gymnax:Pendulum-v1+brax:inverted_pendulum      several of the above, trained together

`register` adds suites of your own. `make_renderer` draws pictures of their states.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from mbx.envs import custom
from mbx.envs.base import (
    EnvSpec,
    HostEnvironment,
    JaxEnvironment,
    RawEnvironment,
    Suite,
    Timestep,
    check_counts,
    check_no_parts,
    episodic,
)
from mbx.envs.custom import EnvironmentFailure
from mbx.envs.host import SteppedEnvironment
from mbx.envs.images import Images
from mbx.envs.raw_check import check_raw
from mbx.envs.render import NoRenderer, Renderer
from mbx.envs.vector import ParallelEnvironment

__all__ = [
    "EnvSpec",
    "EnvironmentFailure",
    "HostEnvironment",
    "Images",
    "JaxEnvironment",
    "NoRenderer",
    "RawEnvironment",
    "Renderer",
    "Suite",
    "Timestep",
    "episodic",
    "make",
    "make_renderer",
    "num_tasks",
    "register",
]

Environment = JaxEnvironment | HostEnvironment
Factory = Callable[..., Environment]

# Modules with a `SUITE`, or with a factory `make`.
_SUITES: dict[str, str | Suite | Factory] = {
    "gymnax": "mbx.envs.gymnax",
    "brax": "mbx.envs.brax",
    "playground": "mbx.envs.playground",
    "gym": "mbx.envs.gymnasium",
    "jax": "mbx.envs.jax_own",
    "dmc": "mbx.envs.dmc",
    "empo": "mbx.empo.suite",
    "multi": "mbx.envs.multi",
}
_RENDERERS: dict[str, Callable[[str], Renderer]] = {}


def register(
    name: str, suite: Suite | Factory, make_renderer: Callable[[str], Renderer] | None = None
) -> None:
    """Add a suite of your own.

    Args:
        name: what stands before the colon in `SUITE:TASK`.
        suite: a `Suite`; or for whole environments a function
            (task, num_envs, *, action_repeat, episode_length, seed) -> environment, whose
            action_repeat and episode_length are None where a run leaves them to the suite.
        make_renderer: task -> `Renderer`, for videos; None: the suite's own, if any.

    Examples:
        >>> envs.register("mine", envs.Suite(raw=make_raw))  # doctest: +SKIP
    """
    _SUITES[name] = suite
    _RENDERERS.pop(name, None)
    if make_renderer is not None:
        _RENDERERS[name] = make_renderer


def num_tasks(name: str) -> int:
    """Tasks that an environment's name stands for: 1, or those of a `multi:` one.

    Examples:
        >>> envs.num_tasks("gymnax:Pendulum-v1")
        1
    """
    return name.count("+") + 1 if name.startswith("multi:") else 1


def make(
    name: str,
    num_envs: int,
    *,
    action_repeat: int | None = None,
    episode_length: int | None = None,
    seed: int = 0,
    kwargs: Mapping[str, Any] | None = None,
    metrics: Sequence[str] = (),
    observe: Sequence[str] = (),
    images: Images = Images(),  # noqa: B008
    film: bool = False,
    workers: int = 0,
    reset_solved: int | None = 0,
    first: int = 0,
    **extra: Any,
) -> Environment:
    """The environment `SUITE:TASK`, `num_envs` times.

    Args:
        name: SUITE:TASK.
        num_envs: copies, stepped together.
        action_repeat: environment steps of an agent step; None for the suite's default (2 for
            dm_control's tasks, else 1).
        episode_length: agent steps of an episode; None for the task's own limit.
        seed: of host environments; JAX ones take keys.
        kwargs: the task's own arguments, of the suites gym, gymnax and jax.
        metrics: numbers of `info` that are averaged over episodes, of the suite gym.
        observe: parts of observations that are dictionaries; empty: all but privileged ones.
        images: what is done with images that are observed, and whether pictures are.
        film: a host environment that draws itself (`SteppedEnvironment.render`).
        workers: processes that step a host environment; 0: this one does.
        reset_solved: agent steps in a row with nearly the highest reward after which three
            environments in four begin another episode (`mbx.envs.solved.Solved`); 0: never; None:
            the task's, as `EnvSpec.reset_solved` says then, and never where a suite makes whole
            environments.
        first: number of the first of them, where several processes step those of a run.
        **extra: what a suite understands besides.

    Raises:
        ValueError: for an unknown suite or task, a count below one, or an action space that is not
            a bounded box.
        FileNotFoundError: where the file of an environment of one's own is gone.
        EnvironmentFailure: where an environment's own code fails.
        ImportError: where a package is missing; names the extra to install.
        NoRenderer: with `film` or `images.pixels`, where it cannot be drawn.

    Examples:
        >>> environment = envs.make("gymnax:Pendulum-v1", 4)  # doctest: +SKIP
    """
    suite_name, colon, task = name.partition(":")
    if not colon or suite_name not in _SUITES:
        raise ValueError(
            f"env.name={name!r}: write SUITE:TASK with a suite of {tuple(_SUITES)}, for example "
            "gymnax:Pendulum-v1"
        )
    suite = _load(suite_name)
    options = dict(action_repeat=action_repeat, episode_length=episode_length)
    if kwargs and not getattr(suite, "takes_kwargs", False):
        raise ValueError(
            f"env.kwargs={dict(kwargs)}: {name} takes no arguments, only gym:, gymnax: and jax: do"
        )
    if metrics and not getattr(suite, "gives_info", False):
        raise ValueError(
            f"env.metrics={tuple(metrics)}: {name} has no `info`, only gym: has; a RawEnvironment "
            "names its metrics itself"
        )
    if workers and not (isinstance(suite, Suite) and suite.host is not None):
        raise ValueError(
            f"env.workers={workers}: {name} is not stepped by processes, only single tasks on the "
            "host are (gym:, dmc:): leave it 0"
        )
    if not isinstance(suite, Suite):
        check_no_parts(name, observe)
        if images != Images():
            raise ValueError(
                f"{images.settings()}: {name} has no images that are looked at, only single tasks "
                "have: leave it out"
            )
        if suite_name == "multi":
            extra |= dict(reset_solved=reset_solved, first=first)
        elif reset_solved:
            raise ValueError(
                f"train.reset_solved={reset_solved}: {name} makes whole environments, whose "
                "episodes only it can cut short: leave it 0"
            )
        with _names_missing_package(name):
            return suite(task, num_envs, seed=seed, **options, **extra)
    if action_repeat is None:
        with _names_missing_package(name, suite.extra):
            default = suite.default_repeat
            options["action_repeat"] = default(task) if callable(default) else default
    check_counts(name, num_envs, options["action_repeat"], episode_length)
    options["reset_solved"] = reset_solved
    with _names_missing_package(name, suite.extra):
        if suite.raw is not None:
            raw = suite.raw(task, **(kwargs or {}))
            if not isinstance(_SUITES[suite_name], str) or custom.is_own(name):
                check_raw(raw)
            return episodic(raw, num_envs, observe=observe, images=images, **options)
    if images.pixels and suite.pixels is None:
        raise ValueError(
            f"env.pixels=True: tasks of {suite_name}: are not drawn to be observed, only those of "
            "dmc: and gym: are (give your own `mbx.envs.Suite` a `pixels`)"
        )
    more = dict(metrics=list(metrics), observe=list(observe), first=first, **options)
    if workers and not film:
        plain = dict(more, kwargs=dict(kwargs or {}), images=images._asdict())
        return ParallelEnvironment(name, num_envs, workers, seed=seed, options=plain)
    seeds = np.random.SeedSequence(seed).generate_state(num_envs)
    return make_share(
        name, seeds, seed=seed, kwargs=kwargs, images=images._asdict(), film=film, **more
    )


def make_share(
    name: str,
    seeds: Sequence[int],
    *,
    seed: int | None = None,
    kwargs: Mapping[str, Any] | None = None,
    images: Mapping[str, Any] | None = None,
    film: bool = False,
    **options: Any,
) -> SteppedEnvironment:
    """A host environment of a task a seed, stepped in this process.

    Args:
        seeds: of the tasks.
        seed: of their first episodes; None: they wait for their `reset`.
        images: the fields of `Images` by name.
        name, kwargs, film, **options: as of `make`, complete.
    """
    suite_name, _, task = name.partition(":")
    suite, seen = _load(suite_name), Images(**(images or {}))
    load = suite.film if film and suite.film else suite.host
    if seen.pixels:
        load = functools.partial(suite.pixels, images=seen, film=film)
    with _names_missing_package(name, suite.extra):
        tasks = [load(task, int(one), **(kwargs or {})) for one in seeds]
    return SteppedEnvironment(name, tasks, seed=seed, images=seen, **options)


def make_renderer(name: str, **options: Any) -> Renderer:
    """What draws the states of the environment `SUITE:TASK`.

    Args:
        name: SUITE:TASK.
        **options: of the suite, as of `make`, where they change what a state is.

    Raises:
        ValueError: where its states are not drawn.
        NoRenderer: where this machine has nothing to draw them with.
        ImportError: where a package is missing; names the extra to install.

    Examples:
        >>> envs.make_renderer("no:such")
        Traceback (most recent call last):
            ...
        ValueError: env.name='no:such': pictures are made of the ...
    """
    suite, _, task = name.partition(":")
    maker = _renderer_maker(suite) if suite in _SUITES else None
    if maker is None:
        drawn = tuple(other for other in _SUITES if _renderer_maker(other) or films(f"{other}:"))
        raise ValueError(
            f"env.name={name!r}: pictures are made of the suites {drawn}; give "
            "`mbx.envs.register` a make_renderer for your own"
        )
    found = _load(suite)
    with _names_missing_package(name, found.extra if isinstance(found, Suite) else ""):
        return maker(task, **options)


def films(name: str) -> bool:
    """Whether the environment SUITE:TASK is one on the host that draws itself."""
    suite = name.partition(":")[0]
    return suite in _SUITES and getattr(_load(suite), "film", None) is not None


def _load(name: str) -> Suite | Factory:
    """A suite by its name, its module imported where it comes with the package."""
    found = _SUITES[name]
    if isinstance(found, str):
        module = importlib.import_module(found)
        found = getattr(module, "SUITE", None) or module.make
    return found


def _renderer_maker(name: str) -> Callable[[str], Renderer] | None:
    if name in _RENDERERS:
        return _RENDERERS[name]
    found = _SUITES[name]
    if isinstance(found, str):
        module = importlib.import_module(found)
        found = getattr(module, "SUITE", module)
    return getattr(found, "make_renderer", None)


@contextlib.contextmanager
def _names_missing_package(name: str, extra: str = "") -> Iterator[None]:
    """Raise the ImportError of a missing package with what to install."""
    try:
        yield
    except ImportError as error:
        if error.name is None:  # no module is missing: its own words
            raise ImportError(f"env.name={name!r}: {error}") from error
        remedy = f"pip install -e '.[{extra}]'" if extra else "pip install -e ."
        raise ImportError(f"env.name={name!r} needs {error.name}: {remedy}") from error
