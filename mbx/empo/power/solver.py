"""The exact solver of small worlds: equations (1)-(9) by jitted sweeps over all states.

The successors of every (state, joint action) are one segment of a flat list, so a sweep is a gather
and a segment sum. Large worlds without cycles are solved once, backward. Axes: S states, H humans,
G goals a human, A actions of an agent, R joint robot actions, P joint human actions."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from mbx.empo.power.equations import (
    ABILITY_FLOOR,
    PowerParams,
    aggregate_ability,
    attained,
    check_params,
    human_aggregate,
    robot_policy,
)
from mbx.empo.power.worlds import (
    TabularWorld,
    check_world,
    joint_index,
    policy_array,
    profiles,
)

LOOSE = 1e-3  # relative error of values above which a solution says that it may have it
LARGE = 2**24  # numbers of one expectation, above which worlds without cycles are solved backward
CHUNK = 4_096  # states that are solved at once there


class Solution(NamedTuple):
    """The exact solution of a world. Joint robot actions are little-endian (`profiles`).
    Equations (1) to (3) are 0 where the state is terminal or the goal achieved in it, but pi_h on
    action 0 ("still") in the latter; (4) to (9) where terminal, but V_r = terminal_v_r.
    """

    V_hm: Array  # `[H, G, S]`
    Q_hm: Array  # `[H, G, S, A]`
    pi_h: Array  # `[H, G, S, A]`
    V_h_e: Array  # `[H, G, S]`
    X_h: Array  # `[H, S]`
    U_r: Array  # `[S]`
    V_r: Array  # `[S]`
    Q_r: Array  # `[S, R]`
    pi_r: Array  # `[S, R]`
    residual: Array  # largest change the equations would still make (relative above 1)
    iterations: Array  # sweeps of both phases
    y: Array  # `[S]`, of equation (8)
    converged: Array  # residual <= tol
    zero_ability: Array  # non-terminal (human, state) pairs with X_h at the floor: U_r is no number
    unreachable: Array  # goals of positive weight with V_h^e = 0 in every state
    bound: Array | float = 0.0  # residual / (1 - gamma): how far values may be off

    @property
    def W_h(self) -> Array:
        """`[H, S]`, log2 X_h, the paper's power in bits; -inf where there is none."""
        return jnp.log2(self.X_h)


def solve(
    world: TabularWorld,
    params: PowerParams,
    *,
    tol: float | None = None,
    max_iterations: int = 20_000,
    human_policy: Any = None,
    habit: Any = None,
    goal_prob: Any = None,
) -> Solution:
    """Solve equations (1)-(9) by sweeps over all states, in the precision that JAX is set to.
    Acyclic worlds take as many sweeps as they are deep, LARGE ones a single one, layer by layer;
    cyclic ones until the residual is at most tol (None: 1e-12 in float64, 1e-6 in float32) or
    max_iterations of each phase. Where a large beta_r makes them oscillate, sweeps are damped.
    Values lie within `bound` of the solution, of which a warning says when it is above LOOSE.
    human_policy: [H, G, S, A], a prior to take instead of phase 1's; V_hm and Q_hm are then 0.
    habit: [H, G, S, A], pi^0 of equation (2); None: uniform. goal_prob: [H, G], how often humans
    pursue goals; None: the goal weights, normalised.
    Raises ValueError: an inconsistent world or parameter, or a policy that is none.
    """
    check_world(world)
    check_params(params, theory=False)
    if max_iterations < 1:
        raise ValueError(f"max_iterations={max_iterations}: give at least 1")
    dtype = jax.dtypes.canonicalize_dtype(jnp.float64)
    tol = tol if tol is not None else (1e-12 if dtype == jnp.float64 else 1e-6)
    human_policy, habit = (
        None if given is None else jnp.asarray(_given_prior(given, world), dtype)
        for given in (human_policy, habit)
    )
    numbers = PowerParams(*(None if isinstance(x, str) else jnp.asarray(x, dtype) for x in params))  # type: ignore[arg-type]
    arrays = _arrange(world, dtype, goal_prob)
    sizes = (len(world.humans), len(world.robots), int(world.num_actions))
    words: dict[str, Any] = {"sizes": sizes, "reduce": params.reduce}
    words["optimistic"] = bool(params.optimistic)
    size = np.asarray(world.achieved).size * sizes[2] ** (sizes[0] + sizes[1])
    layers = _layers(world) if size > LARGE else None
    gammas = [gamma for gamma in (float(params.gamma_h), float(params.gamma_r)) if gamma < 1.0]
    gamma = max(gammas, default=1.0)
    if layers is not None:
        return _solve_backward(arrays, numbers, layers, human_policy, habit, **words)
    words["max_iterations"] = max_iterations
    solution = _solve(arrays, numbers, jnp.asarray(tol, dtype), human_policy, habit, **words)
    warn_of_error(float(solution.residual), float(tol), gamma)
    return solution._replace(bound=solution.residual / (1.0 - gamma) if gamma < 1.0 else np.inf)


