"""Wrong lines made on purpose: small changes of a source file, one at a time.

Kinds:
  arithmetic: `+` for `-`, `*` for `/`, `*` for `**`, ...
  comparison: `<=` for `<`, `!=` for `==`, `or` for `and`, `|` for `&`, a condition negated.
  index: `[:-1]` for `[1:]`, the last for the first, the next one, the other end of a slice.
  sign: `x` for `-x`.
  constant: `n + 1`, `2 x`, True for False.
  swap: two neighbouring positional arguments exchanged.
  drop: one operand of a sum, product or conjunction; one branch of `where`; a bound of
    `maximum`, `minimum`, `clip`.
  stop_gradient: without it.
  key: a random key used again where it was split or folded.

What declares or explains is left alone: annotations, decorators, messages of errors, defaults of a
class's fields.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import NamedTuple

KINDS = tuple("arithmetic comparison index sign constant swap drop stop_gradient key".split())

_ARITHMETIC = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "/"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "*"),
    ast.Pow: ("**", "*"),
}
_COMPARISON = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
    ast.And: ("and", "or"),
    ast.Or: ("or", "and"),
    ast.BitAnd: ("&", "|"),
    ast.BitOr: ("|", "&"),
}
_EITHER_WAY = frozenset(  # the order of these arguments changes nothing, or only types
    "maximum minimum logical_and logical_or add multiply isinstance hasattr getattr setattr zip "
    "allclose result_type promote_types cast".split()
)
_BOUNDS = frozenset("maximum minimum clip max min".split())
_ATOMS = (ast.Name, ast.Attribute, ast.Call, ast.Subscript, ast.Tuple, ast.List)


class Mutant(NamedTuple):
    """A change of one line.

    function: the outermost function (`f`, `Class.method`), "" outside. old, new: the line, without
    its indentation. source: the changed file.
    """

    path: str
    line: int
    function: str
    kind: str
    old: str
    new: str
    source: str

    @property
    def key(self) -> str:
        """Names the change in a list that outlives shifted lines."""
        return f"{self.path} | {self.function} | {self.old} | {self.new}"


class Edit(NamedTuple):
    """The bytes low..high of a file, and what takes their place."""

    kind: str
    low: int
    high: int
    new: str


class _File:
    """A source by its nodes: ast counts columns in bytes."""

    def __init__(self, source: str) -> None:
        self.raw = source.encode()
        self.starts = [0]
        for line in self.raw.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))

    def low(self, node: ast.AST) -> int:
        return self.starts[node.lineno - 1] + node.col_offset

    def high(self, node: ast.AST) -> int:
        return self.starts[node.end_lineno - 1] + node.end_col_offset

    def text(self, node: ast.AST) -> str:
        return self.raw[self.low(node) : self.high(node)].decode()

    def operand(self, node: ast.AST) -> str:
        """Its text where something else stood: a whole, whatever is around it."""
        return self.text(node) if isinstance(node, _ATOMS) else f"({self.text(node)})"

    def replace(self, kind: str, node: ast.AST, new: str) -> Edit:
        return Edit(kind, self.low(node), self.high(node), new)

    def operator(
        self, kind: str, left: ast.AST, right: ast.AST, change: tuple[str, str]
    ) -> Iterator[Edit]:
        """Another operator between two operands."""
        low, high = self.high(left), self.low(right)
        gap = self.raw[low:high].decode()
        if change[0] in gap:
            yield Edit(kind, low, high, gap.replace(*change, 1))


def mutants(path: str, source: str) -> list[Mutant]:
    """All changes of a file, in the order of its lines, none twice."""
    file, found = _File(source), {}
    lines = source.splitlines()
    for function, edit in _walk(ast.parse(source), "", file):
        changed = (file.raw[: edit.low] + edit.new.encode() + file.raw[edit.high :]).decode()
        first = file.raw[: edit.low].count(b"\n")
        after = len(lines) - 1 - file.raw[: edit.high].count(b"\n")
        old = " ".join(line.strip() for line in lines[first : len(lines) - after])
        others = changed.splitlines()
        new = " ".join(line.strip() for line in others[first : len(others) - after])
        if changed != source:
            mutant = Mutant(path, first + 1, function, edit.kind, old, new, changed)
            found.setdefault(changed, mutant)
    return sorted(found.values(), key=lambda m: m.line)


def _walk(node: ast.AST, function: str, file: _File) -> Iterator[tuple[str, Edit]]:
    """Edits below a node, each with the function that holds it."""
    for child in _code_below(node):
        inside = function
        if isinstance(child, ast.ClassDef | ast.FunctionDef) and (
            not function or isinstance(node, ast.ClassDef)
        ):
            inside = f"{function}.{child.name}".lstrip(".")
        for edit in _edits(child, file):
            if function or edit.kind == "constant":
                yield function, edit
        yield from _walk(child, inside, file)


def _code_below(node: ast.AST) -> list[ast.AST]:
    """Children that compute something."""
    if isinstance(node, ast.Raise | ast.Assert | ast.JoinedStr):
        return []
    if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
        return []
    if isinstance(node, ast.FunctionDef):
        return [*node.args.defaults, *filter(None, node.args.kw_defaults), *node.body]
    if isinstance(node, ast.ClassDef):
        return [child for child in node.body if isinstance(child, ast.FunctionDef | ast.ClassDef)]
    if isinstance(node, ast.AnnAssign):
        return [node.value] if node.value else []
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "isinstance":
        return node.args[:1]
    if isinstance(node, ast.UnaryOp) and _number(node) is not None:
        return []
    if isinstance(node, ast.Subscript):
        # Numbers of an index are changed as an index; what is computed in it is code like any.
        bounds = []
        for part in _axes(node):
            bounds += [part.lower, part.upper] if isinstance(part, ast.Slice) else [part]
        return [node.value, *(x for x in bounds if x is not None and _number(x) is None)]
    return list(ast.iter_child_nodes(node))


def _edits(node: ast.AST, file: _File) -> Iterator[Edit]:
    """Changes of one node."""
    if isinstance(node, ast.BinOp):
        yield from _binary(node, file)
    elif isinstance(node, ast.BoolOp):
        first, second = node.values[:2]
        yield from file.operator("comparison", first, second, _COMPARISON[type(node.op)])
        if len(node.values) == 2:
            yield from (file.replace("drop", node, file.operand(x)) for x in node.values)
    elif isinstance(node, ast.Compare):
        operands = [node.left, *node.comparators]
        for op, left, right in zip(node.ops, operands, operands[1:], strict=False):
            yield from file.operator("comparison", left, right, _COMPARISON[type(op)])
    elif isinstance(node, ast.UnaryOp):
        kind = "sign" if isinstance(node.op, ast.USub) else "comparison"
        yield file.replace(kind, node, file.operand(node.operand))
    elif isinstance(node, ast.If | ast.IfExp | ast.While):
        if isinstance(node.test, ast.Name | ast.Attribute | ast.Call):
            yield file.replace("comparison", node.test, f"(not {file.text(node.test)})")
    elif isinstance(node, ast.Constant):
        value = node.value
        if isinstance(value, bool):
            yield file.replace("constant", node, str(not value))
        elif isinstance(value, int | float):
            new = value + 1 if isinstance(value, int) else 2 * value or 1.0
            yield file.replace("constant", node, repr(new))
    elif isinstance(node, ast.Subscript):
        for part in _axes(node):
            yield from _index(part, file)
    elif isinstance(node, ast.Call):
        yield from _call(node, file)
    elif isinstance(node, ast.Attribute) and node.attr == "stop_gradient":
        yield file.replace("stop_gradient", node, "(lambda x: x)")


def _binary(node: ast.BinOp, file: _File) -> Iterator[Edit]:
    op = type(node.op)
    if op in _ARITHMETIC:
        yield from file.operator("arithmetic", node.left, node.right, _ARITHMETIC[op])
    elif op in _COMPARISON:
        yield from file.operator("comparison", node.left, node.right, _COMPARISON[op])
    if op in (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.BitAnd, ast.BitOr):
        yield file.replace("drop", node, file.operand(node.left))
    if op in (ast.Add, ast.Mult, ast.BitAnd, ast.BitOr):
        yield file.replace("drop", node, file.operand(node.right))


def _axes(node: ast.Subscript) -> list[ast.AST]:
    return node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]


def _number(node: ast.AST | None) -> int | None:
    """The value of an integer literal, negative ones included."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        inner = _number(node.operand)
        return None if inner is None else -inner
    plain = isinstance(node, ast.Constant) and type(node.value) is int
    return node.value if plain else None


