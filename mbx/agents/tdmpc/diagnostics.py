"""Diagnostics of the model after an evaluation: can its predictions, values and plans be trusted?

The model predicts the newest replay windows open loop from the actions that were taken; depth N is
the N-th step after the last observation it saw. Values and the acting planner's plans, round by
round, start from states of the evaluation's episodes and are compared with the discounted return
that followed there without exploration noise, plus the last state's value where a time limit cut
the episode. `eval.model=False` leaves them out. Metrics begin with `model/` (`glossary`);
model.png shows them by depth and by round.

Axes: B windows, T steps, D depths, L latent dims, K rounds of the planner, M states of evaluation
episodes (`Episodes`: S steps of E episodes), P of them that are planned from.
"""

from __future__ import annotations

import dataclasses
import functools
import io
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mbx import mppi, replay
from mbx.agents.base import Diagnostics, Episodes, MakeReview
from mbx.agents.tdmpc import planning
from mbx.agents.tdmpc.scoring import score_function
from mbx.agents.tdmpc.types import Batch, TrainState, make_batch
from mbx.fast import compiler
from mbx.types import Array, Params, streams
from mbx.world_model import WorldModel, discount_of, head_values

if TYPE_CHECKING:
    from mbx.agents.tdmpc.settings import Settings

WINDOWS = 64  # B
PLANNED = 16  # P
NEWEST = 4  # windows drawn for each one kept


class Look(NamedTuple):
    """Measurements of one diagnostic pass."""

    mask: Array  # `[D, B]`, 0 for steps after the episode's end
    latent: Array  # mean squared error of the predicted latent, `[D, B]`
    still: Array  # the error if the latent had not changed, `[D, B]`
    reward: Array  # absolute error of the predicted reward, `[D, B]`
    ended: Array  # whether the step terminated the episode, `[D, B]`
    # predicted probability of it, one step ahead; None without a termination head
    said: Array | None
    realised: Array  # return that followed, `[M]`
    value: Array  # `[M]`
    known: Array  # states that an episode reached, with finite rewards, `[M]`
    chosen: Array  # states that are planned from, known ones first, `[P]`
    plans: Array  # value of the policy's actions and of the plan after each round, `[K + 1, P]`
    training: Array | None = None  # `training_gain`, `[B]`; None where no loss reads it


def make_review(settings: Settings, model: WorldModel) -> MakeReview:
    """`Agent.review` of the TD-MPC agent."""

    @functools.cache
    def program() -> Any:
        # It runs once an evaluation: on a CPU, LLVM's optimisation costs more than it saves.
        few = {"xla_backend_optimization_level": 0}
        platform = jax.default_backend()
        options = few if platform == "cpu" else compiler.for_once(platform)
        return jax.jit(functools.partial(look, settings, model), compiler_options=options)

    def review(
        train: TrainState, state: replay.ReplayState, episodes: Episodes, key: Array
    ) -> Diagnostics:
        found = jax.device_get(program()(train, state, episodes, key))
        deepest = len(found.mask)
        shown = sorted({1, min(settings.planner.horizon, deepest), deepest})
        return Diagnostics(summarise(found, shown), {"model.png": draw(found)})

    return review


