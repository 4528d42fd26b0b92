"""Settings of every test: CPU, no silent broadcasting between ranks, a compilation cache."""

import os
import tempfile

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("MPLBACKEND", "Agg")

import jax

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update(
    "jax_compilation_cache_dir", os.path.join(tempfile.gettempdir(), f"mbx-tests-{os.getuid()}")
)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 1.0)
