"""A trained agent as a function of observations: NumPy in, the environment's own units out.

    policy = mbx.load_policy("runs/a")
    policy.reset()                      # an episode begins
    action = policy(observation)

It is compiled once, at loading, and needs neither the environment nor its simulator. `save` writes
one file that runs without mbx (examples/run_exported.py).
"""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mbx import config, observations
from mbx.agents.base import Agent
from mbx.agents.settings import RunSettings
from mbx.config import extensions
from mbx.envs.base import in_space, in_units
from mbx.fast import rng
from mbx.training import build, hub, run, rundir
from mbx.training.build import environment_spec
from mbx.training.checkpoint import Checkpointer
from mbx.training.files import atomic_write
from mbx.training.rundir import load_settings
from mbx.types import Array, EnvSpec, strongly_typed

PLATFORMS = ("cpu", "cuda", "tpu")


def load_policy(
    run_dir: str,
    planner: bool = True,
    *,
    batch: int | None = None,
    which: str = "best",
    seed: int = 0,
    imports: Sequence[str] = (),
    planner_settings: Sequence[str] = (),
) -> Policy:
    """The policy of a run, compiled and warmed up.

    Args:
        planner: plan every action, as evaluations do; False: the policy network alone (TD-MPC).
        batch: observations of a call; None: one, without a leading axis.
        which: "best" (by evaluation return); "latest" or a checkpoint's step need the environment.
        seed: of the planner's samples.
        imports: modules, or files ending in .py, that register what the run uses.
        planner_settings: settings of the acting planner in place of the run's, as "reuse=0.6".

    Raises:
        ValueError: where the directory holds no run of this version, or its agent has no policy
            without the planner; for a planner setting that is not possible.
        FileNotFoundError: where nothing was saved yet.

    Examples:
        >>> policy = mbx.load_policy("runs/a")  # doctest: +SKIP
        >>> action = policy(observation)  # doctest: +SKIP
    """
    extensions.import_all(imports)
    run.set_up_jax()
    run_dir = hub.local(run_dir)
    spec = rundir.load_spec(run_dir) if which == "best" else None
    if spec is None:
        agent, train, settings = run.load(run_dir, which=which)
        spec = environment_spec(settings)
    else:
        run.require_float32()
        settings = load_settings(run_dir)
        agent = build.build_agent(settings, spec)
        with Checkpointer(run_dir) as checkpointer:
            train, _ = checkpointer.restore_best(jax.eval_shape(agent.init, jax.random.key(0)))
    if planner_settings:
        settings = config.load(settings, [f"planner.{one}" for one in planner_settings])
        agent = build.build_agent(settings, spec)
    return Policy(agent, train, spec, settings, planner=planner, batch=batch, seed=seed)


