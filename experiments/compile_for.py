"""A run's programs compiled for accelerators that are not there: memory, exchanges, least times.

    pip install -e '.[tpu-compile,cuda-compile]'    # the compilers, in an environment of their own
    python -m experiments.compile_for --topology=v5e:4x4 --config=configs/tdmpc.py \
        --config.env.num_envs=16
    python -m experiments.compile_for --topology=h100:2x8 --config=configs/dreamer.py   # 2 hosts
    python -m experiments.compile_for --topology=cpu:8 --config=configs/empo.py   # needs neither

Compiles what makes a run's state, its train interval and its evaluation for all chips of a
topology, one environment or more a chip, and reads the compiled text. Nothing runs. `--json` writes
all of it, every collective with its source line; `--hlo` keeps the texts. A loop whose count is not
known before it runs (learner updates of a step, passes of reanalyze) counts once, and of a choice
both branches count: so the numbers of a step are those of one with an update and a pass.
"""

from __future__ import annotations

import collections
import importlib.util
import json
import os
import re
import sys
import time
from typing import Any, NamedTuple

from absl import app, flags, logging
from ml_collections import config_flags

PROGRAMS = ("init", "interval", "evaluation")
_FAST = "S(1)"  # layouts in a TPU's own fast memory
# libtpu looks for its machine's description unless it is told; the values name no machine. The
# plugin for GPUs compiles without a driver, which it would otherwise refuse to load without.
_COMPILERS = dict(
    JAX_SKIP_CUDA_CONSTRAINTS_CHECK="1",
    TPU_SKIP_MDS_QUERY="1",
    TPU_ACCELERATOR_TYPE="v5litepod-16",
    TPU_WORKER_HOSTNAMES="localhost",
    TPU_LOG_DIR="disabled",
    TPU_STDERR_LOG_LEVEL="3",
    TPU_MIN_LOG_LEVEL="3",
    TF_CPP_MIN_LOG_LEVEL="2",
)


class Topology(NamedTuple):
    """What is compiled for.

    Attributes:
        name: as asked for.
        devices: of all hosts.
        hosts: their number.
        chip: published rates of one device, None for a CPU.
    """

    name: str
    devices: list[Any]
    hosts: int
    chip: Any


