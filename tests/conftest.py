"""Settings of every test: CPU, no silent broadcasting between ranks, a compilation cache."""

import gc
import importlib.metadata
import os
import tempfile

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("MPLBACKEND", "Agg")
# Compiling is nearly all of the suite's time, and much of it goes into making machine code fast.
# With JAX_DISABLE_MOST_OPTIMIZATIONS=0 the tests run the code that users run.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
if os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] == "1":
    if importlib.metadata.version("jaxlib").startswith("0.10."):  # others end at an unknown flag
        os.environ.setdefault(
            "XLA_FLAGS",
            # One piece of code a program: with two workers no core is free to compile others.
            "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1 "
            # Passes that make loops and long sums fast, and look through all of a program for it.
            "--xla_disable_hlo_passes=simplify-while-loops,while-loop-invariant-code-motion,"
            "while-loop-constant-sinking,tree_reduction_rewriter",
        )
# Quickly compiled programs too: the other worker reads them, a test that makes the same anew, and
# the processes that tests start.
os.environ.setdefault(
    "JAX_COMPILATION_CACHE_DIR", os.path.join(tempfile.gettempdir(), f"mbx-tests-{os.getuid()}")
)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")

import jax
import pytest

from mbx.fast import compiler, reductions

if os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] == "1":
    reductions.ONES = 2  # before anything is traced; half the pieces of code of a train interval
# Options for programs that run once in a while, as on a GPU: JAX refuses to trace one that has some
# into another. This one says what is so anyway.
compiler._ONCE["cpu"] = {"xla_cpu_enable_fast_math": False}
jax.config.update("jax_numpy_rank_promotion", "raise")
# Tracing makes many objects that live on: looking through them all the time finds little.
gc.set_threshold(300_000, 20, 50)


def pytest_collection_finish():
    """What was imported stays, so that no collection looks through it."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def every_logged_name_is_described():
    """A run of any test that logs a name without a description fails."""
    from mbx.training import glossary, logging

    start, log = logging.RunLogger.__init__, logging.RunLogger.log

    def started(self, workdir, *, config, **options):
        self.agent = config.get("agent")
        start(self, workdir, config=config, **options)

    def checked(self, kind, step, values):
        if self.agent in glossary.AGENTS:
            missing = [x for x in values if glossary.meaning(self.agent, x) is None]
            assert not missing, f"{missing}: describe them in mbx/agents/{self.agent}/glossary.py"
        log(self, kind, step, values)

    logging.RunLogger.__init__, logging.RunLogger.log = started, checked
    yield
    logging.RunLogger.__init__, logging.RunLogger.log = start, log


@pytest.fixture
def opengl():
    """Skips where MuJoCo itself finds nothing to draw with: this machine's fault, not ours."""
    try:
        from mujoco.egl import GLContext

        GLContext(8, 8).free()
    except Exception as error:
        pytest.skip(f"no EGL on this machine: {error}")