class Policy:
    """`policy(observation) -> action`, with the planner's memory of the episode inside.
    agent, train: as from `run.load`; spec: the task; settings: the run's; others: as `load_policy`.
    """

    def __init__(
        self,
        agent: Agent,
        train: Any,
        spec: EnvSpec,
        settings: RunSettings,
        *,
        planner: bool = True,
        batch: int | None = None,
        seed: int = 0,
    ) -> None:
        act = agent.act if planner else agent.act_without_planner
        if act is None:
            raise ValueError(
                f"planner=False: agent {settings.agent!r} cannot act without its "
                "planner, or has none: leave it True"
            )
        if batch is not None and batch < 1:
            raise ValueError(f"batch={batch}: give at least 1, or None for a single observation")
        self.spec, self._batch, self._num = spec, batch, batch or 1
        self.shape = (self._num, *spec.obs_shape)
        leaves, structure = jax.tree.flatten(train)
        begun, actor_structure = jax.tree.flatten(strongly_typed(agent.init_actor(self._num)))

        def step(leaves: list, carry: list, obs: Array, first: Array) -> tuple[Array, list]:
            train = jax.tree.unflatten(structure, leaves)
            *rest, key = carry
            now, later = jax.random.split(jax.random.wrap_key_data(key, impl="threefry2x32"))
            actor = jax.tree.unflatten(actor_structure, rest)
            action, actor = act(train, actor, obs, first, rng.unrolled(now), True)
            carry = [*jax.tree.leaves(strongly_typed(actor)), jax.random.key_data(later)]
            return in_units(spec, action), carry

        zeros = np.zeros(self.shape, spec.obs_dtype), np.ones(self._num, bool)
        carry = [*begun, jax.random.key_data(jax.random.key(seed))]
        used = _used(step, leaves, carry, *zeros)  # an action reads few leaves of a train state
        shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves]

        def lean(few: list, carry: list, obs: Array, first: Array) -> tuple[Array, list]:
            whole = [jnp.zeros(x.shape, x.dtype) for x in shapes]
            for i, x in zip(used, few, strict=True):
                whole[i] = x
            with run.matmul_precision(settings.matmul_precision):  # in every caller, and in exports
                return step(whole, carry, obs, first)

        self.compiled = jax.jit(lean)
        # Bound to no device, as what the program makes of them: one program for all calls.
        self.leaves = [jnp.asarray(np.asarray(leaves[i])) for i in used]
        self._carry = self.begun = [jnp.asarray(np.asarray(x)) for x in carry]
        jax.block_until_ready(self.compiled(self.leaves, self._carry, *zeros))
        self._first = np.ones(self._num, bool)

    @property
    def observation_shape(self) -> tuple[int, ...]:
        """Shape of an observation as the agent sees it: `[...]`, or `[batch, ...]`."""
        return self.shape if self._batch else self.shape[1:]

    def reset(self, which: np.ndarray | None = None) -> None:
        """Begin an episode with the next observation: all of a batch, or `which` `[batch]` bool."""
        first = np.ones(self._num, bool)
        self._first = first if which is None else self._first | np.asarray(which, bool)

    def __call__(self, observation: Any) -> Any:
        """The action for an observation, or `[batch, ...]` of them.

        Args:
            observation: the environment's (the number of a `Discrete`, a dictionary or tuple of
                parts, which may include parts hidden from the agent), or the agent's (one-hot, or
                the array of `mbx.observations.join`).

        Returns:
            The action in the environment's own units, shape and type, or `[batch, ...]` of them; an
            int, or `[batch]` int32, of a Discrete space; a dictionary or tuple of those.

        Raises:
            ValueError: for an observation of another shape, or one that is not finite.
        """
        obs = as_seen(self.spec, observation, self.shape[: 1 if self._batch else 0])
        obs = obs.reshape(self.shape)
        action, self._carry = self.compiled(self.leaves, self._carry, obs, self._first)
        self._first = np.zeros(self._num, bool)
        action = in_space(self.spec, np.asarray(action))
        if self._batch:
            return action
        alone = jax.tree.map(lambda x: x[0], action)
        return int(alone) if self.spec.discrete and not self.spec.action_parts else alone

    def save(self, path: str) -> int:
        """Write the policy to one file for CPUs, NVIDIA GPUs and TPUs; returns its bytes.
        The file is a zip of `program` (`jax.export`), `arrays.npz` (parameters and initial planner
        memory) and `about.json`; examples/run_exported.py runs it. Raises ImportError where
        flatbuffers is missing.
        """
        try:
            import flatbuffers  # noqa: F401  jax.export writes with it
        except ImportError as error:
            raise ImportError("export needs flatbuffers: pip install 'mbx-rl[export]'") from error
        zeros = np.zeros(self.shape, self.spec.obs_dtype), np.ones(self._num, bool)
        export = jax.export.export(self.compiled, platforms=PLATFORMS)
        program = export(self.leaves, self.begun, *zeros).serialize()
        lists = {"params": self.leaves, "memory": self.begun}
        named = {f"{n}_{i}": np.asarray(x) for n, xs in lists.items() for i, x in enumerate(xs)}
        arrays, content = io.BytesIO(), io.BytesIO()
        np.savez(arrays, **named)
        with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as file:
            file.writestr("program", program)
            file.writestr("arrays.npz", arrays.getvalue())
            file.writestr("about.json", json.dumps(self.about()))
        atomic_write(path, content.getvalue())
        return content.tell()

    def about(self) -> dict[str, Any]:
        """Inputs and outputs of an exported file's program, as JSON."""
        spec = self.spec
        names = ("parts", "choices", "discrete", "action_shape", "action_dtype", "action_parts")
        return {name: getattr(spec, name) for name in (*names, "action_low", "action_high")} | {
            "task": spec.name,
            "obs_shape": self.shape,
            "obs_dtype": np.dtype(spec.obs_dtype).name,
            "batch": self._batch,
            "platforms": PLATFORMS,
            "jax": jax.__version__,
        }


