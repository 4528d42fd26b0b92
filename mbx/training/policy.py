"""A trained agent as a function of observations: NumPy in, the environment's own units out.

    policy = mbx.load_policy("runs/a")
    policy.reset()                      # an episode begins
    action = policy(observation)

Compiled once, when it is loaded. Neither the environment nor its simulator is needed: what the
policy has to know of them stands in the run directory. `save` writes one file that runs without mbx
(examples/run_exported.py).
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

from mbx import observations
from mbx.agents.base import Agent
from mbx.agents.settings import RunSettings
from mbx.config import extensions
from mbx.envs.base import in_space, in_units, strongly_typed
from mbx.fast import rng
from mbx.files import atomic_write
from mbx.training import build, run, specs
from mbx.training.checkpoint import Checkpointer, load_settings
from mbx.types import Array, EnvSpec

PLATFORMS = ("cpu", "cuda", "tpu")


def load_policy(
    run_dir: str,
    planner: bool = True,
    *,
    batch: int | None = None,
    which: str = "best",
    seed: int = 0,
    imports: Sequence[str] = (),
) -> Policy:
    """The policy of a run, compiled and warmed up.

    Args:
        run_dir: the run directory.
        planner: plan every action, as evaluations do; False: the policy network alone (TD-MPC).
        batch: observations of a call; None: one, without a leading axis.
        which: "best" (by evaluation return); "latest" or a checkpoint's step need the environment.
        seed: of the planner's samples.
        imports: modules, or files ending in .py, that register what the run uses.

    Raises:
        ValueError: where the directory holds no run of this version, or its agent has no policy
            beside the planner.
        FileNotFoundError: where nothing was saved yet.

    Examples:
        >>> policy = mbx.load_policy("runs/a")  # doctest: +SKIP
        >>> action = policy(observation)  # doctest: +SKIP
    """
    extensions.import_all(imports)
    run.set_up_jax()
    spec = specs.load(run_dir) if which == "best" else None
    if spec is None:
        agent, train, settings = run.load(run_dir, which=which)
        environment = run.evaluation_environment(settings, 1, seed=0)
        spec = environment.spec
    else:
        run.require_float32()
        settings = load_settings(run_dir)
        agent = build.build_agent(settings, spec)
        checkpointer = Checkpointer(run_dir)
        train, _ = checkpointer.restore_best(jax.eval_shape(agent.init, jax.random.key(0)))
        checkpointer.close()
    return Policy(agent, train, spec, settings, planner=planner, batch=batch, seed=seed)


class Policy:
    """`policy(observation) -> action`, with the planner's memory of the episode inside.

    Args:
        agent, train: as `run.load` gives them.
        spec: the task.
        settings: the run's.
        planner, batch, seed: as `load_policy`.
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
                f"planner=False: agent {settings.agent!r} has no policy beside the planner, or "
                "none: leave it True"
            )
        if batch is not None and batch < 1:
            raise ValueError(f"batch={batch}: give at least 1, or None for a single observation")
        self.spec, self._batch, self._num = spec, batch, batch or 1
        self._shape = (self._num, *spec.obs_shape)
        leaves, self._structure = jax.tree.flatten(train)
        actor = strongly_typed(agent.init_actor(self._num))
        begun, actor_structure = jax.tree.flatten(actor)
        key = jax.random.key_data(jax.random.key(seed))

        def step(leaves: list, carry: list, obs: Array, first: Array) -> tuple[Array, list]:
            train = jax.tree.unflatten(self._structure, leaves)
            *rest, key = carry
            now, later = jax.random.split(jax.random.wrap_key_data(key, impl="threefry2x32"))
            actor = jax.tree.unflatten(actor_structure, rest)
            action, actor = act(train, actor, obs, first, rng.unrolled(now), True)
            carry = [*jax.tree.leaves(strongly_typed(actor)), jax.random.key_data(later)]
            return in_units(spec, action), carry

        zeros = np.zeros(self._shape, spec.obs_dtype), np.ones(self._num, bool)
        carry = [*begun, key]
        with run.matmul_precision(settings.matmul_precision):
            # Most of a train state is of learning: an action does not read it.
            used = _used(step, leaves, carry, *zeros)
            shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves]

            def lean(few: list, carry: list, obs: Array, first: Array) -> tuple[Array, list]:
                whole = [jnp.zeros(x.shape, x.dtype) for x in shapes]
                for i, x in zip(used, few, strict=True):
                    whole[i] = x
                return step(whole, carry, obs, first)

            self._compiled = jax.jit(lean)
            # Bound to no device, as what the program makes of them: one program for all calls.
            self._leaves = [jnp.asarray(np.asarray(leaves[i])) for i in used]
            self._begun = [jnp.asarray(np.asarray(x)) for x in carry]
            self._carry = self._begun
            jax.block_until_ready(self._compiled(self._leaves, self._carry, *zeros))
        self._precision = settings.matmul_precision
        self.reset()

    @property
    def observation_shape(self) -> tuple[int, ...]:
        """Of what a call takes: `[...]`, or `[batch, ...]`."""
        return self._shape if self._batch else self._shape[1:]

    def reset(self, which: np.ndarray | None = None) -> None:
        """Tell that the next observation begins an episode.

        Args:
            which: `[batch]` bool, those of a batch that do; None: all.
        """
        if which is None:
            self._first = np.ones(self._num, bool)
        else:
            self._first = self._first | np.asarray(which, bool)

    def __call__(self, observation: Any) -> np.ndarray | int:
        """The action for an observation `[...]`, or for `[batch, ...]` of them.

        Args:
            observation: an array; of a task whose observations are dictionaries, the dictionary
                (`spec.parts` says of what; a choice is one-hot), with or without parts that the
                agent does not see, or the array that `mbx.observations.join` makes of it.

        Returns:
            `[A]` or `[batch, A]` in the environment's units, of the shape and the type that it
            takes (`spec.action_shape`, `spec.action_dtype`); a number, or `[batch]` of them, where
            actions are discrete.

        Raises:
            ValueError: for an observation of another shape.
        """
        if isinstance(observation, Mapping):
            if not self.spec.parts:
                raise ValueError(
                    f"an observation that is a dictionary: this policy takes {self._shape[1:]}"
                )
            observation = observations.join(self.spec.parts, observations.flat(observation))
        obs = np.asarray(observation, self.spec.obs_dtype)
        wanted = self.observation_shape
        if obs.shape != wanted:
            raise ValueError(
                f"an observation of shape {obs.shape}: this policy takes {wanted} (load_policy's "
                "batch says how many at once)"
            )
        obs = obs.reshape(self._shape)
        action, self._carry = self._compiled(self._leaves, self._carry, obs, self._first)
        self._first = np.zeros(self._num, bool)
        action = np.asarray(action)
        if not self.spec.discrete:
            action = in_space(self.spec, action)
        if self._batch:
            return action
        return int(action[0]) if self.spec.discrete else action[0]

    def save(self, path: str) -> int:
        """Write the policy to one file for CPUs, NVIDIA GPUs and TPUs: its bytes.

        The file is a zip of `program` (`jax.export`), `arrays.npz` (parameters and where the
        planner's memory begins) and `about.json`; examples/run_exported.py runs it.

        Raises:
            ImportError: where flatbuffers is missing.
        """
        try:
            import flatbuffers  # noqa: F401  jax.export writes with it
        except ImportError as error:
            raise ImportError("exporting needs flatbuffers: pip install -e '.[export]'") from error
        zeros = np.zeros(self._shape, self.spec.obs_dtype), np.ones(self._num, bool)
        with run.matmul_precision(self._precision):
            exported = jax.export.export(self._compiled, platforms=PLATFORMS)(
                self._leaves, self._begun, *zeros
            )
        arrays, content = io.BytesIO(), io.BytesIO()
        named = {f"params_{i}": np.asarray(x) for i, x in enumerate(self._leaves)}
        named |= {f"memory_{i}": np.asarray(x) for i, x in enumerate(self._begun)}
        np.savez(arrays, **named)
        about = {
            "task": self.spec.name,
            "obs_shape": self._shape,
            "obs_dtype": np.dtype(self.spec.obs_dtype).name,
            "parts": self.spec.parts,
            "batch": self._batch,
            "discrete": self.spec.discrete,
            "platforms": PLATFORMS,
            "jax": jax.__version__,
        }
        with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as file:
            file.writestr("program", exported.serialize())
            file.writestr("arrays.npz", arrays.getvalue())
            file.writestr("about.json", json.dumps(about))
        atomic_write(path, content.getvalue())
        return content.tell()


def _used(step: Any, leaves: list, *inputs: Any) -> list[int]:
    """Numbers of the leaves that a program reads."""
    jaxpr = jax.make_jaxpr(step)(leaves, *inputs).jaxpr
    read = {id(v) for equation in jaxpr.eqns for v in equation.invars}
    read |= {id(v) for v in jaxpr.outvars}
    return [i for i, v in enumerate(jaxpr.invars[: len(leaves)]) if id(v) in read]
