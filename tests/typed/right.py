"""Every public name, as a user would write it; checked by pyright, never run."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

import mbx
from mbx import distributions, envs, heads, mppi, planners, power, replay, returns, successors
from mbx.agents.base import Agent, Diagnostics, Mean, Store
from mbx.agents.settings import RunSettings
from mbx.empo.multigrid import packed
from mbx.envs.base import RawEnvironment, Timestep
from mbx.fast import gradients
from mbx.power import curriculum
from mbx.training import build, run
from mbx.training.policy import Policy
from mbx.types import EnvSpec


def of_distributions(x: jax.Array, bins: jax.Array) -> jax.Array:
    """mbx.distributions."""
    codes = distributions.two_hot(distributions.symlog(x), bins)
    loss = distributions.two_hot_cross_entropy(codes, x, bins)
    return distributions.symexp(loss) + distributions.two_hot_mean(codes, bins)


def of_returns(r: jax.Array, flags: jax.Array) -> tuple[jax.Array, returns.ReturnEMA]:
    """mbx.returns."""
    goals = returns.lambda_returns(r, 0.99, r, 0.95, bootstrap=r[-1])
    rows = returns.replay_lambda_returns(r, flags, flags, r, 0.99, lambda_=0.95)
    weights = returns.discount_weights(flags, gamma=0.99)
    ema = returns.update_return_ema(returns.init_return_ema(), goals, decay=0.9)
    low, scale = returns.return_ema_offset_scale(ema, max_=1.0)
    return (goals[1:] - low) / scale + rows * weights[1:], ema.replace(low=low)


def score(key: jax.Array, actions: jax.Array) -> jax.Array:
    """Of candidates `[B, N, T, A]`."""
    return -jnp.sum(actions**2, axis=(-1, -2))


def of_mppi(key: jax.Array, mean: jax.Array, std: jax.Array) -> jax.Array:
    """mbx.mppi and mbx.fast.gradients."""
    config = mppi.MPPIConfig(iterations=3, num_samples=64, num_elites=8, temperature=std.max())
    plan: mppi.Plan = mppi.plan(key, score, mean, std, has_aux=False, config=config)
    fitted = mppi.refit(
        plan.actions, plan.values, num_elites=8, temperature=0.5, min_std=0.1, max_std=1.0
    )
    with gradients.forward_mode():
        return plan.action + fitted.mean[:, 0] + plan.std[:, 0] + plan.chosen


def of_successors(x: jax.Array, states: jax.Array) -> jax.Array:
    """mbx.successors."""
    u, y = successors.segment_reward(x, states, 3, xi=1.0, eta=1.1)
    return u + y + successors.segment_expectation(x, x, states, num_segments=3)


def of_power(world: power.TabularWorld, x: jax.Array) -> jax.Array:
    """mbx.power."""
    params = power.PowerParams(beta_r=5.0)
    solution: power.Solution = power.solve(world, params)
    pi = power.robot_policy(solution.Q_r, beta_r=params.beta_r)
    reward = power.intrinsic_reward(solution.X_h, xi=params.xi, eta=params.eta)
    plan = power.Curriculum(use_u_r=True, use_v_r=True)
    return power.aggregate_ability(x, x, zeta=2.0) + pi + reward + curriculum.epsilon(plan, x)


def of_packed(grid: jax.Array, layout: Any, state: Any) -> jax.Array:
    """mbx.empo.multigrid.packed."""
    fields = packed.grid_fields(layout, state)
    return packed.channels(packed.encode(fields)) + packed.decode(grid).object_type


def of_replay(row: Mapping[str, Any], rows: dict[str, jax.Array], key: jax.Array) -> jax.Array:
    """mbx.replay."""
    state: replay.ReplayState = replay.init(row, num_envs=2, capacity=100)
    state = replay.insert(state, rows)
    state = replay.insert_step(state, rows, rows, rows["done"])
    batch = replay.sample(state, key, batch_size=8, length=3)
    _, index = replay.sample_stale(state, key, 3, batch_size=8, exponent=1.0)
    if batch.targets is not None:
        state = replay.update_targets(state, index, batch.targets)
    return replay.target_age(state.replace(size=state.size), index, 4) + batch.mask


def of_heads(window: heads.Window) -> heads.Head:
    """mbx.heads and mbx.planners."""

    def inputs(window: heads.Window) -> tuple[jax.Array, ...]:
        return window.encoded[:-1], window.latents[1:]

    def target(window: heads.Window) -> jax.Array:
        return window.action

    def network(spec: EnvSpec) -> Any:
        return spec.action_dim

    head = heads.Head(network=network, inputs=inputs, target=target, coef=0.1)
    heads.register("mine", head)
    planners.register("mine", mppi.plan)
    return head


def reset(key: jax.Array) -> tuple[jax.Array, jax.Array]:
    """An episode's beginning."""
    return key, key


def step(key: jax.Array, state: Any, action: jax.Array) -> tuple[Any, ...]:
    """One step."""
    return state, state, action[0], action[0] > 0.0


def of_environments() -> Timestep:
    """mbx.envs."""

    def raw(task: str) -> RawEnvironment:
        return RawEnvironment(task, (2,), jnp.float32, 1, 100, reset, step)

    envs.register("mine", envs.Suite(raw=raw))
    environment = envs.make("mine:task", 4, episode_length=10)
    print(environment.spec.obs_shape)
    return Timestep(1.0, 1.0, 1.0, False, False, 1.0, 1, False)


class State:
    """A train state."""

    params: dict[str, jax.Array] = {}


def of_agents(settings: RunSettings, spec: EnvSpec) -> Agent:
    """mbx.agents.base."""

    def init(key: jax.Array) -> State:
        return State()

    def init_actor(num_envs: int) -> jax.Array:
        return jax.random.split(jax.random.key(0), num_envs)

    def act(
        train: State,
        actor: jax.Array,
        obs: jax.Array,
        is_first: jax.Array,
        key: jax.Array,
        evaluate: bool,
    ) -> tuple[jax.Array, jax.Array]:
        return obs[:, :1], actor

    def update(
        train: State, replay: replay.ReplayState, key: jax.Array
    ) -> tuple[State, replay.ReplayState, dict[str, jax.Array]]:
        return train, replay, {"loss": jnp.float32(0.0)}

    def example_row() -> dict[str, Any]:
        return replay.example_row((3,), action_dim=1)

    def diagnostics(train: State, replay: replay.ReplayState, key: jax.Array) -> Diagnostics:
        return Diagnostics({"mean": float(Mean(key, count=key).total)}, {})

    agent = Agent(init, init_actor, act, update, example_row, diagnostics=diagnostics)
    store: Store | None = agent.store
    print(store, agent.act)
    return agent


def of_commands(settings: type[RunSettings]) -> npt.NDArray[np.generic] | int:
    """Training and what comes of it."""
    build.register("mine", settings, of_agents)
    agent, _, rows = mbx.train("gymnax:Pendulum-v1", config="tdmpc", steps=10_000, seed=0)
    whole = mbx.train_fn("gymnax:Pendulum-v1", steps=5_000)
    print(whole(0, {"optimizer.learning_rate": 1e-3}).metrics["loss/total"].mean())
    result: run.Result = run.train(presets(), "runs/a")
    loaded = run.load("runs/a", which="best")
    policy: Policy = mbx.load_policy("runs/a", batch=None)
    policy.reset()
    print(agent.act, rows[0], result.workdir, loaded[2].seed, policy.save("policy.mbx"))
    print(result.evaluations)
    return policy([0.0, 1.0])


def presets() -> dict[str, Any]:
    """Settings."""
    return {"version": mbx.__version__}