def as_seen(spec: EnvSpec, observation: Any, lead: tuple[int, ...] = ()) -> np.ndarray:
    """An environment's observation as the agent sees it, `[*lead, *obs_shape]`.
    lead: leading axes. Raises ValueError naming the part that is missing, of another shape or not
    finite.

    Examples:
        >>> spec = types.EnvSpec("x:y", (3,), np.float32, 1, 9, 1, choices=(("", ((5, 3),)),))
        >>> policy.as_seen(spec, 6).tolist()
        [0.0, 1.0, 0.0]
    """
    if isinstance(observation, Mapping) or (spec.parts and isinstance(observation, tuple)):
        if not spec.parts:
            raise ValueError(
                f"an observation that is a dictionary: this policy takes {list(spec.obs_shape)}"
            )
        given = observations.flat(_by_name(observation))
        if missing := [part.name for part in spec.parts if part.name not in given]:
            raise ValueError(f"an observation without {missing[0]!r}: it has {sorted(given)}")
        values = {p.name: _part(spec, given[p.name], *p, lead) for p in spec.parts}
        obs = observations.join(spec.parts, values)
    else:
        obs = _part(spec, observation, "", spec.obs_shape, lead)
    obs = np.asarray(obs, spec.obs_dtype)
    if not np.all(np.isfinite(observations.numbers(spec.parts, obs))):
        raise ValueError(
            f"an observation of {spec.name} that is not finite: correct the sensor, or repeat the "
            "last action"
        )
    return obs


def _by_name(observation: Any) -> Any:
    """Tuples as dictionaries by position."""
    if isinstance(observation, tuple):
        observation = {str(i): one for i, one in enumerate(observation)}
    if isinstance(observation, Mapping):
        return {name: _by_name(one) for name, one in observation.items()}
    return observation


def _part(
    spec: EnvSpec, value: Any, name: str, shape: tuple[int, ...], lead: tuple[int, ...]
) -> np.ndarray:
    """A part of an observation `[*lead, *shape]`; discrete values become one-hot."""
    array, wanted = np.asarray(value), (*lead, *shape)
    named = f"an observation whose {name!r}" if name else "an observation that"
    entries = dict(spec.choices).get(name, ())
    if entries and shape == (len(entries),):  # a single value each
        array = np.ones(wanted, np.float32)
    elif entries and array.shape != wanted and array.size == np.prod(lead) * len(entries):
        hot = []
        for column, (first, count) in zip(array.reshape(-1, len(entries)).T, entries, strict=True):
            if not np.isin(column, np.arange(first, first + count)).all():
                raise ValueError(
                    f"{named} is {value}: this policy takes {first} to {first + count - 1}"
                )
            hot.append(np.eye(count, dtype=np.float32)[column.astype(int) - first])
        array = np.concatenate(hot, axis=1)
    flat = len(shape) == 1 and array.shape[: len(lead)] == lead
    if array.shape != wanted and not (flat and array.size == np.prod(wanted)):
        batch = "" if name else " (load_policy's batch says how many at once)"
        raise ValueError(
            f"{named} has the shape {list(array.shape)}: this policy takes {list(wanted)}{batch}"
        )
    return array.reshape(wanted)


def _used(step: Any, leaves: list, *inputs: Any) -> list[int]:
    """Numbers of the leaves that a program reads."""
    jaxpr = jax.make_jaxpr(step)(leaves, *inputs).jaxpr
    read = {id(v) for equation in jaxpr.eqns for v in equation.invars}
    read |= {id(v) for v in jaxpr.outvars}
    return [i for i, v in enumerate(jaxpr.invars[: len(leaves)]) if id(v) in read]
