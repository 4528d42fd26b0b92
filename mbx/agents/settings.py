"""Settings that the runs of all agents have in common; each agent adds its own sections.

    @dataclasses.dataclass(frozen=True)
    class Settings(RunSettings):
        agent: str = setting("mine", "which agent")
        train: Train = section(Train(steps=60_000), "how long and how often it learns")
        loss: Loss = section(Loss(), "what is minimised")

Steps are environment steps (action repeat included) summed over environments unless a line says
otherwise. Nothing here loads JAX.
"""

from __future__ import annotations

import abc
import dataclasses
import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Self

from mbx.settings import NONZERO, section, setting

if TYPE_CHECKING:
    from mbx.types import EnvSpec

HEADS_HELP = "auxiliary heads of your own, as NAME or NAME:COEFFICIENT, several joined by +"
_MAP = re.compile(r"(empo:multigrid/)(?P<path>.+\.yaml)((?:@stored)?)", re.DOTALL)
_MAPS = re.compile(r"(empo:maps/)(?P<path>.*[/.].*?)((?:@stored)?)", re.DOTALL)


def head_terms(text: str) -> dict[str, float | None]:
    """The heads that "inverse_dynamics:0.1+mine" asks for, with coefficients; None: as declared.

    Raises:
        ValueError: for a name given twice or none, or a coefficient that is no positive number.
    """
    terms: dict[str, float | None] = {}
    for part in text.split("+") if text else ():
        name, colon, number = part.strip().partition(":")
        try:
            coef = float(number) if colon else None
        except ValueError:
            coef = -1.0
        wrong = coef is not None and not 0.0 < coef < math.inf
        if not name.isidentifier() or name in terms or wrong:
            raise ValueError(
                f"heads={text!r}: give names of registered heads, each once, with a positive "
                "coefficient or none, as 'inverse_dynamics:0.1+mine'"
            )
        terms[name] = coef
    return terms


@dataclasses.dataclass(frozen=True)
class Distributed:
    """One run on many devices or processes."""

    enabled: bool = setting(False, "divide environments and batches among all devices")
    coordinator: str = setting(
        "", "HOST:PORT of process 0; empty: found out on a cluster", needs={"enabled": True}
    )
    num_processes: int = setting(
        0, "0: found out; 1: only the devices of this machine", needs={"enabled": True}
    )
    process_id: int = setting(
        -1, "number of this process; -1: found out", at_least=-1, needs={"enabled": True}
    )
    cores: int = setting(
        0,
        "cores that are a device each, of a run on one machine's processor; 0: as many as there "
        "are and its environments divide among; 1: one device, whose threads share every operation",
        needs={"enabled": False, "num_seeds": 1},
    )
    fsdp: bool = setting(False, "divide large parameters, too", needs={"enabled": True})
    heartbeat_timeout: int = setting(
        60,
        "seconds after which a silent process is given up",
        at_least=1,
        needs={"enabled": True},
    )


