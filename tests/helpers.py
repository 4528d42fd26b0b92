"""What several tests use."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import importlib
import inspect
import json
import pathlib
import sys
import types
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.extend import core

FIXTURES = pathlib.Path(__file__).parent / "fixtures"


def load_fixture(group: str, name: str) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Arrays and configuration of a golden fixture: tests/fixtures/GROUP/NAME.npz and .json."""
    arrays = dict(np.load(FIXTURES / group / f"{name}.npz"))
    sidecar = json.loads((FIXTURES / group / f"{name}.json").read_text())
    return arrays, sidecar["config"]


@functools.cache
def program(function: Any, *given: Any) -> Any:
    """`function` with its first arguments given (settings, a model), compiled as one program.

    Called eagerly, it would be hundreds of small programs to compile.
    """
    return jax.jit(functools.partial(function, *given))


def one_program(function: Any) -> Any:
    """`function`, whose calls are one program each: of their arrays, with all else as it is given.

    Errors about numbers (not shapes) in arrays are not to be expected of it: they are traced.
    """
    traced = functools.cache(_of_arrays)

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        leaves, tree = jax.tree.flatten((args, options))
        arrays = [isinstance(x, jax.Array | np.ndarray | np.generic) for x in leaves]
        fixed = tuple(None if is_array else x for x, is_array in zip(leaves, arrays, strict=True))
        given = [x for x, is_array in zip(leaves, arrays, strict=True) if is_array]
        return traced(function, tree, tuple(arrays), _Typed(fixed))(given)

    return call


@dataclasses.dataclass(frozen=True)
class _Typed:
    """Values that are equal only if their types are: 1, 1.0 and True are three."""

    values: tuple[Any, ...]

    def __eq__(self, other: object) -> bool:
        assert isinstance(other, _Typed)
        return repr(self.values) == repr(other.values) and self.values == other.values

    def __hash__(self) -> int:
        return hash(self.values)


def _of_arrays(function: Any, tree: Any, arrays: tuple[bool, ...], fixed: _Typed) -> Any:
    @jax.jit
    def program(given: list[Any]) -> Any:
        rest = iter(given)
        pairs = zip(fixed.values, arrays, strict=True)
        args, options = tree.unflatten(next(rest) if is_array else x for x, is_array in pairs)
        return function(*args, **options)

    return program


def in_programs(module: Any, *names: str) -> Any:
    """A module of whose functions (all its own, or these) a call is one program to compile, not
    dozens of small ones."""
    own = names or [
        name
        for name, found in vars(module).items()
        if inspect.isfunction(found) and found.__module__ == module.__name__
    ]
    programs = {name: one_program(getattr(module, name)) for name in own}
    return types.SimpleNamespace(**(vars(module) | programs))


def compiled(model: Any) -> Any:
    """A world model whose networks are one program each, not hundreds of small ones to compile."""
    names = ("init", "encode", "step", "reward", "termination", "policy", "value", "act", "decode")
    return model._replace(**{name: jax.jit(getattr(model, name)) for name in names})


def active_only(default: Any, values: dict[str, Any]) -> dict[str, Any]:
    """`values` with every setting that has no effect put back to its default."""
    from mbx.settings import flatten, from_dict, inactive, put, to_dict

    settings = from_dict(default, values, check_effects=False)
    new, normal = to_dict(settings), dict(flatten(to_dict(default)))
    for name in inactive(settings):
        put(new, name, normal[name])
    return new


def tiny_config(**sections: dict[str, Any]) -> dict[str, Any]:
    """configs/tdmpc.py on the toy environment, small enough to compile in seconds.

    Keyword arguments update whole sections: tiny_config(train=dict(utd_ratio=2.0)).
    """
    from mbx.agents.tdmpc.settings import Settings
    from mbx.config import presets

    register_toy()
    config = presets.load("tdmpc")
    config.env.update(name="toy:point", num_envs=2)
    config.model.update(size="tiny", num_bins=21)
    config.planner.update(iterations=2, num_samples=12, num_elites=4, num_proposals=2)
    config.training_planner.update(iterations=2, num_samples=6, num_elites=3)
    config.replay.update(capacity=400, keep_targets=4)
    config.loss.update(batch_size=8, value_best_n=2, policy_loss="awr")
    config.reanalyze.update(batch_size=8, interval=2, min_step=0)
    config.train.update(steps=80, seed_steps=16, pretrain_updates=3, utd_ratio=0.5, log_interval=20)
    config.eval.update(interval=40, episodes=2, model=False)
    config.checkpoint.interval = 20
    for name, values in sections.items():
        config[name].update(values) if isinstance(values, dict) else config.update({name: values})
    with contextlib.suppress(ValueError):  # a mistake is for the test to find
        # What the keyword arguments leave without effect would be refused.
        return active_only(Settings(), config.to_dict())
    return config.to_dict()


