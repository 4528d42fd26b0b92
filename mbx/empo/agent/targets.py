"""EMPO's targets: every successor of a batch of states, evaluated once and summed by segment.

Axes: B states, H humans, G goals, P joint human actions, R joint robot actions, K successors of
a joint action, C capacity of the flat list."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from mbx import successors
from mbx.empo import power
from mbx.empo.agent.types import Problem, TrainState
from mbx.empo.power.codec import layout
from mbx.empo.power.curriculum import RAMP_STAGE, stage
from mbx.empo.power.worlds import World, goal_distribution, profiles
from mbx.fast import collectives
from mbx.successors import Successors
from mbx.types import Array, Metrics

# How far the probabilities of a joint action's successors may be from 1 for rounding alone.
MASS_TOLERANCE = 1e-3
# Least X_h in targets: an untrained V_h^e of 0 would make rewards astronomical.
X_FLOOR = 1e-3


class Profiles(NamedTuple):
    """Joint human actions and what they weigh."""

    actions: Array  # `[B, P, H]` int32
    weight: Array  # `[B, P]`, for Q_r: sums to one
    entry: Array  # `[B, H, G, P]`, for V_h^e of human h and goal g: sums over P to `coverage`
    coverage: Array  # `[B, H, G]`, share of draws in which h pursued g; exact: 1


class Targets(NamedTuple):
    """What a batch of states is learned towards."""

    q_r: Array  # `[B, R]`
    known: Array  # `[B, R]` bool, all successors were there and are finite; else q_r is no target
    v_h_e: Array  # `[B, H, G]`
    coverage: Array  # `[B, H, G]`, share of v_h_e's expectation that was there; 0: it is no target
    policy: Array  # `[B, R]`, pi_r
    x_h: Array  # `[B, H]`, abilities by the frozen parameters, at least `X_FLOOR`
    # `[B]`, the aggregate of `x_h` over humans; None where no network learns it
    y: Array | None = None
    v_r: Array | None = None  # `[B]`, eq. (9) by the frozen parameters; None likewise


def exact_profiles(world: World, states: Any) -> Profiles:
    """All joint human actions with their probabilities: humans independent given the state.
    For Q_r each human acts by its goal-marginal; for V_h^e of (h, g) human h pursues g.
    """
    prior = jax.vmap(world.human_policy)(states)  # [B, H, G, A]
    table = jnp.asarray(profiles(world.num_humans, world.num_actions))  # [P, H]
    humans = jnp.arange(world.num_humans)[:, None]
    own = jnp.moveaxis(prior, 2, -1)[:, humans, table.T]  # [B, H, P, G]
    own = jnp.moveaxis(own, -1, 2)
    each = jnp.einsum("bhgp,hg->bhp", own, goal_distribution(world))
    mine = jnp.eye(world.num_humans, dtype=bool)[None, :, :, None]
    others = jnp.prod(jnp.where(mine, 1.0, each[:, None]), axis=2)  # [B, H, P]
    batch = prior.shape[0]
    return Profiles(
        jnp.broadcast_to(table, (batch, *table.shape)).astype(jnp.int32),
        jnp.prod(each, axis=1),
        own * others[:, :, None],
        jnp.ones(prior.shape[:3]),
    )


def fresh_profiles(world: World, states: Any, key: Array, num: int) -> Profiles:
    """`num` draws a state: goals by the goal distribution, actions by the prior for them."""
    goal_key, action_key = jax.random.split(key)
    prior = jax.vmap(world.human_policy)(states)
    batch = prior.shape[0]
    logits = jnp.log(goal_distribution(world))[None, None]
    goals = jax.random.categorical(
        goal_key, jnp.broadcast_to(logits, (batch, num, *logits.shape[2:]))
    )  # [B, P, H]
    chosen = jnp.take_along_axis(prior[:, None], goals[..., None, None], axis=3)[..., 0, :]
    actions = jax.random.categorical(action_key, jnp.log(chosen))
    return drawn_profiles(world, goals, actions)


def drawn_profiles(world: World, goals: Array, actions: Array) -> Profiles:
    """Profiles of given goals and actions, `[B, P, H]` each."""
    batch, num = goals.shape[:2]
    entry = jnp.moveaxis(jax.nn.one_hot(goals, world.num_goals), 1, -1) / num  # [B, H, G, P]
    return Profiles(
        actions.astype(jnp.int32), jnp.full((batch, num), 1.0 / num), entry, jnp.sum(entry, -1)
    )


def expand(
    world: World,
    states: Any,
    human_actions: Array,
    capacity: int | None,
    mask: Array,
    listed: tuple[Any, Array] | None = None,
) -> tuple[Successors, Array, Metrics]:
    """Successors of every (state, human profile, robot action), one flat list.
    human_actions: `[B, P, H]`. capacity: room in the list; None: for every slot. mask: `[B]`, rows
    to count. listed: (states, prob) `[B, P, R, K, ...]`, where they are known already.
    Returns the list, with segments (b * P + p) * R + r; `[B, P, R]` bool, segments some of whose
    successors are missing, in the world's K or in the list; and metrics: n_successors, fill,
    overflow (how many are missing), mass_error (the largest |1 - sum prob|).
    """
    robots = jnp.asarray(profiles(world.num_robots, world.num_actions), jnp.int32)
    batch, num = human_actions.shape[:2]

    def of_joint(state: Any, humans: Array, own: Array) -> tuple[Any, Array, Array]:
        return world.successors(state, jnp.concatenate([humans, own]))

    if listed is None:
        each = jax.vmap(jax.vmap(of_joint, (None, None, 0)), (None, 0, None))
        following, prob, overflow = jax.vmap(each, (0, 0, None))(states, human_actions, robots)
    else:
        following, prob = listed
        overflow = jnp.zeros(prob.shape[:3], bool)
    pairs = (batch, num * len(robots))
    dense = jax.tree.map(lambda x: x.reshape(*pairs, *x.shape[3:]), following)
    prob = prob.reshape(*pairs, -1)
    if capacity is None or capacity >= prob.size:
        flat = _every_slot(dense, prob)
    else:
        flat = successors.flatten(dense, prob, capacity)
    mass = successors.segment_mass(flat.prob, flat.segment, pairs[0] * pairs[1]).reshape(pairs)
    missing = jnp.abs(1.0 - mass)
    worst = jnp.max(jnp.where(mask[:, None], missing, 0.0))
    metrics = {
        "n_successors": flat.count.astype(jnp.float32),
        "fill": collectives.mean_share(flat.fill),
        "overflow": (flat.overflow + jnp.sum(overflow & mask[:, None, None])).astype(jnp.float32),
        "mass_error": collectives.mean_share(collectives.pmax(worst)),
    }
    return flat, (missing > MASS_TOLERANCE).reshape(batch, num, len(robots)), metrics


def _every_slot(states: Any, prob: Array) -> Successors:
    """All slots as they lie, empty ones among them: no compaction, nothing can overflow."""
    num_segments, room = prob.shape[0] * prob.shape[1], prob.shape[2]
    flat = prob.reshape(-1)
    segment = jnp.arange(flat.size, dtype=jnp.int32) // room
    listed = jax.tree.map(lambda x: x.reshape(flat.size, *x.shape[3:]), states)
    none = jnp.int32(0)
    return Successors(listed, flat, segment, flat > 0.0, none, jnp.zeros(num_segments))


def values(
    problem: Problem, train: TrainState, codes: Array, by_network: bool
) -> tuple[Array, Array, Array, Array]:
    """V_r `[N]`, V_h^e clamped `[N, H, G]`, X_h `[N, H]` and Q_r `[N, R]` by frozen parameters.
    X_h is at least X_FLOOR. by_network: V_r is by its network, if it has one that has begun to
    learn; else it is by eq. (9), with U_r by its network, if it has one, or by eq. (8).
    """
    model, params, p = problem.model, train.frozen, problem.at(train.step)
    with jax.named_scope("stage2_encode"):
        latents = model.trunk(params, codes)
    with jax.named_scope("stage3_forward"):
        v = jnp.clip(model.v_h_e(params, latents), 0.0, 1.0)
        q = model.q_r(params, latents)
        if model.x_h is None:
            x = power.aggregate_ability(v, problem.world.goal_weight[None], p.zeta)
        else:
            x = jnp.clip(model.x_h(params, latents), 0.0, 1.0)
        x = jnp.maximum(x, X_FLOOR)
        if model.y is None:
            reward = power.intrinsic_reward(x, p.xi, p.eta, reduce=p.reduce)
        else:
            reward = -(model.y(params, latents) ** p.eta)
        v_r = reward + jnp.sum(power.robot_policy(q, p.beta_r) * q, axis=-1)
        if by_network and model.v_r is not None:
            learned = stage(problem.curriculum, train.step) >= RAMP_STAGE
            v_r = jnp.where(learned, model.v_r(params, latents), v_r)
    return v_r, v, x, q


def make_targets(
    problem: Problem,
    train: TrainState,
    states: Any,
    human: Profiles,
    mask: Array,
    *,
    capacity: int | None = None,
    unique: int = 0,
    listed: tuple[Any, Array] | None = None,
) -> tuple[Targets, Metrics]:
    """Eqs. (4) and (6) for states `[B, ...]` from frozen parameters, averaged over human actions.
    Of a part of a batch (`mbx.fast.collectives`) the metrics are its shares. mask: `[B]` bool, rows
    that exist. capacity, listed: see `expand`. unique: room for distinct successors, 0: all.
    Returns the targets, and metrics: those of `expand`, lost_targets (share of robot actions
    without a target because successors are missing), broken_targets (because a successor is not
    finite) and zero_ability (how often X_h was at the floor).
    """
    model, world, p = problem.model, problem.world, problem.at(train.step)
    shape = (*human.weight.shape, problem.num_robot_actions)
    with jax.named_scope("stage1_collect"):
        flat, lost, metrics = expand(world, states, human.actions, capacity, mask, listed)
        ended = jax.vmap(world.terminal)(flat.state)
        achieved = jax.vmap(world.achieved)(flat.state)
        codes = model.encode(flat.state)

    def evaluate(codes: Array) -> tuple[Array, Array, Array]:
        return values(problem, train, codes, by_network=True)[:3]

    def expected(x: Array) -> Array:
        total = successors.segment_expectation(x, flat.prob, flat.segment, lost.size)
        return total.reshape(*shape, *x.shape[1:])

    if unique:  # a successor is known by its number, or by all its words
        words = layout(world.example_state)[1]
        keys = jax.vmap(words if world.num_states is None else world.index)(flat.state)
        (v_r, v, x), count = successors.map_unique(evaluate, codes, keys, flat.valid, unique)
        metrics["n_unique"] = count.astype(jnp.float32)
    else:
        v_r, v, x = evaluate(codes)
    # Humans whose ability is at the floor: U_r there is a stand-in, not a number to rely on.
    powerless = (x <= X_FLOOR) & (flat.valid & ~ended)[:, None]
    metrics["zero_ability"] = jnp.sum(powerless).astype(jnp.float32)
    with jax.named_scope("stage4_aggregate"):
        following = expected(jnp.where(ended, p.terminal_v_r, v_r))
        q_target = p.gamma_r * jnp.einsum("bpr,bp->br", following, human.weight)
    with jax.named_scope("stage5_v_h_e"):
        v_r, _, x, q = values(problem, train, model.encode(states), by_network=False)
        policy = power.robot_policy(q, p.beta_r)
        over = jnp.broadcast_to(ended[:, None, None], v.shape)
        following = expected(power.attained(v, achieved, p.gamma_h, over))
        total = jnp.einsum("bprhg,br,bhgp->bhg", following, policy, human.entry)
        v_target = total / jnp.maximum(human.coverage, 1e-9)
    targets = Targets(
        *(q_target, jnp.ones_like(q_target, bool), v_target, human.coverage, policy, x),
        y=None if model.y is None else power.human_aggregate(x, p.xi, reduce=p.reduce),
        v_r=None if model.v_r is None else v_r,
    )
    targets, shares = checked(targets, lost, human, mask)
    return targets, metrics | shares


def checked(targets: Targets, lost: Array, human: Profiles, mask: Array) -> tuple[Targets, Metrics]:
    """The targets without those that lack a successor, `lost` `[B, P, R]`, or have no number.
    Missing successors would count 0, better than anything. Also the shares of robots' actions.
    """
    missing = jnp.any(lost & (human.weight > 0.0)[:, :, None], axis=1)
    gap = jnp.any((human.entry > 0.0) & jnp.any(lost, axis=2)[:, None, None], axis=-1)
    sound, whole = jnp.isfinite(targets.q_r), jnp.isfinite(targets.v_h_e)
    rows = collectives.psum(jnp.sum(mask).astype(jnp.float32))

    def share(which: Array) -> Array:
        return jnp.sum(which & mask[:, None]) / jnp.maximum(rows * which.shape[1], 1.0)

    return targets._replace(
        q_r=jnp.where(sound, targets.q_r, -1.0),
        known=targets.known & sound & ~missing,
        v_h_e=jnp.where(whole, targets.v_h_e, 0.0),
        coverage=jnp.where(whole & ~gap, targets.coverage, 0.0),
    ), {"lost_targets": share(missing), "broken_targets": share(~sound)}
