"""What an agent's functions return, looked at while they are traced: no program computes more.

Source: the contract is that of `mbx.agents.base`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import chex
import jax
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

    def same(what: str, before: Any, after: Any) -> None:
        if problem := _difference(before, after):
            refuse(what, problem, "what was given")

    def each(what: str, tree: Any, num_envs: int) -> None:
        try:
            chex.assert_tree_shape_prefix(_shapes(tree), (num_envs,))
        except AssertionError as error:
            refuse(what, _sentence(error), f"leaves [E, ...], E = {num_envs}")

    def init(train: Any, key: Any) -> None:
        if not hasattr(train, "params"):
            refuse("the result of init()", _kind(train), "a dataclass with a field `params`")

    def init_actor(actor: Any, num_envs: int) -> None:
        each("the result of init_actor()", actor, num_envs)

    def after_action(now: Any, actor: Any, action: Any) -> None:
        same("the actor state of after_action()", actor, now)

    def replay_extras(extras: Any, actor: Any) -> None:
        if not isinstance(extras, dict):
            refuse("the result of replay_extras()", _kind(extras), "a dictionary of [E, ...]")
        row = agent.example_row()
        if missing := [field for field in extras if field not in row]:
            refuse("the result of replay_extras()", f"with {missing}", "fields of example_row()")
        for field, x in extras.items():
            if _shape(x)[1:] != tuple(row[field].shape):
                wanted = f"[E, *{list(row[field].shape)}], as example_row() says"
                refuse(f"{field} of replay_extras()", _array(x), wanted)

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
        same("the actor state of act()", actor, result[1])

    def update(result: Any, train: Any, buffer: Any, *_: Any) -> None:
        if not isinstance(result, tuple) or len(result) != 3:
            refuse("the result of update()", _kind(result), "(train state, replay, metrics)")
        if not hasattr(result[0], "params"):
            refuse("the train state of update()", _kind(result[0]), "one with a field `params`")
        if not isinstance(result[2], dict):
            refuse("the metrics of update()", _kind(result[2]), "a dictionary of numbers")
        same("the train state of update()", train, result[0])
        same("the replay of update()", buffer, result[1])
        for metric, value in result[2].items():
            if not isinstance(metric, str):
                refuse("a name among the metrics of update()", repr(metric), "a string")
            for part in value if isinstance(value, Mean) else (value,):
                if _shape(part) != ():
                    refuse(f"metrics[{metric!r}] of update()", _array(part), "one number, shape []")

    changes: dict[str, Any] = dict(
        init=_then(init, agent.init),
        init_actor=_then(init_actor, agent.init_actor),
        act=_then(act, agent.act),
        update=_then(update, agent.update),
        example_row=_then(example_row, agent.example_row),
    )
    if agent.act_without_planner is not None:
        changes["act_without_planner"] = _then(act, agent.act_without_planner)
    if agent.after_action is not None:
        changes["after_action"] = _then(after_action, agent.after_action)
    if agent.replay_extras is not None:
        changes["replay_extras"] = _then(replay_extras, agent.replay_extras)
    if agent.store is not None:

        def reanalyze(result: Any, train: Any, buffer: Any, *_: Any) -> None:
            same("the replay of reanalyze()", buffer, result[0])

        changes["store"] = agent.store._replace(reanalyze=_then(reanalyze, agent.store.reanalyze))
    return agent._replace(**changes)


def _then(look: Callable, function: Callable) -> Callable:
    """`function`, whose result `look(result, *arguments)` sees before it is returned."""

    @functools.wraps(function)
    def looked_at(*args: Any, **more: Any) -> Any:
        result = function(*args, **more)
        look(result, *args)
        return result

    return looked_at


def _shapes(tree: Any) -> Any:
    """What of a tree has to stay as it is: shapes and types."""

    def one(x: Any) -> jax.ShapeDtypeStruct:
        dtype = x.dtype if hasattr(x, "dtype") else jnp.result_type(x)
        return jax.ShapeDtypeStruct(jnp.shape(x), dtype)

    return jax.tree.map(one, tree)


def _difference(before: Any, after: Any) -> str:
    """How a tree differs from another in leaves, shapes or types, in words; '' for not at all."""
    if jax.tree.structure(before) != jax.tree.structure(after):
        old, new = (
            [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
            for tree in (before, after)
        )
        gone, more = [x for x in old if x not in new], [x for x in new if x not in old]
        parts = [f"{w} {', '.join(x)}" for w, x in (("without", gone), ("with", more)) if x]
        return " and ".join(parts) or f"of another type, {_kind(after)}"
    try:
        chex.assert_trees_all_equal_shapes_and_dtypes(_shapes(after), _shapes(before))
    except AssertionError as error:
        return "other, " + _sentence(error).partition("differ")[2].lstrip(": ")
    return ""


def _sentence(error: AssertionError) -> str:
    """The first line of what an assertion of chex says."""
    return str(error).partition("failed: ")[2].strip().partition("\n")[0].rstrip(".")


def _kind(x: Any) -> str:
    return f"a tuple of {len(x)}" if type(x) is tuple else f"a {type(x).__name__}"


def _shape(x: Any) -> tuple[int, ...] | None:
    """The shape of an array or a number, None of anything else."""
    return getattr(x, "shape", () if isinstance(x, int | float) else None)


def _array(x: Any) -> str:
    return f"{x.dtype}{list(x.shape)}" if hasattr(x, "dtype") else _kind(x)
