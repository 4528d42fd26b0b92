"""Time the hot operations of an agent against what the machine can do.

    python -m experiments.benchmark                               # 5M model, TD-MPC2's settings
    python -m experiments.benchmark --preset=sizes                # tiny, 1M, 5M in one table
    python -m experiments.benchmark --preset=default              # configs/tdmpc.py as it is
    python -m experiments.benchmark --preset=dreamer --size=tiny  # 16 x 64 rows, horizon 15
    python -m experiments.benchmark --preset=empo                 # see empo_benchmark
    python -m experiments.benchmark --size=19 --batch=1024 --json=bench.json
    python -m experiments.benchmark --env=brax:halfcheetah --envs=16 --only='fused step'
    python -m experiments.benchmark --suite=gpu --json=gpu.json   # 14 cases, most wanted first

For every operation: the median time after warm-up, the matrix-multiply FLOPs it does (counted in
its program, loops included), the time those need at the matrix-multiply rate measured in the same
run (the floor), the ratio of the two, and the time to compile.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from absl import app, flags, logging
from ml_collections import config_dict

from mbx import envs, presets, replay
from mbx.agents.base import Agent
from mbx.agents.dreamer import agent as dreamer
from mbx.agents.dreamer import rssm
from mbx.agents.dreamer.settings import Settings as DreamerSettings
from mbx.agents.dreamer.update import draw_noise
from mbx.envs.base import EnvSpec, RawEnvironment, episodic
from mbx.fast import rng
from mbx.settings import from_dict
from mbx.training import build, loop, memory, sharding
from mbx.training.metrics import atomic_write
from mbx.training.sharding import Partition, make_partition, num_shards
from mbx.training.state import LoopState, Schedule, init_state

from .benchmark_cases import FUSED, PRESETS, SIZES, SUITES, Case
from .timing import gemm_rate, measure, on_cores


def make_config(case: Case) -> config_dict.ConfigDict:
    """The benchmark's configuration."""
    config = presets.load("tdmpc")
    if case.preset == "dreamer":
        config = presets.load("dreamer")
        config.loss.batch_length = 64
        config.imagination.rows = 0  # dreams from every row
        config.actor.gradient = "reinforce"
    if case.preset == "tdmpc2":
        config.model.update(size="5", critic="q", policy="squashed", num_values=0)
        config.loss.update(value_target="td", policy_loss="svg", value_reduction="min")
        config.loss.batch_size = 256
        config.planner.update(iterations=6, num_samples=512, num_elites=64, num_proposals=24)
    if case.size:
        config.model.size = case.size
    if case.batch:
        config.loss.batch_size = case.batch
    config.model.dtype = case.dtype
    config.env.num_envs = case.envs
    return config


def resolved(case: Case) -> dict[str, Any]:
    """The configuration with as many cores as the command that trains uses for such a run."""
    return on_cores(make_config(case).to_dict(), case.cores)


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
            row = dict(
                obs=obs, action=action, reward=reward, is_first=no, is_last=no, terminated=no
            )
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
        self.rate, self.rows = gemm_rate(case.dtype), []

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
        rate = max(self.rate, gemm_rate(case.dtype))
        rows = [r._replace(floor_ms=1e6 * r.gflop * 1e6 / rate) for r in self.rows]
        rows = [r._replace(ratio=r.median_ms / r.floor_ms if r.floor_ms else 0.0) for r in rows]
        result = dict(
            preset=case.preset,
            size=config["model"]["size"],
            batch=config["loss"]["batch_size"],
            envs=case.envs,
            env=spec.name,
            obs=spec.obs_shape,
            action=spec.action_dim,
            dtype=case.dtype,
            device=f"{self.partition.size} x {jax.devices()[0]}",
            jax=jax.__version__,
            gemm_gflops=rate / 1e9,
            rows=[r._asdict() for r in rows],
        )
        for row in rows:
            if row.name == FUSED and case.env:
                steps = 1e3 * case.envs * spec.action_repeat / row.median_ms
                result |= dict(steps_per_second=steps, hours_per_million=1e6 / steps / 3600)
        return result


