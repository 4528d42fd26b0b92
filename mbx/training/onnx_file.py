"""A policy as an ONNX file, which runs with onnxruntime and numpy (examples/run_onnx.py).

The graph takes `observation` and, where they matter, `first` (an episode begins), `memory_0`, ...
(zeros, then the last call's `next_memory_0`, ...) and the random numbers of an action: `normal_0`,
... (standard normal) and `uniform_1`, ... (in [0, 1)). It returns `action` in the environment's
units. Random numbers are inputs because those of ONNX's own operators differ between runtimes: so
actions can be compared with the run's. Loops are unrolled.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from mbx.envs.base import in_space
from mbx.training.files import atomic_write
from mbx.training.policy import Policy

TOLERANCE, CALLS = 1e-5, 20
_OPSET, _IR = 21, 10  # runtimes read versions up to their own
_INSIDE = {"jit": "jaxpr", "custom_jvp_call": "call_jaxpr", "custom_vjp_call": "call_jaxpr"}
Draw = Callable[[str, Any, tuple[int, ...]], Any]  # (kind, key, shape) -> random numbers


def save(policy: Policy, path: str) -> str:
    """Write the file of a policy after comparing their actions; returns a description.
    Raises ImportError without onnx and onnxruntime, and ValueError where the policy cannot be
    expressed in ONNX or actions differ by more than 1e-5 of half their range (at least 1).
    """
    try:
        import onnxruntime

        graph = _Graph(policy)
    except ImportError as error:
        raise ImportError(f"{error}: pip install 'mbx-rl[onnx]'") from error
    except _Inexpressible as error:
        raise ValueError(
            f"{path} is not written, ONNX cannot express this policy ({error}): give "
            "--no-planner, or --format=mbx"
        ) from error
    content = graph.file()
    try:
        session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    except Exception as error:  # of the runtime, by no common type
        raise ValueError(
            f"{path} is not written, onnxruntime refuses its graph ({str(error).splitlines()[0]}): "
            "give --no-planner, or --format=mbx"
        ) from error
    worst = graph.difference(lambda feeds: session.run(None, feeds)[0])
    if not worst <= TOLERANCE:
        raise ValueError(
            f"{path} is not written, an action of its graph differs from the run's by {worst:.1e} "
            f"(at most {TOLERANCE}): give --no-planner, or --format=mbx"
        )
    atomic_write(path, content)
    return f"{len(content) / 1e3:.0f} kB, {CALLS} actions within {worst:.0e} of the run's"


class _Inexpressible(ValueError):
    """What of a policy's program has no ONNX node here; `save` refuses the policy with it."""


class _Bits(NamedTuple):
    """Random bits of which jax makes a number in [0, 1)."""

    uniform: Any


