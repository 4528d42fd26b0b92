"""Optimisers of Dreamer: the official one (adaptive clipping, RMS scaling, momentum) and Adam.

Source: official DreamerV3; sheeprl for the Adams.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import jax
import optax

from mbx.agents.dreamer.networks import ModelConfig
from mbx.agents.dreamer.settings import GROUPS, Optimizer
from mbx.optim import Tensor, clip_adaptively, scale_by_laprop
from mbx.types import Params


def make_optimizers(own: Optimizer, net: ModelConfig) -> dict[str, optax.GradientTransformation]:
    """An optimiser for each group of parameters."""
    own = own.resolved()

    def of_group(group: str, rate: float, clip: float, eps: float) -> optax.GradientTransformation:
        tensor_of = functools.partial(official_tensor, net, group)
        rest = dict(warmup=own.warmup, anneal=own.anneal, schedule=own.schedule)
        rest |= dict(decay=own.weight_decay, tensor_of=tensor_of)
        return make(own.name, rate, clip=clip, eps=eps, **rest)

    numbers = zip(own.learning_rates, own.clips, own.epsilons, strict=True)
    return {group: of_group(group, *given) for group, given in zip(GROUPS, numbers, strict=True)}


def _scheduled(rate: float, schedule: str, warmup: int, anneal: int) -> float | optax.Schedule:
    if schedule == "linear":
        later = optax.linear_schedule(rate, 0.1 * rate, anneal - warmup)
    elif schedule == "cosine":  # the official end is 0.1 times the rate squared
        later = optax.cosine_decay_schedule(rate, anneal - warmup, 0.1 * rate)
    else:
        return optax.linear_schedule(0.0, rate, warmup) if warmup else rate
    return optax.join_schedules([optax.linear_schedule(0.0, rate, warmup), later], [warmup])


def make(
    name: str,
    learning_rate: float,
    *,
    clip: float,
    eps: float,
    warmup: int = 0,
    schedule: str = "const",
    anneal: int = 0,
    decay: float = 0.0,
    tensor_of: Callable[[str], Tensor] = Tensor,
) -> optax.GradientTransformation:
    """The optimiser of a name: "laprop", the official one, after an adaptive clip, or "adam" after
    a clip of the global norm. A clip of 0 is none. The rate rises linearly from 0 at the first of
    `warmup` updates and then follows `schedule` until `anneal`. `decay` is of kernels alone.
    """
    rate = _scheduled(learning_rate, schedule, warmup, anneal)
    if name == "laprop":
        clipping = clip_adaptively(clip, tensor_of=tensor_of)
        shrink = (optax.add_decayed_weights(decay, kernels),) if decay else ()
        solver = (scale_by_laprop(eps=eps), *shrink, optax.scale_by_learning_rate(rate))
    else:
        clipping = optax.clip_by_global_norm(clip)
        adam = optax.adamw(rate, eps=eps, weight_decay=decay, mask=kernels)
        solver = (adam if decay else optax.adam(rate, eps=eps),)
    return optax.chain(clipping if clip else optax.identity(), *solver)


def kernels(params: Params) -> Params:
    """Which leaves are kernels."""
    return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key == "kernel", params)


# Leaves that are one tensor in the official code (`core="dense"`: in sheeprl's).
_JOINED = {
    **{f"rssm/hidden_{x}/kernel": "rssm/hidden/kernel" for x in "hxa"},
    **{f"rssm/in_{x}/kernel": "rssm/in/kernel" for x in "za"},
    **{f"rssm/posterior/{x}/kernel": "rssm/posterior/kernel" for x in ("deter", "tokens")},
}


def official_tensor(net: ModelConfig, group: str, path: str) -> Tensor:
    """The tensor that a leaf of a group of parameters is, or is a part of, in the official code."""
    if group == "model":
        if path.startswith("decoder/vector/out/"):  # a linear output each part of the vector
            sizes = tuple(math.prod(part.shape) for part in net.parts if not part.is_image)
            return Tensor(path, sizes if len(sizes) > 1 else ())
        joined = path in _JOINED and (net.core == "dense" or not path.startswith("rssm/in_"))
        return Tensor(_JOINED[path] if joined else path)
    means_and_stds = group == "actor" and path.startswith("out/") and not net.discrete
    return Tensor(path, (net.action_dim,) * 2 if means_and_stds else ())
