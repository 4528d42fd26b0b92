"""What a compiled program costs, read from its text: products, bytes, exchanges between devices.

module = hlo.parse(compiled.as_text())
for found in hlo_costs.collectives(module):
print(found.kind, found.shape, found.bytes, found.times, found.loops, found.source)
"""

from __future__ import annotations

import collections
import math
import re
from typing import NamedTuple

from experiments.hlo import Line, Module, called, dims, num_bytes, parts, runs, scope, short, source

_SLICES = ("dynamic-slice", "gather", "slice")
COLLECTIVES = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)


class Collective(NamedTuple):
    """Devices speaking to each other.

    Attributes:
        kind: of `COLLECTIVES`.
        shape: of what every device has afterwards.
        bytes: of the whole array on a device: what a reduction adds up, a gather ends with.
        times: how often it runs, see `Run`.
        loops: likewise.
        branch: likewise.
        scope: what the program called it.
        source: FILE:LINE of the project's own code, "" where that is not known.
        devices: that take part in one.
    """

    kind: str
    shape: str
    bytes: float
    times: float
    loops: tuple[str, ...]
    branch: bool
    scope: str
    source: str
    devices: int


def collectives(module: Module) -> list[Collective]:
    """Every place of a program where devices speak to each other, in its order."""
    found = []
    for run in runs(module):
        line = run.line
        kind = line.kind.removesuffix("-start")
        if kind not in COLLECTIVES:
            continue
        shapes = parts(line.shape)
        if line.kind.endswith("-start") and kind != "all-reduce":  # (what goes in, what comes out)
            shapes = shapes[len(line.operands) : 2 * len(line.operands)] or shapes
        given = [run.own[name].shape for name in line.operands if name in run.own]
        size = sum(map(num_bytes, given if kind == "reduce-scatter" else shapes))
        found.append(
            Collective(
                kind=kind,
                shape=" ".join(shapes),
                bytes=size,
                times=run.times,
                loops=run.loops,
                branch=run.branch,
                scope=short(scope(line)),
                source=source(module, line),
                devices=_group(line.rest),
            )
        )
    return found


def _group(rest: str) -> int:
    """Devices of a collective's first group; 0 where it has none, which is all of them."""
    listed = re.search(r"replica_groups=\{\{([\d,]*)\}", rest)
    if listed:
        return listed.group(1).count(",") + 1
    regular = re.search(r"replica_groups=\[\d+,(\d+)\]", rest)
    if regular:
        return int(regular.group(1))
    mesh = re.search(r"replica_groups=mesh\[(.*?)\] ?\{(.*?)\}", rest)
    if mesh:
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", mesh.group(1)))
        return math.prod(int(sizes[name]) for name in re.findall(r"'(\w+)'", mesh.group(2)))
    return 0


def flops(module: Module) -> float:
    """Multiplications and additions of all matrix products and convolutions of one run."""
    return sum(run.times * line_flops(run.line, run.own) for run in runs(module))


def line_flops(line: Line, own: dict[str, Line]) -> float:
    """Those of one instruction, without what it calls."""
    if line.kind == "dot":
        contract = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", line.rest)
        left = dims(own[line.operands[0]].shape)
        depth = math.prod(left[int(i)] for i in contract.group(1).split(",") if i)
        return 2.0 * depth * math.prod(dims(line.shape))
    if line.kind == "convolution":
        return _convolution_flops(line, own)
    if _is_library_product(line):
        contract = re.search(r'"lhs_contracting_dimensions":\[(.*?)\]', line.rest)
        left = dims(own[line.operands[0]].shape)
        depth = math.prod(left[int(i)] for i in re.findall(r"\d+", contract.group(1)))
        return 2.0 * depth * math.prod(dims(parts(line.shape)[0]))
    return 0.0


def _is_library_product(line: Line) -> bool:
    """Whether it is a GPU library's product: a tuple of the result and of memory to work in."""
    return line.kind == "custom-call" and '"__cublas' in line.rest


def whole_flops(line: Line, own: dict[str, Line], computations: dict[str, list[Line]]) -> float:
    """Those of one instruction with what a fusion holds."""
    inner = computations.get(called(line) or "", [])
    names = {x.name: x for x in inner}
    return line_flops(line, own) + sum(whole_flops(x, names, computations) for x in inner)


