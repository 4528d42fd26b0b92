"""Draw learning curves of one or many runs.

    mbx plot runs/a runs/b --out=curve.png
    mbx plot runs/* --out=curve.png --reference=cartpole-swingup.csv
    mbx plot runs/sweep --out=curve.png --table=scores.tex

Runs are grouped by task and by the settings in which they differ, which name the curves, or by
--labels; a directory may hold several seeds, or be a folder of runs. A group is a line for the mean
over seeds, thin lines for the seeds, and a band (bootstrap 95 % interval of the mean from five
seeds on, the range below that). Published values are markers. --table writes means, interquartile
means with bootstrap intervals and probabilities of improvement over the first group: .md, .csv or
.tex.
"""

from __future__ import annotations

from mbx.analysis import runs, tables
from mbx.analysis.curves import plot_runs
from mbx.commands.arguments import make_parser


def main(arguments: list[str]) -> None:
    """Run `mbx plot`. Raises ValueError or OSError for bad input; `mbx.cli` prints it."""
    parser = make_parser(__name__, __doc__)
    add = parser.add_argument
    add("runs", nargs="+", help="Run directories, folders of them, or hf://USER/NAME.")
    add("--out", default="curve.png", help="Path of the picture to write.")
    add("--metric", default="eval/return_mean", help="Metric to draw, KIND/NAME of metrics.jsonl.")
    add("--labels", help="One label a run, separated by commas; equal labels are one group.")
    add("--table", action="append", default=[], help="Table to write: .md, .csv or .tex.")
    add("--step", type=float, help="Environment steps of the table (default: all runs').")
    add(
        "--reference",
        action="append",
        default=[],
        help="CSV file of published values: step,mean,lcb,ucb or step,reward,seed.",
    )
    options = parser.parse_args(arguments)
    labels = options.labels.split(",") if options.labels else None
    chosen = dict(metric=options.metric, labels=labels, references=options.reference)
    plot_runs(options.runs, options.out, **chosen)
    if options.table:
        found = runs.group(options.runs, labels)
        table = tables.scores(found, metric=options.metric, step=options.step)
        for path in options.table:
            tables.write(path, table)
        print(tables.render(table, "md"))
    print(options.out)
