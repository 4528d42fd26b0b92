"""What `python -m experiments.train --help` prints: settings as their classes declare them.

Values come from running a configuration file's `get_config`, everything else from
`mbx.settings.describe`. Nothing here loads JAX.
"""

from __future__ import annotations

import ast
import difflib
import pathlib
import shlex
import textwrap
from collections.abc import Sequence
from typing import Any

import mbx
from mbx.agents.settings import RunSettings
from mbx.config import extensions, presets
from mbx.config.agents import read, settings_class
from mbx.settings import Declared, describe, flatten, in_words

DEFAULT = "configs/tdmpc.py"
# Shown by the general help.
IMPORTANT = (
    "seed",
    "num_seeds",
    "env.name",
    "env.num_envs",
    "env.action_repeat",
    "train.steps",
    "train.seed_steps",
    "train.utd_ratio",
    "eval.interval",
    "eval.episodes",
    "checkpoint.interval",
    "replay.capacity",
    "model.size",
    "planner.num_samples",
    "optimizer.learning_rate",
    "log.wandb",
    "distributed.enabled",
)
_WIDTH, _COLUMN = 100, 46
_KWARGS = "env.kwargs."


def wants_help(arguments: Sequence[str]) -> bool:
    """Whether a command line asks for help (absl's --helpfull is left to absl)."""
    return any(argument in ("-h", "-help", "--help") for argument in arguments)


def config_argument(arguments: Sequence[str]) -> str | None:
    """The path given as `--config=PATH` or `--config PATH`, None without one."""
    for i, argument in enumerate(arguments):
        if argument.startswith("-") and argument.lstrip("-").startswith("config="):
            return argument.split("=", 1)[1]
        if argument in ("-config", "--config"):
            return arguments[i + 1] if i + 1 < len(arguments) else None
    return None


def help_text(arguments: Sequence[str]) -> str:
    """Help for a command line: of its configuration file, or in general.

    Raises ValueError where the file does not exist.
    """
    path = config_argument(arguments)
    return general_help() if path is None else config_help(path)


