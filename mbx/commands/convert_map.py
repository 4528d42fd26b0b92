"""Convert a map of the EMPO authors' multigrid to a map file of ours.

    mbx convert-map trivial.yaml mine.yaml
    mbx train --config=empo --config.env.name=empo:multigrid/./mine.yaml

Training reads the authors' files by their path, too; a converted one can be changed. What cannot be
represented is an error that names the field, or the line and column of the map.
"""

from __future__ import annotations

import warnings

import yaml

from mbx.commands.arguments import make_parser
from mbx.empo.multigrid.layout import load_world
from mbx.empo.multigrid.reference import convert
from mbx.training.files import atomic_write, prepare_output


def main(arguments: list[str]) -> None:
    """Run `mbx convert-map`. Raises ValueError or OSError for bad input; `mbx.cli` prints it."""
    parser = make_parser(__name__, __doc__)
    parser.add_argument("source", help="Map file of the authors' (.yaml).")
    parser.add_argument("target", help="Map file to write (.yaml).")
    options = parser.parse_args(arguments)
    with warnings.catch_warnings(record=True) as notes:
        warnings.simplefilter("always")
        layout = load_world(options.source)[0]
    with open(options.source, encoding="utf-8", errors="replace") as file:
        fields = yaml.safe_load(file)
    converted = convert(fields)
    if converted is fields:
        raise ValueError(f"{options.source}: is a map file of ours already")
    lines = "".join(f"  {line}\n" for line in converted.pop("map").splitlines())
    rest = yaml.safe_dump(converted, sort_keys=False, default_flow_style=None)
    prepare_output(options.target)
    atomic_write(options.target, f"map: |\n{lines}{rest}".encode())
    for note in notes:
        print(note.message)
    humans, robots, goals = len(layout.humans), len(layout.robots), layout.goals.shape[1]
    print(f"{options.target}: humans: {humans}, robots: {robots}, goals of each human: {goals}")