@dataclasses.dataclass(frozen=True)
class Env:
    """The task and how many copies of it are stepped together."""

    name: str = setting(
        "gymnax:Pendulum-v1", "SUITE:TASK, or where your own is: gym:FILE.py:CLASS, see --help"
    )
    kwargs: dict[str, Any] = setting(
        {}, "arguments of gym:, gymnax: and jax: tasks, a flag each (env.kwargs.mass=2.5)"
    )
    metrics: tuple[str, ...] = setting(
        (), "numbers of a gym: task's info averaged over episodes into the log: success,cost"
    )
    observe: tuple[str, ...] = setting(
        (), "parts of a dictionary of observations that are seen, a,b; empty: all but privileged_*"
    )
    pixels: bool = setting(
        False, "pictures are observed instead of numbers: dmc: and gym: tasks are drawn"
    )
    image_size: int = setting(
        0, "pixels a side that images are resized to; 0: as they are, 64 where they are drawn"
    )
    grey: bool = setting(False, "images in colours become grey ones")
    frame_stack: int = setting(
        1, "newest images that an observation joins on its channels, oldest first", at_least=1
    )
    shadows: bool = setting(
        True,
        "dmc: tasks are drawn with shadows, reflections and smooth edges; without is much quicker "
        "where a processor draws",
        needs={"pixels": True},
    )
    num_envs: int = setting(4, "environments stepped together", at_least=1)
    workers: int = setting(
        0, "processes that step gym: and dmc: environments, for slow ones; 0: none, one by one"
    )
    action_repeat: int = setting(0, "environment steps of an agent step; 0: the suite's default")
    episode_length: int = setting(0, "agent steps of an episode; 0: the task's own limit")
    pad_to: tuple[int, ...] = setting(
        (0, 0),
        "observation and action sizes that several tasks get at least",
        needs={"several_tasks": True},
    )

    def check(self) -> Iterator[str]:
        """Metrics and parts are names; arguments are written into config.json and read again."""
        if not all(isinstance(name, str) for name in self.observe):
            yield f"observe={self.observe!r}: give names of an observation's parts, as text"
        if not all(isinstance(name, str) for name in self.metrics):
            yield f"metrics={self.metrics!r}: give names of numbers in info, as text"
        try:
            same = json.loads(json.dumps(self.kwargs)) == self.kwargs
        except (TypeError, ValueError):
            same = False
        if not same:
            yield (
                f"kwargs={self.kwargs!r}: give numbers, text, True, False, None, or lists and "
                "dictionaries of these"
            )


@dataclasses.dataclass(frozen=True)
class Train:
    """How long a run is; each agent adds how often it learns."""

    steps: int = setting(30_000, "environment steps of the run", at_least=1)
    seed_steps: int = setting(1_000, "environment steps of random actions before learning")
    seed_hold: int = setting(
        1,
        "agent steps that each of those actions is held; above 1 continuous ones are mostly at a "
        "bound",
        at_least=1,
    )
    pretrain_updates: int = setting(0, "updates made at once after them")
    log_interval: int = setting(500, "environment steps between log rows", at_least=1)
    check_finite: bool = setting(True, "stop with an error when a loss is not finite")
    init_from: str = setting("", "run directory whose best parameters to start from")
    dataset: str = setting("", "dataset.npz to learn from without acting")


@dataclasses.dataclass(frozen=True)
class Eval:
    """Evaluations without exploration noise."""

    interval: int = setting(3_000, "environment steps between evaluations; 0: only at the end")
    episodes: int = setting(20, "episodes of an evaluation; 0, with interval=0: no evaluation")
    exploring: bool = setting(False, "evaluate the agent as it acts in training, too")

    def check(self) -> Iterator[str]:
        """Without episodes there is nothing to do at an interval."""
        if self.interval and not self.episodes:
            yield (
                f"episodes=0 with eval.interval={self.interval}: no evaluation is made; set "
                "eval.interval=0, too, or give it episodes"
            )


@dataclasses.dataclass(frozen=True)
class Log:
    """Where the log goes beside the run directory."""

    wandb: str = setting("", "project of Weights & Biases that mirrors the rows; empty: none")
    wandb_entity: str = setting(
        "", "user or team of that project; empty: your default", needs={"wandb": NONZERO}
    )


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """When the state is saved."""

    interval: int = setting(
        6_000, "environment steps between checkpoints; 0: only at the end and by minutes"
    )
    minutes: float = setting(
        5.0, "a checkpoint also after so many minutes, and after the first updates; 0: not"
    )
    keep: int = setting(2, "newest checkpoints kept, beside the best", at_least=1)


@dataclasses.dataclass(frozen=True)
class Replay:
    """What is stored of the past."""

    capacity: int = setting(100_000, "transitions over all environments", at_least=1)
    shards: int = setting(0, "blocks that batches are drawn from evenly; 0: one a device")
    save: bool = setting(False, "write the rows to dataset.npz when the run ends")


