"""What `mbx train --help` prints: settings as their classes declare them, with a file's values.

Nothing here loads JAX.
"""

from __future__ import annotations

import ast
import pathlib
import shlex
import textwrap

import mbx
from mbx.config import presets
from mbx.config.agents import settings_class
from mbx.settings import Declared, describe, flatten, in_words

DEFAULT = "configs/tdmpc.py"
NO_CONFIGURATION = (
    f"no configuration is given: --config={DEFAULT} trains the default (others: "
    f"{', '.join(name for name in presets.names() if name != 'tdmpc')}, or a file of your own);\n"
    "--workdir=RUN --config.resume=True goes on with a run; --help tells more"
)
# Shown by the general help.
IMPORTANT = (
    "seed num_seeds env.name env.num_envs env.action_repeat train.steps train.seed_steps "
    "train.utd_ratio eval.interval eval.episodes checkpoint.interval replay.capacity model.size "
    "planner.num_samples optimizer.learning_rate log.wandb distributed.enabled"
).split()
_WIDTH, _COLUMN = 100, 46


def of(config: str | None) -> str:
    """Help for a configuration, or in general. Raises ValueError where the file does not exist."""
    return general() if config is None else of_config(config)


def general() -> str:
    """Usage of the program, its configurations and the important settings."""
    files = [
        _columns(f"configs/{name}.py", " ".join(_summary(name).split()), 30)
        for name in presets.names()
    ]
    _, values, found = _values(DEFAULT)
    lines = [
        "Train an agent; evaluate, log, checkpoint and plot on the way.",
        "",
        f"  python -m experiments.train --config={DEFAULT}",
        f"  python -m experiments.train --config={DEFAULT} --config.env.name=gymnax:Pendulum-v1",
        "  python -m experiments.train --workdir=runs/a --config.resume=True",
        f"  python -m experiments.train --config={DEFAULT} --help      all settings of that file",
        "",
        "Options:",
        _columns("--config=FILE", "configuration, one of those below (also by name) or your own"),
        _columns("--config.SETTING=VALUE", "change a setting; an unknown one is an error"),
        _columns("--workdir=DIR", "run directory (default: runs/TASK-sSEED-TIME)"),
        _columns("--config.resume=True", "continue the run in --workdir, as it was configured"),
        _columns("--import=MODULE", "import a module or a file first, for what it registers"),
        _columns("--help", "this text; with --config=FILE, every setting of FILE"),
        "",
        "Configuration files:",
        *files,
        "",
        "Tasks (--config.env.name):",
        *_tasks(),
        "",
        f"Important settings, with the defaults of {DEFAULT}:",
        *(_setting(found[name], values[name]) for name in IMPORTANT),
        "",
        "Next: python -m experiments.evaluate RUN, python -m experiments.plot RUN ... --out=FILE",
    ]
    return "\n".join(lines)


def of_config(path: str) -> str:
    """Every setting of a configuration: flag, value and meaning.
    Raises ValueError where the file does not exist.
    """
    words, values, found = _values(path)
    lines = [words.strip() or path, "", f"Settings of {path} and their values there:"]
    section = ""
    for one in found.values():
        head = one.name.rpartition(".")[0]
        if one.is_section:
            lines += ["", f"{one.name}: {one.help}"]
            section = one.name
            continue
        if head != section:
            lines += ["", head or "The run"]
            section = head
        lines.append(_setting(one, values[one.name]))
    return "\n".join(lines)


def _values(path: str) -> tuple[str, dict[str, object], dict[str, Declared]]:
    """Words, values and declared settings of a configuration, by dotted name."""
    found = presets.read(path)
    values = dict(flatten(found.values.to_dict()))
    declared = describe(settings_class(str(values["agent"]))())
    return found.words, values, {one.name: one for one in declared}


def _setting(found: Declared, value: object) -> str:
    return _columns(f"--config.{found.name}={shlex.quote(str(value))}", in_words(found))


def _columns(flag: str, text: str, column: int = _COLUMN) -> str:
    left = f"  {flag}".ljust(column - 2) + "  "
    first, *rest = textwrap.wrap(text, _WIDTH - column) or [""]
    return "\n".join([(left + first).rstrip(), *(" " * column + line for line in rest)])


def _summary(name: str) -> str:
    return presets.read(name).words.partition("\n\n")[0]


def _tasks() -> list[str]:
    """The list of suites in the docstring of `mbx.envs`, read without importing it."""
    source = pathlib.Path(mbx.__file__).parent / "envs" / "__init__.py"
    words = ast.get_docstring(ast.parse(source.read_text())) or ""
    return ["  " + line.strip() for line in words.split("\n\n")[1].splitlines()]