def _convolution_flops(line: Line, own: dict[str, Line]) -> float:
    """Products of a convolution that are none with padding; a TPU's text has all products so."""
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", line.rest)
    (left, kernel), out = (dims(own[x].shape) for x in line.operands[:2]), dims(line.shape)
    window = _window(line.rest, labels.group(2), kernel)
    total = 2.0 * kernel[labels.group(2).index("i")]
    total *= out[labels.group(3).index("b")] * out[labels.group(3).index("f")]
    for axis, label in enumerate(sorted(x for x in labels.group(2) if x.isdigit())):
        size, stride, low, spread, gap = window[axis]
        length = left[labels.group(1).index(label)]
        steps = out[labels.group(3).index(label)]
        reach = (length - 1) * spread + 1
        total *= sum(
            0 <= at < reach and at % spread == 0
            for i in range(steps)
            for at in (i * stride + j * gap - low for j in range(size))
        )
    return total


def _window(rest: str, labels: str, kernel: list[int]) -> list[tuple[int, int, int, int, int]]:
    """(size, stride, padding before, dilation of the input, of the window) of every axis."""
    inside = re.search(r"window=\{(.*?)\}", rest)
    given = dict(re.findall(r"(\w+)=(\S+)", inside.group(1))) if inside else {}
    axes = sum(x.isdigit() for x in labels)
    if not axes:
        return []

    def numbers(name: str) -> list[int]:
        told = given.get(name, "x".join(["1"] * axes)).split("x")
        return [int(x) for x in told]

    pads = given.get("pad", "x".join(["0_0"] * axes)).split("x")
    whole = [kernel[labels.index(str(i))] for i in range(axes)]
    sizes = numbers("size") if "size" in given else whole
    before = [int(pad.split("_")[0]) for pad in pads]
    return list(
        zip(
            sizes,
            numbers("stride"),
            before,
            numbers("lhs_dilate"),
            numbers("rhs_dilate"),
            strict=True,
        )
    )


_FREE = ("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "conditional")


def bytes_moved(module: Module, outside: str = "") -> float:
    """Bytes that one run reads from and writes to memory, operation by operation.

    Args:
        outside: mark of layouts that lie elsewhere: "S(1)" is a TPU's own fast memory.
    """
    total = 0.0
    for run in runs(module):
        kind = run.line.kind
        if not run.fused and kind not in (*_FREE, "call") and not kind.endswith("-done"):
            total += run.times * line_bytes(run.line, run.own, module.computations, outside)
    return total


def line_bytes(
    line: Line, own: dict[str, Line], computations: dict[str, list[Line]], outside: str = ""
) -> float:
    """Bytes that an instruction reads and writes; of an array that is only sliced its slices."""
    inner = computations.get(called(line) or "", [])
    if not inner and line.kind in _SLICES:
        return 2.0 * num_bytes(line.shape, outside)
    if not inner and line.kind == "dynamic-update-slice" and line.operands[1] in own:
        return 2.0 * num_bytes(own[line.operands[1]].shape, outside)
    result = parts(line.shape)[0] if _is_library_product(line) else line.shape
    total = num_bytes(result, outside)
    for index, operand in enumerate(line.operands):
        whole = num_bytes(own[operand].shape, outside) if operand in own else 0.0
        inside = [x for x in inner if x.kind == "parameter" and x.operands == [str(index)]]
        users = [x for x in inner if inside and inside[0].name in x.operands]
        if whole and users and all(_sliced(x, inside[0].name) for x in users):
            if any(x.kind == "dynamic-update-slice" for x in users):  # in place
                total -= whole
            whole = sum(_slice_bytes(x, inner) for x in users)
        total += whole
    return max(total, 0.0)


def _sliced(user: Line, name: str) -> bool:
    """Whether an instruction touches only a part of the array `name`."""
    return user.kind in (*_SLICES, "dynamic-update-slice") and user.operands[0] == name


def _slice_bytes(user: Line, inner: list[Line]) -> float:
    if user.kind != "dynamic-update-slice":
        return num_bytes(user.shape)
    return 2.0 * sum(num_bytes(x.shape) for x in inner if x.name == user.operands[1])


def estimated_cycles(module: Module) -> float:
    """Cycles that the compiler itself expects of one run, where its text says so (a TPU's)."""
    total = 0.0
    for run in runs(module):
        if not run.fused:
            found = re.search(r'"estimated_cycles":"(\d+)"', run.line.rest)
            total += run.times * int(found.group(1)) if found else 0.0
    return total


def by_kind(found: list[Collective]) -> dict[str, tuple[int, float, float]]:
    """Of every kind: places in the program, runs, bytes of all runs."""
    result: dict[str, tuple[int, float, float]] = collections.defaultdict(lambda: (0, 0.0, 0.0))
    for one in found:
        places, times, size = result[one.kind]
        result[one.kind] = places + 1, times + one.times, size + one.times * one.bytes
    return dict(result)