@dataclasses.dataclass(frozen=True)
class RunSettings(abc.ABC):
    """What every run has. An agent's settings add their own, and say how often it learns."""

    agent: str = setting("", "which agent")
    seed: int = setting(0, "of everything: parameters, environments, exploration, sampling")
    num_seeds: int = setting(
        1, "seeds trained side by side in one program, each with its own log", at_least=1
    )
    imports: tuple[str, ...] = setting(
        (), "modules of your own that register what it uses: --import sets it"
    )
    resume: bool = setting(False, "continue the run in the working directory")
    matmul_precision: str = setting(
        "default", "of float32 products", choices=("default", "high", "highest")
    )
    gpu_compiler: str = setting(
        "auto",
        "how long a GPU's compiler may take: full, for the fastest steps; quick; auto: quick in "
        "runs of up to 200,000 steps, which gain more by it than they lose",
        choices=("auto", "quick", "full"),
    )
    distributed: Distributed = section(Distributed(), "many devices and processes")
    env: Env = section(Env(), "the task")
    train: Train = section(Train(), "how long, how often")
    eval: Eval = section(Eval(), "evaluations")
    log: Log = section(Log(), "where the log goes beside the run directory")
    checkpoint: Checkpoint = section(Checkpoint(), "when the state is saved")
    replay: Replay = section(Replay(), "what is stored")

    @property
    def several_tasks(self) -> bool:
        """env.name='multi:...'"""
        return self.env.name.startswith("multi:")

    def for_task(self, spec: EnvSpec) -> Self:
        """These settings with those filled in that are left to the task."""
        env = dataclasses.replace(self.env, action_repeat=spec.action_repeat)
        return dataclasses.replace(self, env=env)

    def check_start(self, other: RunSettings) -> Iterator[str]:
        """Why parameters of another run would mean something else here; both are `for_task`."""
        yield from ()

    @abc.abstractmethod
    def updates_per_step(self) -> float:
        """Learner updates of an agent step, of settings that are `for_task`."""

    def files(self) -> dict[str, str]:
        """Paths of the user's own files that the environment is made from, by setting."""
        found = _MAP.fullmatch(self.env.name) or _MAPS.fullmatch(self.env.name)
        return {"env.name": found["path"]} if found else {}

    def with_files(self, paths: Mapping[str, str]) -> Self:
        """These settings with other paths for the files that `files` names."""
        if "env.name" not in paths:
            return self
        found = _MAP.fullmatch(self.env.name) or _MAPS.fullmatch(self.env.name)
        assert found is not None
        name = f"{found[1]}{paths['env.name']}{found[3]}"
        return dataclasses.replace(self, env=dataclasses.replace(self.env, name=name))

    def environment_options(self, training: bool) -> dict[str, Any]:
        """Options of the environment besides its name: for training, or to evaluate."""
        return {}

    def rows_before_learning(self) -> int:
        """Agent steps over all environments that must be stored before the first update."""
        return 2 * self.env.num_envs

    def draws(self) -> tuple[int, ...]:
        """Every number of rows or windows that is drawn from the replay at once.

        Cores that are devices each draw their share where it is whole; 1, as here: never.
        """
        return (1,)

    def gains_by_cores(self) -> bool:
        """Whether the cores of a processor are better each a device, with a share of every batch.

        So it is where the model is small and its operations too short for threads to share. Of a
        large one every core would read all parameters for its few rows.
        """
        return False

    def large_updates(self) -> bool:
        """Whether an update asks each of several cores for more memory than a thread keeps, 64 MB.

        Such a program is faster with its memory in pieces, and is compiled at every start
        (`mbx.fast.allocator`).
        """
        return False

    def reanalyze_interval(self) -> int:
        """Learner updates between two passes over stored planner targets; 0: none are made."""
        return 0

    def reanalyze_min_step(self) -> int:
        """Environment steps before the first such pass."""
        return 0
