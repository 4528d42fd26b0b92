"""Examples in docstrings of the kit and of training's interface are true.

In scope of an example are jax, jnp, np, mbx and the modules below, by their last name. What would
train, or needs a run, is marked +SKIP; tests/test_api.py runs it. Examples compile every operation
alone, so that those of the modules with the most of them are slow tests.
"""

from __future__ import annotations

import doctest
import importlib
import inspect
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mbx

KIT = (
    "returns mppi categorical planners planners.cem planners.predictive planners.bases "
    "planners.tuning planners.evosax replay distributions networks world_model "
    "successors heads fast.gradients fast.collectives types observations fast.rng power api"
).split()
# Where not all that is public is meant for users (docs/interface.md).
TRAINING = {
    "envs": ("make", "register", "num_tasks", "make_renderer"),
    "training.run": ("train", "load"),
    "training.policy": ("load_policy",),
    "training.build": ("build_agent",),
}
MODULES = [importlib.import_module(f"mbx.{name}") for name in (*KIT, *TRAINING)]
MANY = {f"mbx.{name}" for name in ("distributions", "replay", "networks", "power")}
SCOPE = {"jax": jax, "jnp": jnp, "np": np, "mbx": mbx, "presets": mbx.presets}
SCOPE |= {module.__name__.rpartition(".")[2]: module for module in MODULES}
OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def functions(module: types.ModuleType) -> dict[str, types.FunctionType]:
    """A module's public functions; of a package those that it hands on, too."""
    wanted = TRAINING.get(module.__name__.removeprefix("mbx."))
    found = {}
    for name, value in vars(module).items():
        function = inspect.unwrap(value) if callable(value) else value
        if name.startswith("_") or not inspect.isfunction(function):
            continue
        package = hasattr(module, "__path__") and function.__module__.startswith(module.__name__)
        if function.__module__ == module.__name__ or package:
            found[name] = function
    return {name: found[name] for name in wanted} if wanted else found


@pytest.mark.parametrize(
    "module",
    [
        pytest.param(module, marks=[pytest.mark.slow] if module.__name__ in MANY else [])
        for module in MODULES
    ],
    ids=lambda module: module.__name__,
)
def test_examples_are_true(module):
    runner = doctest.DocTestRunner(optionflags=OPTIONS)
    said = []
    for name, function in functions(module).items():
        text, where = inspect.getdoc(function), f"{module.__name__}.{name}"
        case = doctest.DocTestParser().get_doctest(text, dict(SCOPE), where, None, 0)
        runner.run(case, out=said.append)
    assert not runner.summarize(verbose=False).failed, "".join(said)


def test_a_wrong_example_is_found():
    case = doctest.DocTestParser().get_doctest(">>> 1 + 1\n3\n", {}, "wrong", None, 0)
    runner = doctest.DocTestRunner(optionflags=OPTIONS)
    runner.run(case, out=lambda text: None)
    assert runner.failures == 1