def benchmark(case: Case) -> dict[str, Any]:
    """Measure every operation of a case; returns what `--json` writes."""
    config = resolved(case)
    environment = envs.make(case.env, case.envs) if case.env else toy_environment(case)
    if case.preset == "dreamer":
        return benchmark_dreamer(case, config, environment)
    settings = build.read(config)
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

    rows.add("plan", act, state.train, state.actor, state.obs, key)
    rows.add("update", update, state.train, state.replay, key, donate=True)
    action = jnp.zeros((case.envs, environment.spec.action_dim))
    rows.add("environment", environment.step, state.env, action, key)
    if agent.store:
        rows.add("targets", agent.store.targets, state.train, None, state.obs, key)

        def refresh(buffer: Any, train: Any, key: jax.Array) -> Any:
            return agent.store.reanalyze(train, buffer, key, jnp.int32(-1))[0]

        rows.add("reanalyze", refresh, state.replay, state.train, key, donate=True)
    if rows.wants("insert"):
        row = jax.tree.map(lambda x: jnp.copy(x[:, 0]), state.replay.data)
        made = targets_of(agent, state.train, state.obs, key)

        def insert(buffer: Any, row: Any, made: Any) -> Any:
            return replay.insert(buffer, row, made)

        rows.add("insert", insert, state.replay, row, made, donate=True)
    loss = config["loss"]

    def sample(buffer: Any, key: jax.Array) -> Any:
        return replay.sample(buffer, key, batch_size=loss["batch_size"], length=loss["horizon"])

    rows.add("sample", sample, state.replay, key)
    # The toy system times one update beside one plan, a task what training on it does: UTD 1.
    ratio = 1.0 if case.env else 1.0 / case.envs
    schedule = Schedule(0, 0, ratio, config["reanalyze"]["interval"], 0)
    step = loop.make_step(agent, environment, schedule, apart=partition.mesh is not None)
    step = partition.keep(step)
    rows.add(FUSED, lambda s: step(s)[0], state, donate=True)
    return rows.report(config, environment)


def benchmark_dreamer(case: Case, config: dict[str, Any], environment: Any) -> dict[str, Any]:
    """Acting, the whole update, and its two scans by themselves."""
    num, key = case.envs, jax.random.key(0)
    own = dreamer.resolve(from_dict(DreamerSettings(), config), environment.spec)
    agent, net, partition = dreamer.build_agent(own), own.model, make_partition(own)
    sizes = dict(capacity=2_000, shards=num_shards(own, partition))
    state = init_state(agent, environment, key=key, **sizes)
    state = partition.place(filled(agent, state, environment.spec, 600))
    first, model = jnp.zeros(num, bool), state.train.params["model"]["rssm"]
    noise, lead = draw_noise(own, key), (own.loss.batch_length, own.loss.batch_size)
    tokens = jnp.ones((*lead, net.units))
    actions, resets = jnp.zeros((*lead, net.action_dim)), jnp.zeros(lead, bool)

    def act(train: Any, actor: Any, obs: jax.Array, key: jax.Array) -> Any:
        return agent.act(train, actor, obs, first, key, False)

    def observe(model: Any, tokens: jax.Array) -> Any:
        start = rssm.initial(net, model, lead[1:])
        return rssm.observe(net, model, start, tokens, actions, resets, noise.posterior)

    def observe_gradient(model: Any, tokens: jax.Array) -> Any:
        def total(*args: Any) -> jax.Array:
            seen = observe(*args)
            leaves = (seen.states.deter, seen.states.stoch, seen.posterior, seen.prior)
            return sum(jnp.sum(jnp.square(x)) for x in leaves)

        return jax.grad(total, argnums=(0, 1))(model, tokens)

    def imagine(model: Any, actions: jax.Array) -> Any:
        start = rssm.initial(net, model, (lead[0] * lead[1],))
        return rssm.imagine(net, model, start, lambda f, a: jnp.tanh(a), actions, noise.prior)

    rows = Rows(case, partition)
    rows.add("act", act, state.train, state.actor, state.obs, key)

    def update(both: Any, key: jax.Array) -> Any:
        return agent.update(*both, key)[:2]

    rows.add("update", update, (state.train, state.replay), key, donate=True)
    rows.add("observe scan", observe, model, tokens)
    rows.add("observe scan with gradient", observe_gradient, model, tokens)
    rows.add("imagine scan", imagine, model, noise.action)
    return rows.report(config, environment)