def general_help() -> str:
    """How the program is used, which configuration files there are, the important settings."""
    files = [_columns(path, _summary(path), 30) for path in config_files()]
    values, found = load(DEFAULT), declared(DEFAULT)
    lines = [
        "Train an agent; evaluate, log, checkpoint and plot on the way.",
        "",
        f"  python -m experiments.train --config={DEFAULT}",
        f"  python -m experiments.train --config={DEFAULT} --config.env.name=gymnax:Pendulum-v1",
        "  python -m experiments.train --workdir=runs/a --config.resume=True",
        f"  python -m experiments.train --config={DEFAULT} --help      all settings of that file",
        "",
        "Options:",
        _columns("--config=FILE", "configuration file, one of those below or your own"),
        _columns("--config.SETTING=VALUE", "change a setting; an unknown one is an error"),
        _columns("--workdir=DIR", "run directory (default: runs/TASK-sSEED-TIME)"),
        _columns("--config.resume=True", "continue the run in --workdir, as it was configured"),
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


def config_help(path: str) -> str:
    """Every setting of a configuration file: its flag with the value there, and what it means.

    Raises ValueError where the file does not exist.
    """
    values, found = load(path), declared(path)
    title = presets.read(path).words.strip() or path
    lines = [title, "", f"Settings of {path} and their values there:"]
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


def unknown_flag(arguments: Sequence[str]) -> str | None:
    """What is wrong with a command line, as a message: no configuration, or a `--config.…` flag
    that the configuration does not have, with near matches."""
    path = config_argument(arguments)
    if path is None:
        if any(argument.lstrip("-").startswith("help") for argument in arguments):
            return None
        others = ", ".join(one for one in config_files() if one != DEFAULT)
        return (
            f"no configuration is given: --config={DEFAULT} trains the default (others: {others}, "
            "or a file of your own);\n"
            "--workdir=RUN --config.resume=True goes on with a run; --help tells more"
        )
    known = list(load(path))
    for argument in arguments:
        name = argument.split("=", 1)[0].removeprefix("--config.")
        if name.startswith(_KWARGS):
            continue
        if argument.startswith("--config.") and name not in known:
            close = difflib.get_close_matches(name, known, n=3)
            return f"--config.{name} is not a setting of {path}: did you mean one of {close}?"
    return None


def with_run_config(arguments: Sequence[str]) -> list[str]:
    """A command line that resumes a run and names no configuration, with that of the run."""
    flags = dict(a.lstrip("-").partition("=")[::2] for a in arguments if a.startswith("-"))
    resumes = flags.get("config.resume", "").lower() in ("true", "1")
    if config_argument(arguments) is not None or not resumes or not flags.get("workdir"):
        return list(arguments)
    path = pathlib.Path(__file__).parents[1] / "commands" / "resumed.py"
    return [f"--config={path}:{flags['workdir']}", *arguments]


def with_kwargs(arguments: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """A command line without its `--config.env.kwargs.NAME=VALUE`, and these by name.

    Values are Python's (2.5, True, [1, 2]), and text where they are nothing of that.

    Raises:
        ValueError: for one without a value.
    """
    rest, found = [], {}
    for argument in arguments:
        name, equals, text = argument.partition("=")
        if not name.startswith(f"--config.{_KWARGS}"):
            rest.append(argument)
            continue
        if not equals:
            raise ValueError(f"{name}: write {name}=VALUE")
        try:
            value = ast.literal_eval(text)
        except (SyntaxError, ValueError):
            value = text
        found[name.removeprefix(f"--config.{_KWARGS}")] = value
    return rest, found


def with_whole_numbers(arguments: Sequence[str]) -> list[str]:
    """A command line in which whole numbers may be written as 1e4 or 10000.0."""
    path = config_argument(arguments)
    if path is None:
        return list(arguments)
    values = load(path)
    return [_whole(argument, values) for argument in arguments]


def _whole(argument: str, values: dict[str, Any]) -> str:
    name, equals, text = argument.partition("=")
    old = values.get(name.lstrip("-").removeprefix("config."))
    if not equals or type(old) is not int or not name.startswith("--config."):
        return argument
    try:
        number = float(text)
    except ValueError:
        return argument
    return f"{name}={int(number)}" if number.is_integer() else argument


def read_settings(path: str, overrides: Sequence[str]) -> RunSettings:
    """The settings of a configuration file with others on top, checked.

    Args:
        path: of the file.
        overrides: "SETTING=VALUE" as a command line has them behind --config.

    Raises:
        ValueError: for a setting that does not exist, or a value that no run can have.
    """
    arguments = [f"--config={path}", *(f"--config.{text}" for text in overrides)]
    problem = unknown_flag(arguments)
    if problem:
        raise ValueError(problem)
    rest, kwargs = with_kwargs(with_whole_numbers(arguments))
    values = presets.load(path).to_dict()
    values["imports"] = tuple(dict.fromkeys((*values["imports"], *extensions.loaded())))
    values["env"].setdefault("kwargs", {}).update(kwargs)
    for argument in rest[1:]:
        name, _, text = argument.removeprefix("--config.").partition("=")
        *sections, last = name.split(".")
        inner = values
        for one in sections:
            inner = inner[one]
        try:
            inner[last] = text if isinstance(inner[last], str) else _literal(text)
        except (SyntaxError, ValueError):
            raise ValueError(f"config.{name}={text}: give a value like {inner[last]!r}") from None
    return read(values)


def _literal(text: str) -> Any:
    """A Python value; true and false as on a command line, too."""
    return ast.literal_eval({"true": "True", "false": "False"}.get(text, text))


def run_directory(arguments: list[str], flag: str | None) -> str:
    """The run directory, given as the only argument or by its flag. Raises ValueError for less."""
    given = arguments + ([] if flag is None else [flag])
    if len(given) != 1:
        raise ValueError(f"give one run directory, as argument or --workdir, not {len(given)}")
    return given[0]


def config_files() -> list[str]:
    """The configuration files that come with the package, as they are given to --config."""
    return [f"configs/{name}.py" for name in presets.names()]


def load(path: str) -> dict[str, Any]:
    """Values of a configuration file by dotted name. Raises ValueError where there is none."""
    return dict(flatten(presets.load(path).to_dict()))


def declared(path: str) -> dict[str, Declared]:
    """What the settings of a configuration file's agent declare, by dotted name, in order."""
    return {one.name: one for one in describe(settings_class(load(path)["agent"])())}


def with_found_config(arguments: Sequence[str]) -> list[str]:
    """The arguments with `--config=NAME` as the path of the file that is meant, where there is one.

    Raises ValueError where it does not exist.
    """
    given = config_argument(arguments)
    if given is None:
        return list(arguments)
    name, colon, rest = given.partition(":")
    path = str(presets.find(name)) + colon + rest
    return [
        path
        if a == given
        else a.replace(f"config={given}", f"config={path}", 1)
        if a.lstrip("-") == f"config={given}"
        else a
        for a in arguments
    ]


def _setting(found: Declared, value: Any) -> str:
    return _columns(f"--config.{found.name}={shlex.quote(str(value))}", in_words(found))


def _columns(flag: str, text: str, column: int = _COLUMN) -> str:
    """A flag and, from a common column on, what it means."""
    left = f"  {flag}".ljust(column - 2) + "  "
    first, *rest = textwrap.wrap(text, _WIDTH - column) or [""]
    return "\n".join([(left + first).rstrip(), *(" " * column + line for line in rest)])


def _summary(path: str) -> str:
    words = presets.read(path).words
    return words.partition("\n\n")[0].replace("\n", " ")


def _tasks() -> list[str]:
    """The list of suites in the docstring of `mbx.envs`, which is not imported for it."""
    source = pathlib.Path(mbx.__file__).parent / "envs" / "__init__.py"
    words = ast.get_docstring(ast.parse(source.read_text())) or ""
    return ["  " + line.strip() for line in words.split("\n\n")[1].splitlines()]
