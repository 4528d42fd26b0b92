"""Published rates of accelerators, and the least time that a program could take on one.

Sources, read in 2026: cloud.google.com/tpu/docs/v4, /v5e, /v5p, /v6e; NVIDIA's data sheets of the
H100 and the H200 (SXM, without sparsity). The exchange between chips is what leaves a chip through
all its links at once: half of what Google calls bidirectional, half of NVLink's total.
"""

from __future__ import annotations

from typing import NamedTuple

from experiments.hlo_costs import Collective


class Chip(NamedTuple):
    """A chip's published rates.

    Attributes:
        flops: bfloat16 products and sums a second.
        bandwidth: of its memory, bytes a second.
        memory: bytes.
        exchange: bytes a second that leave it for other chips.
    """

    flops: float
    bandwidth: float
    memory: float
    exchange: float


CHIPS = {
    "v4": Chip(275e12, 1200e9, 32e9, 300e9),
    "v5e": Chip(197e12, 819e9, 16e9, 200e9),
    "v5p": Chip(459e12, 2765e9, 95e9, 600e9),
    "v6e": Chip(918e12, 1638e9, 32e9, 400e9),
    "h100": Chip(989e12, 3350e9, 80e9, 450e9),
    "h200": Chip(989e12, 4800e9, 141e9, 450e9),
}


# What XLA asks of a GPU that it compiles for and that is not there, from the same data sheets and
# NVIDIA's table of compute capability 9.0.
_HOPPER = """
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  shared_memory_per_block: 49152 shared_memory_per_core: 233472
  shared_memory_per_block_optin: 232448
  core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98 l2_cache_size: 52428800
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  memory_bandwidth: {bandwidth:.0f} device_memory_size: {memory:.0f}
  cuda_compute_capability {{ major: 9 }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 1 patch: 0 }}
device_description_str: "NVIDIA {name}"
"""
GPUS = {
    name: _HOPPER.format(
        name=name.upper(), bandwidth=CHIPS[name].bandwidth, memory=CHIPS[name].memory
    )
    for name in ("h100", "h200")
}


class Floor(NamedTuple):
    """Seconds that a program takes at least, if nothing overlaps within a column.

    Attributes:
        compute: its products, at the rate of bfloat16 ones.
        memory: its bytes.
        exchange: those that it sends to other chips, without latency.
    """

    compute: float
    memory: float
    exchange: float

    @property
    def binds(self) -> str:
        """Which of them is the longest."""
        return max(self._fields, key=lambda name: getattr(self, name))

    @property
    def seconds(self) -> float:
        """The longest, since the others may happen at the same time."""
        return max(self)


def sent(found: Collective, devices: int) -> float:
    """Bytes that a device sends at least in one run of a collective.

    Of an all-reduce of n devices twice (n - 1) / n of the array: every part has to be added up
    somewhere and to come back. Of a gather, a reduce-scatter or an exchange of parts, once.
    """
    num = found.devices or devices
    share = (num - 1) / num if num else 0.0
    if found.kind == "all-reduce":
        return 2.0 * share * found.bytes
    if found.kind in ("collective-permute", "collective-broadcast"):
        return found.bytes
    return share * found.bytes


def floor(
    chip: Chip, flops: float, moved: float, found: list[Collective], devices: int, steps: int = 1
) -> Floor:
    """The least time of one of `steps` steps of a program.

    Args:
        chip: that it runs on.
        flops: of a chip, in all steps.
        moved: bytes that it reads and writes, in all steps.
        found: the program's collectives.
        devices: that the program is divided among.
        steps: of the program.
    """
    away = sum(one.times * sent(one, devices) for one in found)
    return Floor(
        flops / chip.flops / steps, moved / chip.bandwidth / steps, away / chip.exchange / steps
    )