def table(result: dict[str, Any]) -> str:
    """The result as Markdown."""
    lines = [
        f"{result['preset']}, size {result['size']}, batch {result['batch']}, {result['envs']} x "
        f"{result['env']}, obs {result['obs']}, action {result['action']}, {result['dtype']}, "
        f"{result['device']}, jax {result['jax']}; matmul {result['gemm_gflops']:.0f} GFLOP/s",
        "",
        "| operation | median ms | GFLOP | floor ms | ratio | compile s |",
        "|---|---|---|---|---|---|",
    ]
    for r in result["rows"]:
        work = (
            f"{r['gflop']:.2f} | {r['floor_ms']:.2f} | {r['ratio']:.2f}" if r["gflop"] else "| | "
        )
        lines.append(f"| {r['name']} | {r['median_ms']:.2f} | {work} | {r['compile_s']:.1f} |")
    if "steps_per_second" in result:
        lines += [
            "",
            f"{result['steps_per_second']:.0f} environment steps a second: a million in "
            f"{result['hours_per_million']:.2f} h",
        ]
    return "\n".join(lines)


def rest_of_step(result: dict[str, Any]) -> float:
    """Share of a fused step, one plan and one update, that neither they nor the environment need.

    Below 0 where the step does all of it faster than its parts are done alone.
    """
    ms = {row["name"]: row["median_ms"] for row in result["rows"]}
    return 1.0 - (ms["plan"] + ms["update"] + ms["environment"]) / ms[FUSED]


def sizes_table(results: list[dict[str, Any]]) -> str:
    """The model sizes as Markdown; "times" is against the operation's own products."""
    lines = [
        "| model, batch | matmul GFLOP/s | plan ms | times | update ms | times | rest of a step |",
        "|---|---|---|---|---|---|---|",
    ]
    for result in results:
        rows = {row["name"]: row for row in result["rows"]}
        plan, update = rows["plan"], rows["update"]
        lines.append(
            f"| {result['size']}, {result['batch']} | {result['gemm_gflops']:.0f} | "
            f"{plan['median_ms']:.1f} | {plan['ratio']:.2f} | {update['median_ms']:.1f} | "
            f"{update['ratio']:.2f} | {rest_of_step(result):.0%} |"
        )
    return "\n".join(lines)


def run_suite(cases: tuple[Case, ...], seconds: float) -> list[dict[str, Any]]:
    """The results of cases in turn, each printed at once; none starts after `seconds`.

    A case that fails (its memory, a missing package) is reported, and the next one runs.
    """
    started, results = time.perf_counter(), []
    for case in cases:
        used = time.perf_counter() - started
        if used > seconds:
            print(f"\nNot run, {seconds:.0f} s were over: {case}", flush=True)
            continue
        try:
            result = benchmark(case)
        except (RuntimeError, ValueError, ImportError) as error:  # XLA's errors are RuntimeErrors
            print(f"\nFailed: {case}: {str(error)[:300]}", flush=True)
            continue
        print(f"\n{table(result)}", flush=True)
        results.append(result)
        jax.clear_caches()
    return results


def define_flags() -> None:
    """The command's flags; whoever imports this module has flags of their own."""
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
    flags.DEFINE_enum("suite", None, ["gpu"], "Many cases in one call.")
    flags.DEFINE_float("seconds", 460.0, "No case of a suite starts later than this.")
    flags.DEFINE_string("json", None, "Also write the results here.")


def asked() -> Case:
    """The case that the flags describe."""
    given = flags.FLAGS
    return Case(
        preset=given.preset,
        size=given.size,
        batch=given.batch,
        obs=given.obs,
        action=given.action,
        env=given.env,
        envs=given.envs,
        repeats=given.repeats,
        dtype=given.dtype,
        only=tuple(given.only),
        cores=given.cores,
    )


def main(_: list[str]) -> None:
    logging.set_verbosity(logging.WARNING)
    memory.dispatch_inline()  # as the commands whose operations these are
    case, given = asked(), flags.FLAGS
    jax.config.update("jax_num_cpu_devices", case.cores or sharding.available_cores())
    if given.suite:
        result = {"suite": given.suite, "cases": run_suite(SUITES[given.suite], given.seconds)}
    elif case.preset == "sizes":
        chosen = dict(repeats=case.repeats, dtype=case.dtype, envs=case.envs, cores=case.cores)
        results = run_suite(tuple(size._replace(**chosen) for size in SIZES), given.seconds)
        print(f"\n{sizes_table(results)}")
        result = {"preset": "sizes", "cases": results}
    elif case.preset == "empo":
        from . import empo_benchmark

        batches = (case.batch,) if case.batch else (32, 4096)
        result = {"preset": "empo", "rows": empo_benchmark.run(batches, min(case.repeats, 5))}
    else:
        try:
            result = benchmark(case)
        except (ValueError, ImportError) as error:
            sys.exit(f"error: {error}")
        print(table(result))
    if given.json:
        atomic_write(given.json, json.dumps(result, indent=2).encode())


if __name__ == "__main__":
    define_flags()
    app.run(main)
