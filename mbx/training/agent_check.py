"""What an agent's functions return, validated while they are traced: no program computes more.

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
        name: what it is registered as.
        spec: the task it was made for.
    """
    contract = _Contract(agent, name, spec)
    made = isinstance(agent, Agent)
    contract.expect(made, "what make_agent() returned", _kind(agent), "an mbx.agents.base.Agent")
    changes = {
        field: _then(getattr(contract, field), getattr(agent, field))
        for field in Agent._fields
        if hasattr(contract, field) and getattr(agent, field) is not None
    }
    if agent.store is not None:
        refresh = _then(contract.reanalyze, agent.store.reanalyze)
        changes["store"] = agent.store._replace(reanalyze=refresh)
    return agent._replace(**changes)


def _then(check: Callable, function: Callable) -> Callable:
    """`function`, whose result `check(result, *arguments)` validates before it is returned."""

    @functools.wraps(function)
    def validated(*args: Any, **more: Any) -> Any:
        result = function(*args, **more)
        check(result, *args)
        return result

    return validated


class _Contract:
    """Checks of what an agent's functions return, each named as the function."""

    def __init__(self, agent: Agent, name: str, spec: EnvSpec) -> None:
        self._agent, self._name, self._spec = agent, name, spec

    def expect(self, fits: bool, what: str, got: str, wanted: str) -> None:
        if not fits:
            raise ValueError(f"agent {self._name!r}: {what} is {got}, wanted {wanted}")

    def same(self, what: str, before: Any, after: Any) -> None:
        problem = _difference(before, after)
        self.expect(not problem, what, problem, "what was given")

    def init(self, train: Any, key: Any) -> None:
        wanted = "a dataclass with a field `params`"
        self.expect(hasattr(train, "params"), "the result of init()", _kind(train), wanted)

    def init_actor(self, actor: Any, num_envs: int) -> None:
        what, wanted = "the result of init_actor()", f"leaves [E, ...], E = {num_envs}"
        try:
            chex.assert_tree_shape_prefix(_shapes(actor), (num_envs,))
        except AssertionError as error:
            self.expect(False, what, _sentence(error), wanted)

    def after_action(self, now: Any, actor: Any, action: Any) -> None:
        self.same("the actor state of after_action()", actor, now)

    def replay_extras(self, extras: Any, actor: Any) -> None:
        what, row = "the result of replay_extras()", self._agent.example_row()
        self.expect(isinstance(extras, dict), what, _kind(extras), "a dictionary of [E, ...]")
        missing = [field for field in extras if field not in row]
        self.expect(not missing, what, f"with {missing}", "fields of example_row()")
        for field, x in extras.items():
            fits, shape = _shape(x)[1:] == tuple(row[field].shape), list(row[field].shape)
            wanted = f"[E, *{shape}], as example_row() says"
            self.expect(fits, f"{field} of replay_extras()", _array(x), wanted)

    def example_row(self, row: Any) -> None:
        what, obs = "the result of example_row()", list(self._spec.obs_shape)
        self.expect(isinstance(row, dict), what, _kind(row), "a dictionary")
        missing = [field for field in _ROW if field not in row]
        self.expect(not missing, what, f"without {', '.join(missing)}", f"all of {_ROW}")
        given, fits = _array(row["obs"]), _shape(row["obs"]) == tuple(obs)
        self.expect(fits, "obs of example_row()", given, f"shape {obs}")

    def act(self, result: Any, train: Any, actor: Any, obs: Any, is_first: Any, *_: Any) -> None:
        pair = isinstance(result, tuple) and len(result) == 2
        self.expect(pair, "the result of act()", _kind(result), "(actions, actor state)")
        want = (is_first.shape[0], self._spec.action_dim)
        fits = _shape(result[0]) == want and jnp.issubdtype(result[0].dtype, jnp.floating)
        wanted = f"float{list(want)}, which is [E, A]"
        self.expect(fits, "the actions of act()", _array(result[0]), wanted)
        self.same("the actor state of act()", actor, result[1])

    act_without_planner = act

    def update(self, result: Any, train: Any, buffer: Any, *_: Any) -> None:
        three = isinstance(result, tuple) and len(result) == 3
        wanted = "(train state, replay, metrics)"
        self.expect(three, "the result of update()", _kind(result), wanted)
        now, after, metrics = result
        what, wanted = "the train state of update()", "one with a field `params`"
        self.expect(hasattr(now, "params"), what, _kind(now), wanted)
        what, wanted = "the metrics of update()", "a dictionary of numbers"
        self.expect(isinstance(metrics, dict), what, _kind(metrics), wanted)
        self.same("the train state of update()", train, now)
        self.same("the replay of update()", buffer, after)
        for name, value in metrics.items():
            what = "a name among the metrics of update()"
            self.expect(isinstance(name, str), what, repr(name), "a string")
            for part in value if isinstance(value, Mean) else (value,):
                what, wanted = f"metrics[{name!r}] of update()", "one number, shape []"
                self.expect(_shape(part) == (), what, _array(part), wanted)

    def reanalyze(self, result: Any, train: Any, buffer: Any, *_: Any) -> None:
        self.same("the replay of reanalyze()", buffer, result[0])


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
