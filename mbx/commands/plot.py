"""Draw learning curves of one or many runs.

    python -m experiments.plot runs/a runs/b --out=curve.png
    python -m experiments.plot runs/* --out=curve.png --reference=cartpole-swingup.csv

    python -m experiments.plot runs/sweep --out=curve.png --table=scores.tex

Runs are grouped by task and by the settings in which they differ, which name the curves, or by
--labels; a directory may hold several seeds, or be a folder of runs. A group is a line for the mean
over seeds, thin lines for the seeds, and a band (bootstrap 95 % interval of the mean from five
seeds on, the range below that). Published values are markers at the steps where they were
published. --table writes means, interquartile means with bootstrap intervals and how likely a group
is better than the first: .md, .csv or .tex.
"""

from __future__ import annotations

import sys

from absl import app, flags

from mbx.analysis import compare, groups, tables
from mbx.analysis.curves import plot_runs

OUT = flags.DEFINE_string("out", "curve.png", "Picture to write.")
METRIC = flags.DEFINE_string("metric", "eval/return_mean", "KIND/NAME of metrics.jsonl.")
LABELS = flags.DEFINE_list("labels", None, "One label a run; equal labels are one group.")
TABLE = flags.DEFINE_multi_string("table", [], "Tables to write: .md, .csv or .tex.")
STEP = flags.DEFINE_float("step", None, "Environment steps of the table (default: all runs').")
XLABEL = flags.DEFINE_string("xlabel", None, "Name of the horizontal axis.")
YLABEL = flags.DEFINE_string("ylabel", None, "Name of the vertical axis (default: the metric).")
REFERENCE = flags.DEFINE_multi_string(
    "reference", [], "CSV files of published values: step,mean,lcb,ucb or step,reward,seed."
)
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
            ylabel=YLABEL.value,
            **({} if XLABEL.value is None else {"xlabel": XLABEL.value}),
        )
        if TABLE.value:
            if LABELS.value:
                found = groups.labelled(argv[1:], LABELS.value)
            else:
                found = groups.group(groups.find_runs(argv[1:]))
            table = compare.scores(found, metric=METRIC.value, step=STEP.value)
            for path in TABLE.value:
                tables.write(path, table)
            print(tables.render(table, "md"))
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    print(OUT.value)


if __name__ == "__main__":
    app.run(main)
