"""Watch a planner think: one episode of a run as an HTML file with sliders over steps and rounds.

    python -m experiments.watch runs/a --out=plans.html
    python -m experiments.watch runs/a --seed=3 --steps=60 --candidates=32

The page shows the candidates of every round, the elites among them, the mean that they were
refitted to, the action that was taken, and the return that was predicted beside the one that
followed. It needs nothing else and asks nothing of the network. For agents that plan, in
environments written in JAX.
"""

from __future__ import annotations

import sys

import jax
from absl import app, flags, logging

from mbx.config.help import run_directory
from mbx.files import atomic_write, prepare_output

WORKDIR = flags.DEFINE_string(
    "workdir", None, "Run directory (or the first argument).", allow_override=True
)
OUT = flags.DEFINE_string("out", "plans.html", "File to write.")
CHECKPOINT = flags.DEFINE_string("checkpoint", "best", "best, latest, or a step.")
SEED = flags.DEFINE_integer("seed", 12345, "Seed of the environment and the planner.")
STEPS = flags.DEFINE_integer("steps", 100, "Steps that are shown at most.", lower_bound=1)
CANDIDATES = flags.DEFINE_integer(
    "candidates", 48, "Candidates of a round that are shown at most, elites first.", lower_bound=1
)
MOST = flags.DEFINE_integer("most", 1000, "Steps that are played at most.", lower_bound=1)
TRUST = flags.DEFINE_bool("trust", False, "Run the environment's file of somebody else's run.")


def main(arguments: list[str]) -> None:
    from mbx import envs
    from mbx.analysis import watching
    from mbx.training import run

    logging.set_verbosity(logging.WARNING)
    run.set_up_jax()
    try:
        prepare_output(OUT.value)
        workdir = run_directory(arguments[1:], WORKDIR.value)
        agent, train_state, settings = run.load(
            workdir, which=CHECKPOINT.value, trusted=TRUST.value
        )
        try:
            renderer = envs.make_renderer(settings.env.name)
        except (ValueError, envs.NoRenderer) as error:
            print(f"without pictures: {error}", file=sys.stderr)
            renderer = None
        with run.matmul_precision(settings.matmul_precision):
            episode = watching.record(
                agent,
                train_state,
                settings,
                jax.random.key(SEED.value),
                renderer=renderer,
                most=MOST.value,
            )
    except (ValueError, OSError, ImportError) as error:
        sys.exit(f"error: {error}")
    title = f"{settings.agent} on {settings.env.name}"
    text = watching.page(episode, title, candidates=CANDIDATES.value, steps=STEPS.value)
    atomic_write(OUT.value, text.encode())
    print(f"{OUT.value}: {len(episode.steps)} steps, {len(text) / 1e3:.0f} kB")


if __name__ == "__main__":
    app.run(main)
