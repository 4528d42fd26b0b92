"""What EMPO writes next to the log: goal reaching, an episode as a GIF, maps of what was learned.

reached_learned, reached_random, reached_frozen   share of (episode, human) pairs that reach the
    pursued goal with the learned, a random or motionless robot; reached_new_... on held-out maps
episode.gif     episodes with the learned robots; outlines are the humans' goals
value_map.png   V_h^e of every human and goal, and X_h, by where the human stands: means over the
    states of episodes with the learned robots
robot_map.png   shares of a robot's actions, by where it stands

In a run on many maps pictures are of one of them: the first held-out one, or else a trained one.
"""

from __future__ import annotations

import functools
import io
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np

from mbx.agents.base import Diagnostics
from mbx.agents.pictures import to_gif
from mbx.empo.agent import evaluation
from mbx.empo.agent.acting import acting_policy
from mbx.empo.agent.types import Problem, TrainState
from mbx.empo.power import aggregate_ability
from mbx.empo.power.worlds import World
from mbx.types import Array

ROBOTS = ("learned", "random", "frozen")
SHOWN = 3  # episodes in the GIF
ON_ONE_MAP = 64  # episodes at most of which maps are drawn, in a run on many


def make_diagnostics(
    problem: Problem, episodes: int, length: int
) -> Callable[[TrainState, Any, Array], Diagnostics]:
    """The diagnostics of EMPO's agent: `episodes` of each robot, of at most `length` steps."""
    world, gamma = problem.world, float(problem.params.gamma_h)
    play = functools.partial(evaluation.play, length=length, gamma=gamma)

    def played_in(world: World, train: TrainState, key: Array) -> evaluation.Episodes:
        policies = (
            evaluation.learned_policy(problem, train),
            evaluation.random_policy(world),
            evaluation.frozen_policy,
        )

        def beside(robot: Array) -> evaluation.Episodes:
            def policy(state: Any, key: Array) -> Array:
                return jax.lax.switch(robot, policies, state, key)

            return play(world, policy, key, episodes=episodes)

        # One robot after the other, so that only the one that plays is computed.
        return jax.lax.map(beside, jnp.arange(len(ROBOTS)))

    many = world.views is not None and world.views.walls is not None

    @jax.jit
    def play_all(train: TrainState, key: Array) -> tuple[Any, Any]:
        played = played_in(world, train, key)
        learned = jax.tree.map(lambda x: x[0], played)
        shown = None if world.views is None or many else (learned, looks(problem, train, learned))
        return (played.reached, played.value), shown

    @jax.jit
    def play_new(train: TrainState, key: Array) -> tuple[Array, Array]:
        played = played_in(problem.held_out, train, key)
        return played.reached, played.value

    @jax.jit
    def play_one(train: TrainState, key: Array) -> Any:
        """On one map."""
        some = world if problem.held_out is None else problem.held_out
        one = some._replace(init=lambda key: some.example_state)
        policy = evaluation.learned_policy(problem, train)
        played = play(one, policy, key, episodes=min(episodes, ON_ONE_MAP))
        return played, looks(problem, train, played)

    def diagnose(train: TrainState, _: Any, key: Array) -> Diagnostics:
        (reached, value), shown = jax.device_get(play_all(train, key))
        metrics = _numbers("", reached, value)
        if problem.held_out is not None:
            new = jax.device_get(play_new(train, jax.random.fold_in(key, 1)))
            metrics |= _numbers("new_", *new)
        if many:
            shown = jax.device_get(play_one(train, jax.random.fold_in(key, 2)))
        return Diagnostics(metrics, {} if shown is None else pictures(world, *shown))

    return diagnose


def looks(problem: Problem, train: TrainState, played: evaluation.Episodes) -> tuple[Array, Array]:
    """What has been learned of the states of episodes, N = E * (length + 1).

    Returns `[N, H, G + 1]`, V_h^e followed by X_h, and pi_r `[N, R]` as the robots act.
    """
    model, world, states = problem.model, problem.world, _joined(played.states)
    latents = model.trunk(train.params, model.encode(states))
    v_h_e = jnp.clip(model.v_h_e(train.params, latents), 0.0, 1.0)
    if model.x_h is None:
        x_h = aggregate_ability(v_h_e, world.goal_weight[None], problem.params.zeta)
    else:
        x_h = jnp.clip(model.x_h(train.params, latents), 0.0, 1.0)
    # One episode at a time: a step ahead evaluates every successor of its states.
    policy = jax.lax.map(lambda own: acting_policy(problem, train, own), played.states)
    return jnp.concatenate([v_h_e, x_h[..., None]], axis=-1), policy.reshape(-1, policy.shape[-1])


def pictures(
    world: World, played: evaluation.Episodes, looked: tuple[np.ndarray, np.ndarray]
) -> dict[str, bytes]:
    """The files by name, of episodes on one map and what `looks` says of their states."""
    (values, policy), blocked = looked, _walls(world, played)
    files = {
        "episode.gif": to_gif(_frames(world, played)),
        "value_map.png": draw_map(
            *value_map(world, played, values),
            world,
            titles=[
                [*(f"human {h + 1}, goal {g + 1}" for g in range(world.num_goals)), f"$X_{h + 1}$"]
                for h in range(world.num_humans)
            ],
            label="$V_h^e$, $X_h$",
            blocked=blocked,
        ),
    }
    if world.views.robots is not None:
        files["robot_map.png"] = draw_map(
            *robot_map(world, played, policy),
            world,
            titles=[
                [f"robot {robot + 1}: {action}" for action in _actions(world)]
                for robot in range(world.num_robots)
            ],
            label="share of actions",
            blocked=blocked,
        )
    return files


