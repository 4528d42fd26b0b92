"""Environments by name: suites, and `make`."""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from mbx.envs import custom
from mbx.envs.base import HostEnvironment, JaxEnvironment, Suite, check_counts, episodic, seeds_of
from mbx.envs.host import SteppedEnvironment
from mbx.envs.images import Images, check_no_parts
from mbx.envs.render import Renderer

Environment = JaxEnvironment | HostEnvironment
Factory = Callable[..., Environment]

# Modules with a `SUITE`.
_SUITES: dict[str, str | Suite] = {
    "gymnax": "mbx.envs.gymnax",
    "brax": "mbx.envs.brax",
    "playground": "mbx.envs.brax:PLAYGROUND",
    "gym": "mbx.envs.gymnasium",
    "jax": "mbx.envs.gymnax:CUSTOM",
    "dmc": "mbx.envs.dmc",
    "atari": "mbx.envs.suites:ATARI",
    "crafter": "mbx.envs.suites:CRAFTER",
    "bsuite": "mbx.envs.suites:BSUITE",
    "empo": "mbx.empo.suite",
    "multi": "mbx.envs.multi",
}


def register(
    name: str, suite: Suite | Factory, make_renderer: Callable[[str], Renderer] | None = None
) -> None:
    """Add a custom suite.

    Args:
        name: what stands before the colon in `SUITE:TASK`.
        suite: a `Suite`; or a function that makes vectorized environments,
            (task, num_envs, *, action_repeat, episode_length, seed) -> environment, where None
            leaves action_repeat and episode_length to the suite.
        make_renderer: task -> `Renderer`, for videos; None: the suite's own, if any.

    Examples:
        >>> envs.register("mine", envs.Suite(raw=make_raw))  # doctest: +SKIP
    """
    found = suite if isinstance(suite, Suite) else Suite(whole=suite)
    _SUITES[name] = found._replace(make_renderer=make_renderer or found.make_renderer)


def num_tasks(name: str) -> int:
    """Number of tasks in an environment's name: more than 1 for `multi:`."""
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
    """The environment `SUITE:TASK`, vectorized.

    Args:
        name: SUITE:TASK.
        num_envs: copies, stepped together.
        action_repeat: environment steps of an agent step; None: the suite's default.
        episode_length: agent steps of an episode; None: the task's own limit.
        seed: of host environments; JAX ones take keys.
        kwargs: the task's own arguments (suites gym, gymnax, jax and playground).
        metrics: numbers of `info` to average over episodes (suite gym).
        observe: parts of dictionary observations; empty: all but privileged ones.
        images: settings of observed images.
        film: make host environments that can `render`.
        workers: processes that step a host environment; 0: this process.
        reset_solved: agent steps in a row with nearly the highest reward after which three
            environments in four are reset (`mbx.envs.base.solved`); 0: never; None: automatic.
        first: number of the first environment, where several processes share a run.
        **extra: further arguments of the suite.

    Raises:
        ValueError: unknown suite or task, a count below one, a setting that the suite does not
            take, or a space that no agent can be trained on.
        FileNotFoundError: the file of a custom environment is missing.
        EnvironmentFailure: an environment's own code failed.
        ImportError: a package is missing; names the extra to install.
        NoRenderer: with `film` or `images.pixels`, where it cannot be drawn.
    """
    kind, colon, _ = name.partition(":")
    if not colon or kind not in _SUITES:
        raise ValueError(
            f"env.name={name!r}: write SUITE:TASK with a suite of {tuple(_SUITES)}, for example "
            "gymnax:Pendulum-v1"
        )
    (suite, task), several = _found(name), kind == "multi"
    options: dict[str, Any] = dict(action_repeat=action_repeat, episode_length=episode_length)
    cut = 0 if several else reset_solved
    _check_taken(name, suite, kwargs, metrics, workers, images, cut)
    with _names_missing_package(name, suite.extra):
        if suite.whole:
            check_no_parts(name, observe)
            extra |= dict(reset_solved=reset_solved, first=first) if several else {}
            return suite.whole(task, num_envs, seed=seed, **options, **extra)
        if action_repeat is None:
            default = suite.default_repeat
            options["action_repeat"] = default(task) if callable(default) else default
        check_counts(name, num_envs=num_envs, **options)
        options |= dict(reset_solved=reset_solved, observe=observe, images=images)
        if suite.raw:
            raw = suite.raw(task, **(kwargs or {}))
            if isinstance(_SUITES[kind], Suite) or custom.is_own(name):
                from mbx.envs.checks import check_raw  # it imports Gymnasium

                check_raw(raw)
            return episodic(raw, num_envs, **options)
    options |= dict(kwargs=dict(kwargs or {}), metrics=metrics, first=first)
    if workers and not film:
        from mbx.envs.vector import ParallelEnvironment

        return ParallelEnvironment(name, num_envs, workers, seed=seed, **options)
    return make_share(name, seeds_of(seed, num_envs), seed=seed, film=film, **options)