def _index(part: ast.AST, file: _File) -> Iterator[Edit]:
    """Changes of one axis of an index; shapes stay where they can."""
    value = _number(part)
    if value is not None:
        new = {0: -1, -1: 0}.get(value, value + 1 if value > 0 else value - 1)
        yield file.replace("index", part, str(new))
    if not isinstance(part, ast.Slice):
        return
    if part.step is not None:
        if _number(part.step) == -1 and part.lower is part.upper is None:
            yield file.replace("index", part, ":")
    elif (part.lower is None) != (part.upper is None):
        bound = part.lower or part.upper
        number = _number(bound)
        other = f"-({file.text(bound)})" if number is None else str(-number)
        yield file.replace("index", part, f"{other}:" if part.lower is None else f":{other}")
    else:
        for bound in (part.lower, part.upper):
            if _number(bound) is not None:
                yield file.replace("index", bound, str(_number(bound) + 1))


def _call(node: ast.Call, file: _File) -> Iterator[Edit]:
    name, args = ast.unparse(node.func), node.args
    last = name.rpartition(".")[2]
    if any(isinstance(x, ast.Starred) for x in args):
        return
    if last == "stop_gradient" and args:
        yield file.replace("stop_gradient", node, file.operand(args[0]))
    elif name.endswith("random.fold_in"):
        yield file.replace("key", node, file.operand(args[0]))
    elif name.endswith("random.split"):
        yield file.replace("key", node, f"{file.text(node)}.at[...].set({file.text(args[0])})")
    else:
        if last == "where" and len(args) == 3:
            yield from (file.replace("drop", node, file.operand(x)) for x in args[1:])
        if last in _BOUNDS and len(args) > 1:
            yield file.replace("drop", node, file.operand(args[0]))
        for a, b in zip(args[:2], args[1:3], strict=False):
            alike = _can_stand_for(a, file) and _can_stand_for(b, file)
            if alike and last not in _EITHER_WAY and file.text(a) != file.text(b):
                between = file.raw[file.high(a) : file.low(b)].decode()
                new = file.text(b) + between + file.text(a)
                yield Edit("swap", file.low(a), file.high(b), new)


def _can_stand_for(node: ast.AST, file: _File) -> bool:
    """False for what nobody passes in another's place by mistake: literals, types, functions."""
    if isinstance(node, ast.Constant | ast.Lambda | ast.Tuple | ast.List | ast.Dict):
        return False
    return not file.text(node).endswith(("float32", "int32", "bool", "bool_", "local", "_fn"))
