"""What an agent is: a NamedTuple of pure functions, as an optax optimiser is.

The training loop (`mbx.training.loop`) knows agents only by this. Their train state and actor state
are pytrees of their own. Axes: E environments.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

from mbx import replay
from mbx.types import Array, EnvSpec, Mean, Metrics

__all__ = ["Agent", "Diagnostics", "Episodes", "Mean", "Metrics", "See", "Store"]


class Init(Protocol):
    """Makes the train state."""

    def __call__(self, key: Array, /) -> Any:
        """Parameters, optimiser states and whatever else learning changes.

        Args:
            key: random key.

        Returns:
            A dataclass (a pytree) with a field `params`, whose size is reported.
        """
        ...


class InitActor(Protocol):
    """Makes the actor state."""

    def __call__(self, num_envs: int, /) -> Any:
        """What acting carries from step to step (a warm start, say): leaves `[E, ...]`."""
        ...


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


class ExampleRow(Protocol):
    """Says what a replay row holds."""

    def __call__(self) -> dict[str, Any]:
        """One un-batched row of `jax.ShapeDtypeStruct`s.

        Returns:
            obs, action `[A]`, reward `[]`, is_first, is_last and terminated `[]` (`mbx.replay`),
            and what `Agent.replay_extras` adds.
        """
        ...


class AfterAction(Protocol):
    """Follows actions that `act` did not choose: the random ones before learning."""

    def __call__(self, actor: Any, action: Array, /) -> Any:
        """The actor state that `act` would have returned had it chosen `action` `[E, A]`."""
        ...


class ReplayExtras(Protocol):
    """Stores some of the actor state with rows."""

    def __call__(self, actor: Any, /) -> dict[str, Array]:
        """Further fields `[E, ...]` of the rows just acted on: latents, say."""
        ...


class Check(Protocol):
    """Looks at the metrics of every log interval."""

    def __call__(self, metrics: Mapping[str, float], /) -> None:
        """Raises ValueError, with the remedy, where they say that the run cannot be right."""
        ...


class MakeTargets(Protocol):
    """Makes what `Store` keeps with a row."""

    def __call__(self, train: Any, actor: Any, obs: Array, key: Array, /) -> replay.Targets:
        """Targets of `obs` `[E, ...]`; actor: as `act` returned it for these observations."""
        ...


class Reanalyze(Protocol):
    """Makes stored targets again with today's parameters."""

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
    """Targets that a planner makes and the replay keeps beside every row.

    Attributes:
        spec: their sizes and dtypes.
        targets: makes those of new rows.
        reanalyze: makes stored ones again.
        batch_size: rows of one `reanalyze` pass.
    """

    spec: replay.TargetSpec
    targets: MakeTargets
    reanalyze: Reanalyze
    batch_size: int


class Diagnostics(NamedTuple):
    """What an agent reports beside the returns of an evaluation.

    Attributes:
        metrics: numbers for the log.
        files: contents by name, for the run directory.
    """

    metrics: dict[str, float]
    files: dict[str, bytes]


class Ahead(NamedTuple):
    """A function that runs a program and can have it compiled before its first call.

    A run has what its evaluations call compiled beside training, where a core is idle.

    Attributes:
        call: the function itself.
        compile: compiles for arguments like those of a call, given abstractly.
    """

    call: Callable[..., Any]
    compile: Callable[..., Any]

    def __call__(self, *args: Any) -> Any:
        """The function's result."""
        return self.call(*args)


class MakeDiagnostics(Protocol):
    """Looks at an agent with every evaluation, outside any compiled program."""

    def __call__(self, train: Any, replay: replay.ReplayState, key: Array, /) -> Diagnostics:
        """What to report of a train state and a replay; key: random key."""
        ...


class Episodes(NamedTuple):
    """What an evaluation played, without exploration noise: T steps of E episodes, of which S are
    seen.

    Attributes:
        rewards: `[T, E]`, 0 behind an episode's end; NaN where a step was not finite.
        lengths: `[E]` agent steps.
        terminated: `[E]`, the episode ended by itself and not by its time limit.
        steps: `[S]`, the steps whose observations were kept.
        obs: `[S, E, ...]`, the observations that were acted on in these steps; of no meaning behind
            an episode's end.
        last_obs: `[E, ...]`, the observation behind an episode's last step.
    """

    rewards: Any
    lengths: Any
    terminated: Any
    steps: Any
    obs: Any
    last_obs: Any


class MakeReview(Protocol):
    """Looks at an agent and at the episodes of every evaluation, outside any compiled program."""

    def __call__(
        self, train: Any, replay: replay.ReplayState, episodes: Episodes, key: Array, /
    ) -> Diagnostics:
        """What to report of a train state, a replay and the episodes just played; key: random."""
        ...


class StartFrom(Protocol):
    """Begins where another run ended (`train.init_from`)."""

    def __call__(self, train: Any, old: Any, old_spec: EnvSpec, /) -> Any:
        """`train`, a fresh train state, with the parameters of another run's.

        Args:
            train: fresh.
            old: the train state that the other run evaluated best.
            old_spec: the task of that run.
        """
        ...


class See(Protocol):
    """Looks on while an agent plans, outside the compiled program."""

    def __call__(self, what: str, arrays: dict[str, Any], /) -> None:
        """Something that planning came to.

        Args:
            what: "candidates" with each set that was scored, "plan" with what came of them.
            arrays: of candidates `actions` `[E, n, T, A]` and `values` `[E, n]`; of a plan the
                fields of `mbx.mppi.Plan`, `num_elites`, and `discount` `[E]`, which values are
                discounted by.
        """
        ...


class Watched(Protocol):
    """Makes an `act` that tells what its planner does."""

    def __call__(self, see: See, /) -> Act:
        """`act` with the same actions, for one device; each step tells `see` in order."""
        ...


class Agent(NamedTuple):
    """An agent.

    Attributes:
        init: makes the train state from a key: parameters, optimiser states and whatever else
            learning changes, a dataclass with a field `params`, whose size is reported.
        init_actor: makes the actor state of a number of environments, what acting carries from step
            to step (a warm start, say); leaves `[E, ...]`.
        act: chooses actions.
        update: makes one learner step.
        example_row: gives one un-batched replay row as `jax.ShapeDtypeStruct`s: obs, action,
            reward, is_first, is_last, terminated (`mbx.replay`) and what `replay_extras` adds.
        store: targets that a planner makes and the replay keeps, for an agent that learns from
            such.
        after_action: (actor state, actions `[E, A]`) -> the actor state that `act` would have
            returned had it chosen these; for an agent whose actor state depends on its actions and
            must follow those of the random phase before learning.
        replay_extras: what is stored of the actor state (latents, say) with the rows just acted on:
            further fields `[E, ...]` of them.
        diagnostics: (train, replay, key) -> `Diagnostics`, called with every evaluation, outside
            any compiled program.
        review: (train, replay, episodes, key) -> `Diagnostics`, likewise, for an agent that also
            looks at what the evaluation played (`Episodes`), which is kept for it.
        act_without_planner: `act` by the policy alone, for an agent whose `act` plans.
        watched: `act` for one who looks on, likewise.
        start_from: gives a fresh train state the parameters of another run.
        check: is given the metrics of every log interval, and raises ValueError, with the remedy,
            where they say that the run cannot be right.
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
