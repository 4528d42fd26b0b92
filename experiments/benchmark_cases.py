"""What `experiments.benchmark` measures: a case, and the suites of them."""

from __future__ import annotations

from typing import NamedTuple


class Case(NamedTuple):
    """What is measured: see the flags of the same names."""

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


PRESETS = ("tdmpc2", "sizes", "default", "dreamer", "empo")
FUSED = "fused step"
# Most wanted first: a suite ends where its time does.
SUITES: dict[str, tuple[Case, ...]] = {
    "gpu": (
        Case(size="5", dtype="bfloat16", repeats=9, only=("plan", "update")),
        Case(size="5", repeats=9, only=("plan", "update")),
        Case(
            size="5",
            env="playground:CheetahRun",
            envs=64,
            repeats=5,
            dtype="bfloat16",
            only=(FUSED,),
        ),
        Case(size="317", dtype="bfloat16", repeats=5, only=("update",)),
        Case(preset="dreamer", size="12m", obs=24, dtype="bfloat16", repeats=9),
        Case(size="5", batch=4096, dtype="bfloat16", repeats=5, only=("update",)),
        Case(size="48", dtype="bfloat16", repeats=5, only=("plan", "update")),
        Case(size="19", dtype="bfloat16", repeats=5, only=("plan", "update")),
        Case(size="5", env="brax:halfcheetah", envs=64, repeats=5, dtype="bfloat16", only=(FUSED,)),
        Case(size="5", envs=1024, dtype="bfloat16", repeats=3, only=("plan",)),
        Case(
            size="5",
            env="playground:CheetahRun",
            envs=256,
            repeats=3,
            dtype="bfloat16",
            only=(FUSED,),
        ),
        Case(size="317", batch=1024, dtype="bfloat16", repeats=3, only=("update",)),
        Case(size="5", env="playground:CheetahRun", envs=16, repeats=5, only=(FUSED,)),
        Case(size="5", envs=4096, dtype="bfloat16", repeats=3, only=("plan",)),
    ),
}


SIZES = tuple(
    Case(size=size, batch=batch, only=("plan", "update", "environment", FUSED))
    for size, batch in (("tiny", 128), ("1", 256), ("5", 256))
)
