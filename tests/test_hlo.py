"""What a compiled program's text tells: loops, products, bytes, exchanges between devices."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import pytest

from experiments import chips, hlo, hlo_costs

# As a TPU's compiler writes: layouts with tiles, a loop whose ends are in its state, a product as a
# convolution, one exchange of two arrays over a mesh of 4 x 2, and an exchange in two halves.
TEXT = """\
HloModule jit_f, is_scheduled=true, input_output_alias={ {0}: (0, {}, may-alias), {1}: (2, {}, \
may-alias) }, entry_computation_layout={(f32[8]{0})->f32[8]{0}}

FileNames
1 "/home/me/mbx/agents/learn.py"
2 "/usr/lib/jax/api.py"

FunctionNames
1 "learn"

FileLocations
1 {file_name_id=1 function_name_id=1 line=26 end_line=26 column=6 end_column=6}
2 {file_name_id=2 function_name_id=1 line=7 end_line=7 column=26 end_column=26}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=1}


%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[]{:T(128)} parameter(0)
  %y = f32[]{:T(128)} parameter(1)
  ROOT %sum = f32[]{:T(128)} add(%x, %y)
}

%product (a: f32[4,8], b: f32[8,16]) -> f32[4,16] {
  %a = f32[4,8]{1,0:T(8,128)} parameter(0)
  %b = f32[8,16]{1,0:T(8,128)} parameter(1)
  ROOT %c = f32[4,16]{1,0:T(8,128)} convolution(%a, %b), dim_labels=bf_io->bf
}

%body (s: (s32[], f32[4,8], s32[])) -> (s32[], f32[4,8], s32[]) {
  %s = (s32[]{:T(128)}, f32[4,8]{1,0:T(8,128)S(1)}, s32[]{:T(128)}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%s), index=0
  %n = s32[]{:T(128)} get-tuple-element(%s), index=2
  %h = f32[4,8]{1,0:T(8,128)S(1)} get-tuple-element(%s), index=1
  %one = s32[]{:T(128)} constant(1)
  %next = s32[]{:T(128)} add(%i, %one)
  %w = f32[8,16]{1,0:T(8,128)} constant({...})
  %out = f32[4,16]{1,0:T(8,128)} fusion(%h, %w), kind=kOutput, calls=%product, \
backend_config={"window_config":{"estimated_cycles":"100"}}
  %both = (f32[4,8]{1,0:T(8,128)S(1)}, f32[4,16]{1,0:T(8,128)}) all-reduce(%h, %out), \
channel_id=1, replica_groups=mesh['axis_0'=4,'axis_1'=2] {'axis_0'}, to_apply=%add, \
metadata={op_name="jit(f)/while/body/closed_call/grads/psum" stack_frame_id=2}
  %new = f32[4,8]{1,0:T(8,128)S(1)} get-tuple-element(%both), index=0
  ROOT %t = (s32[]{:T(128)}, f32[4,8]{1,0:T(8,128)S(1)}, s32[]{:T(128)}) tuple(%next, %new, %n)
}

%condition (s.1: (s32[], f32[4,8], s32[])) -> pred[] {
  %s.1 = (s32[]{:T(128)}, f32[4,8]{1,0:T(8,128)S(1)}, s32[]{:T(128)}) parameter(0)
  %i.1 = s32[]{:T(128)} get-tuple-element(%s.1), index=0
  %n.1 = s32[]{:T(128)} get-tuple-element(%s.1), index=2
  ROOT %less = pred[]{:T(512)} compare(%i.1, %n.1), direction=LT
}

