"""What the first evaluation runs is compiled while the run already trains.

A tiny model's train step leaves a part of the second core idle, so that compiling there costs less
of the run's time than in front of the evaluation. On an accelerator it stays in front, where some
compilers choose among kernels by timing them; beside training it has not been tried there.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

import jax

from mbx.agents.base import Ahead
from mbx.training import notices
from mbx.training.job import Job, matmul_precision
from mbx.training.state import LoopState


def possible(job: Job) -> bool:
    """Whether a run's evaluations can be compiled ahead: one seed, one process, one CPU."""
    alone = job.partition.processes == 1 and (job.partition.mesh is None or job.partition.cores)
    return alone and job.partition.platform == "cpu" and isinstance(job.evaluate, Ahead)


def abstract(state: LoopState) -> LoopState:
    """The shapes of a run's state and where its arrays are bound to, which outlives donation."""

    def one(x: jax.Array) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)

    return jax.tree.map(one, state)


def compile_evaluation(job: Job, state: LoopState) -> None:
    """Compile the evaluation and what the agent looks at after it, for an abstract state."""
    key = jax.eval_shape(lambda: jax.random.key(0))
    episodes = job.evaluate.compile(state.train, [key])
    if isinstance(job.agent.diagnostics, Ahead):
        job.agent.diagnostics.compile(state.train, state.replay, key)
    if isinstance(job.agent.review, Ahead) and episodes is not None:
        job.agent.review.compile(state.train, state.replay, episodes, key)


def start(job: Job, state: LoopState, precision: str, *, talk: bool) -> Future[None]:
    """Begin to compile, in a thread, for states like this one: its result is to be waited for.

    Args:
        precision: of products, as of the run's other programs.
        talk: say that it compiles.
    """
    shapes = abstract(state)

    def work() -> None:
        with matmul_precision(precision):  # a context of this thread's own
            with notices.compiling("the evaluation beside training", talk):
                compile_evaluation(job, shapes)

    pool = ThreadPoolExecutor(max_workers=1)
    future = pool.submit(work)
    pool.shutdown(wait=False)  # nothing further is submitted
    return future
