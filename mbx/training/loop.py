"""The training loop: act, step, store, learn and reanalyze as one compiled program.

`make_step` joins an agent and a JAX environment into one pure function of a `LoopState`;
`make_interval` scans it for a whole logging interval with the state donated. A host environment
runs the same two halves (`choose`, `absorb`) around its Python call: `host_interval`.

Everything that depends on progress (random seed phase, pretraining, update-to-data ratio,
reanalyze interval) is arithmetic on counters in the state, so that a resumed run continues bit for
bit and nothing recompiles. Steps here are agent steps: one action of one environment.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from mbx import replay
from mbx.agents.base import Agent
from mbx.envs.base import EnvSpec, HostEnvironment, JaxEnvironment, Timestep, random_actions

Array = jax.Array
Metrics = dict[str, Array]


@dataclasses.dataclass(frozen=True)
class Schedule:
    """What happens when, in agent steps over all environments and in learner updates.

    seed_steps: random actions before learning starts. pretrain_updates: updates made at once when
    they are over, after which every stored target is refreshed. utd_ratio: updates per agent step
    from then on, below or above 1. reanalyze_interval: learner updates between two reanalyze passes
    (0: never), which is interval / utd_ratio agent steps. reanalyze_min_step: agent steps before
    the first one.
    """

    seed_steps: int
    pretrain_updates: int
    utd_ratio: float
    reanalyze_interval: int
    reanalyze_min_step: int

    @property
    def ratio(self) -> Fraction:
        """The update-to-data ratio as a fraction, counted without rounding drift."""
        return Fraction(self.utd_ratio).limit_denominator(1000)


@flax.struct.dataclass
class LoopState:
    """All of a run: what a checkpoint holds.

    env: the environment's state (None for a host environment). obs `[E, ...]`, reward `[E]`,
    is_first `[E]`: the row that is being acted on. key: the run's base key; a step's keys are
    folded from it and `steps`. steps: agent steps so far. credit: updates owed, in units of
    1/denominator. updates: learner updates made. The last three are the same for all seeds of a
    program (`make_seeds_interval`); everything else then leads with `[S]`.
    """

    train: Any
    actor: Any
    env: Any
    obs: Array
    reward: Array
    is_first: Array
    replay: replay.ReplayState
    key: Array
    steps: Array
    credit: Array
    updates: Array


# Axes of a state that holds several seeds: progress is common to them.
SEEDS = LoopState(
    train=0, actor=0, env=0, obs=0, reward=0, is_first=0, replay=0, key=0, steps=None, credit=None,
    updates=None,
)  # fmt: skip


def init_state(
    agent: Agent,
    environment: JaxEnvironment | HostEnvironment,
    *,
    key: Array,
    capacity: int,
    host_obs: np.ndarray | None = None,
) -> LoopState:
    """A fresh run. capacity: rows an environment; host_obs: first observations `[E, ...]`."""
    num_envs = environment.num_envs
    init_key, env_key, base_key = jax.random.split(key, 3)
    if isinstance(environment, JaxEnvironment):
        env_state, obs = environment.reset(env_key)
    else:
        env_state, obs = None, jnp.asarray(host_obs)
    return LoopState(
        train=agent.init(init_key),
        actor=agent.init_actor(num_envs),
        env=env_state,
        obs=jnp.copy(obs),
        reward=jnp.zeros(num_envs),
        is_first=jnp.ones(num_envs, bool),
        replay=replay.init(
            agent.example_row(), num_envs=num_envs, capacity=capacity,
            target_spec=agent.target_spec,
        ),
        key=base_key,
        steps=jnp.int32(0),
        credit=jnp.int32(0),
        updates=jnp.int32(0),
    )  # fmt: skip


def make_choose(agent: Agent, schedule: Schedule, num_envs: int, spec: EnvSpec) -> Callable:
    """`choose(state, key) -> (action [E, A], actor, targets)`: random in the seed phase."""

    def choose(state: LoopState, key: Array) -> tuple[Array, Any, Any]:
        act_key, target_key = jax.random.split(key)

        def explore(_: None) -> tuple[Array, Any]:
            return random_actions(spec, act_key, num_envs), state.actor

        def plan(_: None) -> tuple[Array, Any]:
            return agent.act(state.train, state.actor, state.obs, state.is_first, act_key, False)

        seeding = state.steps < schedule.seed_steps
        action, actor = jax.lax.cond(seeding, explore, plan, None)
        return action, actor, agent.targets(state.train, actor, state.obs, target_key)

    return choose


def make_learn(agent: Agent) -> Callable:
    """`learn(state, key, num) -> (state, summed metrics)`: `num` learner updates."""

    def update(train: Any, buffer: Any, key: Array) -> tuple[Any, Any, Metrics]:
        if agent.update_replay is not None:
            return agent.update_replay(train, buffer, key)
        train, metrics = agent.update(train, buffer, key)
        return train, None, metrics

    def learn(state: LoopState, key: Array, num: Array) -> tuple[LoopState, Metrics]:
        # What no update writes must stay out of the loop's carry, where it would be copied.
        writes = agent.update_replay is not None

        def body(i: Array, carry: tuple[Any, Any, Metrics]) -> tuple[Any, Any, Metrics]:
            train, buffer, sums = carry
            now = buffer if writes else state.replay
            train, buffer, metrics = update(train, now, jax.random.fold_in(key, i))
            return train, buffer, jax.tree.map(jnp.add, sums, metrics)

        zeros = _zeros_like(jax.eval_shape(update, state.train, state.replay, key)[2])
        carry = (state.train, state.replay if writes else None, zeros)
        train, buffer, sums = jax.lax.fori_loop(0, num, body, carry)
        state = state.replace(train=train, updates=state.updates + num)
        return (state.replace(replay=buffer) if writes else state), sums

    return learn


def make_reanalyze(
    agent: Agent, schedule: Schedule, capacity: int, seeds_axis: tuple[str, ...] | None
) -> Callable:
    """`reanalyze(state, key, before, starting) -> (state, metrics)`: the passes that are due.

    before: updates made when the step began; starting: whether learning begins with this step, and
    all targets of the seed phase, made by an untrained model, are made anew.
    """
    every = schedule.reanalyze_interval

    def passes_due(state: LoopState, before: Array, starting: Array) -> Array:
        rows = jnp.sum(state.replay.size)
        if seeds_axis is not None:  # all seeds make the same number of passes, so take the fullest
            rows = jax.lax.pmax(rows, seeds_axis)
        chunks = -(-state.is_first.shape[0] * capacity // agent.refresh_chunk)
        sweep = jnp.minimum(-(-rows // agent.refresh_chunk), chunks)
        regular = state.updates // every - before // every if every else 0
        regular = jnp.where(state.steps >= schedule.reanalyze_min_step, regular, 0)
        return jnp.where(starting, sweep, regular)

    def reanalyze(
        state: LoopState, key: Array, before: Array, starting: Array
    ) -> tuple[LoopState, Metrics]:
        def refresh(i: Array, buffer: Any) -> tuple[Any, Metrics]:
            chunk = jnp.where(starting, i, -1)
            return agent.refresh(state.train, buffer, jax.random.fold_in(key, i), chunk)

        def body(i: Array, carry: tuple[Any, Metrics]) -> tuple[Any, Metrics]:
            buffer, metrics = refresh(i, carry[0])
            return buffer, jax.tree.map(jnp.add, carry[1], metrics)

        zeros = _zeros_like(jax.eval_shape(refresh, jnp.int32(0), state.replay)[1])
        passes = passes_due(state, before, starting)
        buffer, sums = jax.lax.fori_loop(0, passes, body, (state.replay, zeros))
        metrics = {f"refresh/{name}": value for name, value in sums.items()}
        metrics["refreshes"] = passes
        return state.replace(replay=buffer), metrics

    return reanalyze


def store(
    agent: Agent, state: LoopState, action: Array, actor: Any, targets: Any, timestep: Timestep
) -> LoopState:
    """The state after its row, and where an episode ended that episode's last row, are stored."""
    done = timestep.terminated | timestep.truncated
    no = jnp.zeros_like(done)
    row = dict(
        obs=state.obs, action=action, reward=state.reward, is_first=state.is_first,
        is_last=no, terminated=no,
    )  # fmt: skip
    last = dict(
        obs=timestep.final_obs, action=jnp.zeros_like(action), reward=timestep.reward,
        is_first=no, is_last=~no, terminated=timestep.terminated,
    )  # fmt: skip
    if agent.remember is not None:
        latents = agent.remember(actor)
        row |= latents
        last |= jax.tree.map(jnp.zeros_like, latents)
    buffer = replay.insert(state.replay, row, targets)
    return state.replace(
        actor=actor,
        obs=timestep.obs,
        reward=jnp.where(done, 0.0, timestep.reward),
        is_first=done,
        replay=replay.insert(buffer, last, mask=done),
        steps=state.steps + done.shape[0],
    )