def look(
    settings: Settings,
    model: WorldModel,
    train: TrainState,
    state: replay.ReplayState,
    episodes: Episodes,
    key: Array,
) -> Look:
    """All measurements of the newest windows and of the evaluation's episodes."""
    keys = streams(key, "sample", "choose", "plan", "training")
    params, shape = train.params, episodes.obs.shape[2:]
    batch = newest_windows(settings, state, keys["sample"])
    starts, windows = episodes.obs.reshape(-1, *shape), batch.obs.reshape(-1, *shape)
    z = model.encode(params, jnp.concatenate([windows, starts, episodes.last_obs]))
    z, start, end = jnp.split(z, [len(windows), len(windows) + len(starts)])
    z = z.reshape(*batch.obs.shape[:2], -1)
    latent, still, reward = open_loop(model, params, z, batch)
    values = state_values(model, params, jnp.concatenate([start, end]))
    gamma = discount_of(model, settings.loss.discount, end)
    realised, known = realised_returns(episodes, gamma, values[len(starts) :])
    order = jnp.where(known, jax.random.uniform(keys["choose"], known.shape), 2.0)
    chosen = jnp.argsort(order)[:PLANNED]
    training = None
    if settings.reads_plans:
        training = training_gain(settings, model, params, z[0], keys["training"])
    return Look(
        mask=batch.mask,
        latent=latent,
        still=still,
        reward=reward,
        ended=batch.terminated,
        said=termination(model, params, z[:-1], batch.action),
        realised=realised,
        value=values[: len(starts)],
        known=known,
        chosen=chosen,
        plans=plans_by_round(settings, model, params, start[chosen], train.step, keys["plan"]),
        training=training,
    )