ENTRY %main (p0: f32[4,8], p1: s32[], p2: f32[2]) -> f32[4,8] {
  %p0 = f32[4,8]{1,0:T(8,128)} parameter(0), metadata={op_name="state.replay.data['obs']"}
  %p1 = s32[]{:T(128)} parameter(1)
  %p2 = f32[2]{0} parameter(2)
  %zero = s32[]{:T(128)} constant(2)
  %five = s32[]{:T(128)} constant(5)
  %start = (s32[]{:T(128)}, f32[4,8]{1,0:T(8,128)}, s32[]{:T(128)}) tuple(%zero, %p0, %five)
  %known = (s32[]{:T(128)}, f32[4,8]{1,0:T(8,128)}, s32[]{:T(128)}) while(%start), \
condition=%condition, body=%body
  %told = (s32[]{:T(128)}, f32[4,8]{1,0:T(8,128)}, s32[]{:T(128)}) tuple(%zero, %p0, %p1)
  %open = (s32[]{:T(128)}, f32[4,8]{1,0:T(8,128)}, s32[]{:T(128)}) while(%told), \
condition=%condition, body=%body, metadata={op_name="jit(f)/while/updates"}
  %begin = (f32[2]{0}, f32[16]{0}) all-gather-start(%p2), replica_groups={{0,1,2,3,4,5,6,7}}, \
dimensions={0}
  %done = f32[16]{0} all-gather-done(%begin)
  ROOT %result = f32[4,8]{1,0:T(8,128)} get-tuple-element(%known), index=1
}
"""


@pytest.fixture(scope="module")
def module():
    return hlo.parse(TEXT)


@pytest.mark.parametrize(
    ("shape", "size"),
    [
        ("f32[4,8]{1,0}", 128),
        ("(s32[], bf16[2,3])", 16),
        ("pred[5]", 5),
        ("u8[7]{0}", 7),
        ("f32[4,8]{1,0:T(8,128)S(1)}", 128),
    ],
)
def test_bytes_of_a_shape(shape, size):
    assert hlo.num_bytes(shape) == size


def test_what_lies_elsewhere_does_not_count():
    assert hlo.num_bytes("(f32[4]{0:T(8)S(1)}, f32[2]{0})", outside="S(1)") == 8


def test_the_modules_entry_and_the_arguments_that_are_written_in_place(module):
    assert module.entry == "main"
    assert module.aliases == {0, 2}


def test_exchanges_with_their_bytes_devices_and_how_often_they_run(module):
    known, unknown, gather = hlo_costs.collectives(module)
    both = 4 * (4 * 8 + 4 * 16)
    assert (known.kind, known.bytes, known.devices) == ("all-reduce", both, 4)
    assert (known.times, known.loops) == (3, ())  # from 2 to 5
    assert known.source == "mbx/agents/learn.py:26"  # not jax's own frame inside
    assert known.scope == "grads/psum"
    assert (unknown.times, unknown.loops) == (1, ("updates",))
    assert (gather.kind, gather.shape, gather.bytes) == ("all-gather", "f32[16]", 64)
    assert gather.devices == 8
    assert hlo_costs.by_kind([known, unknown, gather]) == {
        "all-reduce": (2, 4, 4 * both),
        "all-gather": (1, 1, 64),
    }


def test_products_and_cycles_are_counted_as_often_as_they_run(module):
    assert hlo_costs.flops(module) == (3 + 1) * 2 * 4 * 8 * 16
    assert hlo_costs.estimated_cycles(module) == (3 + 1) * 100


def test_a_padded_convolution_counts_no_products_with_padding():
    left = hlo.Line("x", "f32[1,5,3]", "parameter", ["0"], "")
    kernel = hlo.Line("k", "f32[3,3,2]", "parameter", ["1"], "")
    rest = ", window={size=3 pad=1_1}, dim_labels=b0f_0io->b0f"
    line = hlo.Line("y", "f32[1,5,2]", "convolution", ["x", "k"], rest)
    assert hlo_costs.line_flops(line, {"x": left, "k": kernel}) == 2 * (5 * 3 - 2) * 3 * 2


def test_a_product_of_a_gpus_library():
    rest = (
        ', custom_call_target="__cublas$gemm", backend_config={"gemm_backend_config":'
        '{"dot_dimension_numbers":{"lhs_contracting_dimensions":["0"]}}}'
    )
    line = hlo.Line("y", "(f32[16,4]{1,0}, s8[4096]{0})", "custom-call", ["x", "w"], rest)
    left = hlo.Line("x", "f32[8,16]{1,0}", "parameter", ["0"], "")
    assert hlo_costs.line_flops(line, {"x": left}) == 2 * 8 * 16 * 4
    # The 4,096 bytes are memory to work in, of which nobody knows what is touched.
    assert hlo_costs.line_bytes(line, {"x": left}, {}) == 4 * (8 * 16 + 16 * 4)


def test_a_compiled_loop_and_its_products():
    def chain(x, w):
        return jax.lax.scan(lambda x, _: (jnp.tanh(x @ w + 1.0), None), x, length=3)[0]

    text = jax.jit(chain).lower(jnp.ones((8, 16)), jnp.ones((16, 16))).compile().as_text()
    assert hlo_costs.flops(hlo.parse(text)) == 3 * 2 * 8 * 16 * 16


def exchange(kind, size, devices=4, times=1):
    return hlo_costs.Collective(kind, "", size, times, (), False, "", "", devices)


def test_the_floor_of_a_step():
    chip = chips.Chip(flops=100.0, bandwidth=10.0, memory=1e3, exchange=2.0)
    found = [exchange("all-reduce", 8.0, times=2), exchange("all-gather", 8.0)]
    floor = chips.floor(chip, 400.0, 20.0, found, devices=4, steps=2)
    assert floor.compute == 2.0 and floor.memory == 1.0
    # Twice 2 x 3/4 of 8 bytes, and once 3/4 of them, at 2 a second, in two steps.
    assert floor.exchange == (2 * 12.0 + 6.0) / 2.0 / 2
    assert floor.binds == "exchange" and floor.seconds == floor.exchange


def test_all_devices_take_part_where_a_collective_names_none():
    assert chips.sent(exchange("all-gather", 8.0, devices=0), 8) == 7.0


@pytest.mark.slow
def test_a_program_divided_among_eight_devices():
    code = """
    import jax, jax.numpy as jnp
    from experiments import hlo, hlo_costs
    jax.config.update("jax_num_cpu_devices", 8)
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    def step(w, x):
        return w - jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w)))(w)
    def steps(w, x):
        return jax.lax.fori_loop(0, 5, lambda i, w: step(w, x), w)
    place = lambda *axes: jax.NamedSharding(mesh, jax.P(*axes))
    w = jax.ShapeDtypeStruct((16, 4), "float32", sharding=place())
    x = jax.ShapeDtypeStruct((32, 16), "float32", sharding=place("data"))
    module = hlo.parse(jax.jit(steps).lower(w, x).compile().as_text())
    (found,) = hlo_costs.collectives(module)
    assert (found.kind, found.bytes, found.times, found.devices) == ("all-reduce", 256, 5, 8)
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True)