def leave_untrained(workdir: str, config: dict[str, Any], spec: Any, noise: float = 0.0) -> None:
    """What a run of `config` leaves in its directory, before it has learned anything.

    noise: added to its numbers, among which some are zeros, so that values differ.
    """
    from mbx.training import build, rundir
    from mbx.training.checkpoint import Checkpointer
    from mbx.training.logging import RunLogger

    agent = build.build_agent(build.read(config), spec)
    RunLogger(workdir, config=config, quiet=True).close()
    rundir.save_spec(spec, workdir)
    checkpointer, draw = Checkpointer(workdir), np.random.default_rng(3)
    state = jax.tree.map(
        lambda x: x + noise * draw.standard_normal(x.shape, "f4") if x.dtype == "f4" else x,
        jax.jit(agent.init)(jax.random.key(3)),
    )
    checkpointer.save_best(5, state, 1.0)
    checkpointer.close()


def overridden(config: str, overrides: Any) -> dict[str, Any]:
    """A configuration file's settings with "section.name=value" changed, as on the command line.

    config: "configs/tdmpc.py". Raises KeyError for a setting that it does not have.
    """
    module = config.removesuffix(".py").replace("/", ".")
    values = importlib.import_module(module).get_config().to_dict()
    for override in overrides:
        path, text = override.split("=", 1)
        *sections, name = path.split(".")
        section = functools.reduce(lambda found, key: found[key], sections, values)
        kind = type(section[name])
        section[name] = text == "True" if kind is bool else kind(text)
    return values


def register_toy() -> None:
    """toy:point, a point that actions push about; toy:ends, which also terminates by itself;
    toy:line, one-dimensional."""
    from mbx import envs

    def factory(task, num_envs, *, action_repeat, episode_length, seed):
        return envs.episodic(
            _point(task),
            num_envs,
            action_repeat=action_repeat or 1,
            episode_length=episode_length or 7,
        )

    envs.register("toy", factory)


def _point(task: str):
    import jax
    import jax.numpy as jnp

    from mbx import envs

    dims = 1 if task == "line" else 2

    def reset(key):
        x = jax.random.uniform(key, (dims,), minval=-1.0)
        return x, x

    def step(key, state, action):
        x = 0.9 * state + 0.3 * action + 0.01 * jax.random.normal(key, (dims,))
        return x, x, -jnp.sum(jnp.square(x)), (x[0] > 0.8) & (task == "ends")

    return envs.RawEnvironment(f"toy:{task}", (dims,), jnp.float32, dims, 7, reset, step)


def recorded(settings: Any, read: set[str], prefix: str = "") -> Any:
    """`settings`, which put the dotted name of every setting that is read into `read`."""
    sections = {f.name: getattr(settings, f.name) for f in dataclasses.fields(settings)}
    names = {name for name, value in sections.items() if not dataclasses.is_dataclass(value)}

    def look(self: Any, name: str) -> Any:
        copying = sys._getframe(1).f_globals["__name__"] == "dataclasses"
        if name in names and not copying:
            read.add(prefix + name)
        return object.__getattribute__(self, name)

    kind = type(settings)
    new = type(kind.__name__, (kind,), {"__getattribute__": look, "__module__": kind.__module__})
    return new(
        **{
            name: value if name in names else recorded(value, read, f"{prefix}{name}.")
            for name, value in sections.items()
        }
    )


