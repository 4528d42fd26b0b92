"""What EMPO needs to know of a world: `TabularWorld` (arrays) and `World` (pure functions).

`mbx.power.solve` solves the first; the agent trains on the second, functions over one un-batched
state. Axes: S states, J joint actions, K successors of a joint action, H humans, G goals a human,
A actions of an agent, R joint robot actions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array


class TabularWorld(NamedTuple):
    """A finite world as the list of its N transitions of positive probability.
    A joint action is j = sum_i a_i num_actions^i over all agents i (agent 0 fastest). Source:
    docs/sources.md#empo.
    """

    succ_state: Any  # `[N]` int, s
    succ_joint: Any  # `[N]` int, j
    succ_next: Any  # `[N]` int, s'
    succ_prob: Any  # `[N]`, sums to one for every (s, j) of a non-terminal s
    terminal: Any  # `[S]` bool
    achieved: Any  # `[H, G, S]` 0/1, judged on the successor
    goal_weight: Any  # `[H, G]`, w_g of eq. (7); normalised per human also the goal distribution
    humans: Any  # agent numbers
    robots: Any  # agent numbers
    num_actions: int
    num_states: int


class Views(NamedTuple):
    """How people look at a world's states."""

    render: Callable[[Any, Array], Array]  # (state, goals `[H]`) -> uint8 `[height, width, 3]`
    # state -> `[H, 2]` int, the cell (x, y) that each human stands on
    positions: Callable[[Any], Array]
    size: tuple[int, int]  # (columns, rows) of the cells
    blocked: np.ndarray  # `[rows, columns]` bool, cells that nobody can stand on, on any map
    # (state, goals `[H]`, -1 for one not to show) -> lines; not to be traced
    text: Callable[[Any, Any], str] | None = None
    actions: tuple[str, ...] = ()  # what an agent's actions are called
    # state -> `[rows, columns]` bool, the cells of its own map that nobody can stand on; None where
    # all states are of one map
    walls: Callable[[Any], Array] | None = None


class World(NamedTuple):
    """A world as pure functions of one un-batched state (any pytree)."""

    num_humans: int
    num_robots: int
    num_actions: int
    num_goals: int  # of a human, padded to the largest number; goal_weight 0 marks an absent one
    max_successors: int  # K, of one joint action
    num_states: int | None  # `index(state)` lies below it; None where there is no such number
    example_state: Any
    init: Callable[[Array], Any]  # key -> state
    # (state, joint [humans + robots] int32, humans first) -> (states `[K, ...]`, prob `[K]` padded
    # with 0, overflow bool: some did not fit in K)
    successors: Callable[[Any, Array], tuple[Any, Array, Array]]
    terminal: Callable[[Any], Array]  # state -> bool
    achieved: Callable[[Any], Array]  # state -> `[H, G]` bool
    human_policy: Callable[[Any], Array]  # state -> `[H, G, A]`, the prior pi_h
    features: Callable[[Any], Array]  # state -> float32 `[D]`
    index: Callable[[Any], Array]  # type: ignore[assignment]  # the name of a tuple's method
    goal_features: Array  # `[H, G, F]` float32
    goal_weight: Array  # `[H, G]`
    views: Views | None = None  # how states are shown; None where they cannot be
    states: Any = None  # every state `[S, ...]` in the order of `index`, where they are listed
    channels: tuple[int, int, int] | None = None  # (C, Y, X) of a picture that begins `features`
    of_goals: Any = None  # int `[H, G, F]`, numbers of `features` about a human's goal
    scatter: Callable[[Array], Any] | None = None  # key -> a state with all that moves anywhere
    epsilon: float = 0.0  # share of uniform actions of humans, which the prior does not know of
    goal_prob: Any = None  # `[H, G]`, how often goals are pursued; None: the weights, normalised


def goal_distribution(world: World) -> Array:
    """`[H, G]` probabilities proportional to `goal_prob`, or else to the goal weights."""
    prob = world.goal_weight if world.goal_prob is None else jnp.asarray(world.goal_prob)
    return prob / jnp.sum(prob, axis=-1, keepdims=True)


def draw_goals(world: World, key: Array) -> Array:
    """One goal a human, `[H]` int32, by the goal distribution."""
    logits = jnp.log(goal_distribution(world))
    return jax.random.categorical(key, logits).astype(jnp.int32)


def draw_actions(world: World, state: Any, goals: Array, key: Array) -> Array:
    """The humans' actions `[H]` int32: by the prior for their goals, a share `epsilon` uniform."""
    policy = jnp.take_along_axis(world.human_policy(state), goals[:, None, None], axis=1)[:, 0]
    chosen = jax.random.categorical(key, jnp.log(policy)).astype(jnp.int32)
    if not world.epsilon:
        return chosen
    which_key, any_key = jax.random.split(jax.random.fold_in(key, 1))
    anything = jax.random.randint(any_key, chosen.shape, 0, world.num_actions, jnp.int32)
    return jnp.where(jax.random.bernoulli(which_key, world.epsilon, chosen.shape), anything, chosen)