def warn_of_error(residual: float, tol: float, gamma: float) -> None:
    """Warn where values that sweeps left at `residual` may be far from the solution."""
    bound = residual / (1.0 - gamma) if gamma < 1.0 else float("inf")
    if residual <= tol and (bound <= LOOSE or gamma >= 1.0):
        return
    state = "converged only to" if residual <= tol else "did not converge and stopped at"
    warnings.warn(
        f"solve {state} a residual of {residual:.2g}, so values may be off by up to "
        f"residual / (1 - gamma) = {bound:.2g} (relative above 1): raise max_iterations, lower tol "
        f"(in 64 bits, JAX_ENABLE_X64=1) or lower gamma={gamma:g}",
        RuntimeWarning,
        stacklevel=3,
    )


Sizes: TypeAlias = tuple[int, int, int]  # humans, robots, actions of each


class _Arrays(NamedTuple):
    """A world's transitions in the order of their segment (s * P + p) * R + r."""

    segment: Array
    following: Array
    prob: Array
    terminal: Array
    achieved: Array
    weight: Array
    chance: Array  # of goals, `[H, G]`


def _given_prior(human_policy: Any, world: TabularWorld) -> np.ndarray:
    """The policy, 0 in terminal states."""
    policy, over = policy_array(human_policy, world), np.asarray(world.terminal).astype(bool)
    total = policy.sum(axis=-1)[:, :, ~over]
    if (policy < 0).any() or (np.abs(total - 1.0) > 1e-4).any():
        raise ValueError("human_policy, habit: give probabilities that sum to one over actions")
    return np.where(over[None, None, :, None], 0.0, policy)


def _arrange(world: TabularWorld, dtype: np.dtype, goal_prob: Any) -> _Arrays:
    """Transitions with their joint action split into a human and a robot profile."""
    weight = np.asarray(world.goal_weight)
    chance = jnp.asarray(weight if goal_prob is None else goal_prob, dtype)
    if chance.shape != weight.shape or (chance < 0).any() or (chance.sum(axis=1) <= 0).any():
        raise ValueError(f"goal_prob={goal_prob}: give [H, G] = {weight.shape}, none negative")
    humans, robots = np.asarray(world.humans), np.asarray(world.robots)
    num_actions, state = int(world.num_actions), np.asarray(world.succ_state).astype(np.int64)
    actions = profiles(len(humans) + len(robots), num_actions)[np.asarray(world.succ_joint)]
    segment = state * num_actions ** len(humans) + joint_index(actions[:, humans], num_actions)
    segment = segment * num_actions ** len(robots) + joint_index(actions[:, robots], num_actions)
    order = np.argsort(segment, kind="stable")
    return _Arrays(
        segment=jnp.asarray(segment[order], jnp.int32),
        following=jnp.asarray(np.asarray(world.succ_next)[order], jnp.int32),
        prob=jnp.asarray(np.asarray(world.succ_prob)[order], dtype),
        terminal=jnp.asarray(world.terminal, bool),
        achieved=jnp.asarray(world.achieved, bool),
        weight=jnp.asarray(weight, dtype),
        chance=chance / jnp.sum(chance, axis=-1, keepdims=True),
    )


