"""Evaluate a trained agent: mean, spread and every episode's return, without exploration noise.

    python -m experiments.evaluate runs/pendulum --episodes=20
    python -m experiments.evaluate runs/pendulum --checkpoint=latest --random
    python -m experiments.evaluate runs/pendulum --video=episode.gif

The run directory says which agent and environment; --random adds a random policy for comparison,
--video draws one more episode: gym: tasks by their own render(), which a class of your own has to
have, too; simulators by MuJoCo, through EGL.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import jax
import numpy as np
from absl import app, flags, logging

from mbx.agents.settings import RunSettings
from mbx.config.help import run_directory

WORKDIR = flags.DEFINE_string(
    "workdir", None, "Run directory (or the first argument).", allow_override=True
)
EPISODES = flags.DEFINE_integer("episodes", 20, "Episodes.", lower_bound=1)
CHECKPOINT = flags.DEFINE_string("checkpoint", "best", "best, latest, or a step.")
SEED = flags.DEFINE_integer("seed", 12345, "Seed of the evaluation's environments and planner.")
RANDOM = flags.DEFINE_bool("random", False, "Also evaluate uniformly random actions.")
VIDEO = flags.DEFINE_string("video", None, "Also draw an episode into this .gif.")
WIDTH = flags.DEFINE_integer("video_width", 0, "Pixels (0: as drawn).", lower_bound=0)
SECONDS = flags.DEFINE_float("video_seconds", 0.0, "Of the film (0: whole).", lower_bound=0.0)
TRUST = flags.DEFINE_bool("trust", False, "Run the environment's file of somebody else's run.")
JSON = flags.DEFINE_bool("json", False, "Print one JSON object instead of text.")


def main(arguments: list[str]) -> None:
    from mbx.training import environments, run

    logging.set_verbosity(logging.WARNING)
    run.set_up_jax()
    try:
        workdir = run_directory(arguments[1:], WORKDIR.value)
        check_film(VIDEO.value, WIDTH.value, SECONDS.value)
        drawn, renderer = (False, None)
        if VIDEO.value:
            drawn, renderer = find_renderer(workdir, VIDEO.value, trusted=TRUST.value)
        agent, train_state, settings = run.load(
            workdir, which=CHECKPOINT.value, trusted=TRUST.value
        )
    except (ValueError, OSError, ImportError) as error:
        sys.exit(f"error: {error}")
    made = environments.evaluation_environment(settings, EPISODES.value, seed=SEED.value)
    with environments.opened(made) as environment:
        play(environment, agent, train_state, settings, workdir)
    if drawn:
        make_video(agent, train_state, settings, renderer, jax.random.key(SEED.value))


def play(
    environment: Any, agent: Any, train_state: Any, settings: RunSettings, workdir: str
) -> None:
    """Evaluate the checkpoint, and random actions where they are asked for; print the results."""
    from mbx.training import evaluation, run

    key = jax.random.key(SEED.value)
    print(f"evaluating {workdir}, {EPISODES.value} episodes", file=sys.stderr)
    evaluate = evaluation.make_evaluate(agent.act, agent.init_actor, environment)
    with run.matmul_precision(settings.matmul_precision):
        results = {CHECKPOINT.value: evaluate(train_state, key)}
    if RANDOM.value:
        results["random"] = evaluation.make_random(environment)(key)
    show(settings.env.name, results)


def check_film(video: str | None, width: int, seconds: float) -> None:
    """Raises ValueError for a film's size or length where no film is asked for."""
    for name, value in (("video_width", width), ("video_seconds", seconds)):
        if value and not video:
            raise ValueError(f"--{name}={value} is of a film: give --video=episode.gif, too")


def find_renderer(workdir: str, path: str, *, trusted: bool = False) -> tuple[bool, Any]:
    """Whether the run's environment can be drawn here, and what does it (None: it itself).

    Where it cannot, a word about it is printed.

    Raises ValueError for environments that are not drawn and files that are not .gif.
    """
    from mbx import envs
    from mbx.training import trust, video
    from mbx.training.checkpoint import load_settings

    try:
        settings = load_settings(workdir)
        trust.check(settings.env.name, workdir, trusted)  # before its file is executed
        return True, video.check(settings, path)
    except envs.NoRenderer as error:
        print(f"video skipped: {error}", file=sys.stderr)
        return False, None


def make_video(
    agent: Any, train_state: Any, settings: RunSettings, renderer: Any, key: jax.Array
) -> None:
    """Write the video that was asked for."""
    from mbx.training import video

    print(f"filming {VIDEO.value}", file=sys.stderr)
    episode = video.record(
        agent.act, agent.init_actor, train_state, settings, key, renderer=renderer
    )
    video.write(VIDEO.value, video.shortened(episode, width=WIDTH.value, seconds=SECONDS.value))
    if not JSON.value:
        print(f"{VIDEO.value}: {episode.length} steps, return {episode.total:.1f}")


def show(task: str, results: dict[str, Any]) -> None:
    """Print evaluations by name."""
    if JSON.value:
        print(
            json.dumps(
                {k: {**r.summary(), "returns": r.returns.tolist()} for k, r in results.items()}
            )
        )
        return
    for name, result in results.items():
        s = result.summary()
        print(
            f"{task} {name}: {s['return_mean']:.1f} ± {s['return_std']:.1f} "
            f"(min {s['return_min']:.1f}, max {s['return_max']:.1f}) over {EPISODES.value} episodes"
        )
        for name, value in s.items():
            if name.startswith("return_mean/"):
                print(f"  {name.removeprefix('return_mean/')}: {value:.1f}")
        print("  " + " ".join(f"{x:.1f}" for x in np.sort(result.returns)))


if __name__ == "__main__":
    app.run(main)
