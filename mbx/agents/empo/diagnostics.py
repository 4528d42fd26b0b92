"""What EMPO writes beside the log: goal reaching, an episode as a GIF, a map of human values.

reached_learned, reached_random, reached_frozen   share of (episode, human) pairs that reach
    the goal they pursue, with the robots' policy so far, uniformly random or motionless robots;
    reached_new_learned, ... the same on maps held out of training, where there are such
episode.gif     episodes with the learned robots; outlines are the humans' goals
value_map.png   V_h^e of every human and goal by where the human stands, averaged over the
    states of those episodes
"""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np

from mbx.agents.base import Diagnostics
from mbx.agents.empo import evaluation
from mbx.agents.empo.types import Problem, TrainState
from mbx.pictures import to_gif
from mbx.power.worlds import World
from mbx.types import Array

ROBOTS = ("learned", "random", "frozen")
SHOWN = 3  # episodes in the GIF


def make_diagnostics(
    problem: Problem, episodes: int, length: int
) -> Callable[[TrainState, Any, Array], Diagnostics]:
    """The diagnostics of EMPO's agent.

    Args:
        problem: what is learned and how.
        episodes: of each robot.
        length: steps of an episode, at most.
    """
    world, model, gamma = problem.world, problem.model, float(problem.params.gamma_h)

    def played_in(world: World, train: TrainState, key: Array) -> evaluation.Episodes:
        policies = (
            evaluation.learned_policy(problem, train),
            evaluation.random_policy(world),
            evaluation.frozen_policy,
        )

        def beside(robot: Array) -> evaluation.Episodes:
            def policy(state: Any, key: Array) -> Array:
                return jnp.stack([p(state, key) for p in policies])[robot]

            return evaluation.play(
                world, policy, key, episodes=episodes, length=length, gamma=gamma
            )

        return jax.vmap(beside)(jnp.arange(len(ROBOTS)))

    @jax.jit
    def play(train: TrainState, key: Array) -> tuple[Any, Array]:
        played = played_in(world, train, key)
        states = _joined(jax.tree.map(lambda x: x[0], played.states))
        values = model.v_h_e(train.params, model.trunk(train.params, model.encode(states)))
        return played, jnp.clip(values, 0.0, 1.0)

    @jax.jit
    def play_new(train: TrainState, key: Array) -> tuple[Array, Array]:
        played = played_in(problem.held_out, train, key)
        return played.reached, played.value

    def diagnose(train: TrainState, _: Any, key: Array) -> Diagnostics:
        played, values = jax.device_get(play(train, key))
        metrics = _numbers("", played.reached, played.value)
        if problem.held_out is not None:
            new = jax.device_get(play_new(train, jax.random.fold_in(key, 1)))
            metrics |= _numbers("new_", *new)
        files = {}
        if world.views is not None:
            learned = jax.tree.map(lambda x: x[0], played)
            files["episode.gif"] = to_gif(_frames(world, learned))
            files["value_map.png"] = draw_map(*value_map(world, learned, values), world)
        return Diagnostics(metrics, files)

    return diagnose


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

    Args:
        values: `[E * (length + 1), H, G]`, of the states of `played`.
    """
    columns, rows = world.views.size
    states = _joined(played.states)
    places = np.asarray(jax.jit(jax.vmap(world.views.positions))(states), np.int64)
    there = ~played.over.reshape(-1)
    humans, goals = values.shape[1:]
    total, count = np.zeros((humans, goals, rows * columns)), np.zeros((humans, rows * columns))
    for human in range(humans):
        cells = (places[:, human, 1] * columns + places[:, human, 0])[there]
        count[human] = np.bincount(cells, minlength=rows * columns)
        for goal in range(goals):
            weights = values[there, human, goal].astype(np.float64)
            total[human, goal] = np.bincount(cells, weights, rows * columns)
    mean = total / np.maximum(count, 1)[:, None]
    shape = (rows, columns)
    return mean.reshape(humans, goals, *shape), count.reshape(humans, *shape)


def draw_map(mean: np.ndarray, count: np.ndarray, world: World) -> bytes:
    """The map as a PNG file's content: a row a human, a column a goal; white was never visited."""
    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    humans, goals = mean.shape[:2]
    figure = Figure(figsize=(1.0 + 2.2 * goals, 0.6 + 2.3 * humans), layout="constrained")
    axes = figure.subplots(humans, goals, squeeze=False)
    wall = np.where(world.views.blocked, 1.0, np.nan)
    for human, goal in np.ndindex(humans, goals):
        axis, seen = axes[human, goal], np.where(count[human] > 0, mean[human, goal], np.nan)
        image = axis.imshow(seen, vmin=0.0, vmax=1.0, cmap="viridis")
        axis.imshow(wall, vmin=0.0, vmax=1.5, cmap="Greys")
        axis.set_title(f"human {human + 1}, goal {goal + 1}", fontsize=9)
        axis.set_xticks([])
        axis.set_yticks([])
    figure.colorbar(image, ax=axes, label="$V_h^e$", shrink=0.8)
    target = io.BytesIO()
    figure.savefig(target, format="png", dpi=100)
    return target.getvalue()
