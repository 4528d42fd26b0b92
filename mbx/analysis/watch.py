"""One episode of an agent that plans, with every candidate of its planner.

    episode = watch.record(agent, train_state, settings, key)
    text = watch.page(episode, "title")

The actions are those that the agent takes unwatched.
"""

from __future__ import annotations

import base64
import html
import io
import itertools
import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from mbx.agents.base import Agent
from mbx.agents.settings import RunSettings
from mbx.analysis import charts
from mbx.analysis.charts import Line
from mbx.envs.base import JaxEnvironment
from mbx.envs.render import Renderer
from mbx.training import video
from mbx.training.build import make_environment

_DIMS = 6  # of actions that are drawn


class Round(NamedTuple):
    """Candidates of one round, `[N, T, A]`, and their scores, `[N]`."""

    actions: np.ndarray
    values: np.ndarray

    def best(self, count: int) -> np.ndarray:
        """Indices of the best candidates, best first, non-finite ones last."""
        ranked = np.where(np.isfinite(self.values), self.values, -np.inf)
        return np.argsort(-ranked, kind="stable")[:count]


class Step(NamedTuple):
    """One step of the episode.

    Attributes:
        rounds: oldest first.
        plan: fields of `mbx.mppi.Plan` without the state axis, `num_elites`, `discount`.
        picture: uint8 `[height, width, 3]` of the state before the action, if drawn.
    """

    rounds: list[Round]
    plan: dict[str, np.ndarray]
    reward: float
    picture: np.ndarray | None


class Episode(NamedTuple):
    """A recorded episode; terminated: it did not end by its time limit."""

    steps: list[Step]
    terminated: bool


def record(
    agent: Agent,
    train_state: Any,
    settings: RunSettings,
    key: jax.Array,
    *,
    renderer: Renderer | None = None,
    most: int = 1000,
) -> Episode:
    """Play one episode without exploration noise and record the planner.

    Args:
        agent: one with `watched`.
        settings: the run's, with the environment to play.
        key: random numbers are drawn as in an evaluation.
        renderer: draws states; None for no pictures.
        most: maximum number of steps.

    Raises:
        ValueError: for an agent that does not plan, or an environment stepped by the host.
    """
    if agent.watched is None:
        raise ValueError("this agent does not plan: watch a run of one that does (tdmpc)")
    environment = make_environment(settings, 1, seed=0)
    if not isinstance(environment, JaxEnvironment):
        raise ValueError(
            f"env.name={environment.spec.name!r} is stepped by the host: plans are watched on "
            "environments written in JAX"
        )
    seen: list[tuple[str, dict[str, np.ndarray]]] = []

    def see(what: str, arrays: dict[str, Any]) -> None:
        seen.append((what, {name: np.array(value) for name, value in arrays.items()}))

    act, steps, ended = agent.watched(see), [], False
    played = video.play(environment, act, agent.init_actor(1), train_state, key, renderer)
    for picture, reward, terminated in itertools.islice(played, most):
        jax.effects_barrier()
        steps.append(_step(seen, reward, None if picture is None else np.array(picture)))
        seen.clear()
        ended = terminated
    return Episode(steps, ended)


def _step(
    seen: Sequence[tuple[str, dict[str, np.ndarray]]], reward: float, picture: np.ndarray | None
) -> Step:
    scored = [found for what, found in seen if what == "candidates"]
    (plan,) = (found for what, found in seen if what == "plan")
    rounds = [Round(found["actions"][0], found["values"][0]) for found in scored]
    size = plan["values"].shape[-1]
    if len(rounds) > 1 and len(rounds[0].values) + len(rounds[1].values) == size:
        first, *rounds = rounds  # scored once, they take part in every round
        rounds = [
            Round(*(np.concatenate(pair) for pair in zip(first, other, strict=True)))
            for other in rounds
        ]
    own = {name: value[0] if value.ndim else value for name, value in plan.items()}
    return Step(rounds, own, reward, picture)


def predicted(step: Step) -> float:
    """The planner's predicted return: the mean score of the last round's elites."""
    last = step.rounds[-1]
    return float(np.mean(last.values[last.best(int(step.plan["num_elites"]))]))


def realised(episode: Episode) -> list[float]:
    """Discounted sum of the following rewards for every step, up to the end of the episode."""
    total, found = 0.0, []
    for step in reversed(episode.steps):
        total = step.reward + float(step.plan["discount"]) * total
        found.append(total)
    return found[::-1]


def page(
    episode: Episode, title: str, *, candidates: int = 48, steps: int = 100, size: int = 160
) -> str:
    """A self-contained HTML file with a slider over steps and rounds.
    candidates: maximum drawn per round, elites first. steps: maximum shown; longer episodes are
    subsampled. size: maximum width of pictures in pixels.
    """
    stride = -(-len(episode.steps) // steps)
    every = range(0, len(episode.steps), stride)
    shown = [_compact(i, episode.steps[i], candidates, size) for i in every]
    told, came = [predicted(step) for step in episode.steps], realised(episode)
    numbers = range(len(told))
    lines = [
        Line("predicted: mean of the elites", 0, numbers, told),
        Line("realised: rewards that followed", 1, numbers, came),
    ]
    data = {
        "steps": shown,
        "predicted": [float(f"{told[i]:.5g}") for i in every],
        "realised": [float(f"{came[i]:.5g}") for i in every],
        "length": len(episode.steps),
    }
    total = sum(step.reward for step in episode.steps)
    words = f"{len(episode.steps)} steps, return {total:.4g}."
    if not episode.terminated:
        words += " The episode ended at its time limit, so late realised returns are truncated."
    body = charts.fill(
        "watch.html",
        words=html.escape(words),
        returns=charts.chart("discounted return", lines, x_label="steps of the episode"),
        data=json.dumps(data, separators=(",", ":")).replace("<", "\\u003c"),
    )
    return charts.page(title, body)


def _compact(number: int, step: Step, candidates: int, size: int) -> dict[str, Any]:
    """A step for the page: actions in hundredths, elites first, others at even ranks."""
    elites = min(int(step.plan["num_elites"]), candidates)
    rounds = []
    for one in step.rounds:
        order = one.best(len(one.values))
        others = order[int(step.plan["num_elites"]) :]
        room = min(candidates - elites, len(others))
        chosen = others[np.linspace(0, len(others) - 1, room).round().astype(int)] if room else []
        keep = np.concatenate([order[:elites], np.asarray(chosen, int)])
        actions = np.round(100 * one.actions[keep][..., :_DIMS]).astype(int)
        values = [float(f"{v:.5g}") if np.isfinite(v) else None for v in one.values[keep]]
        rounds.append({"actions": actions.tolist(), "values": values})
    found = {
        "number": number,
        "rounds": rounds,
        "elites": elites,
        "mean": np.round(100 * step.plan["mean"][..., :_DIMS]).astype(int).tolist(),
        "action": np.round(100 * step.plan["action"][:_DIMS]).astype(int).tolist(),
        "reward": float(f"{step.reward:.4g}"),
    }
    if step.picture is not None:
        found["picture"] = _data_url(step.picture, size)
    return found


def _data_url(picture: np.ndarray, size: int) -> str:
    from PIL import Image

    image = Image.fromarray(picture)
    image.thumbnail((size, size))
    target = io.BytesIO()
    image.convert("P", palette=Image.Palette.ADAPTIVE, colors=32).save(target, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(target.getvalue()).decode()