def other_value(declared):
    """Another legal value of a setting (`mbx.settings.Declared`)."""
    value = declared.default
    if declared.allowed.startswith("one of"):
        choices = declared.allowed.removeprefix("one of ").split(", ")
        return next(choice for choice in choices if choice != str(value))
    if isinstance(value, bool):
        return not value
    if isinstance(value, tuple):
        return tuple(x + 2 if isinstance(x, int) else 0.5 * x for x in value)
    if isinstance(value, int):
        return value + 2
    return 0.75 * value if value else 0.5


# -------------------------------------------------------------------------------------------------
# Programs that are traced and compiled

_EVENTS = {
    "/jax/core/compile/jaxpr_trace_duration": "traced",
    "/jax/core/compile/backend_compile_duration": "compiled",  # also where the cache has it
}
_counted: list[collections.Counter] = []


def _listen(event: str, seconds: float, **labels: str) -> None:
    if event in _EVENTS:
        name = labels["fun_name"].removeprefix("jit(").removesuffix(")").split(" ")[0]
        for counter in _counted:
            counter[_EVENTS[event], name] += 1


jax.monitoring.register_event_duration_secs_listener(_listen)


@contextlib.contextmanager
def counting():
    """A counter of (traced or compiled, program) that fills while it is open."""
    counter = collections.Counter()
    _counted.append(counter)
    try:
        yield counter
    finally:
        _counted.remove(counter)


FUSED = ("init_state", "train_interval", "evaluation")
HOST = ("init_state", "train_act", "train_store", "train_learn", "evaluation")


def programs_of(counter: collections.Counter) -> dict[tuple[str, str], int]:
    """How often each program of a run was traced and compiled."""
    ours = ("train_", "evaluation", "init_state")
    return {key: count for key, count in counter.items() if key[1].startswith(ours)}


def once(*programs: str) -> dict[tuple[str, str], int]:
    """What `programs_of` is where these were traced and compiled once, and no other."""
    return {(how, name): 1 for how in _EVENTS.values() for name in programs}


# Parts of a batch that are put together by `mbx.fast.collectives`, where tests divide one.
PARTS = 4


def in_parts(function: Any, axes: Any, *args: Any) -> Any:
    """`function` of every part of a batch, `[PARTS, ...]`, each seeing the others as on devices.

    axes: for each argument the axis of its leaves that is divided, None for none; or a tree of
    those, as the argument is one.
    """
    from mbx.fast import collectives

    def split(axis: int | None, tree: Any) -> Any:
        def one(x: Any) -> Any:
            shape = (*x.shape[:axis], PARTS, x.shape[axis] // PARTS, *x.shape[axis + 1 :])
            return jax.numpy.moveaxis(jax.numpy.asarray(x).reshape(shape), axis, 0)

        return tree if axis is None else jax.tree.map(one, tree)

    def part(*own: Any) -> Any:
        with collectives._axes(("parts",)):
            return function(*own)

    none = functools.partial(jax.tree.map, is_leaf=lambda x: x is None)
    parts = [none(split, axis, tree) for axis, tree in zip(axes, args, strict=True)]
    lanes = [none(lambda axis: None if axis is None else 0, axis) for axis in axes]
    return jax.vmap(part, in_axes=lanes, axis_name="parts")(*parts)


def equations(jaxpr: Any) -> Iterator[Any]:
    """Every equation of a jaxpr and of those inside of it, in their order."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in core.jaxprs_in_params(equation.params):
            yield from equations(inner)


def exchanges(function: Any, *args: Any) -> list[tuple[str, int]]:
    """Name and numbers of every exchange of a program for PARTS devices, in their order.

    Traced alone, so that the devices need not be there.
    """
    from mbx.fast import collectives

    kinds = ("psum", "pmax", "pmin", "all_", "ppermute", "reduce_scatter")
    mesh = jax.sharding.AbstractMesh((PARTS,), ("data",), (jax.sharding.AxisType.Auto,))
    with jax.sharding.use_abstract_mesh(mesh), collectives.data_parallel():
        jaxpr = jax.make_jaxpr(function)(*args).jaxpr
    return [
        (equation.primitive.name, sum(x.aval.size for x in equation.outvars))
        for equation in equations(jaxpr)
        if equation.primitive.name.startswith(kinds)
    ]
