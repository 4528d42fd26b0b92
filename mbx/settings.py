"""A setting is declared once: a field with its default, a line of help and the values it may take.

    @dataclasses.dataclass(frozen=True)
    class Loss:
        value_target: str = setting("planner", "Targets of values.", choices=("planner", "lambda"))
        lambda_: float = setting(0.95, "Trace.", at_most=1, needs={"value_target": "lambda"})

    @dataclasses.dataclass(frozen=True)
    class Settings:
        seed: int = setting(0, "Seed of all random numbers.")
        loss: Loss = section(Loss(), "What is minimised.")

From such a class everything else is derived: the nested dictionary that configuration files and
flags change (`to_dict`), the checked object that the code reads (`from_dict`), `--help` and the
page of settings (`describe`). Rules over several settings are a method `check(self)` of a section
or of the whole, which yields sentences. Nothing here loads JAX.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import math
import re
import typing
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")

NONZERO = object()  # in `needs`: any value but 0, False, "" and ()
_TYPES = {int: "a whole number", float: "a number", bool: "True or False", str: "text"}


class Declared(NamedTuple):
    """The declaration of a setting or a section.

    Attributes:
        name: dotted.
        default: None for a section.
        allowed: range or choices in words; '' for no limits.
        needs: other settings by dotted name with the value, or tuple of values, required for an
            effect.
    """

    name: str
    default: Any
    help: str
    allowed: str
    needs: dict[str, Any]
    is_section: bool = False


def setting(
    default: Any,
    help: str,
    *,
    at_least: float | None = 0,
    above: float | None = None,
    at_most: float | None = None,
    choices: tuple[Any, ...] | None = None,
    needs: str | Mapping[str, Any] | None = None,
) -> Any:
    """Declare a setting as a field of a frozen dataclass.

    Args:
        help: one line on its effect, with its unit.
        at_least, above, at_most: limits of a number, or of each number of a tuple. Numbers must be
            finite, and at least 0 unless `at_least` is another number or None (no lower limit).
        choices: all allowed values.
        needs: conditions for an effect: the dotted name of another setting (or the bare name within
            the section) with its required value, a tuple of values, or `NONZERO`. The bare name of
            a property of the whole settings is a condition whose docstring describes it; a string
            is one such name. A setting without effect is refused unless it has its default.
    """
    metadata: dict[str, Any] = dict(
        help=help, at_least=at_least, above=above, at_most=at_most, choices=choices
    )
    metadata["needs"] = {needs: True} if isinstance(needs, str) else dict(needs or {})
    if isinstance(default, dict):  # names that a user chooses; a default of its own for everyone
        # Not part of a hash: settings are hashable, dictionaries are not.
        return dataclasses.field(
            default_factory=lambda: dict(default), metadata=metadata, hash=False
        )
    return dataclasses.field(default=default, metadata=metadata)


def section(default: Any, help: str = "") -> Any:
    """Declare a section: a field whose default is a dataclass of settings."""
    return dataclasses.field(default=default, metadata={"help": help, "section": True})


def to_dict(settings: Any) -> dict[str, Any]:
    """The settings as nested dictionaries, one per section."""
    values = {f.name: getattr(settings, f.name) for f in dataclasses.fields(settings)}
    return {
        name: to_dict(value) if dataclasses.is_dataclass(value) else value
        for name, value in values.items()
    }


def from_dict(default: T, values: Mapping[str, Any], *, check_effects: bool = True) -> T:
    """The checked settings that `values` holds.

    Args:
        default: supplies names that `values` lacks.
        values: nested mappings as from `to_dict`.
        check_effects: refuse changed settings that have no effect.

    Raises:
        ValueError: for an unknown name, a wrong type or range, a broken rule, or a changed setting
            without effect; names the setting, its value and the remedy.
    """
    known = [one.name for one in describe(default)]
    settings = _read(default, values, "", known)
    _check_rules(settings, "")
    if check_effects:
        _check_effects(settings, default)
    return settings


def flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every value of nested mappings with its dotted name; an empty mapping is one."""
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from flatten(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def put(values: dict[str, Any], name: str, value: Any) -> None:
    """Set one value of nested dictionaries by its dotted name, creating sections."""
    *path, last = name.split(".")
    for part in path:
        values = values.setdefault(part, {})
    values[last] = value


def full_name(name: str, settings: Any, of: str = "") -> str:
    """The dotted name of a setting, given in full or by its unique last part.
    Entries of a dictionary ("env.kwargs.mass") are settings, too. of: the owner, for the message ("
    of agent 'tdmpc'"). Raises ValueError, with similar names, for an unknown or ambiguous name.
    """
    found = {one.name: one.default for one in describe(settings) if not one.is_section}
    holder = name
    while holder not in found and "." in holder:
        holder = holder.rpartition(".")[0]
    if name in found or isinstance(found.get(holder), dict):
        return name
    short = [one for one in found if one.rpartition(".")[2] == name]
    if len(short) > 1:
        raise ValueError(f"config.{name} is {len(short)} settings: say which of {_listed(short)}")
    return short[0] if short else _unknown(name, found, of)


def parse(text: str, default: Any) -> Any:
    """The value of a command line's text, for a setting with the given default.
    Numbers, True, False, None, tuples and dictionaries are Python's; whole numbers also 1e4, and
    several values a,b. Everything else is text.
    """
    if isinstance(default, str):
        return text
    try:
        value = ast.literal_eval({"true": "True", "false": "False"}.get(text, text))
    except (SyntaxError, ValueError):
        value = text
    if isinstance(default, bool) and value in (0, 1):
        return bool(value)
    if isinstance(default, tuple) and not isinstance(value, tuple | list):
        parts = text.split(",") if isinstance(value, str) else (value,)
        value = tuple(part.strip() if isinstance(part, str) else part for part in parts if part)
    return value


def describe(settings: Any, prefix: str = "") -> Iterator[Declared]:
    """Declarations of all settings and sections, in order."""
    own = {field.name for field in dataclasses.fields(settings)}
    for field in dataclasses.fields(settings):
        name, value = prefix + field.name, getattr(settings, field.name)
        if field.metadata.get("section"):
            yield Declared(name, None, field.metadata["help"], "", {}, True)
            yield from describe(value, f"{name}.")
        else:
            needs = {
                prefix + other if other in own else other: required
                for other, required in field.metadata["needs"].items()
            }
            limited = field.metadata["choices"] or re.search(r"\b(int|float)\b", str(field.type))
            allowed = _allowed(field.metadata) if limited else ""
            yield Declared(name, value, field.metadata["help"], allowed, needs)


def in_words(found: Declared) -> str:
    """The help of a setting, and its choices where the help does not name them."""
    if found.allowed.startswith("one of") and not all(
        choice in found.help for choice in found.allowed.removeprefix("one of ").split(", ")
    ):
        return f"{found.help} ({found.allowed.removeprefix('one of ')})"
    return found.help


def inactive(settings: Any) -> dict[str, str]:
    """The settings without effect, by dotted name, with their requirements."""
    values = dict(flatten(to_dict(settings)))
    needs = {declared.name: declared.needs for declared in describe(settings)}

    def unmet(name: str) -> str:
        for other, required in needs.get(name, {}).items():
            if above := unmet(other):  # what a setting needs may have no effect itself
                return above
            value = values[other] if other in values else getattr(settings, other)
            several = required if isinstance(required, tuple) else (required,)
            if not (bool(value) if required is NONZERO else value in several):
                return requirement(settings, other, required)
        return ""

    return {name: found for name in sorted(needs) if (found := unmet(name))}


def requirement(settings: Any, other: str, required: Any) -> str:
    """The required value of a setting that `needs` names, in words."""
    condition = getattr(type(settings), other, None)
    if isinstance(condition, property):
        return " ".join((condition.__doc__ or "").split())
    if required is NONZERO:
        return f"{other}=something other than 0"
    several = required if isinstance(required, tuple) else (required,)
    return f"{other}={' or '.join(map(repr, several))}"


def _read(default: Any, values: Mapping[str, Any], prefix: str, known: list[str]) -> Any:
    if not isinstance(values, Mapping):
        raise ValueError(f"config.{prefix.rstrip('.')}={values!r}: a section of settings is needed")
    fields = {field.name: field for field in dataclasses.fields(default)}
    types = typing.get_type_hints(type(default))
    new = {}
    for name, value in values.items():
        full = prefix + name
        if name not in fields:
            _unknown(full, known)
        field = fields[name]
        if field.metadata.get("section"):
            new[name] = _read(getattr(default, name), value, f"{full}.", known)
        else:
            new[name] = _convert(value, types[name], full)
            _check_value(new[name], field.metadata, full)
    return dataclasses.replace(default, **new)


def _unknown(name: str, known: Iterable[str], of: str = "") -> typing.NoReturn:
    """Raise ValueError for an unknown name, with similar ones."""
    last = {one: one.rpartition(".")[2] for one in known}
    near = difflib.get_close_matches(name.rpartition(".")[2], set(last.values()), n=3)
    close = [one for part in near for one in last if last[one] == part]
    close = difflib.get_close_matches(name, close, n=3, cutoff=0.0) or difflib.get_close_matches(
        name, last, n=3
    )
    if not close:
        raise ValueError(f"config.{name} is not a setting{of}: --help with --config lists them all")
    raise ValueError(f"config.{name} is not a setting{of}: did you mean {_listed(close)}?")


def _listed(names: list[str]) -> str:
    return ", ".join(names[:-1]) + " or " * (len(names) > 1) + names[-1]


def _convert(value: Any, kind: Any, name: str) -> Any:
    """`value` as the declared type; JSON lists become tuples, whole floats integers."""
    origin = typing.get_origin(kind) or kind
    if origin is tuple and isinstance(value, list | tuple):
        of = {*typing.get_args(kind)} - {...}  # several types, or none, are the owner's to check
        one = of.pop() if of in ({int}, {float}) else None
        return tuple(_convert(x, one, name) if one else x for x in value)
    if origin is float and _is_number(value):
        return float(value)
    if origin is int and _is_number(value) and math.isfinite(value) and value == int(value):
        return int(value)
    if isinstance(origin, type) and isinstance(value, origin) and origin is not int:
        return value
    wanted = _TYPES.get(origin, f"a {getattr(origin, '__name__', kind)}")
    raise ValueError(f"config.{name}={value!r}: give {wanted}")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _check_value(value: Any, limits: Mapping[str, Any], name: str) -> None:
    choices, low, over, high = (
        limits[limit] for limit in ("choices", "at_least", "above", "at_most")
    )
    for one in value if isinstance(value, tuple) else (value,):
        if choices is not None and one not in choices:
            raise ValueError(f"config.{name}={one!r}: choose one of {choices}")
        if not _is_number(one):
            continue
        if not math.isfinite(one):
            raise ValueError(f"config.{name}={one}: give a finite number")
        outside = (low is not None and one < low) or (over is not None and one <= over)
        if outside or (high is not None and one > high):
            raise ValueError(f"config.{name}={one}: give {_allowed(limits)}")


def _allowed(limits: Mapping[str, Any]) -> str:
    """Limits or choices in words; '' for none."""
    if limits["choices"] is not None:
        return "one of " + ", ".join(map(str, limits["choices"]))
    parts = []
    if limits["above"] is not None:
        parts.append(f"more than {limits['above']:g}")
    elif limits["at_least"] is not None:
        parts.append(f"at least {limits['at_least']:g}")
    if limits["at_most"] is not None:
        parts.append(f"at most {limits['at_most']:g}")
    return " and ".join(parts)


def _check_rules(settings: Any, prefix: str) -> None:
    for field in dataclasses.fields(settings):
        if field.metadata.get("section"):
            _check_rules(getattr(settings, field.name), f"{prefix}{field.name}.")
    for problem in getattr(settings, "check", tuple)():
        raise ValueError(f"config.{prefix}{problem}")


def _check_effects(settings: Any, default: Any) -> None:
    values, normal = dict(flatten(to_dict(settings))), dict(flatten(to_dict(default)))
    for name, needed in inactive(settings).items():
        if values[name] != normal[name]:
            raise ValueError(
                f"config.{name}={values[name]!r} has no effect here: it needs {needed}; leave it "
                f"at {normal[name]!r}"
            )
