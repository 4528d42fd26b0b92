"""What an agent is: a NamedTuple of pure functions, as an optax optimiser is.

In: an environment's observations and replay rows. Out: actions, updated states and metrics. The
training loop (`mbx.training.loop`) knows agents only by this. A train state holds all that learning
changes, a dataclass with a field `params`; an actor state what acting carries from step to step (a
warm start, say), leaves `[E, ...]`. Both are pytrees of the agent's own. Axes: E environments, A
action dims.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

from mbx import replay
from mbx.types import Array, EnvSpec, Mean, Metrics

__all__ = ["Agent", "Diagnostics", "Episodes", "Mean", "Metrics", "See", "Store"]

Init = Callable[[Array], Any]
InitActor = Callable[[int], Any]
ExampleRow = Callable[[], dict[str, Any]]
AfterAction = Callable[[Any, Array], Any]
ReplayExtras = Callable[[Any], dict[str, Array]]
Check = Callable[[Mapping[str, float]], None]


class Act(Protocol):
    """Chooses actions."""

    def __call__(
        self, train: Any, actor: Any, obs: Array, is_first: Array, key: Array, evaluate: bool, /
    ) -> tuple[Array, Any]:
        """One step of acting.

        Args:
            train: train state.
            actor: actor state, from `init_actor` or from the step before.
            obs: observations `[E, ...]`.
            is_first: `[E]`, where an episode begins with this observation.
            key: random key.
            evaluate: a Python bool; without exploration noise.

        Returns:
            Actions `[E, A]` in [-1, 1] (one-hot where they are discrete), and the new actor state.
        """
        ...


class Update(Protocol):
    """Learns from the replay."""

    def __call__(
        self, train: Any, replay: replay.ReplayState, key: Array, /
    ) -> tuple[Any, replay.ReplayState, Metrics]:
        """One gradient step on a batch of the replay.

        Returns:
            The new train state; the replay, which is the very one that came in unless the agent
            writes into it; and metrics, scalars (or `Mean`s) that the log averages over updates.
        """
        ...


class MakeTargets(Protocol):
    """Makes what `Store` keeps with a row."""

    def __call__(self, train: Any, actor: Any, obs: Array, key: Array, /) -> replay.Targets:
        """Targets of `obs` `[E, ...]`; actor: as `act` returned it for these observations."""
        ...


class Reanalyze(Protocol):
    """Refreshes stored targets with the current parameters."""

    def __call__(
        self, train: Any, replay: replay.ReplayState, key: Array, chunk: Array, /
    ) -> tuple[replay.ReplayState, Metrics]:
        """One pass over `Store.batch_size` rows.

        Args:
            train: train state.
            replay: rows with their targets.
            key: random key.
            chunk: -1 where the agent chooses the rows; else the number of the pass, where passes
                0, 1, ... together visit every row.

        Returns:
            The replay with these rows' targets replaced, and metrics.
        """
        ...


class Store(NamedTuple):
    """Targets that a planner makes and the replay keeps with every row.

    Attributes:
        spec: their sizes and dtypes.
        targets: makes those of new rows.
        reanalyze: refreshes stored ones.
        batch_size: rows of one `reanalyze` pass.
    """

    spec: replay.TargetSpec
    targets: MakeTargets
    reanalyze: Reanalyze
    batch_size: int


class Diagnostics(NamedTuple):
    """What an agent reports in addition to the returns of an evaluation.

    Attributes:
        metrics: numbers for the log.
        files: contents by name, for the run directory.
    """

    metrics: dict[str, float]
    files: dict[str, bytes]


class Episodes(NamedTuple):
    """What an evaluation played, without exploration noise: T steps of E episodes, of which S are
    kept.

    Attributes:
        rewards: `[T, E]`, 0 after an episode's end; NaN where a step was not finite.
        lengths: `[E]` agent steps.
        terminated: `[E]`, the episode ended by itself and not by its time limit.
        steps: `[S]`, the steps whose observations were kept.
        obs: `[S, E, ...]`, the observations that were acted on in these steps; of no meaning after
            an episode's end.
        last_obs: `[E, ...]`, the observation after an episode's last step.
    """

    rewards: Any
    lengths: Any
    terminated: Any
    steps: Any
    obs: Any
    last_obs: Any


class See(Protocol):
    """Is called while an agent plans, outside the compiled program."""

    def __call__(self, what: str, arrays: dict[str, Any], /) -> None:
        """A set of candidates, or a plan.

        Args:
            what: "candidates" with each set that was scored, "plan" with what came of them.
            arrays: of candidates `actions` `[E, n, T, A]` and `values` `[E, n]`; of a plan the
                fields of `mbx.mppi.Plan`, `num_elites`, and `discount` `[E]`, which values are
                discounted by.
        """
        ...


MakeDiagnostics = Callable[[Any, replay.ReplayState, Array], Diagnostics]
MakeReview = Callable[[Any, replay.ReplayState, Episodes, Array], Diagnostics]
StartFrom = Callable[[Any, Any, EnvSpec], Any]
Watched = Callable[[See], Act]


class Agent(NamedTuple):
    """An agent.

    Attributes:
        init: key -> train state, of which the size of `params` is reported.
        init_actor: number of environments -> actor state.
        act: chooses actions.
        update: makes one learner step.
        example_row: () -> one un-batched replay row as `jax.ShapeDtypeStruct`s: obs, action `[A]`,
            reward, is_first, is_last, terminated `[]` (`mbx.replay`) and what `replay_extras` adds.
        store: targets that a planner makes and the replay keeps, for an agent that learns from
            them.
        after_action: (actor state, actions `[E, A]`) -> the actor state that `act` would have
            returned had it chosen these; for an agent whose actor state depends on its actions and
            must follow those of the random phase before learning.
        replay_extras: actor state -> further fields `[E, ...]` of the rows just acted on: latents,
            say.
        diagnostics: (train, replay, key) -> `Diagnostics`, called with every evaluation, outside
            any compiled program.
        start_from: (fresh train state, the one that another run evaluated best, that run's task) ->
            the fresh one with the other's parameters (`train.init_from`).
        check: is given the metrics of every log interval, and raises ValueError, with the remedy,
            where they say that the run cannot be right.
        act_without_planner: `act` by the policy alone, for an agent whose `act` plans.
        watched: see -> `act` with the same actions, for one device; each step calls `see` in order.
        review: (train, replay, episodes, key) -> `Diagnostics`, for an agent that also reads what
            the evaluation played (`Episodes`), which is kept for it.
    """

    init: Init
    init_actor: InitActor
    act: Act
    update: Update
    example_row: ExampleRow
    store: Store | None = None
    after_action: AfterAction | None = None
    replay_extras: ReplayExtras | None = None
    diagnostics: MakeDiagnostics | None = None
    start_from: StartFrom | None = None
    check: Check | None = None
    act_without_planner: Act | None = None
    watched: Watched | None = None
    review: MakeReview | None = None
