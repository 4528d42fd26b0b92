"""Training in three lines of Python.

import mbx
agent, state, metrics = mbx.train("gymnax:Pendulum-v1", config="tdmpc", steps=10_000, seed=0)
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

from mbx.agents.base import Agent
from mbx.analysis import report
from mbx.config import presets
from mbx.envs import custom
from mbx.settings import describe
from mbx.training import build, pure, run
from mbx.training.metrics import read_rows


def train(
    environment: Any,
    config: str | Mapping[str, Any] = "tdmpc",
    *,
    steps: int | None = None,
    seed: int = 0,
    workdir: str | None = None,
    **settings: Any,
) -> tuple[Agent, Any, list[dict[str, Any]]]:
    """Train an agent.

    Args:
        environment: its name, SUITE:TASK; or a class, a function that makes it, a
            `functools.partial` of one, or an instance (`mbx.envs.custom.name_of`).
        config: a configuration that comes with mbx, by name, a file, or nested mappings.
        steps: environment steps; None: the configuration's.
        seed: of everything.
        workdir: the run directory; None: runs/TASK-sSEED-TIME.
        **settings: further settings: whole sections, `model=dict(size="1")`, or single ones by
            their last name where only one section has it, `batch_size=64`.

    Returns:
        The agent, the train state that evaluated best (the last one where none did), and the rows
        of the log, dictionaries with `kind` ("train", "eval") and `step`.

    Raises:
        ValueError: for impossible settings or environments, before anything compiles.

    Examples:
        >>> agent, state, rows = mbx.train("gymnax:Pendulum-v1", steps=10_000)  # doctest: +SKIP
    """
    values = _values(environment, config, steps, settings)
    values["seed"] = seed
    workdir = workdir or default_workdir(values)
    run.train(values, workdir, at_end=report.at_end)
    rows = read_rows(os.path.join(_first(values, workdir), "metrics.jsonl"))
    scored = any(row.get("return_mean") is not None for row in rows)
    agent, state, _ = run.load(
        _first(values, workdir), which="best" if scored else "latest", trusted=True
    )
    return agent, state, rows


def train_fn(
    environment: Any,
    config: str | Mapping[str, Any] = "tdmpc",
    *,
    steps: int | None = None,
    axis_name: str | None = None,
    batched: bool | None = None,
    **settings: Any,
) -> pure.TrainFunction:
    """A run as a pure function, for `jax.jit` and `jax.vmap`: it writes no files.

    Args:
        environment, config, steps, settings: as of `train`; the environment is written in JAX.
        axis_name: that of the `vmap` the function will be under; with it runs made together are
            faster.
        batched: whether a `vmap` makes its runs together or one after another inside the same
            program, each as it is alone (None: together unless on a processor).

    Returns:
        `run(seed, settings={}) -> mbx.training.pure.Trained`. seed, and settings by full names,
        `{"optimizer.learning_rate": rate}`, may be traced.

    Raises:
        ValueError: for impossible settings or environments.

    Examples:
        >>> run = mbx.train_fn("gymnax:Pendulum-v1", steps=5_000)  # doctest: +SKIP
        >>> trained = jax.jit(jax.vmap(run))(jnp.arange(4))  # doctest: +SKIP
    """
    return pure.make_train(_values(environment, config, steps, settings), axis_name, batched)


def _values(
    environment: Any,
    config: str | Mapping[str, Any],
    steps: int | None,
    settings: Mapping[str, Any],
) -> dict[str, Any]:
    """The configuration that the arguments of `train` stand for."""
    values = presets.load(config).to_dict() if isinstance(config, str) else _copy(config)
    if isinstance(environment, str):
        values["env"]["name"] = environment
    else:
        values["env"]["name"], values["env"]["kwargs"] = custom.name_of(environment)
    if steps is not None:
        values["train"]["steps"] = steps
    for name, value in settings.items():
        _change(values, name, value)
    return values


def default_workdir(config: Mapping[str, Any]) -> str:
    """runs/ENVIRONMENT-sSEED-TIME.

    Examples:
        >>> config = presets.load("tdmpc").to_dict()
        >>> api.default_workdir(config)[:26]  # and the time
        'runs/gymnax-Pendulum-v1-s0'
    """
    task = custom.label(config["env"]["name"])
    return os.path.join("runs", f"{task}-s{config['seed']}-{time.strftime('%Y%m%d-%H%M%S')}")


def _first(values: Mapping[str, Any], workdir: str) -> str:
    """The directory of the run's first seed."""
    several = values.get("num_seeds", 1) > 1
    return os.path.join(workdir, f"seed-{values['seed']}") if several else workdir


def _change(values: dict[str, Any], name: str, value: Any) -> None:
    """Set a section, or a setting by its last name. Raises ValueError where that is not one."""
    if isinstance(value, Mapping) and isinstance(values.get(name), dict):
        values[name].update(value)
        return
    declared = describe(build.settings_class(values["agent"])())
    full = [one.name for one in declared if one.name.split(".")[-1] == name and not one.is_section]
    if name in full:
        full = [name]
    if len(full) != 1:
        hint = f"say which, {full[0].replace('.', '=dict(')}=…)" if full else "mend the name"
        raise ValueError(f"{name}={value!r} is {len(full) or 'no'} settings {full}: {hint}")
    *sections, last = full[0].split(".")
    for section in sections:
        values = values[section]
    values[last] = value


def _copy(config: Mapping[str, Any]) -> dict[str, Any]:
    return {k: _copy(v) if isinstance(v, Mapping) else v for k, v in config.items()}
