"""Training in three lines of Python.

import mbx
agent, state, metrics = mbx.train("gymnax:Pendulum-v1", config="tdmpc", steps=10_000, seed=0)
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from mbx import config as configuration
from mbx.agents.base import Agent
from mbx.agents.settings import RunSettings
from mbx.analysis import report
from mbx.envs import custom
from mbx.training import run, rundir, seeds
from mbx.training.logging import read_rows


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
        environment: a name, SUITE:TASK; or a class, a function, a `functools.partial`, or what
            `gymnasium.make` returned (`mbx.envs.custom.name_of`).
        config: name of a configuration that comes with mbx, a file, or nested mappings.
        steps: environment steps; None: the configuration's.
        workdir: the run directory; None: runs/TASK-sSEED-TIME.
        **settings: further settings by full name, `**{"loss.batch_size": 64}`, by unique last part,
            `utd_ratio=1`, or by section, `model=dict(size="1")`. `imports` names modules to import.

    Returns:
        The agent, the train state with the best evaluation (the last one without evaluations), and
        the rows of the log, dictionaries with `kind` ("train", "eval") and `step`.

    Raises:
        ValueError: for impossible settings or environments, before anything compiles.

    Examples:
        >>> agent, state, rows = mbx.train("gymnax:Pendulum-v1", steps=10_000)  # doctest: +SKIP
    """
    here = os.getcwd()  # an environment may go to another directory when it is made
    chosen = _settings(environment, config, steps, {"seed": seed, **settings})
    workdir = os.path.join(here, workdir or rundir.default(chosen))
    run.train(chosen, workdir, at_end=report.at_end)
    first = os.path.join(workdir, f"seed-{seed}") if chosen.num_seeds > 1 else workdir
    rows = read_rows(os.path.join(first, "metrics.jsonl"))
    scored = any(row.get("return_mean") is not None for row in rows)
    agent, state, _ = run.load(first, which="best" if scored else "latest", trusted=True)
    return agent, state, rows


def train_fn(
    environment: Any,
    config: str | Mapping[str, Any] = "tdmpc",
    *,
    steps: int | None = None,
    axis_name: str | None = None,
    batched: bool | None = None,
    **settings: Any,
) -> seeds.TrainFunction:
    """A run as a pure function, for `jax.jit` and `jax.vmap`: it writes no files.

    Args:
        environment, config, steps, settings: as in `train`; the environment must be in JAX.
        axis_name: name of the `vmap` axis over runs, if any; it makes runs faster.
        batched: whether `vmap` executes runs together or one after another within one program
            (None: together unless on a processor).

    Returns:
        `run(seed, settings={}) -> mbx.training.seeds.Trained`; seed and settings by full names,
        `{"optimizer.learning_rate": rate}`, may be traced.

    Raises:
        ValueError: for impossible settings or environments.

    Examples:
        >>> run = mbx.train_fn("gymnax:Pendulum-v1", steps=5_000)  # doctest: +SKIP
        >>> trained = jax.jit(jax.vmap(run))(jnp.arange(4))  # doctest: +SKIP
    """
    return seeds.make_train(_settings(environment, config, steps, settings), axis_name, batched)


def _settings(
    environment: Any,
    config: str | Mapping[str, Any],
    steps: int | None,
    settings: Mapping[str, Any],
) -> RunSettings:
    changes = dict(settings) if steps is None else {"train.steps": steps, **settings}
    if isinstance(environment, str):
        return configuration.load(config, {"env.name": environment, **changes})
    if environment is None or isinstance(environment, int | float | Mapping):
        raise ValueError(
            f"environment={environment!r}: give a task's name (SUITE:TASK), a class, a function "
            "that makes the environment, or what gymnasium.make returned"
        )
    name, kwargs = custom.name_of(environment)
    return configuration.load(config, {"env.name": name, "env.kwargs": kwargs, **changes})