def _check_taken(
    name: str, suite: Suite, kwargs: Any, metrics: Any, workers: int, images: Images, cut: Any
) -> None:
    """Raise ValueError for settings that a suite does not take."""
    drawn = "env.pixels=True" if images.pixels else ""
    own = {"images", "film"} & set(kwargs or ())
    rows = [
        ("env.kwargs=", kwargs, suite.takes_kwargs, "takes no arguments (gym:, jax:, … do)"),
        ("env.metrics=", metrics, suite.gives_info, "has no `info` (gym: has)"),
        ("env.workers=", workers, suite.host, "is not stepped by processes (gym:, dmc: are)"),
        ("", images.settings(), not suite.whole, "has no images to change, single tasks have"),
        ("", drawn, suite.raw or suite.draws, "is not drawn to be observed (dmc:, gym: are)"),
        ("env.kwargs=", own, not suite.draws, "gets these from mbx"),
        ("train.reset_solved=", cut, not suite.whole, "makes whole environments"),
    ]
    for setting, value, taken, why in rows:
        if value and not taken:
            raise ValueError(f"{setting}{value}: {name} {why}: leave it out")


def make_share(
    name: str,
    seeds: Sequence[int],
    *,
    kwargs: Mapping[str, Any],
    images: Images,
    film: bool = False,
    **options: Any,
) -> SteppedEnvironment:
    """A host environment with one task per seed, stepped in this process.
    options are those of `SteppedEnvironment`.
    """
    suite, task = _found(name)
    load = suite.host
    if suite.draws:
        load = functools.partial(load, images=None if images == Images() else images, film=film)
    with contextlib.ExitStack() as opened, _names_missing_package(name, suite.extra):
        tasks = []
        for one in seeds:
            tasks.append(load(task, int(one), **kwargs))
            opened.callback(custom.close, name, tasks[-1])
        made = SteppedEnvironment(name, tasks, images=images, **options)
        opened.pop_all()  # it closes them
    return made


def make_renderer(name: str, **options: Any) -> Renderer:
    """Renderer of the environment `SUITE:TASK`; options as in `make`, where they change a state.
    Raises ValueError where states cannot be drawn, NoRenderer where this machine cannot draw,
    ImportError where a package is missing (names the extra to install).
    """
    suite, task = _found(name)
    if suite.make_renderer is None:
        own = "is not drawn: give `mbx.envs.register` a make_renderer for your own"
        itself = "draws itself: make it with film=True and call its render()"
        raise ValueError(f"env.name={name!r} {itself if suite.draws else own}")
    with _names_missing_package(name, suite.extra):
        return suite.make_renderer(task, **options)


def films(name: str) -> bool:
    """Whether a host environment draws itself."""
    return _found(name)[0].draws


def _found(name: str) -> tuple[Suite, str]:
    """Suite (an empty one where it is unknown) and task of SUITE:TASK."""
    suite, _, task = name.partition(":")
    found = _SUITES.get(suite, Suite())
    if isinstance(found, str):  # it comes with mbx
        place, _, what = found.partition(":")
        found = getattr(importlib.import_module(place), what or "SUITE")
    return found, task


@contextlib.contextmanager
def _names_missing_package(name: str, extra: str = "") -> Iterator[None]:
    """Raise ImportError with installation instructions for a missing package."""
    try:
        yield
    except ImportError as error:
        remedy = f"pip install 'mbx-rl[{extra}]'" if extra else "pip install mbx-rl"
        words = f" needs {error.name}: {remedy}" if error.name else f": {error}"
        raise ImportError(f"env.name={name!r}{words}") from error
