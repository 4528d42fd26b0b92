"""Draw learning curves of one or many runs.

    python -m experiments.plot runs/a runs/b --out=curve.png
    python -m experiments.plot runs/* --out=curve.png --reference=cartpole-swingup.csv

Runs of one environment and label form a group: a line for the mean over seeds, thin lines for the
seeds, and a band (bootstrap 95 % interval of the mean from five seeds on, the range below that).
Published values are markers at the steps where they were published.
"""

from __future__ import annotations

import sys

from absl import app, flags

from mbx.training.curves import plot_runs

OUT = flags.DEFINE_string("out", "curve.png", "Picture to write.")
METRIC = flags.DEFINE_string("metric", "eval/return_mean", "KIND/NAME of metrics.jsonl.")
LABELS = flags.DEFINE_list("labels", None, "One label a run; equal labels are seeds of one group.")
REFERENCE = flags.DEFINE_multi_string("reference", [], "CSV files of published values.")
TITLE = flags.DEFINE_string("title", None, "Title.")


def main(argv: list[str]) -> None:
    if len(argv) < 2:
        sys.exit("error: no run directory given: python -m experiments.plot RUN_DIR [RUN_DIR ...]")
    try:
        plot_runs(
            argv[1:],
            OUT.value,
            metric=METRIC.value,
            labels=LABELS.value,
            references=REFERENCE.value,
            title=TITLE.value,
        )
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    print(OUT.value)


if __name__ == "__main__":
    app.run(main)