@partial(jax.jit, static_argnames=("sizes", "reduce", "optimistic", "max_iterations"))
def _solve(
    a: _Arrays,
    p: PowerParams,
    tol: Array,
    given: Array | None,
    habit: Array | None,
    *,
    sizes: Sizes,
    reduce: str,
    optimistic: bool,
    max_iterations: int,
) -> Solution:
    running, zeros = ~a.terminal, jnp.zeros(a.achieved.shape, a.prob.dtype)
    repeat = partial(iterate, tol=tol, max_iterations=max_iterations)
    if given is None:

        def prior(v: Array) -> tuple[Array, Array, Array]:
            worth = attained(v, a.achieved, p.gamma_h)
            return _prior_sweep(a, p, sizes, optimistic, worth, habit)

        v_hm, residual_1, count_1 = repeat(lambda v: prior(v)[0], zeros)
        v_hm, q_hm, pi_h = prior(v_hm)
    else:
        v_hm, residual_1, count_1 = zeros, jnp.zeros_like(tol), jnp.int32(0)
        q_hm, pi_h = jnp.zeros_like(given), given
    others, own = _human_profiles(a, pi_h, sizes)
    marginal = others[0] * jnp.einsum("g,gsp->sp", a.chance[0], own[0])

    def value(v: Array, pi_r: Array) -> Array:
        """Eq. (6) for given robot policy, one sweep: [H, G, S]."""
        over = jnp.broadcast_to(a.terminal, v.shape)
        worth = attained(v, a.achieved, p.gamma_h, over)
        return _value(a, sizes, worth, pi_r, others, own)

    robot = partial(_robot, a, p, sizes, marginal=marginal)
    reward = partial(_reward, a, p, reduce)

    def sweep(values: tuple[Array, Array]) -> tuple[Array, Array]:
        q, pi_r = robot(values[1])
        v = value(values[0], pi_r)
        v_r = reward(v)[2] + jnp.sum(pi_r * q, axis=-1)
        return v, jnp.where(running, v_r, p.terminal_v_r)

    # V_h^e under a uniform robot first: from V = 0 the first rewards would be astronomical.
    num_robot = sizes[2] ** sizes[1]
    uniform = jnp.where(running[:, None], jnp.full((len(running), num_robot), 1.0 / num_robot), 0.0)
    v, _, count_2 = repeat(lambda v: value(v, uniform.astype(v.dtype)), zeros)
    start = v, jnp.where(running, -jnp.ones(running.shape, v.dtype), p.terminal_v_r)
    (v, v_r), residual_2, count_3 = repeat(sweep, start)
    (q_r, pi_r), (x_h, y, u_r) = robot(v_r), reward(v)
    residual = jnp.maximum(residual_1, residual_2)
    return Solution(
        *(v_hm, q_hm, pi_h, v, x_h, u_r, v_r, q_r, pi_r, residual),
        iterations=count_1 + count_2 + count_3,
        y=y,
        converged=residual <= tol,
        zero_ability=jnp.sum((x_h <= ABILITY_FLOOR) & jnp.broadcast_to(running, x_h.shape)),
        unreachable=(a.weight > 0) & jnp.all(v <= 0.0, axis=-1),
    )


def _value(a: _Arrays, sizes: Sizes, worth: Array, pi_r: Array, others: Array, own: Array) -> Array:
    """Eq. (6) by what successors are `worth`."""
    expected = jnp.einsum("hgspr,sr->hgsp", _expect(a, worth, sizes), pi_r)
    value = jnp.sum(expected * own * others[:, None], axis=-1)
    return jnp.where(jnp.broadcast_to(a.terminal, value.shape), 0.0, value)


