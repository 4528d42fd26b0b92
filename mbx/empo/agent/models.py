"""What EMPO's agent learns with: networks or lookup tables, one interface.

A `Model` reads a state as a code (`encode`: features, or the state's number), and gives Q_r, V_h^e
for every human and goal at once, and X_h. Networks have one state encoder, trained through V_h^e;
the heads of Q_r and X_h see its output without a gradient into it, and the features. V_h^e is a
product of a state vector and a goal vector, so that all goals of a state cost one encoding. Tables
have one row a state. Axes: N states, H humans, G goals, R joint robot actions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from mbx import networks
from mbx.empo.agent.settings import Model as Options
from mbx.empo.power.worlds import World
from mbx.fast import gradients
from mbx.networks import MLP
from mbx.types import Array, Params

# What a network cannot tell from 0: actions with -Q_r below twice this count as equally good. Only
# those all of whose successors are terminal, worth nearly 0 to the robot, lie there.
Q_FLOOR = 1e-3
MAX_GOALS = 4096


class Model(NamedTuple):
    """Functions of parameters and codes of N states."""

    # key -> params, a dict of "v_h_e", "q_r" and perhaps "x_h", "u_r", "v_r"
    init: Callable[[Array], Params]
    encode: Callable[[Any], Array]  # states `[N, ...]` -> codes
    # (params, codes) -> latents that the heads read; evaluated once a state
    trunk: Callable[[Params, Array], Any]
    q_r: Callable[[Params, Any], Array]  # (params, latents) -> `[N, R]`, below 0
    v_h_e: Callable[[Params, Any], Array]  # (params, latents) -> `[N, H, G]`, unclamped
    # (params, latents) -> `[N, H]`; None where X_h is the sum over goals
    x_h: Callable[[Params, Any], Array] | None
    # (params, latents) -> `[N]`, at least 1, what U_r = -y^eta is made of; None where that is by
    # eq. (8)
    y: Callable[[Params, Any], Array] | None = None
    # (params, latents) -> `[N]`, below 0; None where V_r is by eq. (9)
    v_r: Callable[[Params, Any], Array] | None = None
    # key -> the model with dropout, for losses; None where there is none
    dropping: Callable[[Array], Model] | None = None


def q_from_raw(raw: Array, head: str) -> Array:
    """The output of Q_r's last layer as a value below 0.
    raw: `[..., R]`; for "dueling" `[..., 1 + R]`, a level and an advantage a joint action. head:
    "exp" -exp(raw); "dueling" -exp(level + advantage - its mean), as the level is much larger and
    changes with every update; "softplus" -softplus(raw). All end at -2 Q_FLOOR, with the gradient
    going through.
    """
    if head == "dueling":
        level, advantage = raw[..., :1], raw[..., 1:]
        raw, head = level + advantage - jnp.mean(advantage, axis=-1, keepdims=True), "exp"
    size = jnp.exp(jnp.minimum(raw, 30.0)) if head == "exp" else jax.nn.softplus(raw)
    size = size + Q_FLOOR
    return -(size + jax.lax.stop_gradient(jnp.maximum(size, 2.0 * Q_FLOOR) - size))


class GridEncoder(nn.Module):
    """Features `[N, D]` that begin with a picture -> `[N, hidden]`, in (-1, 1).

    A 3x3 convolution and two residual ones of width `width` over the picture; then two layers of
    `hidden` over all its cells and the rest of the features.
    """

    picture: tuple[int, int, int]
    width: int
    hidden: int

    @nn.compact
    def __call__(self, x: Array) -> Array:
        channels, rows, columns = self.picture
        size = channels * rows * columns
        picture = x[:, :size].reshape(-1, channels, rows, columns).transpose(0, 2, 3, 1)

        def layer(inputs: Array, name: str) -> Array:
            scale = nn.initializers.variance_scaling(2.0, "fan_in", "truncated_normal")
            kernel = self.param(name, scale, (3, 3, inputs.shape[-1], self.width))
            bias = self.param(f"{name}_bias", nn.initializers.zeros, (self.width,))
            return gradients.conv(inputs, kernel) + bias.reshape(1, 1, 1, -1)

        y = jax.nn.relu(layer(picture, "conv_0"))
        for number in (1, 2):
            y = jax.nn.relu(y + layer(y, f"conv_{number}"))
        flat = y.reshape(len(x), -1)
        return MLP([self.hidden], self.hidden, nn.tanh, name="dense")(flat, x[:, size:])


class DroppingMLP(nn.Module):
    """An `MLP` with dropout behind every hidden layer, where a "dropout" key is given to `apply`.

    As in the heads of the original's networks (github.com/mensch72/empo).
    """

    hidden: Sequence[int]
    features: int
    dropout: float

    @nn.compact
    def __call__(self, *inputs: Array) -> Array:
        for number, size in enumerate(self.hidden):
            x = networks.NormedDense(size, name=f"layer_{number}")(*inputs)
            if self.has_rng("dropout"):
                x = networks.dropout(self.make_rng("dropout"), x, self.dropout)
            inputs = (x,)
        return networks.Dense(self.features, name="out")(*inputs)


def _check_options(world: World, options: Options) -> None:
    """Raises ValueError for options that do not go together; settings know their choices."""
    if options.encoder == "conv" and world.channels is None:
        raise ValueError(
            "model.encoder='conv' needs a world whose features begin with a picture, as those of "
            "empo:maps/SOURCE do: choose mlp or identity"
        )
    if options.q_encoder != "shared" and options.encoder == "identity":
        raise ValueError(
            f"model.q_encoder={options.q_encoder!r} with model.encoder='identity': there is no "
            "encoder"
        )
    if options.q_encoder == "split" and options.q_head != "dueling":
        raise ValueError(
            f"model.q_encoder='split' with model.q_head={options.q_head!r}: only dueling has two "
            "parts, choose own"
        )
    if world.num_goals > MAX_GOALS:
        raise ValueError(f"the world has {world.num_goals} goals a human: at most {MAX_GOALS}")


class _Networks:
    """The modules that the settings `model.*` describe, and what each computes.

    A network's latents are (features, V_h^e's encoding of them); with the encoder "identity" both
    are the features.
    """

    def __init__(self, world: World, options: Options, drop_key: Array | None = None) -> None:
        self.world, self.options, self.drop_key = world, options, drop_key
        self.identity, self.dueling = options.encoder == "identity", options.q_head == "dueling"
        hidden, humans, goals = options.hidden, world.num_humans, world.num_goals
        self.body: Any = MLP([hidden], hidden, nn.tanh)
        if options.encoder == "conv":
            self.body = GridEncoder(world.channels, options.conv_width, hidden)
        head: Any = MLP
        if options.dropout:
            head = functools.partial(DroppingMLP, dropout=options.dropout)
        self.state, self.goal = head([hidden], hidden), MLP([hidden], hidden)
        # What a goal's network reads: whose it is, one-hot, and its features.
        whose = jnp.broadcast_to(jnp.eye(humans)[:, None], (humans, goals, humans))
        self.described = jnp.concatenate([whose, world.goal_features], axis=-1)
        self.advantage = head([hidden, hidden], world.num_actions**world.num_robots)
        # A network of its own, so that the jitter of the level does not reach the advantage.
        self.level = head([hidden, hidden], 1)
        self.ability, self.scalar = head([hidden], humans), head([hidden], 1)
        self.others = [n for n in ("x_h", "u_r", "v_r") if getattr(options, n) == "network"]

    def model(self) -> Model:
        return Model(
            self.init,
            jax.vmap(self.world.features),
            self.trunk,
            self.q_r,
            self.v_h_e,
            self.x_h if "x_h" in self.others else None,
            self.y if "u_r" in self.others else None,
            self.v_r if "v_r" in self.others else None,
            self.dropping if self.options.dropout else None,
        )

    def dropping(self, key: Array) -> Model:
        return _Networks(self.world, self.options, key).model()

    def init(self, key: Array) -> Params:
        keys = jax.random.split(key, 5)
        features = jnp.zeros((1, *self.world.features(self.world.example_state).shape))
        latent = features if self.identity else jnp.zeros((1, self.options.hidden))
        read = (features,) if self.identity else (features, latent)
        params = {
            "v_h_e": {
                "state": _fresh(self.state, keys[0], latent),
                "goal": _fresh(self.goal, keys[1], self.described),
            },
            "q_r": self._init_q(keys[2], features, latent, read),
        }
        if not self.identity:
            params["v_h_e"]["encoder"] = _fresh(self.body, keys[3], features)
        for number, name in enumerate(name for name in self.others if name != "x_h"):
            params[name] = _fresh(self.scalar, jax.random.fold_in(keys[4], 1 + number), *read)
        if "x_h" in self.others:
            params["x_h"] = _fresh(self.ability, keys[4], *read)
        return params

    def _init_q(self, key: Array, features: Array, latent: Array, read: tuple) -> Params:
        kind, number = self.options.q_encoder, functools.partial(jax.random.fold_in, key)
        read = read if kind == "shared" else (latent,)
        params = _fresh(self.advantage, key, *read)
        if self.dueling:
            params = {"advantage": params, "level": _fresh(self.level, number(1), *read)}
        if kind == "shared":
            return params
        params = {"heads": params, "encoder": _fresh(self.body, number(2), features)}
        if kind == "split":
            params["level_encoder"] = _fresh(self.body, number(3), features)
        return params

    def trunk(self, params: Params, features: Array) -> tuple[Array, Array]:
        if self.identity:
            return features, features
        return features, self.body.apply({"params": params["v_h_e"]["encoder"]}, features)

    def _head(self, number: int, head: nn.Module, params: Params, *read: Array) -> Array:
        """A head's output; `number` is that of its key, where numbers are dropped."""
        rngs = None
        if self.drop_key is not None:
            rngs = {"dropout": jax.random.fold_in(self.drop_key, number)}
        return head.apply({"params": params}, *read, rngs=rngs)

    def _read(self, latents: tuple[Array, Array]) -> tuple[Array, ...]:
        """What heads other than V_h^e's see."""
        features, latent = latents
        return (features,) if self.identity else (features, jax.lax.stop_gradient(latent))

    def v_h_e(self, params: Params, latents: tuple[Array, Array]) -> Array:
        own = params["v_h_e"]
        state = self._head(0, self.state, own["state"], latents[1])
        goal = self.goal.apply({"params": own["goal"]}, self.described)
        return jnp.einsum("nf,hgf->nhg", state, goal)

    def q_r(self, params: Params, latents: tuple[Array, Array]) -> Array:
        own, kind = params["q_r"], self.options.q_encoder
        read = of_level = self._read(latents)
        if kind != "shared":
            read = of_level = (self.body.apply({"params": own["encoder"]}, latents[0]),)
            if kind == "split":
                of_level = (self.body.apply({"params": own["level_encoder"]}, latents[0]),)
            own = own["heads"]
        if not self.dueling:
            return q_from_raw(self._head(2, self.advantage, own, *read), self.options.q_head)
        level = self._head(1, self.level, own["level"], *of_level)
        advantage = self._head(2, self.advantage, own["advantage"], *read)
        return q_from_raw(jnp.concatenate([level, advantage], axis=-1), "dueling")

    def x_h(self, params: Params, latents: tuple[Array, Array]) -> Array:
        return self._head(3, self.ability, params["x_h"], *self._read(latents))

    def _scalar(self, name: str, params: Params, latents: tuple[Array, Array]) -> Array:
        number = 4 + self.others.index(name)
        return self._head(number, self.scalar, params[name], *self._read(latents))

    def y(self, params: Params, latents: tuple[Array, Array]) -> Array:
        return 1.0 + jnp.exp(jnp.minimum(self._scalar("u_r", params, latents)[:, 0], 30.0))

    def v_r(self, params: Params, latents: tuple[Array, Array]) -> Array:
        head = "exp" if self.dueling else self.options.q_head
        return q_from_raw(self._scalar("v_r", params, latents), head)[:, 0]


