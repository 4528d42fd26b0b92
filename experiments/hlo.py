"""A compiled program's text (HLO), read: its instructions and how often they run.

    module = hlo.parse(jax.jit(f).lower(x).compile().as_text())

What they cost, and where devices speak to each other, is in `experiments.hlo_costs`. How often an
instruction runs is the product of the trip counts of the loops around it, as far as the text knows
them (a `fori_loop` or `scan` with constant bounds). A loop whose count is known only when it runs
counts once, and is named.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import NamedTuple

_SIZES = {"pred": 1, "bf16": 2, "f16": 2}  # others end in their bits: f32, s8, u64
_NAME = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = ")
_HEAD = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")


class Line(NamedTuple):
    """An instruction as written.

    Attributes:
        name: unique in its computation.
        shape: of the result, with its layout.
        kind: what it does.
        operands: their names; of a parameter its number, of a constant its value.
        rest: what follows the operands: attributes, scope, source.
        root: whether it is what its computation gives back.
    """

    name: str
    shape: str
    kind: str
    operands: list[str]
    rest: str
    root: bool = False


class Module(NamedTuple):
    """A program.

    Attributes:
        entry: name of the computation that runs.
        computations: instructions by computation.
        aliases: numbers of the arguments whose memory holds results.
        frames: stack frames by number: (file, line, number of the frame that called).
    """

    entry: str
    computations: dict[str, list[Line]]
    aliases: frozenset[int]
    frames: dict[int, tuple[str, int, int]]


class Run(NamedTuple):
    """An instruction where it runs.

    Attributes:
        line: itself.
        own: the instructions of its computation, by name.
        times: how often, as far as known.
        loops: where the loops around it are whose count is not known, outermost first.
        fused: whether it is part of a fusion, which reads and writes memory as a whole.
        branch: whether only one branch of a choice runs it.
    """

    line: Line
    own: dict[str, Line]
    times: float
    loops: tuple[str, ...]
    fused: bool
    branch: bool


# -------------------------------------------------------------------------------------------------
# The text


def parse(text: str) -> Module:
    """The module in a compiled program's text."""
    computations: dict[str, list[Line]] = {}
    entry, current = "", []
    for line in text.splitlines():
        head = _HEAD.match(line)
        if head:
            current = computations.setdefault(head.group(2), [])
            entry = head.group(2) if head.group(1) else entry
        elif (found := _instruction(line)) is not None:
            current.append(found)
    header = text.partition("\n")[0]
    alias = re.search(r"input_output_alias=\{(.*?)\}, \w+=", header)
    numbers = re.findall(r": \((\d+), \{", alias.group(1)) if alias else []
    return Module(entry, computations, frozenset(map(int, numbers)), _frames(text))


def _instruction(line: str) -> Line | None:
    name = _NAME.match(line)
    if not name:
        return None
    shape_end = _end(line, name.end())
    kind = re.match(r" ([\w\-]+)(?=\()", line[shape_end:])
    if not kind:
        return None
    start = shape_end + kind.end()
    end = _end(line, start)
    inside = line[start + 1 : end - 1]
    verbatim = kind.group(1) in ("parameter", "constant")
    operands = [inside] if verbatim else re.findall(r"%([\w.\-]+)", inside)
    root = line.lstrip().startswith("ROOT ")
    return Line(
        name.group(1), line[name.end() : shape_end], kind.group(1), operands, line[end:], root
    )


def _end(line: str, start: int) -> int:
    """Where a shape, or a list in brackets, that begins at `start` is over."""
    depth = 0
    for i in range(start, len(line)):
        depth += line[i] in "({["
        depth -= line[i] in ")}]"
        if depth == 0 and (line[i] in ")" and line[start] == "(" or line[i] == " "):
            return i if line[i] == " " else i + 1
    return len(line)


def _frames(text: str) -> dict[int, tuple[str, int, int]]:
    """The table of stack frames that follows a module's header."""
    head = text[: text.find("\n%")]
    files = dict(re.findall(r'^(\d+) "(.*)"$', head.partition("FunctionNames")[0], re.MULTILINE))
    places = {
        number: (files.get(file, ""), int(line))
        for number, file, line in re.findall(
            r"^(\d+) \{file_name_id=(\d+) .*?\bline=(\d+)", head, re.MULTILINE
        )
    }
    frames = re.findall(
        r"^(\d+) \{file_location_id=(\d+)(?: parent_frame_id=(\d+))?", head, re.MULTILINE
    )
    return {int(n): (*places.get(at, ("", 0)), int(up or n)) for n, at, up in frames}


def num_bytes(shape: str, outside: str = "") -> float:
    """Bytes of a shape, `f32[4,8]{1,0}` or a tuple of such.

    Args:
        outside: a layout's mark, "S(1)" say; what has it does not count.
    """
    total = 0.0
    for kind, dims, layout in re.findall(r"([a-z]+\d*)\[([\d,]*)\](\{[^}]*\})?", shape):
        if outside and outside in layout:
            continue
        digits = re.match(r"\d+", kind.lstrip("abcdefghijklmnopqrstuvwxyz"))
        size = _SIZES.get(kind, int(digits.group()) / 8 if digits else 0)
        total += size * math.prod(int(d) for d in dims.split(",") if d)
    return total


def parts(shape: str) -> list[str]:
    """The shapes in a tuple's, layouts left out; a single one's is alone."""
    return [f"{k}[{d}]" for k, d in re.findall(r"([a-z]\w*)\[([\d,]*)\]", shape)]


def dims(shape: str) -> list[int]:
    """Lengths of the axes of an array's shape."""
    found = re.search(r"\[([\d,]*)\]", shape)
    return [int(d) for d in found.group(1).split(",") if d] if found else []


