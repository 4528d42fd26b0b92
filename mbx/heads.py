r"""Auxiliary heads: a network, its target and its loss, declared once, learned with the model.

    heads.register("inverse_dynamics", heads.Head(
        network=lambda spec: networks.MLP((256,), spec.action_dim),
        inputs=lambda window: (window.encoded[:-1], window.encoded[1:]),
        target=lambda window: window.action,
    ))
    python -m experiments.train --import=my_module --config=tdmpc \
        --config.loss.heads=inverse_dynamics:0.1

An agent with `loss.heads` learns them with its world model: parameters, optimiser, checkpoints and
the log follow from the declaration; gradients reach the model through the head's inputs. Axes: T
transitions of a window, B batch, L latent dims, A action dims.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from mbx import observations
from mbx.fast import collectives
from mbx.types import Array, EnvSpec, Params, streams


class Window(NamedTuple):
    """What a head may read of a batch: T transitions, between T+1 states."""

    # `[T+1, B, ...]` as stored (or shifted images); packed rows as a dictionary of their parts
    obs: Any
    encoded: Array  # latents from each state's own observation, `[T+1, B, L]`
    # latents predicted from the first state on, `[T+1, B, L]`; `encoded` for an agent that filters
    # observations
    latents: Array
    action: Array  # `[T, B, A]`
    reward: Array  # of that action, `[T, B]`
    terminated: Array  # 1 where the action ended the episode by itself, `[T, B]`
    mask: Array  # 0 for transitions that do not count, `[T, B]`


def squared_error(prediction: Array, target: Array) -> Array:
    """Mean over all axes but the first two: `[T, B, ...]` twice -> `[T, B]`.
    Raises ValueError where the shapes differ.
    """
    if prediction.shape != target.shape:
        raise ValueError(
            f"the prediction is {_words(prediction)}, wanted the target's shape, {_words(target)}"
        )
    return jnp.mean(jnp.square(prediction - target), axis=tuple(range(2, target.ndim)))


class Head(NamedTuple):
    """An auxiliary head. On several devices a custom loss or `metrics` gets the whole batch."""

    # task -> a flax module (or anything with `init(key, *inputs)` and `apply`)
    network: Callable[[EnvSpec], Any]
    inputs: Callable[[Window], tuple[Array, ...]]  # the network's
    target: Callable[[Window], Array]  # without gradient
    coef: float = 1.0  # weight of the loss where `loss.heads` gives none
    loss: Callable[[Array, Array], Array] = squared_error  # (prediction, target) -> `[T, B]`
    # (prediction, target) -> further log entries, `[T, B]` each
    metrics: Callable[[Array, Array], Mapping[str, Array]] | None = None
    # (prediction, target, mask) -> `[T, B]`: in place of `loss`, for one that compares transitions
    batch_loss: Callable[[Array, Array, Array], Array] | None = None


_KNOWN: dict[str, Head] = {}


def register(name: str, head: Head) -> None:
    """Register a head for `loss.heads`, replacing one of the same name.
    Raises ValueError for a name that `loss.heads` could not hold, or two losses.

    Examples:
        >>> heads.register("no name", None)
        Traceback (most recent call last):
            ...
        ValueError: head 'no name': choose a name of letters, digits ...
    """
    if not name.isidentifier():
        raise ValueError(f"head {name!r}: choose a name of letters, digits and underscores")
    if head.batch_loss and head.loss is not squared_error:
        raise ValueError(f"head {name!r} has a loss and a batch_loss: give one of them")
    _KNOWN[name] = head


def find(name: str) -> Head:
    """The head of a name. Raises ValueError for an unknown one, naming those registered."""
    if name not in _KNOWN:
        known = f"choose one of {', '.join(_KNOWN)}" if _KNOWN else "none is registered"
        raise ValueError(
            f"loss.heads={name!r}: {known}; heads of your own are registered by a module that "
            "--import names"
        )
    return _KNOWN[name]


@dataclasses.dataclass(frozen=True, eq=False)
class Heads:
    """The heads of an agent, for its task; modules are their networks."""

    heads: Mapping[str, Head]
    modules: Mapping[str, Any]
    coefs: Mapping[str, float]
    spec: EnvSpec

    def init(self, key: Array, latent: int, obs_shape: tuple[int, ...]) -> Params:
        """Parameters by name, for latents of `latent` numbers and observations of a shape."""
        states, one = jnp.zeros((2, 1, latent)), jnp.zeros((1, 1))
        action = jnp.zeros((1, 1, self.spec.action_dim))
        packed = observations.is_packed(self.spec.parts)
        obs = jnp.zeros((2, 1, *obs_shape), jnp.uint8 if packed else jnp.float32)
        window = Window(self.seen(obs), states, states, action, one, one, jnp.ones((1, 1)))
        keys = streams(key, *self.heads)
        return {
            name: self.modules[name].init(keys[name], *_inputs(name, head, window))["params"]
            for name, head in self.heads.items()
        }

    def seen(self, obs: Array) -> Any:
        """`Window.obs` of observations `[T+1, B, ...]`."""
        parts = self.spec.parts
        if not observations.is_packed(parts):
            return obs
        return observations.named(parts, observations.split(parts, obs))

    def losses(self, params: Params, window: Window) -> tuple[dict[str, Array], dict[str, Array]]:
        """Losses by name, and the metrics as NAME/METRIC, all `[T, B]` without the mask.
        Raises ValueError, which names the head, where its loss or a metric has another shape.
        """
        losses, metrics = {}, {}
        for name, head in self.heads.items():
            losses[name], found = self._loss(name, head, params[name], window)
            metrics |= found
        return losses, metrics

    def _loss(
        self, name: str, head: Head, params: Params, window: Window
    ) -> tuple[Array, dict[str, Array]]:
        prediction = self.modules[name].apply({"params": params}, *_inputs(name, head, window))
        target = jax.lax.stop_gradient(head.target(window))
        # A custom loss may compare rows: it gets those of all devices, which returns these rows'.
        compares = head.batch_loss or head.metrics or head.loss is not squared_error
        mask, (steps, rows) = window.mask, window.mask.shape
        devices = collectives.axis_size() if compares else 1
        if compares:
            gather = functools.partial(collectives.all_gather, axis=1)
            prediction, target, mask = jax.tree.map(gather, (prediction, target, mask))
        try:
            if head.batch_loss:
                loss = head.batch_loss(prediction, target, mask)
            else:
                loss = head.loss(prediction, target)
        except ValueError as error:
            raise ValueError(f"head {name!r}: {error}") from error
        found = head.metrics(prediction, target) if head.metrics else {}
        metrics = {f"{name}/{key}": x for key, x in found.items()}
        for what, x in {f"the loss of head {name!r}": loss, **metrics}.items():
            if jnp.shape(x) != (steps, rows * devices):
                wanted = [steps, rows * devices]
                raise ValueError(f"{what} is {_words(x)}, wanted {wanted}, as [T, B]")
        if devices > 1:
            own = collectives.row_offset(rows) + jnp.arange(rows)
            return jax.tree.map(lambda x: jnp.take(x, own, axis=1), (loss, metrics))
        return loss, metrics


def make_heads(terms: Mapping[str, float | None], spec: EnvSpec) -> Heads | None:
    """The heads for coefficients by name (None: as declared); None without any.
    Raises ValueError for an unknown name.
    """
    if not terms:
        return None
    heads = {name: find(name) for name in terms}
    coefs = {name: heads[name].coef if c is None else c for name, c in terms.items()}
    return Heads(heads, {name: head.network(spec) for name, head in heads.items()}, coefs, spec)


def masked_mean(x: Array, mask: Array, count: Array | None = None) -> Array:
    """Mean of `[T, B]` where the mask is 1; on one of n devices its contribution to that mean.

    Args:
        count: the mask's sum over the whole batch, in all or a step; None: summed here.
    """
    count = collectives.psum(jnp.sum(mask)) if count is None else jnp.sum(count)
    return jnp.sum(x * mask) / jnp.maximum(count, 1.0)


def _inputs(name: str, head: Head, window: Window) -> tuple[Array, ...]:
    inputs = head.inputs(window)
    if not isinstance(inputs, tuple):
        raise ValueError(f"head {name!r}: inputs are {_words(inputs)}, wanted a tuple of arrays")
    return inputs


def _words(x: Any) -> str:
    return f"{x.dtype}{list(x.shape)}" if hasattr(x, "dtype") else f"a {type(x).__name__}"
