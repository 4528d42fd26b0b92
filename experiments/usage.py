"""What `python -m experiments.train --help` prints, read from the configuration files themselves.

Values come from running a file's `get_config`, the words beside them from its comments, those of
imported sections and of the file it derives from included. Nothing here loads JAX.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import io
import pathlib
import shlex
import textwrap
import tokenize
from collections.abc import Sequence
from typing import Any

from mbx.settings import describe
from mbx.training.ranges import flat

ROOT = pathlib.Path(__file__).resolve().parents[1]
DEFAULT = "configs/tdmpc.py"
# Shown by the general help; a configuration without one of them leaves it out.
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


def wants_help(arguments: Sequence[str]) -> bool:
    """Whether a command line asks for help (absl's --helpfull is left to absl)."""
    return any(argument in ("-h", "-help", "--help") for argument in arguments)


def config_argument(arguments: Sequence[str]) -> str | None:
    """The path given as `--config=PATH` or `--config PATH`, None without one."""
    for i, argument in enumerate(arguments):
        if argument.lstrip("-").startswith("config=") and argument.startswith("-"):
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
    files = [_setting_line(path, _summary(path), 30) for path in config_files()]
    values = settings(DEFAULT)
    words = comments(_find(DEFAULT)) | declared(values["agent"])
    shown = [_setting(name, values[name], words[name]) for name in IMPORTANT if name in values]
    lines = [
        "Train an agent; evaluate, log, checkpoint and plot on the way.",
        "",
        f"  python -m experiments.train --config={DEFAULT}",
        f"  python -m experiments.train --config={DEFAULT} --config.env.name=gymnax:Pendulum-v1",
        f"  python -m experiments.train --config={DEFAULT} --workdir=runs/a --config.resume=True",
        f"  python -m experiments.train --config={DEFAULT} --help      all settings of that file",
        "",
        "Options:",
        _setting_line("--config=FILE", "configuration file, one of those below or your own"),
        _setting_line("--config.SETTING=VALUE", "change a setting; an unknown one is an error"),
        _setting_line("--workdir=DIR", "run directory (default: runs/TASK-sSEED-TIME)"),
        _setting_line("--config.resume=True", "continue the run in --workdir"),
        _setting_line("--help", "this text; with --config=FILE, every setting of FILE"),
        "",
        "Configuration files:",
        *files,
        "",
        "Tasks (--config.env.name):",
        *_tasks(),
        "",
        f"Important settings, with the defaults of {DEFAULT}:",
        *shown,
        "",
        "Next: python -m experiments.evaluate RUN, python -m experiments.plot RUN ... --out=FILE",
    ]
    return "\n".join(lines)


def config_help(path: str) -> str:
    """Every setting of a configuration file: its flag with the default, and what it means.

    Raises ValueError where the file does not exist.
    """
    found = _find(path)
    values = settings(path)
    words = comments(found) | declared(values.get("agent", ""))
    lines = [
        ast.get_docstring(ast.parse(found.read_text())) or path,
        "",
        f"Settings of {path} and their defaults:",
    ]
    section = ""
    # In the order of the source, where one comment may go on from the one above it.
    for name in [n for n in words if n in values] + [n for n in values if n not in words]:
        head = name.rpartition(".")[0]
        if head != section:
            section = head
            lines += ["", head + (f": {words[head]}" if words.get(head) else "")]
        lines.append(_setting(name, values[name], words.get(name, "")))
    return "\n".join(lines)


def config_files() -> list[str]:
    """The configuration files that come with the package, as they are given to --config."""
    return [
        f"configs/{path.name}"
        for path in sorted((ROOT / "configs").glob("*.py"))
        if "def get_config(" in path.read_text()
    ]


def settings(path: str) -> dict[str, Any]:
    """Defaults of a configuration file by dotted name. Raises ValueError where there is none."""
    spec = importlib.util.spec_from_file_location("config", _find(path))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return dict(flat(module.get_config().to_dict()))


def declared(agent: str) -> dict[str, str]:
    """What an agent's settings say of themselves, by dotted name; {} where none are declared."""
    try:
        module = importlib.import_module(f"mbx.agents.{agent}.settings")
    except ModuleNotFoundError:
        return {}
    return {found.name: found.help for found in describe(module.Settings())}


def comments(path: str | pathlib.Path, function: str = "get_config") -> dict[str, str]:
    """Trailing comments of a configuration's assignments by dotted name, in the source's order.

    '' where there is none. Followed are `config = other.get_config()` and
    `config.part = sections.part()`; what the base file says about a setting comes before what a
    file that derives from it says.
    """
    source = pathlib.Path(path).read_text()
    tree, beside = ast.parse(source), _trailing(source)
    bodies = {node.name: node.body for node in tree.body if isinstance(node, ast.FunctionDef)}
    modules, found = _imports(tree), {}
    for node in bodies.get(function, ()):
        if not isinstance(node, ast.Assign):
            continue
        name = _dotted(node.targets[0]).partition(".")[2]
        new = {name: beside.get(node.end_lineno, "")} if name else {}
        for key, text in _called(node.value, modules, path).items():
            new[f"{name}.{key}" if name else key] = text
        for key, text in new.items():
            found[key] = found.get(key) or text
    return found


def _called(value: ast.expr, modules: dict[str, pathlib.Path], here: Any) -> dict[str, str]:
    """Comments of the function that an assignment calls, where its source is at hand."""
    if not isinstance(value, ast.Call):
        return {}
    module, _, function = _dotted(value.func).rpartition(".")
    if not module:
        return comments(here, function)
    return comments(modules[module], function) if module in modules else {}


def _imports(tree: ast.Module) -> dict[str, pathlib.Path]:
    """Files of the modules that are imported from a package `configs`, by their local name."""
    found = {}
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.module == "configs":
            for alias in node.names:
                spec = importlib.util.find_spec(f"configs.{alias.name}")
                if spec is not None and spec.origin:
                    found[alias.asname or alias.name] = pathlib.Path(spec.origin)
    return found


def _trailing(source: str) -> dict[int, str]:
    """Comments that stand behind code, by line number."""
    found, code = {}, set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            text = token.string.lstrip("# ").strip()
            if token.start[0] in code and not text.startswith(("fmt:", "noqa")):
                found[token.start[0]] = text
        elif token.type not in (tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT):
            code.update(range(token.start[0], token.end[0] + 1))
    return found


def _dotted(node: ast.expr) -> str:
    """`a.b.c` of nested attributes; '' for anything else."""
    if isinstance(node, ast.Attribute):
        head = _dotted(node.value)
        return f"{head}.{node.attr}" if head else ""
    return node.id if isinstance(node, ast.Name) else ""


def _find(path: str) -> pathlib.Path:
    """A configuration file below the working directory, or beside this package."""
    path = path.partition(":")[0]  # FILE:ARGUMENT hands get_config an argument
    for candidate in (pathlib.Path(path), ROOT / path):
        if candidate.is_file():
            return candidate
    raise ValueError(f"--config={path} does not exist: choose one of {config_files()} or your own")


def _setting(name: str, value: Any, comment: str) -> str:
    return _setting_line(f"--config.{name}={shlex.quote(str(value))}", comment)


def _setting_line(flag: str, text: str, column: int = _COLUMN) -> str:
    """A flag and, from a common column on, what it means."""
    left = f"  {flag}".ljust(column - 2) + "  "
    first, *rest = textwrap.wrap(text, _WIDTH - column) or [""]
    return "\n".join([(left + first).rstrip(), *(" " * column + line for line in rest)])


def _summary(path: str) -> str:
    words = ast.get_docstring(ast.parse((ROOT / path).read_text())) or ""
    return words.partition("\n\n")[0].replace("\n", " ")


def _tasks() -> list[str]:
    """The list of suites in the docstring of `mbx.envs`, which is not imported for it."""
    words = ast.get_docstring(ast.parse((ROOT / "mbx" / "envs" / "__init__.py").read_text())) or ""
    return ["  " + line.strip() for line in words.split("\n\n")[1].splitlines()]