def make_advance(
    agent: Agent, schedule: Schedule, capacity: int, seeds_axis: tuple[str, ...] | None = None
) -> Callable:
    """`advance(state, before, key) -> (state, metrics)`: what is due since the steps `before`.

    Makes updates and reanalyze passes. Metrics are sums: `updates`, `update/...`, `refresh/...`.
    seeds_axis: names of the axes that seeds lie along, see `make_seeds_interval`.
    """
    ratio = schedule.ratio
    learn = make_learn(agent)
    reanalyze = make_reanalyze(agent, schedule, capacity, seeds_axis) if agent.refresh else None

    def advance(state: LoopState, before: Array, key: Array) -> tuple[LoopState, Metrics]:
        update_key, refresh_key = jax.random.split(key)
        updates_before = state.updates
        started = state.steps >= schedule.seed_steps
        starting = started & (before < schedule.seed_steps)
        earned = (state.steps - before) * ratio.numerator
        credit = state.credit + jnp.where(started & ~starting, earned, 0)
        due = credit // ratio.denominator
        updates = due + jnp.where(starting, schedule.pretrain_updates, 0)
        state = state.replace(credit=credit - due * ratio.denominator)
        state, sums = learn(state, update_key, updates)
        metrics = {f"update/{name}": value for name, value in sums.items()}
        metrics["updates"] = updates
        if reanalyze is not None:
            state, extra = reanalyze(state, refresh_key, updates_before, starting)
            metrics |= extra
        return state, metrics

    return advance