def _walls(world: World, played: evaluation.Episodes) -> np.ndarray:
    """`[rows, columns]` bool, of the map that the episodes are on."""
    if world.views.walls is None:
        return world.views.blocked
    return np.asarray(world.views.walls(jax.tree.map(lambda x: x[0, 0], played.states)))


def _actions(world: World) -> Sequence[str]:
    return world.views.actions or [f"action {number}" for number in range(world.num_actions)]


def _numbers(where: str, reached: np.ndarray, value: np.ndarray) -> dict[str, float]:
    """What humans reach beside each of ROBOTS, `[3, E, H]`, by name."""
    metrics = {}
    for number, robot in enumerate(ROBOTS):
        numbers = evaluation.summarise(reached[number], value[number])
        metrics[f"reached_{where}{robot}"] = numbers["reached"]
        metrics[f"reached_{where}{robot}_error"] = numbers["reached_error"]
        metrics[f"all_reached_{where}{robot}"] = numbers["all_reached"]
    return metrics


def _frames(world: World, played: evaluation.Episodes) -> list[np.ndarray]:
    """The first episodes, each with its last state twice."""
    draw = jax.jit(jax.vmap(world.views.render, in_axes=(0, None)))
    frames = []
    for number in range(min(SHOWN, len(played.over))):
        states = jax.tree.map(lambda x, n=number: jnp.asarray(x[n]), played.states)
        pictures = np.asarray(draw(states, jnp.asarray(played.goals[number])))
        kept = pictures[~played.over[number]]
        frames += [*kept, kept[-1]]
    return frames


def _joined(states: Any) -> Any:
    """States `[E, T, ...]` as `[E * T, ...]`."""
    return jax.tree.map(
        lambda x: jnp.asarray(x).reshape(x.shape[0] * x.shape[1], *x.shape[2:]), states
    )


def value_map(
    world: World, played: evaluation.Episodes, values: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Mean V_h^e `[H, G, rows, columns]` by the human's cell, and visits `[H, rows, columns]`.

    played: episodes on one map; values: `[N, H, G]` of their states, or more columns than goals.
    """
    return _by_cell(world, world.views.positions, played, values)


def robot_map(
    world: World, played: evaluation.Episodes, policy: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Mean shares of a robot's actions `[robots, A, rows, columns]` by its own cell, and visits.

    played: episodes on one map; policy: pi_r `[N, R]` of their states, over joint actions.
    """
    num = world.num_robots
    joint = np.asarray(policy).reshape(-1, *[world.num_actions] * num)  # the first robot's last
    others = [tuple(1 + k for k in range(num) if k != num - 1 - robot) for robot in range(num)]
    shares = np.stack([joint.sum(axis=axes) for axes in others], axis=1)
    return _by_cell(world, world.views.robots, played, shares)


def _by_cell(
    world: World, where: Any, played: evaluation.Episodes, values: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Means `[K, V, rows, columns]` of values `[N, K, V]` by the cells `where` has K agents."""
    columns, rows = world.views.size
    places = np.asarray(jax.jit(jax.vmap(where))(_joined(played.states)), np.int64)
    there = ~played.over.reshape(-1)
    agents, kinds = values.shape[1:]
    total, count = np.zeros((agents, kinds, rows * columns)), np.zeros((agents, rows * columns))
    for agent in range(agents):
        cells = (places[:, agent, 1] * columns + places[:, agent, 0])[there]
        count[agent] = np.bincount(cells, minlength=rows * columns)
        for kind in range(kinds):
            weights = values[there, agent, kind].astype(np.float64)
            total[agent, kind] = np.bincount(cells, weights, rows * columns)
    mean = total / np.maximum(count, 1)[:, None]
    shape = (rows, columns)
    return mean.reshape(agents, kinds, *shape), count.reshape(agents, *shape)


def draw_map(
    mean: np.ndarray,
    count: np.ndarray,
    world: World,
    *,
    titles: Sequence[Sequence[str]] | None = None,
    label: str = "$V_h^e$",
    blocked: np.ndarray | None = None,
) -> bytes:
    """The map as a PNG file's content: a row an agent, a column a value; white was never visited.

    mean `[K, V, rows, columns]` from 0 to 1; count `[K, rows, columns]` visits; titles of each, by
    default the humans' goals; blocked `[rows, columns]` bool, by default the world's walls.
    """
    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    agents, kinds = mean.shape[:2]
    figure = Figure(figsize=(1.0 + 2.2 * kinds, 0.6 + 2.3 * agents), layout="constrained")
    axes = figure.subplots(agents, kinds, squeeze=False)
    wall = np.where(world.views.blocked if blocked is None else blocked, 1.0, np.nan)
    for agent, kind in np.ndindex(agents, kinds):
        axis, seen = axes[agent, kind], np.where(count[agent] > 0, mean[agent, kind], np.nan)
        image = axis.imshow(seen, vmin=0.0, vmax=1.0, cmap="viridis")
        axis.imshow(wall, vmin=0.0, vmax=1.5, cmap="Greys")
        title = titles[agent][kind] if titles else f"human {agent + 1}, goal {kind + 1}"
        axis.set_title(title, fontsize=9)
        axis.set_xticks([])
        axis.set_yticks([])
    figure.colorbar(image, ax=axes, label=label, shrink=0.8)
    target = io.BytesIO()
    figure.savefig(target, format="png", dpi=100)
    return target.getvalue()
