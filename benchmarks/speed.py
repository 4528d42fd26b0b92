"""Time the hot operations of an agent against what the machine can do.

    python -m benchmarks.speed                               # 5M model, TD-MPC2's settings
    python -m benchmarks.speed --suite=sizes                 # tiny, 1M, 5M
    python -m benchmarks.speed --preset=default              # configs/tdmpc.py as it is
    python -m benchmarks.speed --preset=dreamer --size=tiny  # 16 x 64 rows, horizon 15
    python -m benchmarks.speed --env=brax:halfcheetah --envs=16 --only='fused step'
    python -m benchmarks.speed --env=dmc:walker-walk --size=tiny --steps=2000    # a run, end to end
    python -m benchmarks.speed --suite=gpu --json=gpu.json   # 12 minutes, most wanted first
    python -m benchmarks.speed --suite=gpu --rehearse        # its kinds of cases, tiny
    python -m benchmarks.speed --preset=default --only='fused step' --before=/tmp/before
    python -m benchmarks.speed --policy=runs/a --calls=10000 # milliseconds per action of a run

For every operation: the median time after warm-up, the matrix-multiply FLOPs it does (counted in
its program, loops included), the time those need at the matrix-multiply rate measured in the same
run (the floor), the ratio of the two, and the time to compile. --before names another checkout:
both are timed in turn, round by round, and the ratio after / before is printed. --policy times
single actions of a trained policy on the machine that will act. --steps trains instead: a run
from its files to its log, or with --seeds that many runs in one program, `mbx.train_fn`.
"""

from __future__ import annotations

import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags, logging
from jax.interpreters import partial_eval
from ml_collections import config_dict

import mbx
from mbx import envs, presets, replay
from mbx.agents.base import Agent
from mbx.config import load
from mbx.envs.base import EnvSpec, RawEnvironment, episodic
from mbx.fast import allocator, rng
from mbx.training import build, devices, loop
from mbx.training.devices import ONE_DEVICE, Partition, make_partition, num_shards
from mbx.training.files import atomic_write
from mbx.training.policy import Policy, load_policy
from mbx.training.state import LoopState, Schedule, init_state

from . import suites


class Case(NamedTuple):
    """A measurement; fields are the flags of the same names."""

    preset: str = "tdmpc2"
    size: str | None = None
    batch: int | None = None
    obs: int = 17
    action: int = 6
    env: str | None = None
    envs: int = 1
    repeats: int = 15
    dtype: str = "float32"
    only: tuple[str, ...] = ()
    cores: int = 0
    unroll: int = 1
    workers: int = 0
    seeds: int = 0
    steps: int = 0


PRESETS = ("tdmpc2", "default", "dreamer")
FUSED = "fused step"


# Most wanted first: a suite ends where its time does.
SUITES = {
    name: tuple(Case(**one | {"only": tuple(one.get("only", ()))}) for one in listed)
    for name, listed in suites.DATA["speed"].items()
}


def small(case: Case) -> Case:
    """The same kind of case, as small as a CPU needs to try it; on a task that has no extra."""
    task = case.env and ("dmc:walker-walk" if case.workers else "gymnax:Pendulum-v1")
    asked = dict(size="tiny", batch=8, env=task, repeats=3, dtype="float32", only=case.only[:1])
    asked |= dict(envs=2 if case.env else 1, seeds=2 if case.seeds else 0)
    asked |= dict(workers=min(case.workers, 2), unroll=2 if case.preset == "dreamer" else 1)
    return case._replace(**asked, steps=min(case.steps, 120))


def rehearsal(name: str) -> tuple[Case, ...]:
    """The kinds of cases of a suite, each once."""
    return tuple(dict.fromkeys(small(case) for case in SUITES[name]))


# -------------------------------------------------------------------------------------------------
# Times and FLOPs of compiled functions


