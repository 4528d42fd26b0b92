"""Environments of one's own, named by where they are defined.

    gym:path/to/tank.py:Tank       a Gymnasium class, or a function that makes one
    gym:package.module:Tank        likewise, from a module
    gym:module:Tank-v0             an id that importing the module registers
    jax:path/to/rail.py:make       gymnax's interface, or a `RawEnvironment` (mbx.envs.jax_own)

A run records the absolute path of a file, so that it is found from any directory; a module that is
installed keeps its name. From Python a class, a function, a `functools.partial` or an instance is
named by `name_of`.
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
import sysconfig
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

SUITES = ("gym", "jax")


class EnvironmentFailure(RuntimeError):
    """An error inside an environment's own code, which is its `__cause__`, with its traceback."""


@contextlib.contextmanager
def own_code(name: str, what: str) -> Iterator[None]:
    """Raise what an environment's own code raises as an `EnvironmentFailure` that names both."""
    try:
        yield
    except EnvironmentFailure:
        raise
    except Exception as error:
        raise failure(name, what, error) from error


def failure(name: str, what: str, error: Exception) -> EnvironmentFailure:
    """The `EnvironmentFailure` for an error in `what` (`step()`, say) of an environment."""
    return EnvironmentFailure(f"env.name={name!r}: {what} raised {type(error).__name__}: {error}")


def is_own(name: str) -> bool:
    """Whether SUITE:TASK says where an environment is defined."""
    suite, _, task = name.partition(":")
    return suite in SUITES and ":" in task


def own_names(name: str) -> list[str]:
    """The environments of one's own among those that a name stands for."""
    names = name.removeprefix("multi:").split("+") if name.startswith("multi:") else [name]
    return [one for one in names if is_own(one)]


def located(name: str) -> str:
    """`name` with the absolute path of the file in which an environment of one's own is defined.

    Modules that are installed keep their names, and so does every other environment.

    Raises:
        FileNotFoundError: where there is no such file or module.
    """
    if name.startswith("multi:"):
        return "multi:" + "+".join(map(located, name.removeprefix("multi:").split("+")))
    if not is_own(name):
        return name
    suite, _, task = name.partition(":")
    place, _, what = task.rpartition(":")
    return f"{suite}:{_file_of(name, place) or place}:{what}"


def label(name: str) -> str:
    """A short name for directories: gym-Tank of gym:path/to/tank.py:Tank."""
    suite, _, task = name.partition(":")
    return f"{suite}-{task.rpartition(':')[2]}" if is_own(name) else name.replace(":", "-")


def find(name: str) -> Any:
    """What an environment's name stands for: a class, a function, an object, or its id (`str`).

    Raises:
        FileNotFoundError: where the file or the module has gone.
        ValueError: where it does not define that name.
        EnvironmentFailure: where importing it fails.
    """
    suite, _, task = name.partition(":")
    place, _, what = task.rpartition(":")
    path = _file_of(name, place)
    with own_code(name, f"importing {path or place}"):
        module = _import(path) if path else importlib.import_module(place)
    with contextlib.suppress(AttributeError):
        return functools.reduce(getattr, what.split("."), module)
    if suite == "gym":
        import gymnasium

        if what in gymnasium.registry:
            return what
    close = difflib.get_close_matches(what, [n for n in vars(module) if n[0] != "_"], cutoff=0.4)
    raise ValueError(f"env.name={name!r}: {path or place} has no {what!r}: did you mean {close}?")


def make(name: str, kwargs: Mapping[str, Any]) -> Any:
    """The object that an environment's name stands for, made with the arguments `kwargs`.

    Raises as `find`, and ValueError where it does not take these arguments.
    """
    found = _GIVEN.get(name) or find(name)
    if isinstance(found, str):
        import gymnasium

        with own_code(name, "making it"):
            return gymnasium.make(found, **kwargs)
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


# -------------------------------------------------------------------------------------------------
# From Python

_GIVEN: dict[str, Callable[..., Any]] = {}  # what cannot be imported, in this process