def _robot(
    a: _Arrays, p: PowerParams, sizes: Sizes, v_r: Array, marginal: Array
) -> tuple[Array, Array]:
    """Eqs. (4) and (5)."""
    running = ~a.terminal[:, None]
    q = p.gamma_r * jnp.einsum("spr,sp->sr", _expect(a, v_r, sizes), marginal)
    pi_r = robot_policy(jnp.where(running, q, -1.0), p.beta_r)
    return jnp.where(running, q, 0.0), jnp.where(running, pi_r, 0.0)


def _reward(a: _Arrays, p: PowerParams, reduce: str, v: Array) -> tuple[Array, Array, Array]:
    """Eqs. (7) and (8): X_h, y and U_r."""
    x_h = aggregate_ability(jnp.moveaxis(v, 1, -1), a.weight[:, None, :], p.zeta)
    y = human_aggregate(x_h.T, p.xi, reduce=reduce)
    return x_h, jnp.where(a.terminal, 0.0, y), jnp.where(a.terminal, 0.0, -(y**p.eta))


def _layers(world: TabularWorld) -> list[np.ndarray] | None:
    """The states that are not terminal, those first whose successors are all terminal, then those
    whose successors are all among these, and so on; None where there are cycles.
    """
    state, following = np.asarray(world.succ_state), np.asarray(world.succ_next)
    solved, layers = np.asarray(world.terminal).astype(bool), []
    while not solved.all():
        waits = np.zeros_like(solved)
        waits[state[~solved[following]]] = True
        layers.append(np.flatnonzero(~solved & ~waits))
        if not layers[-1].size:
            return None
        solved = solved | ~waits
    return layers


def _solve_backward(
    a: _Arrays,
    p: PowerParams,
    layers: list[np.ndarray],
    given: Array | None,
    habit: Array | None,
    *,
    sizes: Sizes,
    reduce: str,
    optimistic: bool,
) -> Solution:
    """The solution of a world without cycles: every state once, after its successors."""
    humans, robots, actions = sizes
    joint, states = actions ** (humans + robots), len(a.terminal)
    chunks = [own for layer in layers for own in np.split(layer, range(CHUNK, len(layer), CHUNK))]
    a = jax.tree.map(np.asarray, a)
    ends: Any = np.searchsorted(a.segment, np.arange(states + 1) * joint)
    count = np.diff(ends)
    room = max(int(count[own].sum()) for own in chunks)
    dtype = a.prob.dtype
    s: dict[str, Any] = {name: np.zeros(a.achieved.shape, dtype) for name in ("V_hm", "V_h_e")}
    s["V_r"] = np.where(a.terminal, np.asarray(p.terminal_v_r), 0).astype(dtype)
    for own in chunks:
        size = min(CHUNK, max(map(len, layers)))
        where = np.concatenate([np.arange(ends[i], ends[i + 1]) for i in own])
        local = np.repeat(np.arange(len(own)), count[own]) * joint + a.segment[where] % joint
        local = np.pad(local, (0, room - len(where)), constant_values=size * joint - 1)
        padded = np.pad(own, (0, size - len(own)), mode="edge")
        part = _Arrays(
            segment=local.astype(np.int32),
            following=np.pad(a.following[where], (0, room - len(where))),
            prob=np.pad(a.prob[where], (0, room - len(where))),
            terminal=np.zeros(size, bool),
            achieved=a.achieved[:, :, padded],
            weight=a.weight,
            chance=a.chance,
        )
        known = s["V_hm"], s["V_h_e"], s["V_r"], a.achieved, a.terminal
        priors = [None if x is None else np.asarray(x)[:, :, padded] for x in (given, habit)]
        found = _solve_layer(part, p, known, *priors, sizes, reduce, optimistic)
        for name, value in found.items():
            axis = {"V_hm": 2, "V_h_e": 2, "Q_hm": 2, "pi_h": 2, "X_h": 1}.get(name, 0)
            every = (*value.shape[:axis], states, *value.shape[axis + 1 :])
            s.setdefault(name, np.zeros(every, dtype))
            s[name][(slice(None),) * axis + (own,)] = np.take(value, range(len(own)), axis)
    running = np.broadcast_to(~a.terminal, s["X_h"].shape)
    return Solution(
        **{name: jnp.asarray(value) for name, value in s.items()},
        residual=jnp.zeros((), dtype),
        iterations=jnp.int32(len(layers)),
        converged=jnp.bool_(True),
        zero_ability=jnp.sum((s["X_h"] <= ABILITY_FLOOR) & running),
        unreachable=jnp.asarray((a.weight > 0) & (s["V_h_e"] <= 0.0).all(axis=-1)),
    )


