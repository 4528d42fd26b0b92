"""Custom environments, named by where they are defined.

    gym:path/to/tank.py:Tank       a Gymnasium class, or a function that makes one
    gym:package.module:Tank        a class or a function, from a module
    gym:module:Tank-v0             an id that importing the module registers
    jax:path/to/rail.py:make       gymnax's interface, or a `RawEnvironment`

A run records absolute paths of files; an installed module keeps its name. From Python, `name_of`
names a class, a function, a `functools.partial` or what `gymnasium.make` returned.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import importlib
import importlib.util
import inspect
import os
import sys
import types
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from mbx.config import extensions

SUITES = ("gym", "jax")
WORKER = "MBX_WORKER"  # environment variable of the processes of `env.workers`


class EnvironmentFailure(RuntimeError):
    """Error in an environment's own code, kept as `__cause__` with its traceback."""


@contextlib.contextmanager
def own_code(name: str, what: str, passed: tuple = ()) -> Iterator[None]:
    """Re-raise errors of an environment's own code, except `passed`, as `EnvironmentFailure`."""
    try:
        yield
    except (EnvironmentFailure, *passed):
        raise
    except Exception as error:
        words = f"{what} raised {type(error).__name__}: {error}"
        raise EnvironmentFailure(f"env.name={name!r}: {words}") from error


def is_own(name: str) -> bool:
    """Whether a name says where a custom environment is defined."""
    return name.startswith(tuple(f"{suite}:" for suite in SUITES)) and name.count(":") > 1


def own_names(name: str) -> list[str]:
    """The custom environments in a name."""
    names = name.removeprefix("multi:").split("+") if name.startswith("multi:") else [name]
    return [one for one in names if is_own(one)]


def located(name: str) -> str:
    """`name` with the absolute path of a custom environment's file; other names are unchanged.
    Raises FileNotFoundError where there is no such file or module.
    """
    if name.startswith("multi:"):
        return "multi:" + "+".join(map(located, name.removeprefix("multi:").split("+")))
    if not is_own(name):
        return name
    suite, place, what = _split(name)
    return f"{suite}:{_file_of(name, place) or place}:{what}"


def label(name: str) -> str:
    """Short name for directories: gym-Tank for gym:path/to/tank.py:Tank."""
    suite, _, what = _split(name)
    return f"{suite}-{what}" if is_own(name) else name.replace(":", "-")


def _split(name: str) -> tuple[str, str, str]:
    suite, _, task = name.partition(":")
    place, _, what = task.rpartition(":")
    return suite, place, what


def find(name: str) -> Any:
    """The class, function, object or id (`str`) that a name stands for.
    Raises FileNotFoundError for a missing file or module, ValueError where it does not define the
    name, EnvironmentFailure where importing it fails.
    """
    suite, place, what = _split(name)
    path = _file_of(name, place)
    if name in _GIVEN:
        return _GIVEN[name]
    with own_code(name, f"importing {path or place}"):
        module = _import(path) if path else importlib.import_module(place)
    if (found := _defined(module, what)) is not None:
        return found
    import gymnasium

    if suite == "gym" and what in gymnasium.registry:
        return what
    close = difflib.get_close_matches(what, [n for n in vars(module) if n[0] != "_"], cutoff=0.4)
    raise ValueError(f"env.name={name!r}: {path or place} has no {what!r}: did you mean {close}?")


def _defined(module: Any, what: str) -> Any:
    """What a module has under a dotted name, or None."""
    try:
        return functools.reduce(getattr, what.split("."), module)
    except AttributeError:
        return None


def make(name: str, kwargs: Mapping[str, Any]) -> Any:
    """Make a custom environment with the arguments `kwargs`.
    Raises as `find`, and ValueError for arguments that it does not take.
    """
    found = find(name)
    if isinstance(found, str):
        return make_registered(name, found, kwargs)
    if not callable(found):
        if kwargs:
            raise ValueError(f"env.kwargs={dict(kwargs)}: {name} is an object, leave them out")
        return found
    try:
        inspect.signature(found).bind(**kwargs)
    except TypeError as error:
        raise ValueError(
            f"env.kwargs={dict(kwargs)}: {name} takes {inspect.signature(found)} ({error}): "
            "give its arguments as --config.env.kwargs.NAME=VALUE"
        ) from error
    except ValueError:  # of a builtin nobody knows the signature
        pass
    with own_code(name, f"{name.rpartition(':')[2]}()"):
        return found(**kwargs)


