"""What an agent is: a NamedTuple of pure functions, as an optax optimiser is.

In: an environment's observations and replay rows. Out: actions, updated states and metrics. The
training loop (`mbx.training.loop`) knows agents only by this. A train state holds all that learning
changes, a dataclass with a field `params`; an actor state what acting keeps from step to step (such
as a warm start), leaves `[E, ...]`. Both are the agent's own pytrees. Axes: E environments, A
action dims.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

from mbx import replay
from mbx.types import Array, EnvSpec, Mean, Metrics

__all__ = ["Agent", "Diagnostics", "Episodes", "Mean", "Metrics", "See", "Store"]


class Act(Protocol):
    """Chooses actions."""

    def __call__(
        self, train: Any, actor: Any, obs: Array, is_first: Array, key: Array, evaluate: bool, /
    ) -> tuple[Array, Any]:
        """One step of acting.

        Args:
            actor: actor state, from `init_actor` or from the step before.
            obs: observations `[E, ...]`.
            is_first: `[E]`, where an episode begins with this observation.
            evaluate: a Python bool; without exploration noise.

        Returns:
            Actions `[E, A]` in [-1, 1] (one-hot where they are discrete), and the new actor state.
        """


class Update(Protocol):
    """Learns from the replay."""

    def __call__(
        self, train: Any, replay: replay.ReplayState, key: Array, /
    ) -> tuple[Any, replay.ReplayState, Metrics]:
        """One gradient step on a batch of the replay.

        Returns:
            The new train state; the replay, unchanged unless the agent writes into it; and metrics,
            scalars (or `Mean`s) that the log averages over updates.
        """


class MakeTargets(Protocol):
    """Makes what `Store` keeps with a row."""

    def __call__(self, train: Any, actor: Any, obs: Array, key: Array, /) -> replay.Targets:
        """Targets of `obs` `[E, ...]`; actor: as `act` returned it for these observations."""


class Reanalyze(Protocol):
    """Refreshes stored targets with the current parameters."""

    def __call__(
        self, train: Any, replay: replay.ReplayState, key: Array, chunk: Array, /
    ) -> tuple[replay.ReplayState, Metrics]:
        """One pass over `Store.batch_size` rows.

        Args:
            chunk: -1: the agent chooses the rows; else the number of the pass, where passes 0,
                1, ... together visit every row.

        Returns:
            The replay with these rows' targets replaced, and metrics.
        """


class Store(NamedTuple):
    """Targets that a planner makes and the replay keeps with every row."""

    spec: replay.TargetSpec  # sizes and dtypes
    targets: MakeTargets  # for new rows
    reanalyze: Reanalyze  # refreshes stored ones
    batch_size: int  # rows of one `reanalyze` pass


class Diagnostics(NamedTuple):
    """What an agent reports in addition to the returns of an evaluation."""

    metrics: dict[str, float]  # for the log
    files: dict[str, bytes]  # contents by name, for the run directory


class Episodes(NamedTuple):
    """T steps of E evaluation episodes without exploration noise; observations of S of them."""

    rewards: Any  # `[T, E]`, 0 after an episode's end; NaN where a step was not finite
    lengths: Any  # agent steps, `[E]`
    terminated: Any  # `[E]`, the episode ended by itself and not by its time limit
    steps: Any  # steps whose observations were kept, `[S]`
    obs: Any  # `[S, E, ...]`, acted on in these steps; undefined after an episode's end
    last_obs: Any  # `[E, ...]`, after an episode's last step


class See(Protocol):
    """Called while an agent plans, outside the compiled program."""

    def __call__(self, what: str, arrays: dict[str, Any], /) -> None:
        """A set of candidates, or a plan.

        Args:
            what: "candidates" with each set that was scored, "plan" with the result.
            arrays: for candidates `actions` `[E, n, T, A]` and `values` `[E, n]`; for a plan the
                fields of `mbx.mppi.Plan`, `num_elites`, and the values' `discount` `[E]`.
        """


MakeDiagnostics = Callable[[Any, replay.ReplayState, Array], Diagnostics]
MakeReview = Callable[[Any, replay.ReplayState, Episodes, Array], Diagnostics]


class Agent(NamedTuple):
    """An agent's functions; those with default None are optional."""

    init: Callable[[Array], Any]  # key -> train state; the size of its `params` is reported
    init_actor: Callable[[int], Any]  # number of environments -> actor state
    act: Act
    update: Update
    # () -> one un-batched replay row as `jax.ShapeDtypeStruct`s: obs, action `[A]`, reward,
    # is_first, is_last, terminated `[]` (`mbx.replay`) and what `replay_extras` adds
    example_row: Callable[[], dict[str, Any]]
    store: Store | None = None  # targets of a planner that the replay keeps
    # (actor state, actions `[E, A]`) -> the actor state that `act` would have returned with these
    # actions; where it depends on them and must follow the random phase before learning
    after_action: Callable[[Any, Array], Any] | None = None
    # actor state -> further fields `[E, ...]` of the rows just acted on, such as latents
    replay_extras: Callable[[Any], dict[str, Array]] | None = None
    # (train, replay, key), with every evaluation and outside any compiled program
    diagnostics: MakeDiagnostics | None = None
    # (fresh train state, the best one of another run, that run's task) -> the fresh one with the
    # other's parameters (`train.init_from`)
    start_from: Callable[[Any, Any, EnvSpec], Any] | None = None
    # gets the metrics of every log interval; raises ValueError, with the remedy, where the run
    # cannot be right
    check: Callable[[Mapping[str, float]], None] | None = None
    act_without_planner: Act | None = None  # the policy alone, for an agent whose `act` plans
    # see -> `act` with the same actions, for one device; each step calls `see` in order
    watched: Callable[[See], Act] | None = None
    # (train, replay, episodes, key), for an agent that also reads the evaluation's `Episodes`
    review: MakeReview | None = None