@partial(jax.jit, static_argnums=(5, 6, 7))
def _solve_layer(
    a: _Arrays,
    p: PowerParams,
    known: tuple[Array, ...],
    given: Array | None,
    habit: Array | None,
    sizes: Sizes,
    reduce: str,
    optimistic: bool,
) -> dict[str, Array]:
    """Fields of `Solution` of the states of `a`, by the values of all states that follow them."""
    v_hm, v, v_r, achieved, terminal = known
    over = jnp.broadcast_to(terminal, v.shape)
    if given is None:
        worth = attained(v_hm, achieved, p.gamma_h)
        v_hm, q_hm, pi_h = _prior_sweep(a, p, sizes, optimistic, worth, habit)
        found = {"V_hm": v_hm, "Q_hm": q_hm, "pi_h": pi_h}
    else:
        found = {"Q_hm": jnp.zeros_like(given), "pi_h": given}
    others, own = _human_profiles(a, found["pi_h"], sizes)
    marginal = others[0] * jnp.einsum("g,gsp->sp", a.chance[0], own[0])
    q, pi_r = _robot(a, p, sizes, v_r, marginal)
    worth = attained(v, achieved, p.gamma_h, over)
    v = _value(a, sizes, worth, pi_r, others, own)
    x_h, y, u_r = _reward(a, p, reduce, v)
    v_r = u_r + jnp.sum(pi_r * q, axis=-1)
    return found | dict(V_h_e=v, X_h=x_h, U_r=u_r, y=y, Q_r=q, pi_r=pi_r, V_r=v_r)


def _expect(a: _Arrays, values: Array, sizes: Sizes) -> Array:
    """sum_s' P(s'|s, p, r) values(s'): `[..., S]` -> `[..., S, P, R]`."""
    humans, robots, actions = sizes
    split = (len(a.terminal), actions**humans, actions**robots)
    weighted = jnp.moveaxis(values[..., a.following], -1, 0)
    weighted = weighted * a.prob.reshape((-1,) + (1,) * (values.ndim - 1))
    total = jax.ops.segment_sum(weighted, a.segment, math.prod(split), indices_are_sorted=True)
    return jnp.moveaxis(total, 0, -1).reshape(*values.shape[:-1], *split)


def _prior_sweep(
    a: _Arrays, p: PowerParams, sizes: Sizes, optimistic: bool, worth: Array, habit: Array | None
) -> tuple[Array, Array, Array]:
    """Eqs. (1)-(3): what successors are `worth`, `[H, G, S]` -> V_hm, Q_hm, pi_h."""
    humans, _, actions = sizes
    robot = jnp.max if optimistic else jnp.min
    profile = robot(_expect(a, worth, sizes), axis=-1)
    # Which joint human actions have human h do a; the others are believed uniform.
    choice = jax.nn.one_hot(profiles(humans, actions), actions)
    believed = choice.astype(worth.dtype) / actions ** (humans - 1)
    q = jnp.einsum("hgsp,pha->hgsa", profile, believed)
    terminal = jnp.broadcast_to(a.terminal, a.achieved.shape)[..., None]
    open_ = ~a.achieved[..., None] & ~terminal
    q = jnp.where(open_, q, 0.0)
    # One number each, or one a goal: `[G]` or `[H, G]`.
    nu_h, beta_h = (
        x if jnp.ndim(x) == 0 else jnp.broadcast_to(x, q.shape[:2])[..., None, None]
        for x in (p.nu_h, p.beta_h)
    )
    usual = nu_h / actions if habit is None else nu_h * habit
    pi = usual + (1.0 - nu_h) * _soft_best(q, beta_h)
    still = jax.nn.one_hot(jnp.zeros(a.achieved.shape, jnp.int32), actions, dtype=worth.dtype)
    pi = jnp.where(open_, pi, jnp.where(terminal, 0.0, still))
    return jnp.sum(pi * q, axis=-1), q, pi