def make_registered(name: str, task: str, kwargs: Mapping[str, Any]) -> Any:
    """`gymnasium.make(task, **kwargs)` for the environment SUITE:TASK.
    Raises ValueError for an unregistered task, missing packages or unknown arguments; ImportError
    where the task has moved to another package; EnvironmentFailure where its own code fails.
    """
    import gymnasium

    try:
        with own_code(name, "making it", passed=(ImportError, gymnasium.error.Error)):
            return gymnasium.make(task, **kwargs)
    except gymnasium.error.Error as error:
        words = str(error)
        if isinstance(error, gymnasium.error.UnregisteredEnv):
            close = difflib.get_close_matches(task, list(gymnasium.registry), n=3, cutoff=0.6)
            words = f"{words.removesuffix('.')} (similar names: {close}); a task that a package "
            words += f"registers is gym:PACKAGE:{task}"
        raise ValueError(f"env.name={name!r}: {words}") from error
    except EnvironmentFailure as failed:
        if isinstance(error := failed.__cause__, TypeError) and kwargs:
            raise ValueError(f"env.kwargs={dict(kwargs)}: {name}: {error}") from error
        raise


def close(name: str, environment: Any, stacklevel: int = 2) -> None:
    """Close an environment; an error in its own code becomes a warning."""
    try:
        if hasattr(environment, "close"):
            environment.close()
    except Exception as error:
        words = f"env.name={name!r}: close() raised {type(error).__name__}: {error}"
        warnings.warn(words, stacklevel=stacklevel)


def check_guard() -> None:
    """Raise EnvironmentFailure in a worker whose import of the user's script starts a run."""
    if os.environ.get(WORKER):
        raise EnvironmentFailure(
            "env.workers: a worker imports this script to find its environment, and the script "
            'begins a run at its top: guard it with if __name__ == "__main__":'
        )


# -------------------------------------------------------------------------------------------------
# From Python

_GIVEN: dict[str, Callable[..., Any]] = {}  # what cannot be imported, in this process


def name_of(environment: Any) -> tuple[str, dict[str, Any]]:
    """`env.name` and `env.kwargs` by which a run records an environment given from Python.
    The environment is a class or a function without required arguments, a `functools.partial` of
    one, or what `gymnasium.make` returned (never stepped: a run makes copies). What cannot be
    imported again (a lambda, a class in a notebook's cell) is found by this process alone.
    Raises ValueError for an instance that cannot be copied; EnvironmentFailure in a worker of
    `env.workers`, which imports a script that trains.
    """
    check_guard()
    target, kwargs = environment, {}
    if isinstance(target, functools.partial):
        if target.args:
            raise ValueError(
                f"environment={environment}: give functools.partial its arguments by name"
            )
        target, kwargs = target.func, dict(target.keywords)
    elif not isinstance(target, type | types.FunctionType | types.MethodType):
        return _name_of_instance(target)
    what, path = target.__qualname__, _source(target)  # an environment may change the directory
    suite = _suite(made := target(**kwargs))
    close(f"{suite}:{what}", made)
    if path and _defined(sys.modules.get(target.__module__), what) is target:
        return f"{suite}:{path}:{what}", kwargs
    _GIVEN[name := f"{suite}:python:{what}"] = target
    return name, kwargs


def _name_of_instance(instance: Any) -> tuple[str, dict[str, Any]]:
    import gymnasium

    kind, spec = type(instance), getattr(instance, "spec", None)
    if isinstance(instance, gymnasium.vector.VectorEnv):
        raise ValueError(
            f"environment={kind.__name__}(…) is a vector environment: give one that env.num_envs "
            "makes copies of"
        )
    if spec is not None and _suite(instance) == "gym" and spec.id in gymnasium.registry:
        return _name_of_registered(instance, spec)
    if isinstance(instance, gymnasium.Wrapper):
        raise _copies_unknown(instance, f"how {kind.__name__} was put around it")
    if not hasattr(instance, "reset") or isinstance(instance, tuple):
        raise ValueError(
            f"environment={instance!r}: give its name, SUITE:TASK, a class, or a function that "
            "makes it"
        )
    raise _copies_unknown(instance, "its arguments")