class Row(NamedTuple):
    """One operation: milliseconds, GFLOP, floor in milliseconds, ratio, megabytes of its arguments,
    results and temporary memory, seconds to compile."""

    name: str
    median_ms: float
    gflop: float
    floor_ms: float
    ratio: float
    memory_mb: float
    compile_s: float


def count_flops(jaxpr: Any) -> float:
    """FLOPs of all matrix multiplications and convolutions in a jaxpr, times their loop counts.

    A loop with a count known only at run time is counted once.
    """
    total = 0.0
    for equation in jaxpr.eqns:
        name, params = equation.primitive.name, equation.params
        if name == "dot_general":
            (contract, _), _ = params["dimension_numbers"]
            left, out = equation.invars[0].aval, equation.outvars[0].aval
            depth = np.prod([left.shape[i] for i in contract], dtype=float)
            total += 2.0 * depth * np.prod(out.shape, dtype=float)
        elif name == "conv_general_dilated":
            kernel, out = equation.invars[1].aval, equation.outvars[0].aval
            channels = kernel.shape[params["dimension_numbers"].rhs_spec[0]]
            total += 2.0 * np.prod(out.shape, dtype=float) * np.prod(kernel.shape) / channels
        inner = [p for p in jax.tree.leaves(params, is_leaf=_is_jaxpr) if _is_jaxpr(p)]
        counts = [count_flops(p.jaxpr if hasattr(p, "jaxpr") else p) for p in inner]
        if name == "cond":
            total += max(counts, default=0.0)
        else:
            total += sum(counts) * (params["length"] if name == "scan" else 1)
    return total


def _is_jaxpr(x: Any) -> bool:
    return hasattr(x, "eqns") or (hasattr(x, "jaxpr") and hasattr(x.jaxpr, "eqns"))


