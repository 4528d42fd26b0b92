"""Where settings come in: a configuration, and what a command line or a caller changes in it.

    load("tdmpc", {"train.steps": 5_000})                        # Python
    load("tdmpc", ["train.steps=5e3", "loss.rho=0.7"])           # text, as in a sweep
    load(["--config=tdmpc", "--config.train.steps=5e3"])         # a command line

All three take the same names, refuse the same mistakes in the same words and know the same agents.
Nothing here loads JAX.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ml_collections import config_dict

from mbx.agents.settings import RunSettings
from mbx.config import extensions, presets
from mbx.config.agents import settings_class
from mbx.settings import describe, flatten, from_dict, full_name, parse, put, to_dict

_OPTIONS = ("config", "workdir", "help")


class Arguments(NamedTuple):
    """Arguments of a command line; changes: "SETTING=VALUE", in order."""

    config: str | None
    workdir: str | None
    changes: tuple[str, ...]
    help: bool

    def value(self, name: str) -> str | None:
        """The value that the command line gives to a setting."""
        given = [text for text in self.changes if text.startswith(f"{name}=")]
        return given[-1].partition("=")[2] if given else None


def parse_arguments(arguments: Sequence[str]) -> Arguments:
    """Parse `--config=NAME`, `--config.SETTING=VALUE`, `--workdir=DIR` and `--help`.
    A value may also be the next argument; a setting without one is True. Raises ValueError for
    anything else.
    """
    options: dict[str, str | None] = {}
    changes, rest = [], list(arguments)
    while rest:
        argument = rest.pop(0)
        name, equals, value = argument.partition("=")
        name = name.lstrip("-")
        if not argument.startswith("-"):
            raise ValueError(f"{argument} is no option: write --NAME=VALUE, see --help")
        if name in ("h", "help", "helpfull", "helpshort"):
            options["help"] = ""
            continue
        if not equals:
            follows = bool(rest) and not rest[0].startswith("--")
            value = rest.pop(0) if follows else "True"
        if name.startswith("config."):
            changes.append(f"{name.removeprefix('config.')}={value}")
        elif name not in _OPTIONS:
            close = difflib.get_close_matches(name, _OPTIONS, n=1) or ["config.SETTING"]
            raise ValueError(f"--{name} is unknown: did you mean --{close[0]}?")
        else:
            options[name] = value
    return Arguments(
        options.get("config"), options.get("workdir"), tuple(changes), "help" in options
    )


def load(
    source: str | Sequence[str] | Mapping[str, Any] | config_dict.ConfigDict | RunSettings,
    changes: Mapping[str, Any] | Sequence[str] = (),
) -> RunSettings:
    """The settings of a run, checked and frozen.

    Args:
        source: name or path of a configuration, nested mappings, arguments of a command line, or
            settings.
        changes: values by a setting's full name ("optimizer.learning_rate") or unique last part,
            whole sections (`model=dict(size="1")`), or texts "SETTING=VALUE". `imports` names
            modules and files to import now.

    Raises:
        ValueError: naming the setting, its value and the remedy, for impossible settings.
    """
    if isinstance(source, Sequence) and not isinstance(source, str):
        given = parse_arguments(source)
        if given.config is None:
            raise ValueError("no configuration is given: --config=tdmpc, say")
        return load(given.config, (*given.changes, *changes))
    if isinstance(source, RunSettings) and not changes:
        return from_dict(type(source)(), to_dict(source))
    values, of = _values(source)
    if isinstance(changes, Mapping):
        chosen = dict(changes)
    else:
        chosen = {name: _Text(value) for name, _, value in (one.partition("=") for one in changes)}
    extensions.import_all(_plain(chosen.pop("imports", ()), ()))
    agent = _plain(chosen.pop("agent", values.get("agent", "")), "")
    kind, of = settings_class(agent), of or f" of agent {agent!r}"
    values = _rebased(values, agent, kind)
    default = kind()
    known = dict(flatten(to_dict(default)))
    for name, value in _named(chosen, default, of):
        put(values, name, _plain(value, known.get(name)))
    values["imports"] = tuple(dict.fromkeys((*values.get("imports", ()), *extensions.loaded())))
    return from_dict(default, values)


class _Text(str):
    """Text that is parsed by the type of its setting."""


def _plain(value: Any, default: Any) -> Any:
    """A Python value: text is parsed, NumPy scalars are converted."""
    if isinstance(value, _Text):
        return parse(str(value), default)
    return value.item() if getattr(value, "ndim", None) == 0 else value


def _values(source: Any) -> tuple[dict[str, Any], str]:
    """All settings of a configuration as dictionaries, and its name for messages."""
    if isinstance(source, RunSettings):
        return to_dict(source), ""
    found = presets.load(source) if isinstance(source, str) else source
    values = found.to_dict() if isinstance(found, config_dict.ConfigDict) else _copy(found)
    extensions.require(values.get("imports", ()), "config.imports")
    return values, f" of {source}" if isinstance(source, str) else ""


def _copy(values: Mapping[str, Any]) -> dict[str, Any]:
    return {k: _copy(v) if isinstance(v, Mapping) else v for k, v in values.items()}


def _rebased(values: dict[str, Any], agent: str, kind: type[RunSettings]) -> dict[str, Any]:
    """A configuration for another agent, from its changes to its own agent's defaults.
    Raises ValueError where the other agent lacks one of these settings.
    """
    before = settings_class(values.get("agent", ""))
    if before is kind:
        return values | {"agent": agent}
    usual, new = dict(flatten(to_dict(before()))), to_dict(kind())
    for name, value in flatten(values):
        if name in usual and usual[name] == value:
            continue
        if name not in dict(flatten(new)):
            raise ValueError(
                f"config.agent={agent!r}: this configuration is of agent {values['agent']!r} and "
                f"sets {name}={value!r}, which {agent!r} does not have; make one from the class of "
                "its settings (examples/own_config.py)"
            )
        put(new, name, value)
    return new | {"agent": agent}


def _named(changes: Mapping[str, Any], default: RunSettings, of: str) -> Iterator[tuple[str, Any]]:
    """Every changed setting by its full name, sections flattened."""
    sections = {one.name for one in describe(default) if one.is_section}
    for name, value in changes.items():
        if name not in sections:
            yield full_name(name, default, of), value
        elif isinstance(value, Mapping):
            yield from _named({f"{name}.{k}": v for k, v in value.items()}, default, of)
        else:
            raise ValueError(f"config.{name}={value!r} is a section: give a setting of it a value")