def scope(line: Line) -> str:
    """What the program called an instruction, "" where it has no name."""
    found = re.search(r'op_name="([^"]*)"', line.rest)
    return found.group(1) if found else ""


def source(module: Module, line: Line, own: str = "mbx/") -> str:
    """FILE:LINE of the innermost frame in a file whose path holds `own`, from there on."""
    found = re.search(r"stack_frame_id=(\d+)", line.rest)
    number = int(found.group(1)) if found else 0
    while number in module.frames:
        path, at, above = module.frames[number]
        if own in path:
            return f"{own}{path.split(own)[-1]}:{at}"
        if above == number:
            break
        number = above
    named = re.search(r'source_file="([^"]*)" source_line=(\d+)', line.rest)
    if named and own in named.group(1):
        return f"{own}{named.group(1).split(own)[-1]}:{named.group(2)}"
    return ""


# -------------------------------------------------------------------------------------------------
# How often


def runs(module: Module) -> Iterator[Run]:
    """Every instruction of a program where it runs, those inside of fusions among them."""
    yield from _runs(module, module.entry, 1.0, (), False, False)


def _runs(
    module: Module, name: str, times: float, loops: tuple[str, ...], fused: bool, branch: bool
) -> Iterator[Run]:
    own = {line.name: line for line in module.computations.get(name, ())}
    for line in own.values():
        yield Run(line, own, times, loops, fused, branch)
        if line.kind == "while":
            count = trip_count(module, line, own)
            inner = times, (*loops, source(module, line) or short(scope(line)) or "a loop")
            if count is not None:
                inner = times * count, loops
            for part in re.findall(r"(?:condition|body)=%?([\w.\-]+)", line.rest):
                yield from _runs(module, part, *inner, fused, branch)
        elif line.kind == "conditional":
            for part in _branches(line):
                yield from _runs(module, part, times, loops, fused, True)
        elif line.kind == "call":
            for part in re.findall(r"to_apply=%?([\w.\-]+)", line.rest):
                yield from _runs(module, part, times, loops, fused, branch)
        elif (inner_name := called(line)) is not None:
            inside = fused or line.kind == "fusion"
            yield from _runs(module, inner_name, times, loops, inside, branch)


def _branches(line: Line) -> list[str]:
    several = re.search(r"branch_computations=\{(.*?)\}", line.rest)
    if several:
        return re.findall(r"%?([\w.\-]+)", several.group(1))
    return re.findall(r"(?:true|false)_computation=%?([\w.\-]+)", line.rest)


def called(line: Line) -> str | None:
    found = re.search(r"calls=%?([\w.\-]+)", line.rest)
    return found.group(1) if found else None


def trip_count(module: Module, line: Line, own: dict[str, Line]) -> int | None:
    """How often a loop's body runs, None where only the run knows.

    As the compiler noted it, or from a counter that begins with a constant and ends at another.
    """
    noted = re.search(r'known_trip_count"?:\{"?n"?:"?(\d+)', line.rest)
    if noted:
        return int(noted.group(1))
    condition = re.search(r"condition=%?([\w.\-]+)", line.rest)
    lines = module.computations.get(condition.group(1) if condition else "", [])
    inside = {x.name: x for x in lines}
    root = next((x for x in lines if x.root), None)
    if root is not None and root.kind == "fusion":  # the comparison alone, fused
        fused = {x.name: x for x in module.computations.get(called(root) or "", [])}
        compare = next((x for x in fused.values() if x.root), None)
        if compare is None or compare.kind != "compare":
            return None
        ends = [_through(fused, name, inside, root.operands) for name in compare.operands]
    elif root is not None and root.kind == "compare":
        compare, ends = root, [_resolve(inside, name) for name in root.operands]
    else:
        return None
    direction = re.search(r"direction=(\w+)", compare.rest)
    start, stop = (_value(end, line, own) for end in ends)
    if start is None or stop is None or not direction or direction.group(1) not in ("LT", "LE"):
        return None
    return max(0, stop - start + (direction.group(1) == "LE"))


def _through(
    fused: dict[str, Line], name: str, inside: dict[str, Line], given: list[str]
) -> Line | None:
    """What a value inside of a fusion comes from, which was `given` what is in `inside`."""
    line = _resolve(fused, name)
    if line is not None and line.kind == "parameter":
        return _resolve(inside, given[int(line.operands[0])])
    return line


def _resolve(own: dict[str, Line], name: str) -> Line | None:
    """The instruction that a value comes from, behind copies and changes of shape."""
    line = own.get(name)
    while line is not None and line.kind in ("copy", "bitcast", "reshape", "convert", "broadcast"):
        line = own.get(line.operands[0]) if line.operands else None
    return line


def _value(line: Line | None, loop: Line, own: dict[str, Line]) -> int | None:
    """The number that an end of a loop's comparison begins with."""
    if line is not None and line.kind == "get-tuple-element":
        index = re.search(r"index=(\d+)", line.rest)
        state = _resolve(own, loop.operands[0])
        if index is None or state is None or state.kind != "tuple":
            return None
        line = _resolve(own, state.operands[int(index.group(1))])
    if line is None or line.kind != "constant" or not re.fullmatch(r"-?\d+", line.operands[0]):
        return None
    return int(line.operands[0])


def short(text: str) -> str:
    """The last parts of a scope, without the wrappers that every operation has."""
    first = text.split(";")[0]
    dull = ("while", "body", "closed_call", "cond", "shard_map", "")
    named = [p for p in first.split("/") if p not in dull and not p.startswith("jit(")]
    return "/".join(named[-3:])
