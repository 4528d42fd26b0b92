"""What an agent's functions return, looked at while they are traced: no program computes more.

Source: the contract is that of `mbx.agents.base`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from mbx.agents.base import Agent, Mean
from mbx.types import EnvSpec

_ROW = ("obs", "action", "reward", "is_first", "is_last", "terminated")


def checked(agent: Agent, name: str, spec: EnvSpec) -> Agent:
    """The same agent, whose functions raise ValueError where they return what no run can use.

    The message names the agent, the function, what it returned and what is wanted.

    Args:
        agent: the agent.
        name: what it is registered as.
        spec: the task it was made for.
    """

    def refuse(what: str, got: Any, wanted: str) -> None:
        raise ValueError(f"agent {name!r}: {what} is {got}, wanted {wanted}")

    if not isinstance(agent, Agent):
        refuse("what make_agent() returned", _kind(agent), "an mbx.agents.base.Agent")

    def init(train: Any, key: Any) -> None:
        if not hasattr(train, "params"):
            refuse("the result of init()", _kind(train), "a dataclass with a field `params`")

    def example_row(row: Any) -> None:
        if not isinstance(row, dict):
            refuse("the result of example_row()", _kind(row), "a dictionary")
        if missing := [field for field in _ROW if field not in row]:
            refuse("the result of example_row()", f"without {', '.join(missing)}", f"all of {_ROW}")
        if _shape(row["obs"]) != tuple(spec.obs_shape):
            refuse("obs of example_row()", _array(row["obs"]), f"shape {list(spec.obs_shape)}")

    def act(result: Any, train: Any, actor: Any, obs: Any, is_first: Any, *_: Any) -> None:
        if not isinstance(result, tuple) or len(result) != 2:
            refuse("the result of act()", _kind(result), "(actions, actor state)")
        want = (is_first.shape[0], spec.action_dim)
        if _shape(result[0]) != want or not jnp.issubdtype(result[0].dtype, jnp.floating):
            refuse("the actions of act()", _array(result[0]), f"float{list(want)}, which is [E, A]")

    def update(result: Any, *_: Any) -> None:
        if not isinstance(result, tuple) or len(result) != 3:
            refuse("the result of update()", _kind(result), "(train state, replay, metrics)")
        if not hasattr(result[0], "params"):
            refuse("the train state of update()", _kind(result[0]), "one with a field `params`")
        if not isinstance(result[2], dict):
            refuse("the metrics of update()", _kind(result[2]), "a dictionary of numbers")
        for metric, value in result[2].items():
            if not isinstance(metric, str):
                refuse("a name among the metrics of update()", repr(metric), "a string")
            for part in value if isinstance(value, Mean) else (value,):
                if _shape(part) != ():
                    refuse(f"metrics[{metric!r}] of update()", _array(part), "one number, shape []")

    changes: dict[str, Any] = dict(
        init=_then(init, agent.init),
        act=_then(act, agent.act),
        update=_then(update, agent.update),
        example_row=_then(example_row, agent.example_row),
    )
    if agent.act_without_planner is not None:
        changes["act_without_planner"] = _then(act, agent.act_without_planner)
    return agent._replace(**changes)


def _then(look: Callable, function: Callable) -> Callable:
    """`function`, whose result `look(result, *arguments)` sees before it is returned."""

    @functools.wraps(function)
    def looked_at(*args: Any, **more: Any) -> Any:
        result = function(*args, **more)
        look(result, *args)
        return result

    return looked_at


def _kind(x: Any) -> str:
    return f"a tuple of {len(x)}" if type(x) is tuple else f"a {type(x).__name__}"


def _shape(x: Any) -> tuple[int, ...] | None:
    """The shape of an array or a number, None of anything else."""
    return getattr(x, "shape", () if isinstance(x, int | float) else None)


def _array(x: Any) -> str:
    return f"{x.dtype}{list(x.shape)}" if hasattr(x, "dtype") else _kind(x)