def median_time(call: Callable[[], Any], repeats: int) -> float:
    """Median seconds of `call`, which must return arrays to wait for."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(call())
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def square_sizes(platform: str) -> tuple[int, ...]:
    """Of the products that show a machine's rate: large, and still a matter of milliseconds.

    An accelerator needs larger ones: one of 2048 takes an H200 as long as its launch.
    """
    return (1024, 2048) if platform == "cpu" else (4096, 8192)


def gemm_rate(dtype: str, sizes: tuple[int, ...] | None = None, repeats: int = 9) -> float:
    """The machine's matrix-multiply rate in FLOP/s: the best median over some square sizes.

    Of random numbers: a GPU multiplies ones with less power, so faster.
    """
    best = 0.0
    for n in sizes or square_sizes(jax.default_backend()):
        x = jax.random.normal(jax.random.key(0), (n, n), dtype)
        multiply = jax.jit(jnp.matmul)
        jax.block_until_ready(multiply(x, x))
        seconds = median_time(lambda m=multiply, x=x: m(x, x), repeats)
        best = max(best, 2.0 * n**3 / seconds)
    return best


def measure(
    name: str,
    function: Callable,
    *args: Any,
    rate: float,
    repeats: int,
    donate: bool = False,
    partition: Partition = ONE_DEVICE,
) -> Row:
    """Compile and time `function(*args)`; with `donate` its result replaces the first argument.

    On a partition's devices, if these are several: the arguments lie there.
    """
    traced = jax.make_jaxpr(function)(*args).jaxpr
    # A product that nothing reads is none: the compiler leaves it out as well.
    flops = count_flops(partial_eval.dce_jaxpr(traced, [True] * len(traced.outvars))[0])
    start = time.perf_counter()
    # As it is compiled inside a program that trains.
    asked: dict[str, Any] = dict(compiler_options=partition.training)
    program = jax.jit(partition.traced(function), donate_argnums=0 if donate else (), **asked)
    compiled = program.lower(*args).compile()
    compile_s = time.perf_counter() - start
    carry = [jax.tree.map(jnp.copy, args[0]) if donate else args[0]]

    def call() -> Any:
        out = compiled(carry[0], *args[1:])
        if donate:
            carry[0] = out
        return out

    jax.block_until_ready(call())
    jax.block_until_ready(call())
    seconds = median_time(call, repeats)
    floor = flops / rate
    ratio = seconds / floor if floor else float("nan")
    memory = memory_mb(compiled)
    return Row(name, 1e3 * seconds, flops / 1e9, 1e3 * floor, ratio, memory, compile_s)


def memory_mb(compiled: Any) -> float:
    """Megabytes that a program occupies while it runs."""
    size = compiled.memory_analysis()
    used = size.argument_size_in_bytes + size.output_size_in_bytes + size.temp_size_in_bytes
    return (used - size.alias_size_in_bytes) / 1e6


# -------------------------------------------------------------------------------------------------
# Cases


def make_config(case: Case) -> config_dict.ConfigDict:
    """The benchmark's configuration."""
    config = presets.load("tdmpc")
    if case.preset == "dreamer":
        config = presets.load("dreamer")
        config.loss.batch_length = 64
        config.imagination.rows = 0  # dreams from every row
        config.actor.gradient = "reinforce"
        config.model.unroll = case.unroll
    if case.preset == "tdmpc2":
        config = presets.load("tdmpc2")
    if case.size:
        config.model.size = case.size
    if case.batch:
        config.loss.batch_size = case.batch
    if case.steps:  # a short run learns, too
        config.train.seed_steps = min(1_000, case.steps // 2)
        config.train.pretrain_updates = min(config.train.pretrain_updates, case.steps // 6)
    config.model.dtype = case.dtype
    config.env.update(num_envs=case.envs, workers=case.workers)
    return config


def resolved(case: Case) -> dict[str, Any]:
    """The configuration with as many cores as the command that trains uses for such a run."""
    config = make_config(case).to_dict()
    if jax.default_backend() == "cpu":
        usual = devices.cores_for(load(config), jax.local_device_count())
        config["distributed"]["cores"] = case.cores or usual
    return config


def toy_environment(case: Case) -> Any:
    """A linear system: costs nothing beside the agent."""
    size, action = case.obs, case.action

    def reset(key: jax.Array) -> tuple:
        x = jax.random.normal(key, (size,))
        return x, x

    def step(key: jax.Array, state: jax.Array, action: jax.Array) -> tuple:
        x = 0.95 * state + 0.1 * jnp.sum(action)
        return x, x, -jnp.mean(jnp.square(x)), jnp.bool_(False)

    # It never ends an episode and says so: no model learns a termination that has no place in it.
    raw = RawEnvironment("toy:linear", (size,), jnp.float32, action, 500, reset, step)
    return episodic(raw._replace(can_terminate=False), case.envs)


def filled(agent: Any, state: LoopState, spec: EnvSpec, steps: int) -> LoopState:
    """The state with `steps` random rows an environment in its replay."""

    @jax.jit
    def fill(state: LoopState) -> LoopState:
        def one(carry: Any, i: jax.Array) -> tuple:
            key = jax.random.fold_in(state.key, i)
            num = state.reward.shape[0]
            no = jnp.zeros(num, bool)
            action = jax.random.uniform(key, (num, spec.action_dim), minval=-1.0)
            obs = jax.random.normal(key, (num, *spec.obs_shape))
            reward = obs.reshape(num, -1)[:, 0]
            row = dict(obs=obs, action=action, reward=reward)
            row |= dict.fromkeys(("is_first", "is_last", "terminated"), no)
            return replay.insert(carry, row, targets_of(agent, state.train, obs, key)), None

        buffer, _ = jax.lax.scan(one, state.replay, jnp.arange(steps))
        return state.replace(replay=buffer)

    return fill(state)


def targets_of(agent: Agent, train: Any, obs: jax.Array, key: jax.Array) -> Any:
    """What the agent's planner stores with rows; None where it stores nothing."""
    return agent.store.targets(train, None, obs, key) if agent.store else None


class Rows:
    """Rows of one case, measured as they are added: all operations, or those it asks for."""

    def __init__(self, case: Case, partition: Partition) -> None:
        self.case, self.partition = case, partition
        self.rate, self.rows = gemm_rate(case.dtype, repeats=case.repeats), []

    def wants(self, name: str) -> bool:
        """Whether the case asks for an operation."""
        return not self.case.only or name in self.case.only

    def add(self, name: str, function: Callable, *args: Any, donate: bool = False) -> None:
        """Measure `function(*args)`, see `measure`."""
        if not self.wants(name):
            return
        asked: dict[str, Any] = dict(rate=self.rate, repeats=self.case.repeats, donate=donate)
        self.rows.append(measure(name, function, *args, partition=self.partition, **asked))

    def report(self, config: dict[str, Any], environment: Any) -> dict[str, Any]:
        """What `--json` writes; floors by the better of two measured matrix-multiply rates.

        Raises ValueError where the case asks for an operation that its preset does not have.
        """
        case, spec = self.case, environment.spec
        missing = sorted(set(case.only) - {row.name for row in self.rows})
        if missing:
            raise ValueError(f"--only={','.join(missing)}: no operation of --preset={case.preset}")
        rate = max(self.rate, gemm_rate(case.dtype, repeats=case.repeats))
        rows = [r._replace(floor_ms=1e6 * r.gflop * 1e6 / rate) for r in self.rows]
        rows = [r._replace(ratio=r.median_ms / r.floor_ms if r.floor_ms else 0.0) for r in rows]
        told = dict(case=named(case), size=config["model"]["size"], obs=spec.obs_shape)
        told |= dict(batch=config["loss"]["batch_size"], action=spec.action_dim)
        told |= dict(device=f"{self.partition.size} x {jax.devices()[0]}", jax=jax.__version__)
        told |= dict(gemm_gflops=round(rate / 1e9), rows=[r._asdict() for r in rows])
        for row in rows:
            if row.name == FUSED and case.env:
                steps = 1e3 * case.envs * spec.action_repeat / row.median_ms
                told["steps_per_second"] = steps
        return told


def benchmark(case: Case) -> dict[str, Any]:
    """Measure every operation of a case; returns what `--json` writes."""
    config = resolved(case)
    environment = envs.make(case.env, case.envs) if case.env else toy_environment(case)
    if not isinstance(environment, envs.JaxEnvironment):
        raise ValueError(f"--env={case.env} runs on the host, outside of a program: give --steps")
    settings = load(config)
    agent, partition = build.build_agent(settings, environment.spec), make_partition(settings)
    key, capacity = jax.random.key(0), max(700, 10_000 // case.envs)
    sizes = dict(capacity=capacity, shards=num_shards(settings, partition))
    state = init_state(agent, environment, key=key, **sizes)
    state = partition.place(filled(agent, state, environment.spec, 600))
    first, rows = jnp.zeros(case.envs, bool), Rows(case, partition)

    def act(train: Any, actor: Any, obs: jax.Array, key: jax.Array) -> Any:
        return agent.act(train, actor, obs, first, rng.unrolled(key), False)

    def update(train: Any, buffer: Any, key: jax.Array) -> Any:
        return agent.update(train, buffer, rng.unrolled(key))[0]

    dreamer = case.preset == "dreamer"
    rows.add("act" if dreamer else "plan", act, state.train, state.actor, state.obs, key)
    if dreamer:  # its update writes latents into the replay
        both = state.train, state.replay
        rows.add("update", lambda both, key: agent.update(*both, key)[:2], both, key, donate=True)
        return rows.report(config, environment)
    rows.add("update", update, state.train, state.replay, key, donate=True)
    action = jnp.zeros((case.envs, environment.spec.action_dim))
    rows.add("environment", environment.step, state.env, action, key)
    if store := agent.store:
        rows.add("targets", store.targets, state.train, None, state.obs, key)

        def refresh(buffer: Any, train: Any, key: jax.Array) -> Any:
            return store.reanalyze(train, buffer, key, jnp.int32(-1))[0]

        rows.add("reanalyze", refresh, state.replay, state.train, key, donate=True)
    if rows.wants("insert"):
        row = jax.tree.map(lambda x: jnp.copy(x[:, 0]), state.replay.data)
        made = targets_of(agent, state.train, state.obs, key)
        rows.add("insert", lambda *x: replay.insert(*x), state.replay, row, made, donate=True)
    loss = config["loss"]

    def sample(buffer: Any, key: jax.Array) -> Any:
        return replay.sample(buffer, key, batch_size=loss["batch_size"], length=loss["horizon"])

    rows.add("sample", sample, state.replay, key)
    # The toy system times one update beside one plan, a task what training on it does: UTD 1.
    ratio = 1.0 if case.env else 1.0 / case.envs
    schedule = Schedule(0, 0, ratio, config["reanalyze"]["interval"], 0)
    step = partition.keep(loop.make_step(agent, environment, schedule))
    rows.add(FUSED, lambda s: step(s)[0], state, donate=True)
    return rows.report(config, environment)


def train(case: Case) -> dict[str, Any]:
    """Environment steps a second of training for `case.steps` steps, over all `case.seeds`.

    A run is timed from the first interval that learns on, without evaluations; several seeds are
    one program without what it takes to compile, random steps and the last evaluation within.
    """
    config, told = make_config(case).to_dict(), dict(name="training", memory_mb=0.0)
    if case.seeds:
        run = mbx.train_fn(case.env, config, steps=case.steps, **{"eval.episodes": 1})
        program = jax.jit(jax.vmap(run)).lower(jnp.arange(case.seeds)).compile()
        seconds = median_time(lambda: program(jnp.arange(case.seeds)), 1)
        rate, told["memory_mb"] = case.seeds * case.steps / seconds, memory_mb(program)
        return dict(case=named(case), rows=[told], steps_per_second=rate)
    quiet = {"eval.interval": 0, "eval.episodes": 0, "train.log_interval": case.steps // 20}
    with tempfile.TemporaryDirectory() as folder:
        *_, rows = mbx.train(case.env, config, steps=case.steps, workdir=f"{folder}/run", **quiet)
    rates = [row["steps_per_second"] for row in rows if row.get("updates")]
    if peak := (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use"):
        told["memory_mb"] = peak / 1e6  # of this process up to now; a processor does not count it
    return dict(case=named(case), rows=[told], steps_per_second=statistics.median(rates[1:]))


def named(case: Case) -> str:
    """What of a case is not as usual."""
    usual = Case._field_defaults | {"only": case.only, "repeats": case.repeats}
    told = (f"{name} {x}" for name, x in case._asdict().items() if x != usual[name])
    return ", ".join(told) or case.preset


def table(results: list[dict[str, Any]], heads: bool = True) -> str:
    """Results as Markdown, a row an operation or a training run."""
    columns = dict(median_ms=2, gflop=2, floor_ms=2, ratio=2, memory_mb=0, compile_s=1)
    names = ["case", "operation", *columns, "steps_per_second", "minutes_per_million"]
    lines = [f"| {' | '.join(names).replace('_', ' ')} |", "|---" * len(names) + "|"] * heads
    for result in results:
        for row in result["rows"]:
            cells = [f"{row[n]:.{d}f}" if row.get(n) else "" for n, d in columns.items()]
            rate = row["name"] in (FUSED, "training") and result.get("steps_per_second")
            cells += [f"{rate:.0f}", f"{1e6 / rate / 60:.1f}"] if rate else ["", ""]
            lines.append(f"| {' | '.join([result['case'], row['name'], *cells])} |")
    return "\n".join(lines)


def run_suite(
    cases: tuple[Case, ...], seconds: float, path: str | None = None
) -> list[dict[str, Any]]:
    """The results of cases in turn; none starts after `seconds`. Prints their table at the end.

    A case that fails (its memory, a missing package) is reported, and the next one runs. Each
    result is printed and written to `path` at once: a call that is stopped keeps what it has.
    """
    started, results = time.perf_counter(), []
    for case in cases:
        used = time.perf_counter() - started
        if used > seconds:
            print(f"\nNot run, {seconds:.0f} s were over: {case}", flush=True)
            continue
        try:
            result = train(case) if case.steps else benchmark(case)
        except (RuntimeError, ValueError, ImportError) as error:  # XLA's errors are RuntimeErrors
            print(f"\nFailed: {case}: {str(error)[:300]}", flush=True)
            continue
        results.append(result)
        print(f"\n{table([result], not results[1:])}", flush=True)
        write(path, {"cases": results})
        jax.clear_caches()
    print(f"\n{table(results)}", flush=True)
    return results


def write(path: str | None, result: Any) -> None:
    """The results as JSON."""
    if path:
        atomic_write(path, json.dumps(result, indent=2).encode())


# -------------------------------------------------------------------------------------------------
# Two checkouts, and a policy's latency


def alternate(measure: Callable[[str], float], before: str, after: str, rounds: int) -> Any:
    """Milliseconds of two checkouts in every round, `[rounds, 2]`, each in turn first."""
    times = []
    for i in range(rounds):
        order = (before, after) if i % 2 == 0 else (after, before)
        found = {where: measure(where) for where in order}
        times.append((found[before], found[after]))
        print(f"round {i + 1}: before {times[-1][0]:.3f} ms, after {times[-1][1]:.3f} ms")
    return np.array(times)


def spread(times: Any) -> dict[str, float]:
    """Medians of `[rounds, 2]`, and median, least and largest ratio after / before of a round."""
    ratios, (before, after) = times[:, 1] / times[:, 0], np.median(times, axis=0)
    found = dict(before_ms=before, after_ms=after, ratio=np.median(ratios), rounds=len(times))
    found |= dict(least=ratios.min(), largest=ratios.max())
    return {name: float(value) for name, value in found.items()}


def compare(before: str, rounds: int, case: Case) -> dict[str, Any]:
    """This checkout against another, in turn; RuntimeError where either fails."""
    name = case.only[0] if case.only else FUSED
    own = [f"--{n}={getattr(case, n)}" for n in ("preset", "repeats", "envs")]

    def measured(where: str) -> float:
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder, "result.json")
            asked = [*own, f"--only={name}", f"--json={path}"]
            command = [sys.executable, "-m", "benchmarks.speed", *asked]
            around = dict(cwd=where, env=dict(os.environ, PYTHONPATH=where))
            done = subprocess.run(command, capture_output=True, text=True, check=False, **around)
            if done.returncode:
                raise RuntimeError(f"{where}: {done.stderr or done.stdout}")
            return json.loads(path.read_text())["rows"][0]["median_ms"]

    times = alternate(measured, os.path.abspath(before), os.getcwd(), rounds)
    found = spread(times)
    print(", ".join(f"{key} {value:.3f}" for key, value in found.items()))
    return found | {"times_ms": times.tolist(), "operation": name}


def seconds_per_action(
    policy: Policy, calls: int, clock: Callable[[], float] = time.perf_counter
) -> np.ndarray:
    """`[calls]` seconds of single actions, the first one included."""
    shape = policy.observation_shape
    drawn = np.random.default_rng(0).standard_normal((min(calls, 1_000), *shape))
    observations = drawn.astype(policy.spec.obs_dtype)
    taken = np.empty(calls)
    policy.reset()
    for i in range(calls):
        observation = observations[i % len(observations)]
        start = clock()
        policy(observation)
        taken[i] = clock() - start
    return taken


def latency(taken: np.ndarray) -> dict[str, float]:
    """Milliseconds: `first`, then `median`, `p99`, `worst` of the calls after it; and `calls`."""
    median, p99, worst = np.percentile(1e3 * taken[1:], (50, 99, 100)).tolist()
    return dict(first=1e3 * float(taken[0]), median=median, p99=p99, worst=worst, calls=len(taken))


def define_flags() -> None:
    """The command's flags; tests import the module without them."""
    flags.DEFINE_enum("preset", "tdmpc2", PRESETS, "Settings.")
    flags.DEFINE_string("size", None, "Model size (default: 5 for tdmpc2, tiny for default).")
    flags.DEFINE_integer("batch", None, "Batch size (default: 256 for tdmpc2).")
    flags.DEFINE_integer("obs", 17, "Observation size.")
    flags.DEFINE_integer("action", 6, "Action size.")
    flags.DEFINE_string("env", None, "A task, as brax:ant, in place of --obs and --action.")
    flags.DEFINE_integer("envs", 1, "Environments planned for at once.")
    flags.DEFINE_integer("cores", 0, "Cores that are a device each; 0: as in training, 1: none.")
    flags.DEFINE_integer("repeats", 15, "Timed calls an operation.", lower_bound=3)
    flags.DEFINE_enum("dtype", "float32", ["float32", "bfloat16"], "Compute dtype.")
    flags.DEFINE_list("only", [], "Operations to measure (default: all).")
    flags.DEFINE_integer("unroll", 1, "Steps of Dreamer's recurrent model in a pass of its loops.")
    flags.DEFINE_integer("workers", 0, "Processes that step a --steps run's environments.")
    flags.DEFINE_integer("steps", 0, "Train on --env for so many environment steps.")
    flags.DEFINE_integer("seeds", 0, "Seeds of --steps in one program; 0: one run with its files.")
    flags.DEFINE_bool("rehearse", False, "A --suite's kinds of cases at tiny sizes, for a CPU.")
    flags.DEFINE_enum("suite", None, list(SUITES), "Many cases in one call.")
    flags.DEFINE_float("seconds", 560.0, "No case of a suite starts later than this.")
    flags.DEFINE_string("before", None, "Another checkout of mbx, timed alternately with this one.")
    flags.DEFINE_integer("rounds", 6, "Rounds of --before.", lower_bound=1)
    flags.DEFINE_string("policy", None, "A run directory: time single actions of its policy.")
    flags.DEFINE_bool("planner", True, "Plan every action of --policy; --noplanner: network alone.")
    flags.DEFINE_integer("calls", 10_000, "Actions of --policy.", lower_bound=2)
    flags.DEFINE_string("json", None, "Also write the results here.")


def run(given: Any) -> dict[str, Any]:
    """Measure and print what the flags ask for."""
    case = Case(*(getattr(given, name) for name in Case._fields))._replace(only=tuple(given.only))
    if given.policy:
        policy = load_policy(given.policy, planner=given.planner)
        row = latency(seconds_per_action(policy, given.calls))
        numbers = ", ".join(f"{k} {row[k]:.2f}" for k in ("first", "median", "p99", "worst"))
        print(f"{given.policy}: {numbers} ms of {row['calls']:,} actions")
        return row
    if given.before:
        return compare(given.before, given.rounds, case)
    allocator.dispatch_inline()  # as the commands whose operations these are
    jax.config.update("jax_num_cpu_devices", case.cores or devices.available_cores())
    if given.suite:
        if given.rehearse:  # seeds would compile for longer than all the rest takes
            jax.config.update("jax_disable_most_optimizations", True)
        asked = (rehearsal if given.rehearse else SUITES.get)(given.suite)
        return {"cases": run_suite(asked, given.seconds, given.json)}
    result = train(case) if case.steps else benchmark(case)
    names = ("size", "batch", "obs", "action", "device", "jax", "gemm_gflops")
    told = [f"{name} {result[name]}" for name in names if name in result]
    print(", ".join(told), table([result]), sep="\n\n")
    return result


def main(_: list[str]) -> None:
    logging.set_verbosity(logging.WARNING)
    try:
        result = run(flags.FLAGS)
    except (ValueError, ImportError, OSError, RuntimeError) as error:
        sys.exit(f"error: {error}")
    write(flags.FLAGS.json, result)


if __name__ == "__main__":
    define_flags()
    app.run(main)