def draw_successor(world: World, state: Any, joint: Array, key: Array) -> Any:
    """A state that follows a joint action, humans first, drawn by its probability."""
    following, prob, _ = world.successors(state, joint)
    chosen = jax.random.categorical(key, jnp.log(prob))
    return jax.tree.map(lambda x: x[chosen], following)


def robot_actions(world: World, joint: Array) -> Array:
    """The actions `[robots]` int32 of a joint robot action."""
    base = world.num_actions ** jnp.arange(world.num_robots)
    return (joint // base % world.num_actions).astype(jnp.int32)


def reached(world: World, state: Any, goals: Array) -> Array:
    """`[H]` bool: whose goal holds in a state."""
    return jnp.take_along_axis(world.achieved(state), goals[:, None], axis=1)[:, 0]


def make_varied_start(world: World, walk: int) -> Callable[[Array], Any]:
    """`start(key) -> state`: a state that is not over, from all over the world.
    Where states are listed each is equally likely; else `scatter`; else where uniformly random
    agents are after 0 to `walk` steps from an ordinary start.
    """
    if world.states is not None:
        with jax.ensure_compile_time_eval():  # also where a run's state is only traced, to be read
            running = ~np.asarray(jax.jit(jax.vmap(world.terminal))(world.states))
            allowed = jnp.asarray(np.flatnonzero(running))
        listed = lambda i: jax.tree.map(lambda x: x[i], world.states)  # noqa: E731
        return lambda key: listed(jax.random.choice(key, allowed))
    if world.scatter is not None:
        return world.scatter
    num_agents = world.num_humans + world.num_robots

    def start(key: Array) -> Any:
        begin_key, length_key, step_key = jax.random.split(key, 3)

        def step(i: Array, state: Any) -> Any:
            action_key, chance_key = jax.random.split(jax.random.fold_in(step_key, i))
            joint = jax.random.randint(action_key, (num_agents,), 0, world.num_actions, jnp.int32)
            after = draw_successor(world, state, joint, chance_key)
            over = world.terminal(after)
            return jax.tree.map(lambda old, new: jnp.where(over, old, new), state, after)

        length = jax.random.randint(length_key, (), 0, walk + 1)
        return jax.lax.fori_loop(0, length, step, world.init(begin_key))

    return start


def profiles(num_agents: int, num_actions: int) -> np.ndarray:
    """`[num_actions ** num_agents, num_agents]`: the actions of each joint index, agent 0 fastest.
    Little-endian: index = sum_i a_i num_actions^i, `joint_index` is the inverse.
    """
    index = np.arange(num_actions**num_agents)[:, None]
    return index // num_actions ** np.arange(num_agents)[None, :] % num_actions


def joint_index(actions: Any, num_actions: int) -> Any:
    """`[..., n]` actions to `[...]` little-endian joint indices (numpy in, numpy out)."""
    shape = (1,) * (actions.ndim - 1) + (-1,)
    weights = (num_actions ** np.arange(actions.shape[-1])).reshape(shape)
    return (actions * weights).sum(axis=-1)


def check_world(world: TabularWorld) -> None:
    """Raise ValueError, naming field, value and remedy, for an inconsistent world.
    Goal weights need not sum to one; then X_h may exceed 1, y fall below 1 and U_r rise above -1.
    """
    w = TabularWorld(*(np.asarray(field) for field in world))
    agents = sorted([*w.humans.tolist(), *w.robots.tolist()])
    if not len(w.humans) or not len(w.robots) or agents != list(range(len(agents))):
        raise ValueError(
            f"humans={w.humans.tolist()}, robots={w.robots.tolist()}: at least one of each, and "
            "together they must number the agents 0..n-1, each once"
        )
    num_joint, num_states = int(w.num_actions) ** len(agents), int(w.num_states)
    bounds = {"succ_state": num_states, "succ_next": num_states, "succ_joint": num_joint}
    for name, bound in bounds.items():
        values = getattr(w, name)
        if values.size and (values.min() < 0 or values.max() >= bound):
            raise ValueError(
                f"{name} holds {values.min()}..{values.max()}: must be in 0..{bound - 1}"
            )
    expected = (len(w.humans), w.goal_weight.shape[-1], num_states)
    if w.achieved.shape != expected or w.terminal.shape != (num_states,):
        raise ValueError(
            f"achieved {w.achieved.shape} and terminal {w.terminal.shape} should be "
            f"[H, G, S] = {expected} and [S] = ({num_states},)"
        )
    if not np.all(w.succ_prob >= 0):
        raise ValueError(f"succ_prob has the entry {w.succ_prob.min()}: must not be negative")
    mass = np.zeros((num_states, num_joint))
    np.add.at(mass, (w.succ_state, w.succ_joint), w.succ_prob)
    wrong = ~(np.abs(mass - 1.0) <= 1e-5) & ~w.terminal[:, None]
    if wrong.any():
        s, j = np.argwhere(wrong)[0]
        raise ValueError(
            f"succ_prob sums to {mass[s, j]:.6g} at state {s}, joint action {j} ({wrong.sum()} such"
            " pairs): every non-terminal pair must sum to 1; list all its successors"
        )
    if np.any(w.goal_weight < 0) or np.any(w.goal_weight.sum(axis=-1) <= 0):
        raise ValueError(f"goal_weight={w.goal_weight}: no negative weight, a positive sum a human")


def tabular_world(
    world: TabularWorld,
    human_policy: Any = None,
    *,
    start: Any = None,
    features: Any = None,
    views: Views | None = None,
    goal_prob: Any = None,
) -> World:
    """A `World` whose state is the state's number, int32.
    human_policy: a `Solution` (its pi_h) or an array `[H, G, S, A]`; None for uniform. start: `[n]`
    states an episode begins in, each equally likely; None for those that no transition enters from
    another state, or state 0 where there is none. features: `[S, D]`; None for one-hot. views: of
    state numbers. goal_prob: as in `World`.
    Raises ValueError for an inconsistent world or a policy of the wrong shape.
    """
    check_world(world)
    num_states, num_actions = int(world.num_states), int(world.num_actions)
    num_humans, num_goals = np.shape(world.goal_weight)
    policy = jnp.asarray(policy_array(human_policy, world), jnp.float32)
    policy = jnp.moveaxis(policy, 2, 0)
    following, probs = dense_successors(world)
    following, probs = jnp.asarray(following), jnp.asarray(probs, jnp.float32)
    begin = _starts(world) if start is None else np.atleast_1d(np.asarray(start))
    begin = jnp.asarray(begin, jnp.int32)
    table = None if features is None else jnp.asarray(features, jnp.float32)
    weight = num_actions ** np.concatenate([np.asarray(world.humans), np.asarray(world.robots)])
    weight = jnp.asarray(weight, jnp.int32)
    terminal = jnp.asarray(world.terminal, bool)
    achieved = jnp.moveaxis(jnp.asarray(world.achieved, bool), -1, 0)

    def successors(state: Array, joint: Array) -> tuple[Array, Array, Array]:
        j = jnp.sum(joint * weight, dtype=jnp.int32)
        return following[state, j], probs[state, j], jnp.bool_(False)

    def encode(state: Array) -> Array:
        return jax.nn.one_hot(state, num_states) if table is None else table[state]

    return World(
        num_humans=num_humans,
        num_robots=len(world.robots),
        num_actions=num_actions,
        num_goals=num_goals,
        max_successors=following.shape[-1],
        num_states=num_states,
        example_state=jnp.int32(0),
        init=lambda key: jax.random.choice(key, begin),
        successors=successors,
        terminal=lambda state: terminal[state],
        achieved=lambda state: achieved[state],
        human_policy=lambda state: policy[state],
        features=encode,
        index=lambda state: state,
        goal_features=jnp.eye(num_humans * num_goals).reshape(num_humans, num_goals, -1),
        goal_weight=jnp.asarray(world.goal_weight, jnp.float32),
        views=views,
        states=jnp.arange(num_states, dtype=jnp.int32),
        goal_prob=goal_prob,
    )


def policy_array(human_policy: Any, world: TabularWorld) -> np.ndarray:
    """A policy `[H, G, S, A]` as given, of a `Solution`, or uniform; its shape is checked."""
    shape = (*np.shape(world.achieved), int(world.num_actions))
    policy = getattr(human_policy, "pi_h", human_policy)
    policy = np.full(shape, 1.0 / shape[-1]) if policy is None else np.asarray(policy)
    if policy.shape != shape:
        raise ValueError(f"human_policy has shape {policy.shape}: give [H, G, S, A] = {shape}")
    return policy


def dense_successors(world: TabularWorld) -> tuple[np.ndarray, np.ndarray]:
    """Successors and probabilities `[S, J, K]` of a listed world, padded with probability 0."""
    num_joint = int(world.num_actions) ** (len(world.humans) + len(world.robots))
    pair = np.asarray(world.succ_state).astype(np.int64) * num_joint + np.asarray(world.succ_joint)
    order = np.argsort(pair, kind="stable")
    pair = pair[order]
    rank = np.arange(pair.size) - np.searchsorted(pair, pair)
    shape = (int(world.num_states), num_joint, int(rank.max(initial=0)) + 1)
    following, probs = np.zeros(shape, np.int32), np.zeros(shape)
    where = (*np.divmod(pair, num_joint), rank)
    following[where] = np.asarray(world.succ_next)[order]
    probs[where] = np.asarray(world.succ_prob)[order]
    return following, probs


def _starts(world: TabularWorld) -> np.ndarray:
    entered = np.zeros(int(world.num_states), bool)
    state, following = np.asarray(world.succ_state), np.asarray(world.succ_next)
    entered[following[state != following]] = True
    sources = np.flatnonzero(~entered & ~np.asarray(world.terminal).astype(bool))
    return sources if sources.size else np.zeros(1, int)