def _soft_best(q: Array, beta: Array) -> Array:
    """softmax(beta q); beta = inf: uniform over actions within float noise of the best."""
    tie = 1e-9 if q.dtype == jnp.float64 else 1e-6
    q = q - jnp.max(q, axis=-1, keepdims=True)  # before beta, as `distributions.awr_weights`
    best = (q >= -tie).astype(q.dtype)
    best = best / jnp.sum(best, axis=-1, keepdims=True)
    return jnp.where(jnp.isinf(beta), best, jax.nn.softmax(jnp.where(jnp.isinf(beta), 0, beta) * q))


def _human_profiles(a: _Arrays, pi_h: Array, sizes: Sizes) -> tuple[Array, Array]:
    """Probabilities of joint human actions p, as two factors whose product is a distribution.
    others `[H, S, P]`: all humans but h, each by its goal-marginal. own `[H, G, S, P]`: human h
    by its policy for g.
    """
    humans, _, actions = sizes
    marginal = jnp.einsum("hg,hgsa->hsa", a.chance, pi_h)
    index = jnp.asarray(profiles(humans, actions).T)  # [H, P]
    each = jax.vmap(lambda m, i: m[:, i])(marginal, index)  # [H, S, P]
    own = jax.vmap(lambda m, i: m[:, :, i])(pi_h, index)  # [H, G, S, P]
    mine = jnp.eye(humans, dtype=bool)[:, :, None, None]
    return jnp.prod(jnp.where(mine, 1.0, each[None]), axis=1), own


def iterate(
    sweep: Callable[[Any], Any], start: Any, *, tol: Array, max_iterations: int
) -> tuple[Any, Array, Array]:
    """Iterate x <- x + step (sweep(x) - x) until the largest relative change of a sweep is <= tol.
    Returns (values, residual, sweeps). The step halves when 100 sweeps bring no new low residual.
    """
    patience, smallest = 100, 1.0 / 64.0

    def change(old: Array, new: Array) -> Array:
        return jnp.max(jnp.abs(new - old) / jnp.maximum(1.0, jnp.abs(old)))

    def body(carry: tuple) -> tuple:
        x, _, count, step, best, since = carry
        new = sweep(x)
        residual = jnp.max(jnp.stack(jax.tree.leaves(jax.tree.map(change, x, new))))
        # Within tol the step is taken whole: the values returned satisfy the equations.
        taken = jnp.where(residual <= tol, 1.0, step)
        x = jax.tree.map(lambda old, now: old + taken * (now - old), x, new)
        since = jnp.where(residual < best, 0, since + 1)
        stuck = since >= patience
        step = jnp.where(stuck, jnp.maximum(0.5 * step, smallest), step)
        best = jnp.minimum(best, residual)
        return x, residual, count + 1, step, best, jnp.where(stuck, 0, since)

    def unfinished(carry: tuple) -> Array:
        return ~(carry[1] <= tol) & (carry[2] < max_iterations)

    infinity = jnp.full_like(tol, jnp.inf)
    carry = (start, infinity, jnp.int32(0), jnp.ones_like(tol), infinity, jnp.int32(0))
    x, residual, count, *_ = jax.lax.while_loop(unfinished, body, carry)
    return x, residual, count
