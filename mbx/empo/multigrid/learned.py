"""Human priors that a network has learned from exact ones: `humans.model=learned`.

Equations (1) to (3) need a list of states, which small maps have; what a network learned from these
it says of all maps of their kind. It reads a state once for every human and goal: a convolution,
repeated, carries over the board how far things are, and the policy is read at the human's cell.
`python -m benchmarks.empo prior` writes the file. Axes: N states, H humans, G goals, A actions."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import unflatten_dict

from mbx.empo.multigrid.compact import make_features, used_channels
from mbx.empo.multigrid.family import SHARED, Family
from mbx.empo.multigrid.layout import Layout
from mbx.empo.multigrid.state import State
from mbx.empo.power.equations import PowerParams
from mbx.networks import RepeatedConv
from mbx.types import Array

ROUNDS = 10  # cells that the network sees beyond those next to the human
_POWER = ("beta_h", "gamma_h", "nu_h", "optimistic")  # all that equations (1) to (3) read


class Network(nn.Module):
    """Features of `compact`, `[N, D]`, to logits of the humans' actions, `[N, H, G, A]`."""

    agreed: Mapping[str, Any]  # see `agreement`
    width: int

    @nn.compact
    def __call__(self, x: Array) -> Array:
        channels, *cells = picture = self.agreed["picture"]
        humans, goals, robots = (self.agreed[name] for name in ("humans", "goals", "robots"))
        planes, rest = jnp.split(x, [int(np.prod(picture))], axis=1)
        planes = planes.reshape(-1, channels, *cells)
        seen, marks = jnp.split(planes, [channels - humans * goals], axis=1)
        own = seen[:, -4 * (humans + robots) :][:, : 4 * humans].reshape(-1, 4, *cells)
        # From here on a row is a state, a human and a goal.
        own, pairs = jnp.repeat(own, goals, axis=0), humans * goals
        parts = jnp.repeat(seen, pairs, axis=0), own, marks.reshape(-1, 1, *cells)
        picture = jnp.moveaxis(jnp.concatenate(parts, axis=1), 1, 3)
        carried = RepeatedConv(self.width, ROUNDS, name="board")
        board = carried(picture, jnp.repeat(rest, pairs, axis=0))
        here = jnp.einsum("nyxw,nyx->nw", board, jnp.sum(own, axis=1))
        hidden = jax.nn.relu(nn.Dense(2 * self.width, name="hidden")(here))
        logits = nn.Dense(self.agreed["actions"], name="out")(hidden)
        return logits.reshape(-1, humans, goals, logits.shape[-1])


def agreement(family: Family, params: PowerParams, channels: np.ndarray) -> dict[str, Any]:
    """What a file and a run must have in common, as JSON; channels: see `used_channels`."""
    template = family.template
    features, picture = make_features(template, channels)
    start = jax.tree.map(lambda x: x[0], family.starts)
    found = {name: getattr(template, name) for name in SHARED}
    found |= {"humans": len(template.humans), "robots": len(template.robots)}
    found |= {"goals": template.goals.shape[1], "actions": template.num_actions}
    found |= {f"power.{name}": getattr(params, name) for name in _POWER}
    found |= {"channels": channels.tolist(), "picture": picture}
    found |= {"features": jax.eval_shape(lambda state: features(template, state), start).size}
    return json.loads(json.dumps(found))


def load(path: str, family: Family, params: PowerParams) -> Callable[[Layout, State], Array]:
    """`prior(layout, state)` -> `[H, G, A]` by the network of a file.
    Raises ValueError for a file of another kind, of other maps, or made with other parameters.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = dict(file)
        there = json.loads(str(arrays.pop("about")))["agreed"]
        channels, width = np.array(there["channels"], int), arrays["board/read"].shape[3]
    except (ValueError, LookupError, TypeError, OSError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(
            f"humans.network={path!r} cannot be read ({error}): give a file that `python -m "
            "benchmarks.empo prior` wrote"
        ) from error
    here = agreement(family, params, channels)
    here["channels"] = sorted({*channels.tolist(), *used_channels(family.places).tolist()})
    for name, value in here.items():
        if there.get(name) != value:
            raise ValueError(
                f"humans.network={path!r} was learned with {name}={there.get(name)!r}, this run "
                f"has {value!r}: give a file for it, see `python -m benchmarks.empo prior`"
            )
    network, weights = Network(here, width), unflatten_dict(arrays, "/")
    features, _ = make_features(family.template, channels)
    want = jax.eval_shape(network.init, jax.random.key(0), jnp.zeros((1, here["features"])))
    if jax.tree.map(jnp.shape, weights) != jax.tree.map(jnp.shape, want["params"]):
        raise ValueError(f"humans.network={path!r} is damaged: arrays are missing or too many")

    def prior(layout: Layout, state: State) -> Array:
        logits = network.apply({"params": weights}, features(layout, state)[None])
        return jax.nn.softmax(logits[0], axis=-1)

    return prior