def set_environment(topology: str) -> None:
    """What has to be set before JAX starts: this machine's CPU, and compilers without theirs."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    if not topology.startswith("cpu:"):
        for name, value in _COMPILERS.items():
            os.environ.setdefault(name, value)


def find_topology(name: str) -> Topology:
    """The devices that a name describes.

    Args:
        name: "v5e:4x4", a kind of TPU and the chips along its axes; "h100:2x8", a kind of GPU,
            hosts and those of one; or "cpu:8".

    Raises:
        ValueError: for a kind or a shape that there is not.
        ImportError: without libtpu, or without jax's plugin for GPUs.
    """
    import jax
    from jax.experimental import topologies

    from experiments.chips import CHIPS, GPUS

    kind, _, shape = name.partition(":")
    if kind == "cpu" and shape.isdigit() and int(shape):
        devices = jax.devices("cpu")
        if len(devices) < int(shape):
            raise ValueError(f"--topology={name}: JAX has started with {len(devices)} CPU devices")
        return Topology(name, devices[: int(shape)], 1, None)
    axes, gpu = 2 if kind in GPUS else 3, kind in GPUS
    sizes = shape.split("x")
    if kind not in CHIPS or len(sizes) > axes or not all(x.isdigit() and int(x) for x in sizes):
        raise ValueError(
            f"--topology={name}: give a kind and a shape, v5e:4x4, h100:2x8 or cpu:8 say; kinds "
            f"are {', '.join(CHIPS)} and cpu"
        )
    package = "jax_cuda12_plugin" if gpu else "libtpu"
    if importlib.util.find_spec(package) is None:
        wanted = "cuda-compile" if gpu else "tpu-compile"
        raise ImportError(
            f"--topology={name} needs the compiler of those chips, the package {package}: pip "
            f"install -e '.[{wanted}]' into an environment of its own"
        )
    given: dict[str, Any] = {}
    if gpu:
        hosts, each = ["1", *sizes][-2:]
        given = dict(target_config=GPUS[kind], topology=f"1x{hosts}x{each}")
    try:
        found = topologies.get_topology_desc(name, "cuda" if gpu else "tpu", **given)
    except Exception as error:  # the compilers' own, of several types
        raise ValueError(f"--topology={name}: {str(error).splitlines()[0]}") from error
    devices = list(found.devices)
    cores = 1 if gpu else len(devices) // len({tuple(d.coords) for d in devices})
    chip = CHIPS[kind]._make(x / cores for x in CHIPS[kind])
    return Topology(name, devices, len({d.process_index for d in devices}), chip)


def lower(settings: Any, topology: Topology, programs: tuple[str, ...]) -> dict[str, Any]:
    """Programs of a run, lowered for a topology; with every one how many steps it makes.

    Raises ValueError for settings that no run can have, for an environment that the host steps, and
    where a device cannot hold its share of the state.
    """
    import jax

    from mbx.training import evaluation, job, run
    from mbx.training.environments import evaluation_environment

    with run.matmul_precision(settings.matmul_precision):
        work = job.prepare(settings, topology.devices)
        if not hasattr(work.interval, "lower"):
            raise ValueError(
                f"env.name={settings.env.name!r} is stepped by the host, so that there is no one "
                "program to compile: choose an environment written in JAX"
            )
        partition = work.partition
        make = job.initial_state(work.agent, work.environment, settings, partition)
        key = jax.eval_shape(lambda: jax.random.key(0))
        everywhere = jax.sharding.NamedSharding(partition.mesh, jax.P())
        key = jax.ShapeDtypeStruct(key.shape, key.dtype, sharding=everywhere)
        state = partition.shapes(jax.eval_shape(make, key))
        check_memory(settings, state, topology)
        lowered: dict[str, Any] = {}
        if "init" in programs:
            lowered["init"] = partition.builder(make, key).lower(key), 1
        if "interval" in programs:
            lowered["interval"] = work.interval.lower(state), work.intervals.length
        if "evaluation" in programs:
            env = evaluation_environment(settings, settings.eval.episodes, seed=settings.seed + 1)
            episodes = evaluation.make_episodes(
                work.agent.act, work.agent.init_actor, env, partition
            )
            lowered["evaluation"] = partition.compile(episodes).lower(state.train, key), 1
    return lowered


def check_memory(settings: Any, state: Any, topology: Topology) -> None:
    """Raise ValueError, with the numbers and what to do, where a state alone is too large."""
    import jax

    def held(tree: Any) -> int:
        shapes = ((x.sharding.shard_shape(x.shape), x.dtype) for x in jax.tree.leaves(tree))
        return sum(int(jax.numpy.prod(jax.numpy.array(s))) * d.itemsize for s, d in shapes)

    if topology.chip is None:
        return
    replay, train, limit = held(state.replay), held(state.train), topology.chip.memory
    if replay + train > limit:
        raise ValueError(
            f"replay.capacity={settings.replay.capacity} and the model need {_gb(replay)} and "
            f"{_gb(train)} on every chip of {topology.name}, which has {_gb(limit)}: lower "
            "replay.capacity, choose a smaller model or more chips, or set distributed.fsdp=True"
        )


def study(compiled: Any, topology: Topology, steps: int) -> dict[str, Any]:
    """What a compiled program holds, computes, moves and exchanges, on each chip."""
    from experiments import chips, hlo, hlo_costs

    module = hlo.parse(compiled.as_text())
    found = hlo_costs.collectives(module)
    memory = compiled.memory_analysis()
    flops, moved = hlo_costs.flops(module), hlo_costs.bytes_moved(module, _FAST)
    held = {
        x.operands[0]: hlo.scope(x)
        for x in module.computations[module.entry]
        if x.kind == "parameter"
    }
    copied = [name for number, name in held.items() if int(number) not in module.aliases]
    told = dict(
        steps=steps,
        memory=dict(
            arguments=memory.argument_size_in_bytes,
            aliased=memory.alias_size_in_bytes,
            results=memory.output_size_in_bytes,
            temporaries=memory.temp_size_in_bytes,
        ),
        replay_not_aliased=sorted(name for name in copied if ".replay" in name),
        flops=flops,
        bytes=moved,
        estimated_cycles=hlo_costs.estimated_cycles(module),
        collectives=[one._asdict() for one in found],
    )
    if topology.chip is not None:
        floor = chips.floor(topology.chip, flops, moved, found, len(topology.devices), steps)
        told["floor"] = {**floor._asdict(), "binds": floor.binds}
    return told


def table(told: dict[str, Any]) -> str:
    """Markdown: a row a program, then its collectives, those of one kind and place together."""
    lines = [
        f"{told['config']} for {told['topology']}: {told['devices']} devices of {told['hosts']} "
        f"hosts, {told['num_envs']} environments",
        "",
        "| program | arguments | aliased | temporaries | GFLOP a step | MB a step "
        "| floor of a step | collectives |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, one in told["programs"].items():
        memory, steps = one["memory"], one["steps"]
        floor = one.get("floor")
        least = ""
        if floor:
            times = ", ".join(
                f"{k} {1e6 * floor[k]:.1f}" for k in ("compute", "memory", "exchange")
            )
            least = f"{times} us: {floor['binds']}"
        lines.append(
            f"| {name} | {_mb(memory['arguments'])} | {_mb(memory['aliased'])} | "
            f"{_mb(memory['temporaries'])} | {one['flops'] / steps / 1e9:.3f} | "
            f"{one['bytes'] / steps / 1e6:.1f} | {least} | {_counted(one['collectives'], steps)} |"
        )
    for name, one in told["programs"].items():
        if one["replay_not_aliased"]:
            lines += ["", f"{name}: copied, not aliased: {', '.join(one['replay_not_aliased'])}"]
        if one["collectives"]:
            lines += ["", f"{name}:", "", *_rows(one["collectives"], one["steps"])]
    return "\n".join(lines)


def _counted(found: list[dict[str, Any]], steps: int) -> str:
    """Runs in a step, by kind."""
    counts: collections.Counter = collections.Counter()
    for one in found:
        counts[one["kind"]] += one["times"] / steps
    return ", ".join(f"{count:g} {kind}" for kind, count in counts.most_common()) or "none"


def _rows(found: list[dict[str, Any]], steps: int) -> list[str]:
    lines = ["| collective | runs a step | bytes | in | from |", "|---|---|---|---|---|"]
    groups: dict[tuple, list[dict[str, Any]]] = collections.defaultdict(list)
    for one in found:
        inside = (*one["loops"], *(["a branch"] if one["branch"] else []))
        groups[one["kind"], inside, one["source"], one["scope"], one["bytes"]].append(one)
    for (kind, inside, source, scope, size), several in groups.items():
        times = sum(one["times"] for one in several) / steps
        shape = several[0]["shape"]
        shown = shape if len(shape) < 60 else f"{len(shape.split())} arrays"
        place = " ".join(x for x in (source, f"`{scope}`" if scope else "") if x)
        lines.append(f"| {kind} {shown} | {times:g} | {size:.0f} | {', '.join(inside)} | {place} |")
    return lines


def _mb(size: float) -> str:
    return f"{size / 1e6:.1f} MB"


def _gb(size: float) -> str:
    return f"{size / 1e9:.2f} GB"


def compile_all(
    settings: Any, topology: Topology, programs: tuple[str, ...], hlo: str | None = None
) -> dict[str, Any]:
    """Lower, compile and study programs of a run.

    Args:
        settings: of the run, with `distributed.enabled`.
        topology: to compile for.
        programs: some of `PROGRAMS`.
        hlo: folder that takes the compiled texts.

    Raises ValueError as `lower`, and where a program does not fit into a chip's memory.
    """
    from mbx.files import atomic_write

    results: dict[str, Any] = {}
    began = time.perf_counter()
    lowered = lower(settings, topology, programs)
    lowering = time.perf_counter() - began
    for name, (program, steps) in lowered.items():
        began = time.perf_counter()
        try:
            compiled = program.compile()
        except Exception as error:
            text = str(error)
            if "RESOURCE_EXHAUSTED" not in text:
                raise
            said = re.search(r"(?:Ran out of|Exceeded|Used) [^\n]*", text)
            raise ValueError(
                f"{name} does not fit a chip of {topology.name}: "
                f"{said.group() if said else text.splitlines()[0]} Lower loss.batch_size, "
                "planner.num_samples or env.num_envs, or divide the parameters with "
                "distributed.fsdp=True"
            ) from error
        took = time.perf_counter() - began
        if hlo:
            os.makedirs(hlo, exist_ok=True)
            atomic_write(os.path.join(hlo, f"{name}.txt"), compiled.as_text().encode())
        results[name] = study(compiled, topology, steps) | {"seconds_to_compile": took}
        print(f"{name}: compiled in {took:.0f} s", file=sys.stderr, flush=True)
    return dict(
        topology=topology.name,
        devices=len(topology.devices),
        hosts=topology.hosts,
        num_envs=settings.env.num_envs,
        seconds_to_lower=lowering,
        programs=results,
    )


def define_flags() -> None:
    """The command's flags; whoever imports this module has flags of their own."""
    config_flags.DEFINE_config_file("config", None, "Configuration file.", lock_config=True)
    flags.DEFINE_string("topology", "v5e:4x4", "Kind and shape: v5e:4x4, h100:2x8, cpu:8.")
    flags.DEFINE_list("programs", list(PROGRAMS), f"Of {', '.join(PROGRAMS)}.")
    flags.DEFINE_string("json", None, "Also write all of it here.")
    flags.DEFINE_string("hlo", None, "Also write the compiled programs' texts into this folder.")
    flags.mark_flag_as_required("config")


def main(_: list[str]) -> None:
    """Compile, and print what was found."""
    logging.set_verbosity(logging.WARNING)
    given = flags.FLAGS
    set_environment(given.topology)
    import jax

    if given.topology.startswith("cpu:") and given.topology[4:].isdigit():
        jax.config.update("jax_num_cpu_devices", int(given.topology[4:]))
    from mbx.files import atomic_write
    from mbx.training import build

    config = given.config.to_dict()
    config["distributed"].update(enabled=True, num_processes=1)
    try:
        if unknown := sorted(set(given.programs) - set(PROGRAMS)):
            raise ValueError(f"--programs={','.join(unknown)}: choose of {','.join(PROGRAMS)}")
        topology = find_topology(given.topology)
        told = compile_all(build.read(config), topology, tuple(given.programs), given.hlo)
    except (ValueError, ImportError) as error:
        sys.exit(f"error: {error}")
    told = {"config": f"{config['agent']}, {config['env']['name']}", **told}
    print(table(told))
    if given.json:
        atomic_write(given.json, json.dumps(told, indent=1).encode())


if __name__ == "__main__":
    define_flags()
    app.run(main)
