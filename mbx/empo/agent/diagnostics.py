"""What EMPO writes next to the log: goal reaching, an episode as a GIF, maps of what was learned.

In a run on many maps pictures are of one of them: the first held-out one, or else a trained one."""

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
    world, held_out, gamma = problem.world, problem.held_out, float(problem.params.gamma_h)
    many = world.views is not None and world.views.walls is not None
    play = functools.partial(evaluation.play, length=length, gamma=gamma)

    def beside_each(world: World, train: TrainState, key: Array) -> evaluation.Episodes:
        """Episodes `[3, E, ...]` beside ROBOTS."""
        learned = evaluation.learned_policy(problem, train)
        policies = (learned, evaluation.random_policy(world), evaluation.frozen_policy)

        def beside(robot: Array) -> evaluation.Episodes:
            def policy(state: Any, key: Array) -> Array:
                return jax.lax.switch(robot, policies, state, key)

            return play(world, policy, key, episodes=episodes)

        # One robot after the other, so that only the one that plays is computed.
        return jax.lax.map(beside, jnp.arange(len(ROBOTS)))

    @jax.jit
    def play_all(train: TrainState, key: Array) -> tuple[dict[str, tuple[Array, Array]], Any]:
        """What is reached beside ROBOTS, by where, and episodes to be shown with their `looks`."""
        played = {"": beside_each(world, train, key)}
        if held_out is not None:
            played["new_"] = beside_each(held_out, train, jax.random.fold_in(key, 1))
        numbers = {where: (each.reached, each.value) for where, each in played.items()}
        if world.views is None:
            return numbers, None
        shown = jax.tree.map(lambda x: x[0], played[""])
        if many:  # on one map
            some = world if held_out is None else held_out
            one = some._replace(init=lambda key: some.example_state)
            policy, few = evaluation.learned_policy(problem, train), min(episodes, ON_ONE_MAP)
            shown = play(one, policy, jax.random.fold_in(key, 2), episodes=few)
        return numbers, (shown, looks(problem, train, shown))

    def diagnose(train: TrainState, _: Any, key: Array) -> Diagnostics:
        numbers, shown = jax.device_get(play_all(train, key))
        metrics = {}
        for where, each in numbers.items():
            metrics |= _numbers(where, *each)
        return Diagnostics(metrics, {} if shown is None else pictures(world, *shown))

    return diagnose


def looks(problem: Problem, train: TrainState, played: evaluation.Episodes) -> Array:
    """V_h^e followed by X_h, `[N, H, G + 1]`, of the states of episodes, N = E * (length + 1)."""
    model, world, states = problem.model, problem.world, _joined(played.states)
    latents = model.trunk(train.params, model.encode(states))
    v_h_e = jnp.clip(model.v_h_e(train.params, latents), 0.0, 1.0)
    if model.x_h is None:
        x_h = aggregate_ability(v_h_e, world.goal_weight[None], problem.params.zeta)
    else:
        x_h = jnp.clip(model.x_h(train.params, latents), 0.0, 1.0)
    return jnp.concatenate([v_h_e, x_h[..., None]], axis=-1)


def pictures(world: World, played: evaluation.Episodes, values: np.ndarray) -> dict[str, bytes]:
    """The files by name, of episodes on one map and what `looks` says of their states."""
    blocked = world.views.blocked
    if world.views.walls is not None:
        blocked = np.asarray(world.views.walls(jax.tree.map(lambda x: x[0, 0], played.states)))
    titles = [
        [*(f"human {h + 1}, goal {g + 1}" for g in range(world.num_goals)), f"$X_{h + 1}$"]
        for h in range(world.num_humans)
    ]
    means, words = value_map(world, played, values), "$V_h^e$, $X_h$"
    drawn = draw_map(*means, world, titles=titles, label=words, blocked=blocked)
    return {"episode.gif": to_gif(_frames(world, played)), "value_map.png": drawn}


def _numbers(where: str, reached: np.ndarray, value: np.ndarray) -> dict[str, float]:
    """What humans reach beside each of ROBOTS, `[3, E, H]`, by name."""
    metrics = {}
    for robot, *played in zip(ROBOTS, reached, value, strict=True):
        numbers = evaluation.summarise(*played)
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
    columns, rows = world.views.size
    there = ~played.over.reshape(-1)
    where = jax.jit(jax.vmap(world.views.positions))
    places = np.asarray(where(_joined(played.states)), np.int64)[there]
    humans, kinds = values.shape[1:]
    at = np.arange(humans), places[..., 1], places[..., 0]  # [n, H]
    total, count = np.zeros((humans, rows, columns, kinds)), np.zeros((humans, rows, columns))
    np.add.at(total, at, values[there])
    np.add.at(count, at, 1)
    return np.moveaxis(total / np.maximum(count, 1)[..., None], -1, 1), count


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
    mean `[K, V, rows, columns]` from 0 to 1; count `[K, rows, columns]` visits; blocked: walls.
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
        axis.set(xticks=[], yticks=[])
    figure.colorbar(image, ax=axes, label=label, shrink=0.8)
    target = io.BytesIO()
    figure.savefig(target, format="png", dpi=100)
    return target.getvalue()