def name_of(environment: Any) -> tuple[str, dict[str, Any]]:
    """Name and arguments by which a run records an environment that was given from Python.

    Args:
        environment: a class or a function without required arguments, a `functools.partial` of
            one, or an instance (which is not stepped itself: a run makes copies of its own).

    Returns:
        `env.name` and `env.kwargs`. What cannot be imported again (a lambda, a class inside a
        function) is found by this process alone.

    Raises:
        ValueError: for an instance of which copies cannot be made.
    """
    target, kwargs = environment, {}
    if isinstance(target, functools.partial):
        if target.args:
            raise ValueError(
                f"environment={environment}: give functools.partial its arguments by name"
            )
        target, kwargs = target.func, dict(target.keywords)
    elif not isinstance(target, type | types.FunctionType | types.MethodType):
        return _name_of_instance(target)
    suite = _suite(target(**kwargs))
    what, path = target.__qualname__, inspect.getsourcefile(target)
    if path and "<" not in what:
        name = f"{suite}:{os.path.abspath(path)}:{what}"
        with contextlib.suppress(AttributeError):
            if functools.reduce(getattr, what.split("."), sys.modules[target.__module__]) is target:
                return name, kwargs
    name = f"{suite}:python:{what}"
    _GIVEN[name] = target
    return name, kwargs


def _name_of_instance(instance: Any) -> tuple[str, dict[str, Any]]:
    spec = getattr(instance, "spec", None)
    if spec is not None and _suite(instance) == "gym":
        import gymnasium

        if gymnasium.registry.get(spec.id) is not None:
            module = getattr(inspect.getmodule(type(instance.unwrapped)), "__name__", "")
            place = "" if module.startswith("gymnasium.") else f"{module}:"
            return f"gym:{place}{spec.id}", dict(spec.kwargs)
    kind, kwargs = type(instance), dict(getattr(instance, "_ezpickle_kwargs", None) or {})
    if callable(instance) and not hasattr(instance, "reset"):
        raise ValueError(f"environment={instance!r}: give a function or a class")
    unknown = [name for name in inspect.signature(kind).parameters if name not in kwargs]
    if unknown:
        raise ValueError(
            f"environment={kind.__name__}(…): a run makes copies of it and cannot know which "
            f"{unknown[0]} this one was made with: give the class {kind.__name__}, or "
            f"functools.partial({kind.__name__}, {unknown[0]}=…)"
        )
    return name_of(functools.partial(kind, **kwargs))


def _suite(made: Any) -> str:
    """The suite that steps an object: jax for gymnax's interface and ours, gym for Gymnasium's."""
    functional = isinstance(made, tuple) or hasattr(made, "step_env")
    return "jax" if functional else "gym"


# -------------------------------------------------------------------------------------------------
# Files and modules


def _file_of(name: str, place: str) -> str | None:
    """The file of an environment's place; None for a module that is installed."""
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
                f"env.name={name!r}: the file {path} does not exist: put it there, or mend the "
                "path (of a run: env.name in its config.json)"
            )
        return path
    if place.partition(".")[0] in sys.stdlib_module_names:
        raise ValueError(f"env.name={name!r}: {place} is a module of Python's own, no environment")
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.append(os.getcwd())
    try:
        spec = importlib.util.find_spec(place)
    except (ModuleNotFoundError, ValueError):
        spec = None
    if spec is None:
        raise FileNotFoundError(
            f"env.name={name!r}: there is no module {place!r} in the working directory or on "
            "Python's path: give the file, path/to/file.py:Class, or install the module"
        )
    paths = sysconfig.get_paths()
    installed = [paths[kind] + os.sep for kind in ("purelib", "platlib", "stdlib")]
    origin = spec.origin
    if not origin or not origin.endswith(".py") or origin.startswith(tuple(installed)):
        return None
    return os.path.abspath(origin)


def _import(path: str) -> types.ModuleType:
    """The module of a file, imported once however it is named."""
    for module in list(sys.modules.values()):
        own = getattr(module, "__file__", None)
        if isinstance(own, str) and os.path.abspath(own) == path:
            return module
    root, parts = os.path.split(path.removesuffix(".py"))
    parts = [parts]
    while os.path.isfile(os.path.join(root, "__init__.py")):
        root, package = os.path.split(root)
        parts.insert(0, package)
    if parts[-1] == "__init__":
        parts.pop()
    if root not in sys.path:
        sys.path.append(root)  # so that it can import what lies beside it
    dotted = ".".join(parts)
    with contextlib.suppress(ModuleNotFoundError):
        spec = importlib.util.find_spec(dotted)
        if spec is not None and spec.origin and os.path.abspath(spec.origin) == path:
            return importlib.import_module(dotted)
    dotted = f"mbx_own_{abs(hash(path)):x}_{parts[-1]}"  # another module has the name
    spec = importlib.util.spec_from_file_location(dotted, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[dotted] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[dotted]
        raise
    return module