def make_absorb(
    agent: Agent, schedule: Schedule, capacity: int, seeds_axis: tuple[str, ...] | None = None
) -> Callable:
    """`absorb(state, action, actor, targets, timestep, key) -> (state, metrics)`.

    Stores the rows, then advances. Metrics: those of `make_advance`, and `episodes`, `episode/...`.
    """
    advance = make_advance(agent, schedule, capacity, seeds_axis)

    def absorb(
        state: LoopState, action: Array, actor: Any, targets: Any, timestep: Timestep, key: Array
    ) -> tuple[LoopState, Metrics]:
        before = state.steps
        state = store(agent, state, action, actor, targets, timestep)
        state, metrics = advance(state, before, key)
        done = timestep.terminated | timestep.truncated
        metrics["episodes"] = jnp.sum(done)
        metrics["episode/return"] = jnp.sum(jnp.where(done, timestep.episode_return, 0.0))
        metrics["episode/length"] = jnp.sum(jnp.where(done, timestep.episode_length, 0))
        return state, metrics

    return absorb


def make_step(
    agent: Agent,
    environment: JaxEnvironment,
    schedule: Schedule,
    capacity: int,
    seeds_axis: tuple[str, ...] | None = None,
) -> Callable[[LoopState], tuple[LoopState, Metrics]]:
    """One fused train step of all environments: `state -> (state, metrics)`."""
    num_envs = environment.num_envs
    choose = make_choose(agent, schedule, num_envs, environment.spec)
    absorb = make_absorb(agent, schedule, capacity, seeds_axis)

    def step(state: LoopState) -> tuple[LoopState, Metrics]:
        choose_key, env_key, learn_key = _step_keys(state)
        action, actor, targets = choose(state, choose_key)
        env_state, timestep = environment.step(state.env, action, env_key)
        state = state.replace(env=env_state)
        return absorb(state, action, actor, targets, timestep, learn_key)

    return step


def make_interval(
    agent: Agent, environment: JaxEnvironment, schedule: Schedule, *, capacity: int, length: int
) -> Callable[[LoopState], tuple[LoopState, Metrics]]:
    """`length` fused steps in one compiled, donated scan; metrics are summed over them."""
    step = make_step(agent, environment, schedule, capacity)
    return jax.jit(_scanned(step, length), donate_argnums=0)


def _scanned(step: Callable, length: int) -> Callable[[LoopState], tuple[LoopState, Metrics]]:
    def interval(state: LoopState) -> tuple[LoopState, Metrics]:
        state, metrics = jax.lax.scan(lambda s, _: step(s), state, None, length=length)
        return state, jax.tree.map(lambda x: jnp.sum(x, axis=0), metrics)

    return interval


def make_seeds_interval(
    agent: Agent,
    environment: JaxEnvironment,
    schedule: Schedule,
    *,
    capacity: int,
    length: int,
    mesh: jax.sharding.Mesh | None = None,
) -> Callable[[LoopState], tuple[LoopState, Metrics]]:
    """`make_interval` for several seeds, which take every step together.

    The state's leaves lead with `[S]` as `SEEDS` says; metrics are `[S]`, and counts that all seeds
    share are scalars. mesh: devices among which the seeds are divided evenly, axis "devices".
    """
    axes = ("seeds",) if mesh is None else ("seeds", *mesh.axis_names)
    plain = make_step(agent, environment, schedule, capacity)
    one = make_step(agent, environment, schedule, capacity, axes)

    def metric_axes(state: LoopState) -> dict[str, int | None]:
        found = dict.fromkeys(jax.eval_shape(plain, one_seed(state, 0))[1], 0)
        return found | {name: None for name in ("updates", "refreshes") if name in found}

    def together(state: LoopState) -> tuple[LoopState, Metrics]:
        outputs = (SEEDS, metric_axes(state))
        return jax.vmap(one, in_axes=(SEEDS,), out_axes=outputs, axis_name="seeds")(state)

    interval = _scanned(together, length)
    if mesh is None:
        return jax.jit(interval, donate_argnums=0)

    def divided(state: LoopState) -> tuple[LoopState, Metrics]:
        specs = [_specs(x, mesh) for x in (SEEDS, metric_axes(state))]
        return jax.shard_map(
            interval, mesh=mesh, in_specs=(specs[0],), out_specs=tuple(specs), check_vma=False
        )(state)

    return jax.jit(divided, donate_argnums=0)