class _Graph:
    """A policy's program as ONNX nodes.

    In it, a value is an array, or the name of a node's output, or None for a random key.
    """

    def __init__(self, policy: Policy) -> None:
        import onnx

        self.onnx, self.policy = onnx, policy
        zeros = np.zeros(policy.shape, policy.spec.obs_dtype), np.ones(policy.shape[0], bool)
        self._program = jax.make_jaxpr(policy.compiled)(policy.leaves, policy.begun, *zeros)
        *memory, key = policy.begun
        if any(np.any(x) for x in memory):
            raise _Inexpressible("its memory does not begin with zeros")
        self.nodes: list[Any] = []
        self._constants: dict[tuple, Any] = {}
        self.inputs: dict[str, Any] = {"observation": zeros[0], "first": zeros[1]}
        names = [f"memory_{i}" for i in range(len(memory))]
        self.inputs |= dict(zip(names, memory, strict=True))

        def draw(kind: str, _: Any, shape: tuple[int, ...]) -> str:
            name = f"{kind}_{len(self.inputs) - len(memory) - 2}"
            self.inputs[name] = np.zeros(shape, np.float32)
            return name

        action, *found, _ = self._outputs(["observation", "first"], [*names, None], draw)
        self.outputs = {"action": self._in_space(action)}
        self.outputs |= {f"next_{a}": b for a, b in zip(names, found, strict=True) if a is not b}
        for name, value in self.outputs.items():
            self.nodes.append(onnx.helper.make_node("Identity", [self.name(value)], [name]))
        needed, kept = set(self.outputs), []
        for node in self.nodes[::-1]:
            if needed & set(node.output):
                needed |= set(node.input)
                kept.append(node)
        self.nodes = kept[::-1]
        self.used = [name for name in self.inputs if name in needed]
        if "first" in self.used:
            self.outputs["next_first"] = "next_first"
            false = self.name(np.zeros_like(zeros[1]))
            self.nodes.append(onnx.helper.make_node("Identity", [false], ["next_first"]))
            needed.add(false)
        self._constants = {k: x for k, x in self._constants.items() if x.name in needed}

    def __call__(self, op: str, *inputs: Any, num: int = 1, **attributes: Any) -> Any:
        """Add a node; returns its output's name, or the list of `num` outputs."""
        outputs = [f"{op}_{len(self.nodes)}_{i}" for i in range(num)]
        names = [self.name(x) for x in inputs]
        self.nodes.append(self.onnx.helper.make_node(op, names, outputs, **attributes))
        return outputs if num > 1 else outputs[0]

    def name(self, value: Any) -> str:
        """The name of a value; arrays become constants of the graph."""
        if isinstance(value, str):
            return value
        array = np.asarray(value)
        tensor = self.onnx.numpy_helper.from_array(array, f"constant_{len(self._constants)}")
        key = (array.dtype, array.shape, array.tobytes())
        return self._constants.setdefault(key, tensor).name

    def type_of(self, dtype: Any) -> int:
        """ONNX's number of a NumPy type."""
        return self.onnx.helper.np_dtype_to_tensor_dtype(np.dtype(dtype))

    def reshape(self, x: Any, old: Sequence[int], new: Sequence[int]) -> Any:
        """`x` in another shape."""
        return x if tuple(old) == tuple(new) else self("Reshape", x, _int64(new))

    def file(self) -> bytes:
        """The content of the file. Its metadata `mbx` is JSON."""
        info = self.onnx.helper.make_tensor_value_info
        inputs = [(name, self.inputs[name]) for name in self.used]
        graph = self.onnx.helper.make_graph(
            self.nodes,
            "policy",
            [info(name, self.type_of(x.dtype), x.shape) for name, x in inputs],
            [self.onnx.helper.make_empty_tensor_value_info(name) for name in self.outputs],
            list(self._constants.values()),
        )
        opsets = [self.onnx.helper.make_opsetid("", _OPSET)]
        model = self.onnx.helper.make_model(graph, opset_imports=opsets, ir_version=_IR)
        about = self.policy.about() | {"outputs": list(self.outputs)}
        about["action_dtype"] = "int64" if about["discrete"] else about["action_dtype"]
        del about["platforms"]
        about["inputs"] = [(name, x.dtype.name, x.shape) for name, x in inputs]
        self.onnx.helper.set_model_props(model, {"mbx": json.dumps(about)})
        return self.onnx.shape_inference.infer_shapes(model).SerializeToString()

    def _outputs(self, given: list[Any], carry: list[Any], draw: Draw) -> list[Any]:
        inputs = [*self.policy.leaves, *carry, *given]
        return _run(self, self._program.jaxpr, self._program.consts, inputs, draw)

    def _in_space(self, action: Any) -> Any:
        """Actions in the environment's shape and rounded for it; jax has not all of its types."""
        spec = self.policy.spec
        if spec.discrete:
            return action
        if np.dtype(spec.action_dtype).kind in "iu":
            action = self("Round", action)
        shape = (self.policy.shape[0], spec.action_dim)
        return self.reshape(action, shape, (shape[0], *(spec.action_shape or shape[1:])))

    def numbers(self, carry: list[Any]) -> list[Any]:
        """The random numbers that the run's own program draws, in the order of inputs."""
        drawn: list[Any] = []

        def draw(kind: str, key: Any, shape: tuple[int, ...]) -> Any:
            drawn.append(getattr(jax.random, kind)(key, shape))
            return drawn[-1]

        self._outputs([self.inputs["observation"], self.inputs["first"]], carry, draw)
        return drawn

    def difference(self, run: Callable[[dict[str, Any]], Any]) -> float:
        """Largest difference of the actions of `run` from the policy's, in half ranges."""
        policy, spec, random, found = self.policy, self.policy.spec, np.random.default_rng(0), []
        half = 0.5 * np.subtract(spec.action_high, spec.action_low) if spec.action_high else 1.0
        draw, carry = jax.jit(self.numbers), policy.begun
        for i in range(CALLS):
            obs = random.standard_normal(policy.shape)
            obs = np.asarray(abs(60 * obs) if spec.obs_dtype == np.uint8 else obs, spec.obs_dtype)
            first = np.full(policy.shape[0], i % (CALLS // 2) == 0)
            values = dict(zip(self.inputs, [obs, first, *carry[:-1], *draw(carry)], strict=True))
            action = run({name: np.asarray(values[name]) for name in self.used})
            wanted, carry = policy.compiled(policy.leaves, carry, obs, first)
            wanted = in_space(spec._replace(action_parts=()), np.asarray(wanted))
            off = np.abs(action - np.asarray(wanted, np.float64)).reshape(len(action), -1)
            found.append(np.max(off / (1.0 if spec.discrete else np.maximum(1.0, half))))
        return float(np.max(found))


def _run(
    graph: _Graph, jaxpr: Any, consts: Sequence[Any], inputs: Sequence[Any], draw: Draw
) -> list[Any]:
    """Outputs of a program."""
    values: dict[Any, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
    values.update(zip(jaxpr.invars, inputs, strict=True))

    def read(x: Any) -> Any:
        return np.asarray(x.val, x.aval.dtype) if isinstance(x, Literal) else values[x]

    for equation in jaxpr.eqns:
        found = _equation(graph, equation, [read(x) for x in equation.invars], draw)
        values.update(zip(equation.outvars, found, strict=True))
    return [read(x) for x in jaxpr.outvars]


def _equation(graph: _Graph, equation: Any, given: list[Any], draw: Draw) -> list[Any]:
    """Outputs of an operation: computed from arrays, otherwise as nodes of the graph."""
    name, params = equation.primitive.name, equation.params
    shape = equation.outvars[0].aval.shape
    if name == "jit" and params["name"] == "_normal":
        return [draw("normal", given[0], shape)]
    if name == "random_bits":
        drawn = draw("uniform", given[0], shape)
        if isinstance(drawn, str):
            return [_Bits(drawn)]
    if given and isinstance(given[0], _Bits):
        if name == "sort":  # a permutation: the order of the bits is that of the numbers
            index = graph("TopK", given[0].uniform, _int64(shape), num=2, largest=0)[1]
            return [None, graph("Gather", given[1], index)]
        if name == "bitcast_convert_type":  # 23 of the bits after the exponent of 1
            return [graph("Add", given[0].uniform, np.float32(1.0))]
        if name in ("shift_right_logical", "or"):
            return given[:1]
    if name in _INSIDE:
        inner = params[_INSIDE[name]]
        return _run(graph, inner.jaxpr, inner.consts, given, draw)
    if name == "platform_index":  # the plain form, not a CPU's
        return [params["platforms"].index(None)]
    if name == "cond" and isinstance(given[0], int):
        branch = params["branches"][given[0]]
        return _run(graph, branch.jaxpr, branch.consts, given[1:], draw)
    if name == "scan":
        return _unrolled(graph, equation, given, draw)
    if name in ("stop_gradient", "optimization_barrier", "copy"):
        return given
    if any(x is None for x in given):
        return [None] * len(equation.outvars)
    if any(isinstance(x, str | _Bits) for x in given):
        if name not in _OPERATIONS:
            raise _Inexpressible(f"it has the operation {name!r}")
        found = _OPERATIONS[name](graph, equation, *given)
        return found if isinstance(found, list) else [found]
    found = equation.primitive.bind(*given, **params)
    return list(found) if equation.primitive.multiple_results else [found]


def _unrolled(graph: _Graph, equation: Any, given: list[Any], draw: Draw) -> list[Any]:
    """Outputs of a scan, its steps one after the other."""
    params = equation.params
    body = params["jaxpr"]

    def whole(outer: Sequence[Any], inner: Sequence[Any]) -> int:
        """How many are not stacked; versions of jax name these numbers differently."""
        return sum(a.aval.shape == b.shape for a, b in zip(outer, inner, strict=True))

    carried = whole(equation.outvars, body.out_avals)
    consts = whole(equation.invars, body.in_avals) - carried
    carry, columns = given[consts : consts + carried], given[consts + carried :]
    rows: list[list[Any]] = []
    for i in range(params["length"])[:: -1 if params["reverse"] else 1]:
        row = [_row(graph, x, i) for x in columns]
        found = _run(graph, body.jaxpr, body.consts, [*given[:consts], *carry, *row], draw)
        carry = found[:carried]
        rows.append(found[carried:])
    stacked = zip(*rows[:: -1 if params["reverse"] else 1], strict=True)
    shapes = [x.shape for x in body.out_avals[carried:]]
    return [*carry, *(_stack(graph, s, x, 0) for s, x in zip(shapes, stacked, strict=True))]


def _row(graph: _Graph, x: Any, i: int) -> Any:
    if isinstance(x, str):
        return graph("Gather", x, np.int64(i), axis=0)
    return None if x is None else x[i]


def _stack(graph: _Graph, shape: tuple[int, ...], values: Sequence[Any], axis: int) -> Any:
    """Values of one shape along a new axis."""
    if any(x is None for x in values):
        return None
    if not any(isinstance(x, str) for x in values):
        return jnp.stack(values, axis)
    new = (*shape[:axis], 1, *shape[axis:])
    return graph("Concat", *(graph.reshape(x, shape, new) for x in values), axis=axis)


def _int64(numbers: Sequence[int]) -> np.ndarray:
    return np.array(numbers, np.int64)


# -------------------------------------------------------------------------------------------------
# Operations: (graph, equation, *inputs) -> output, or the list of several


def _broadcast(g: _Graph, e: Any, x: Any) -> Any:
    shape, where = e.params["shape"], e.params["broadcast_dimensions"]
    old = e.invars[0].aval.shape
    ones = [old[where.index(i)] if i in where else 1 for i in range(len(shape))]
    x = g.reshape(x, old, ones)
    return x if tuple(ones) == tuple(shape) else g("Expand", x, _int64(shape))


def _dot(g: _Graph, e: Any, a: Any, b: Any) -> Any:
    contracted, batched = e.params["dimension_numbers"]
    joined: list[Any] = []
    ends, shapes = [], [x.aval.shape for x in e.invars]
    for i, x in enumerate((a, b)):  # [..., M, K] and [..., K, N]
        shape, over, batch = shapes[i], tuple(contracted[i]), tuple(batched[i])
        free = tuple(k for k in range(len(shape)) if k not in over + batch)
        order = batch + (over + free if i else free + over)
        x = x if order == tuple(range(len(shape))) else g("Transpose", x, perm=order)
        sizes = [math.prod(shape[k] for k in ks) for ks in ((over, free) if i else (free, over))]
        new = [*(shape[k] for k in batch), *sizes]
        joined.append(g.reshape(x, [shape[k] for k in order], new))
        ends.append(new)
    product = [*ends[0][:-1], ends[1][-1]]
    return g.reshape(g("MatMul", *joined), product, e.outvars[0].aval.shape)


def _gather(g: _Graph, e: Any, x: Any, index: Any) -> Any:
    numbers, shape = e.params["dimension_numbers"], e.invars[1].aval.shape
    batch, axes = numbers.operand_batching_dims, numbers.start_index_map
    whole = [n for i, n in enumerate(e.params["slice_sizes"]) if i not in batch + axes]
    rest = [n for i, n in enumerate(e.invars[0].aval.shape) if i not in batch + axes]
    places = [i for i in range(len(e.outvars[0].aval.shape)) if i not in numbers.offset_dims]
    plain = len(axes) == 1 and numbers.collapsed_slice_dims == axes and whole == rest
    start = axes[0] - len(batch)
    if batch:  # leading axes of both
        plain &= batch == numbers.start_indices_batching_dims == tuple(range(len(batch)))
    if not plain or places != [*batch, *range(axes[0], axes[0] + len(shape) - 1 - len(batch))]:
        raise _Inexpressible("it gathers along several axes")
    index = g("Cast", index, to=g.type_of(np.int64))
    if batch:
        if start:
            raise _Inexpressible("it gathers along several axes")
        return g("GatherND", x, index, batch_dims=len(batch))
    return g("Gather", x, g.reshape(index, shape, shape[:-1]), axis=axes[0])


def _convolution(g: _Graph, e: Any, x: Any, kernel: Any) -> Any:
    p, numbers = e.params, e.params["dimension_numbers"]
    if set(p["lhs_dilation"]) != {1} or p["batch_group_count"] != 1:
        raise _Inexpressible("it has a transposed convolution")
    found = g(
        "Conv",
        g("Transpose", x, perm=numbers.lhs_spec),
        g("Transpose", kernel, perm=numbers.rhs_spec),
        strides=p["window_strides"],
        pads=[pair[i] for i in (0, 1) for pair in p["padding"]],
        dilations=p["rhs_dilation"],
        group=p["feature_group_count"],
    )
    return g("Transpose", found, perm=np.argsort(numbers.out_spec).tolist())


def _cast(g: _Graph, e: Any, x: Any) -> Any:
    old, new = e.invars[0].aval.dtype, e.outvars[0].aval.dtype
    return x if old == new else g("Cast", x, to=g.type_of(new))


def _reduction(op: str, g: _Graph, e: Any, x: Any) -> Any:
    boolean = e.invars[0].aval.dtype == np.dtype(bool)
    x = g("Cast", x, to=g.type_of(np.int32)) if boolean else x
    x = g(op, x, _int64(e.params["axes"]), keepdims=0)
    return g("Cast", x, to=g.type_of(bool)) if boolean else x


def _arg(op: str, g: _Graph, e: Any, x: Any) -> Any:
    index = g(op, x, axis=e.params["axes"][0], keepdims=0)
    return g("Cast", index, to=g.type_of(e.outvars[0].aval.dtype))


def _top_k(g: _Graph, e: Any, x: Any) -> list[Any]:
    values, index = g("TopK", x, _int64([e.params["k"]]), num=2, axis=e.params["axis"])
    return [values, g("Cast", index, to=g.type_of(np.int32))]


def _slice(g: _Graph, e: Any, x: Any) -> Any:
    p = e.params
    start, end = _int64(p["start_indices"]), _int64(p["limit_indices"])
    steps = _int64(p["strides"] or [1] * len(start))
    return g("Slice", x, start, end, _int64(range(len(start))), steps)


def _split(g: _Graph, e: Any, x: Any) -> Any:
    sizes = e.params["sizes"]
    return g("Split", x, _int64(sizes), num=len(sizes), axis=e.params["axis"])


def _reshape(g: _Graph, e: Any, x: Any) -> Any:
    return g.reshape(x, e.invars[0].aval.shape, e.outvars[0].aval.shape)


def _alike(op: str, g: _Graph, e: Any, *inputs: Any) -> Any:
    return g(op, *inputs)


_ALIKE = (
    "add Add sub Sub mul Mul div Div max Max min Min pow Pow exp Exp log Log tanh Tanh neg Neg "
    "sign Sign abs Abs sqrt Sqrt floor Floor round Round erf Erf sin Sin cos Cos logistic Sigmoid "
    "eq Equal lt Less gt Greater le LessOrEqual ge GreaterOrEqual and And or Or not Not xor Xor"
).split()
_ONE = np.float32(1.0)
_OPERATIONS: dict[str, Callable[..., Any]] = {
    **{
        name: functools.partial(_alike, op)
        for name, op in zip(_ALIKE[::2], _ALIKE[1::2], strict=True)
    },
    "ne": lambda g, e, a, b: g("Not", g("Equal", a, b)),
    "square": lambda g, e, x: g("Mul", x, x),
    "rsqrt": lambda g, e, x: g("Reciprocal", g("Sqrt", x)),
    "integer_pow": lambda g, e, x: g("Pow", x, np.float32(e.params["y"])),
    "expm1": lambda g, e, x: g("Sub", g("Exp", x), _ONE),
    "log1p": lambda g, e, x: g("Log", g("Add", x, _ONE)),
    "erfc": lambda g, e, x: g("Sub", _ONE, g("Erf", x)),
    "is_finite": lambda g, e, x: g("Not", g("Or", g("IsInf", x), g("IsNaN", x))),
    "select_n": lambda g, e, which, no, yes: g("Where", which, yes, no),
    "clamp": lambda g, e, low, x, high: g("Min", g("Max", x, low), high),
    "concatenate": lambda g, e, *xs: g("Concat", *xs, axis=e.params["dimension"]),
    "stack": lambda g, e, *xs: _stack(g, e.invars[0].aval.shape, xs, e.params["axis"]),
    "transpose": lambda g, e, x: g("Transpose", x, perm=e.params["permutation"]),
    "convert_element_type": _cast,
    "broadcast_in_dim": _broadcast,
    **dict.fromkeys(("reshape", "squeeze", "expand_dims"), _reshape),
    **{
        f"reduce_{n}": functools.partial(_reduction, f"Reduce{n.title()}")
        for n in ("sum", "max", "min")
    },
    "reduce_or": functools.partial(_reduction, "ReduceMax"),
    "reduce_and": functools.partial(_reduction, "ReduceMin"),
    "argmax": functools.partial(_arg, "ArgMax"),
    "argmin": functools.partial(_arg, "ArgMin"),
    "dot_general": _dot,
    "conv_general_dilated": _convolution,
    "gather": _gather,
    "top_k": _top_k,
    "slice": _slice,
    "split": _split,
}
