"""Settings of every test: CPU, no silent broadcasting between ranks, a compilation cache."""

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
        os.environ.setdefault("XLA_FLAGS", "--xla_cpu_use_fusion_emitters=false")

import jax

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update(
    "jax_compilation_cache_dir", os.path.join(tempfile.gettempdir(), f"mbx-tests-{os.getuid()}")
)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 1.0)