def newest_windows(settings: Settings, state: replay.ReplayState, key: Array) -> Batch:
    """The newest of uniformly drawn windows, three times the planner's horizon long."""
    pixels = state.data["obs"].dtype == jnp.uint8  # whole windows of images are large
    capacity = state.data["reward"].shape[1]
    length = max(1, min(3 * settings.planner.horizon, capacity - 1))
    draws = state.shards * -(-WINDOWS * (1 if pixels else NEWEST) // state.shards)
    sample = replay.sample(state.replace(targets=None), key, batch_size=draws, length=length)
    env, slot = sample.index.env[0], sample.index.slot[0]
    age = (state.position[env] - 1 - slot) % capacity
    chosen = jnp.argsort(jnp.where(sample.mask[0], age, capacity))[:WINDOWS]
    return jax.tree.map(lambda x: x[:, chosen], make_batch(sample))


def open_loop(
    model: WorldModel, params: Params, z: Array, batch: Batch
) -> tuple[Array, Array, Array]:
    """Open-loop errors of latents, of unchanged latents and of rewards, `[D, B]` each.

    Args:
        z: latents of the observations, `[D + 1, B, L]`.
    """
    own = model.config.latent  # the task's embedding follows

    def step(state: Array, action: Array) -> tuple[Array, tuple[Array, Array]]:
        reward = jnp.mean(model.reward_mean(params, state, action), axis=(0, 1))
        state = model.step(params, state, action)
        return state, (jnp.mean(state, axis=0), reward)

    _, (predicted, rewards) = jax.lax.scan(step, model.tile_heads(z[0]), batch.action)

    def distance(x: Array) -> Array:
        return jnp.mean(jnp.square(x - z[1:])[..., :own], axis=-1)

    still = distance(jnp.broadcast_to(z[:1], z[1:].shape))
    return distance(predicted), still, jnp.abs(rewards - batch.reward)


def termination(model: WorldModel, params: Params, z: Array, action: Array) -> Array | None:
    """Probability, one step ahead, that the episode ends: z `[D, B, L]` -> `[D, B]`."""
    if not model.config.episodic:
        return None
    after = model.step(params, model.tile_heads(z), action)
    return jnp.mean(jax.nn.sigmoid(model.termination(params, after)), axis=0)


def state_values(model: WorldModel, params: Params, z: Array) -> Array:
    """Mean over value heads, at the policy's mean action for a Q critic: `[...]`."""
    action = None
    if model.config.critic == "q":
        mean, log_std = model.policy(params, z)
        action = model.act(mean, log_std, jnp.zeros_like(mean))
    return jnp.mean(head_values(model, params["value"], z, action, None), axis=0)


def realised_returns(episodes: Episodes, gamma: Any, last_value: Array) -> tuple[Array, Array]:
    """Discounted return from each kept step to the episode's end, with the last state's value
    unless the episode ended by itself.

    Args:
        gamma: a number, or `[E]`.
        last_value: value of the state after an episode's last step, `[E]`.

    Returns:
        Returns and whether they are known (the episode reached the step, its rewards are
        finite), `[M]` each.
    """
    ending = jnp.where(episodes.terminated, 0.0, last_value)
    count = len(episodes.rewards)

    def back(following: Array, now: tuple[Array, Array]) -> tuple[Array, Array]:
        step, reward = now
        here = jnp.where(step < episodes.lengths, reward + gamma * following, ending)
        return here, here

    steps = jnp.arange(count)
    _, returns = jax.lax.scan(back, ending, (steps, episodes.rewards), reverse=True)
    finite = jnp.all(jnp.isfinite(episodes.rewards), axis=0)
    known = (episodes.steps[:, None] < episodes.lengths[None]) & finite[None]
    return returns[episodes.steps].reshape(-1), known.reshape(-1)


def plans_by_round(
    settings: Settings, model: WorldModel, params: Params, z: Array, step: Array, key: Array
) -> Array:
    """Values, by the model, of the policy's actions and of the plan's mean after each round.

    Plans are made as in an evaluation, but without a warm start. A planner that remembers more than
    its Gaussian between rounds restarts in each. Discrete actions: the plan is the likeliest action
    of each step.

    Args:
        z: `[P, L]`.
        step: updates made.

    Returns:
        `[K + 1, P]`.
    """
    keys = streams(key, "proposals", "proposal_noise", "rounds", "score")
    planner = dataclasses.replace(settings.planner, std_coef=settings.planner.evaluation_std_coef)
    config = planning.search_config(planner)
    num, horizon, action_dim = len(z), planner.horizon, model.config.action_dim
    one, number = config, 1
    if isinstance(config, mppi.MPPIConfig):  # other methods have no separate rounds
        one = dataclasses.replace(config, iterations=1, extra_iterations=0)
        number = config.rounds(action_dim)
    score = score_function(settings, model, params, z, planner)
    own = planning.policy_trajectories(model, params, z, jnp.zeros((horizon, num, 1, action_dim)))
    proposals = planning.policy_proposals(
        planner, model, params, z, keys["proposals"], keys["proposal_noise"]
    )

    def next_round(gaussian: tuple[Array, Array], key: Array) -> tuple[Any, Array]:
        plan = planning.search(
            planner, model, z, key, score, *gaussian, proposals=proposals, config=one
        )
        return (plan.mean, plan.std), plan.mean

    mean = jnp.zeros((num, horizon, action_dim))
    start = planning.plan_start(planner, model, params, z, mean, step)
    rounds = jax.random.split(keys["rounds"], number)
    _, means = jax.lax.scan(next_round, start, rounds)
    if model.config.policy == "categorical":  # probabilities -> likeliest action
        means = jax.nn.one_hot(jnp.argmax(means, axis=-1), action_dim)
    candidates = jnp.concatenate([own, jnp.swapaxes(means, 0, 1)], axis=1)
    return score(keys["score"], candidates).T


def training_gain(
    settings: Settings, model: WorldModel, params: Params, z: Array, key: Array
) -> Array:
    """Gain of the training planner's best actions over the policy's mean action, `[B]`.

    The mean of the `loss.value_best_n` best from `z` `[B, L]` less the value of the policy's mean
    action, both scored by the training planner.
    """
    keys = streams(key, "plan", "score")
    found = planning.plan_targets(settings, model, params, z, keys["plan"])
    best = jax.lax.top_k(found.values, min(settings.loss.value_best_n, found.values.shape[1]))[0]
    planner = settings.training_planner.as_run
    eps = jnp.zeros((planner.horizon, len(z), 1, model.config.action_dim))
    own = planning.policy_trajectories(model, params, z, eps)
    score = score_function(settings, model, params, z, planner)
    return jnp.mean(best, axis=1) - score(keys["score"], own)[:, 0]


# -------------------------------------------------------------------------------------------------
# In NumPy


def summarise(found: Look, shown: list[int]) -> dict[str, float]:
    """The logged metrics of a pass in NumPy arrays at the depths `shown`, without NaNs."""
    result = {}
    for name in ("latent", "still", "reward"):
        error = by_depth(getattr(found, name), found.mask)
        result |= {f"{name}_error_{n}": error[n - 1] for n in shown}
    value, realised = found.value[found.known], found.realised[found.known]
    there = found.known[found.chosen]
    planned, came = found.plans[:, there], found.realised[found.chosen][there]
    gain, shares = shares_of_gain(planned)
    result |= dict(
        realised=_mean(realised),
        value=_mean(value),
        value_bias=_mean(value - realised),
        value_correlation=correlation(value, realised),
        policy=_mean(planned[0]),
        planned=_mean(planned[-1]),
        planned_bias=_mean(planned[-1] - came),
        planned_correlation=correlation(planned[-1], came),
        planner_gain=gain,
    )
    result |= {f"gain_by_round_{k + 1}": share for k, share in enumerate(shares)}
    if found.training is not None:
        result["training_gain"] = _mean(found.training[found.mask[0] > 0])
    if found.said is not None:
        said, ended = ((x > 0.5)[found.mask > 0.5] for x in (found.said, found.ended))
        result["termination_precision"] = _mean(ended[said])
        result["termination_recall"] = _mean(said[ended])
    return {f"model/{name}": float(x) for name, x in result.items() if np.isfinite(x)}


def by_depth(error: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Mean over the windows that reach each depth, `[D, B] -> [D]`; NaN where none does."""
    return np.array([_mean(each[reached > 0]) for each, reached in zip(error, mask, strict=True)])


def correlation(x: np.ndarray, y: np.ndarray) -> float:
    """Pearson's correlation; NaN where one of them is constant."""
    if x.size < 2 or np.std(x) < 1e-9 or np.std(y) < 1e-9:
        return float("nan")
    return float(np.corrcoef(x, y)[0, 1])


def shares_of_gain(plans: np.ndarray) -> tuple[float, np.ndarray]:
    """Gain of the last round over the policy, and the share of it after each round.

    Args:
        plans: `[K + 1, P]`, as `Look.plans`.

    Returns:
        The gain, and the shares `[K]`, NaN where nothing is gained.
    """
    means = np.array([_mean(each) for each in plans])
    gain = means[-1] - means[0]
    gains = gain > 1e-6 * max(1.0, np.abs(means).max())
    return gain, (means[1:] - means[0]) / gain if gains else np.full(len(means) - 1, np.nan)


def draw(found: Look) -> bytes:
    """A PNG file's content: errors by depth, values and plans against returns, gain by round."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6), layout="constrained")
    (latents, rewards), (returns, rounds) = figure.subplots(2, 2)
    depth, label = np.arange(1, len(found.mask) + 1), "steps after the last observation"
    latents.plot(depth, by_depth(found.latent, found.mask), label="model")
    latents.plot(depth, by_depth(found.still, found.mask), "--", label="if nothing moved")
    latents.set(title="latent, squared error", xlabel=label)
    rewards.plot(depth, by_depth(found.reward, found.mask))
    rewards.set(title="reward, size of the error", xlabel=label)
    known, there = found.known, found.known[found.chosen]
    returns.scatter(found.realised[known], found.value[known], s=8, label="value")
    came = found.realised[found.chosen][there]
    returns.scatter(came, found.plans[-1][there], s=12, marker="x", label="plan")
    ends = returns.get_xlim()
    returns.plot(ends, ends, color="grey", linewidth=0.5)
    returns.set(title="predicted against realised return, evaluation", xlabel="realised")
    if there.any():
        rounds.plot(range(len(found.plans)), found.plans[:, there].mean(axis=1), marker="o")
    rounds.set(title="value of the plan, by the model", xlabel="round (0: the policy alone)")
    for axis in (latents, returns):
        axis.legend(fontsize=8)
    for axis in (latents, rewards, returns, rounds):
        axis.tick_params(labelsize=8)
        axis.grid(alpha=0.3)
    target = io.BytesIO()
    figure.savefig(target, format="png", dpi=100)
    return target.getvalue()


def _mean(x: np.ndarray) -> float:
    return float(x.mean()) if x.size else float("nan")