def _fresh(module: nn.Module, key: Array, *inputs: Array) -> Params:
    return module.init(key, *inputs)["params"]


def network_model(world: World, options: Options) -> Model:
    """The networks that the settings `model.*` describe.
    Raises ValueError for options that do not go together, and for more than MAX_GOALS goals.
    """
    _check_options(world, options)
    return _Networks(world, options).model()


def table_model(world: World) -> Model:
    """Arrays with a row a state: Q_r starts at -1, V_h^e at 0.5; X_h is the sum over goals.
    From V_h^e = 0 every state not yet met would have no ability, and rewards beyond all measure
    would reach those that were.
    Raises ValueError for a world without state numbers.
    """
    if world.num_states is None:
        raise ValueError("model.kind='tables' needs a world that numbers its states: use networks")
    num_robot_actions = world.num_actions**world.num_robots

    def init(key: Array) -> Params:
        return {
            "v_h_e": jnp.full((world.num_states, world.num_humans, world.num_goals), 0.5),
            "q_r": -jnp.ones((world.num_states, num_robot_actions)),
        }

    return Model(
        init=init,
        encode=jax.vmap(world.index),
        trunk=lambda params, index: index,
        q_r=lambda params, index: params["q_r"][index],
        v_h_e=lambda params, index: params["v_h_e"][index],
        x_h=None,
    )
