"""Evaluate a trained agent: mean, spread and every episode's return, without exploration noise.

    mbx evaluate runs/pendulum --episodes=20
    mbx evaluate runs/pendulum --checkpoint=latest --random
    mbx evaluate runs/pendulum --video=episode.gif

The run directory says which agent and environment. --random adds a random policy as a baseline.
--video draws one more episode: simulators by MuJoCo through EGL, gym: tasks by their render(),
which a custom class needs as well.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import jax
import numpy as np

from mbx import envs
from mbx.commands.arguments import add_run, at_least, make_parser, run_directory
from mbx.training import build, evaluation, run, rundir, video
from mbx.training.rundir import load_settings


def main(arguments: list[str]) -> None:
    """Run `mbx evaluate`. Raises ValueError or OSError for bad input; `mbx.cli` prints it."""
    parser = make_parser(__name__, __doc__)
    add_run(parser)
    add = parser.add_argument
    add("--episodes", type=at_least(1), default=20, help="Number of episodes.")
    add("--seed", type=int, default=12345, help="Seed of the environments and the planner.")
    add("--random", action="store_true", help="Also evaluate uniformly random actions.")
    add("--video", help="Also draw an episode into this .gif.")
    add(
        "--video_width",
        type=at_least(0),
        default=0,
        help="Width of the film in pixels (0: as drawn).",
    )
    add(
        "--video_seconds",
        type=float,
        default=0.0,
        help="Seconds of the film (0: the whole episode).",
    )
    add("--json", action="store_true", help="Print one JSON object instead of text.")
    options = parser.parse_args(arguments)
    workdir = run_directory(options)
    check_film(options.video, options.video_width, options.video_seconds)
    path = options.video and os.path.abspath(options.video)
    run.set_up_jax()
    drawn, renderer = find_renderer(workdir, path, trusted=options.trust) if path else (False, None)
    agent, train_state, settings = run.load(
        workdir, which=options.checkpoint, trusted=options.trust
    )
    key = jax.random.key(options.seed)
    made = build.evaluation_environment(settings, options.episodes, seed=options.seed)
    with build.opened(made) as environment:
        print(f"evaluating {workdir}, {options.episodes} episodes", file=sys.stderr)
        evaluate = evaluation.make_evaluate(agent.act, agent.init_actor, environment)
        with run.matmul_precision(settings.matmul_precision):
            results = {options.checkpoint: evaluate(train_state, key)}
        if options.random:
            results["random"] = evaluation.make_random(environment)(key)
    show(settings.env.name, results, as_json=options.json)
    if drawn:
        print(f"filming {path}", file=sys.stderr)
        episode = video.record(
            agent.act, agent.init_actor, train_state, settings, key, renderer=renderer
        )
        size = dict(width=options.video_width, seconds=options.video_seconds)
        video.write(path, video.shortened(episode, **size))
        if not options.json:
            print(f"{options.video}: {episode.length} steps, return {episode.total:.4g}")


def check_film(path: str | None, width: int, seconds: float) -> None:
    """Raise ValueError for a video's size or length without --video."""
    for name, value in (("video_width", width), ("video_seconds", seconds)):
        if value < 0 or (value and not path):
            raise ValueError(f"--{name}={value} is of a film: give --video=episode.gif, too")


def find_renderer(workdir: str, path: str, *, trusted: bool = False) -> tuple[bool, Any]:
    """Whether the run's environment can be drawn here, and its renderer (None: itself).
    Prints a line where it cannot. Raises ValueError for environments that are not drawn and for
    files that are not .gif.
    """
    try:
        settings = load_settings(workdir)
        rundir.check_trusted(settings.env.name, workdir, trusted)  # before its file is executed
        return True, video.check(settings, path)
    except envs.NoRenderer as error:
        print(f"video skipped: {error}", file=sys.stderr)
        return False, None


def show(task: str, results: dict[str, Any], *, as_json: bool = False) -> None:
    """Print the evaluations of a task by name, as lines or as one line of JSON."""
    if as_json:
        found = {k: {**r.summary(), "returns": r.returns.tolist()} for k, r in results.items()}
        print(json.dumps(found))
        return
    for name, result in results.items():
        s = result.summary()
        print(
            f"{task} {name}: {s['return_mean']:.4g} ± {s['return_std']:.4g} "
            f"(min {s['return_min']:.4g}, max {s['return_max']:.4g}) "
            f"over {len(result.returns)} episodes"
        )
        for key, value in s.items():
            if key.startswith("return_mean/"):
                print(f"  {key.removeprefix('return_mean/')}: {value:.4g}")
        print("  " + " ".join(f"{x:.4g}" for x in np.sort(result.returns)))