def _copies_unknown(instance: Any, what: str) -> ValueError:
    kind = type(instance).__name__
    return ValueError(
        f"environment={kind}(…): a run makes copies of it and cannot know {what}: give a class, "
        "functools.partial(CLASS, ARGUMENT=…) or a function that makes it"
    )


def _name_of_registered(instance: Any, spec: Any) -> tuple[str, dict[str, Any]]:
    """Name and arguments of an environment from `gymnasium.make`, with its time limit."""
    import gymnasium

    kwargs, known, around = dict(spec.kwargs), gymnasium.registry[spec.id], spec.additional_wrappers
    if spec.max_episode_steps != known.max_episode_steps:
        kwargs["max_episode_steps"] = spec.max_episode_steps or -1
    if around and around != known.additional_wrappers:
        raise _copies_unknown(instance, f"how {around[-1].name} was put around {spec.id}")
    kind = type(instance.unwrapped)
    if kind.__module__.startswith("gymnasium."):
        return f"gym:{spec.id}", kwargs
    place = kind.__module__
    if place == "__main__" and not (place := _source(kind) or ""):
        _GIVEN[name := f"gym:python:{spec.id}"] = functools.partial(gymnasium.make, spec.id)
        return name, kwargs
    return f"gym:{place}:{spec.id}", kwargs


def _suite(made: Any) -> str:
    """Suite of an object: jax for gymnax's interface and `RawEnvironment`, else gym."""
    return "jax" if isinstance(made, tuple) or hasattr(made, "step_env") else "gym"


# -------------------------------------------------------------------------------------------------
# Files and modules


def _source(target: Any) -> str | None:
    """Absolute path of the file that defines a class or a function, or None."""
    try:
        path = inspect.getsourcefile(target)
    except (TypeError, OSError):  # a builtin, a notebook's cell
        return None
    return os.path.abspath(path) if path and os.path.isfile(path) else None


def _file_of(name: str, place: str) -> str | None:
    """File of a custom environment; None for an installed module."""
    if name in _GIVEN:
        return None
    if place == "python":
        raise FileNotFoundError(
            f"env.name={name!r} was given from Python by a function that no file defines at its "
            "top: define it in a file, or give it again: mbx.train(ENVIRONMENT, …)"
        )
    if place.endswith(".py") or os.sep in place:
        path = os.path.abspath(os.path.expanduser(place))
        if not os.path.isfile(path):
            raise FileNotFoundError(
                f"env.name={name!r}: the file {path} does not exist: put it there, or correct the "
                "path (of a run: env.name in its config.json)"
            )
        return path
    if place.partition(".")[0] in sys.stdlib_module_names:
        raise ValueError(f"env.name={name!r}: {place} is a module of Python's own, no environment")
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.append(os.getcwd())
    if (spec := _spec(place)) is None:
        raise FileNotFoundError(
            f"env.name={name!r}: there is no module {place!r} in the working directory or on "
            "Python's path: give the file, path/to/file.py:Class, or install the module"
        )
    origin = os.path.abspath(spec.origin or "")
    installed = not {"site-packages", "dist-packages"}.isdisjoint(origin.split(os.sep))
    return None if installed or not origin.endswith(".py") else origin


def _spec(module: str) -> importlib.machinery.ModuleSpec | None:
    try:
        return importlib.util.find_spec(module)
    except (ModuleNotFoundError, ValueError):
        return None


def _import(path: str) -> types.ModuleType:
    """The module of a file, imported once for all spellings of its path."""
    for module in list(sys.modules.values()):
        place = getattr(module, "__file__", None)
        if isinstance(place, str) and os.path.abspath(place) == path:
            return module
    root, last = os.path.split(path.removesuffix(".py"))
    parts = [] if last == "__init__" else [last]
    while os.path.isfile(os.path.join(root, "__init__.py")):
        root, package = os.path.split(root)
        parts.insert(0, package)
    if root not in sys.path:
        sys.path.append(root)  # it may import modules of its folder
    dotted = ".".join(parts)
    spec = _spec(dotted)
    if spec is not None and spec.origin and os.path.abspath(spec.origin) == path:
        return importlib.import_module(dotted)
    # Another module may have the name.
    return extensions.execute(path, f"mbx_own_{abs(hash(path)):x}_{parts[-1]}")