def _specs(axes: Any, mesh: jax.sharding.Mesh) -> Any:
    """Axes as `vmap` takes them (0 or None), as partitions over the mesh's devices."""

    def spec(axis: int | None) -> jax.sharding.PartitionSpec:
        return jax.sharding.PartitionSpec(*mesh.axis_names if axis == 0 else ())

    return jax.tree.map(spec, axes, is_leaf=lambda x: x is None)


def place_seeds(state: LoopState, mesh: jax.sharding.Mesh | None) -> LoopState:
    """The state of several seeds, divided among the devices of `mesh` (None: left alone)."""
    if mesh is None:
        return state
    specs = _specs(SEEDS, mesh)
    names = [field.name for field in dataclasses.fields(state)]
    shardings = {n: jax.sharding.NamedSharding(mesh, getattr(specs, n)) for n in names}
    return LoopState(**{n: jax.device_put(getattr(state, n), shardings[n]) for n in names})


def make_offline_interval(
    agent: Agent, schedule: Schedule, *, capacity: int, length: int
) -> Callable[[LoopState], tuple[LoopState, Metrics]]:
    """`length` steps that learn from the replay as it is, without acting.

    A step counts as one of all environments, so that schedules mean what they mean when acting.
    """
    advance = make_advance(agent, schedule, capacity)

    def step(state: LoopState) -> tuple[LoopState, Metrics]:
        key, before = _step_keys(state)[2], state.steps
        return advance(state.replace(steps=before + state.is_first.shape[0]), before, key)

    return jax.jit(_scanned(step, length), donate_argnums=0)


def one_seed(state: LoopState, index: int) -> LoopState:
    """The state of one of several seeds : leaves `[S, ...] -> [...]`."""

    def pick(axis: int | None, tree: Any) -> Any:
        return tree if axis is None else jax.tree.map(lambda x: x[index], tree)

    names = [field.name for field in dataclasses.fields(state)]
    return LoopState(**{n: pick(getattr(SEEDS, n), getattr(state, n)) for n in names})


def make_host_interval(
    agent: Agent, environment: HostEnvironment, schedule: Schedule, *, capacity: int, length: int
) -> Callable[[LoopState], tuple[LoopState, Metrics]]:
    """The same `length` steps around a host environment's Python call."""
    num_envs = environment.num_envs
    choose = make_choose(agent, schedule, num_envs, environment.spec)
    absorb = make_absorb(agent, schedule, capacity)
    choose_now = jax.jit(lambda state: choose(state, _step_keys(state)[0]))
    absorb_now = jax.jit(
        lambda state, action, actor, targets, timestep: absorb(
            state, action, actor, targets, timestep, _step_keys(state)[2]
        ),
        donate_argnums=0,
    )

    def interval(state: LoopState) -> tuple[LoopState, Metrics]:
        total = None
        for _ in range(length):
            action, actor, targets = choose_now(state)
            timestep = environment.step(np.asarray(action))
            timestep = jax.tree.map(jnp.asarray, timestep)
            state, metrics = absorb_now(state, action, actor, targets, timestep)
            total = metrics if total is None else jax.tree.map(jnp.add, total, metrics)
        return state, total

    return interval


def summarise(sums: dict[str, Any]) -> dict[str, float]:
    """Means over updates, refreshes and episodes of an interval's summed metrics."""
    sums = {name: float(value) for name, value in jax.device_get(sums).items()}
    counts = {"update/": "updates", "refresh/": "refreshes", "episode/": "episodes"}
    result = {name: value for name, value in sums.items() if "/" not in name}
    for prefix, counter in counts.items():
        count = sums.get(counter, 0.0)
        for name, value in sums.items():
            if name.startswith(prefix) and count:
                short = name if prefix == "episode/" else name.removeprefix(prefix)
                result[short] = value / count
    return result


def _step_keys(state: LoopState) -> tuple[Array, Array, Array]:
    keys = jax.random.split(jax.random.fold_in(state.key, state.steps), 3)
    return keys[0], keys[1], keys[2]


def _zeros_like(shapes: Metrics) -> Metrics:
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
