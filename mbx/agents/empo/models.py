"""What EMPO's agent learns with: networks or lookup tables, one interface.

A `Model` reads a state as a code (`encode`: features, or the state's number), and gives Q_r, V_h^e
for every human and goal at once, and X_h. Networks: one state encoder, trained through V_h^e; the
heads of Q_r and X_h see its output without a gradient into it, and the features themselves; or Q_r
has an encoder of its own, and its head sees that one's output. V_h^e is a product of a state vector
and a goal vector, so that all goals of a state cost one encoding.
Tables are arrays with one row a state. Axes: N states, H humans, G goals, R joint robot actions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from mbx import networks, power
from mbx.networks import MLP
from mbx.power.worlds import World
from mbx.types import Array, Params

# What a network cannot tell from 0: actions with -Q_r below twice this count as equally good. Only
# those all of whose successors are terminal, worth nearly 0 to the robot, lie there.
Q_FLOOR = 1e-3


class Model(NamedTuple):
    """Functions of parameters and codes of N states.

    Attributes:
        init: key -> params, a dict of "v_h_e", "q_r" and perhaps "x_h", "u_r", "v_r".
        encode: states `[N, ...]` -> codes.
        trunk: (params, codes) -> latents that the heads read; evaluated once a state.
        q_r: (params, latents) -> `[N, R]`, below 0.
        v_h_e: (params, latents) -> `[N, H, G]`, unclamped.
        x_h: (params, latents) -> `[N, H]`; None where X_h is the sum over goals.
        y: (params, latents) -> `[N]`, at least 1, what U_r = -y^eta is made of; None where that is
            by eq. (8).
        v_r: (params, latents) -> `[N]`, below 0; None where V_r is by eq. (9).
    """

    init: Callable[[Array], Params]
    encode: Callable[[Any], Array]
    trunk: Callable[[Params, Array], Any]
    q_r: Callable[[Params, Any], Array]
    v_h_e: Callable[[Params, Any], Array]
    x_h: Callable[[Params, Any], Array] | None
    y: Callable[[Params, Any], Array] | None = None
    v_r: Callable[[Params, Any], Array] | None = None


def q_from_raw(raw: Array, head: str, eta: float, xi: float) -> Array:
    """The output of Q_r's last layer as a value below 0.

    Args:
        raw: `[..., R]`; for "dueling" `[..., 1 + R]`, a level and an advantage a joint action.
        head: "exp" -exp(raw); "dueling" -exp(level + advantage - its mean), as the level is much
            the larger part and changes with every update; "softplus" -softplus(raw); "z"
            -sigmoid(raw)^(-eta xi), at most -1. All but the last end at -2 Q_FLOOR, with the
            gradient going through.
        eta: of eq. (8).
        xi: of eq. (8).
    """
    if head == "dueling":
        level, advantage = raw[..., :1], raw[..., 1:]
        raw, head = level + advantage - jnp.mean(advantage, axis=-1, keepdims=True), "exp"
    if head == "z":
        return power.z_to_q(jax.nn.sigmoid(raw), eta, xi)
    if head not in ("exp", "softplus"):
        raise ValueError(f"model.q_head={head!r}: choose exp, dueling, softplus or z")
    size = jnp.exp(jnp.minimum(raw, 30.0)) if head == "exp" else jax.nn.softplus(raw)
    size = size + Q_FLOOR
    return -(size + jax.lax.stop_gradient(jnp.maximum(size, 2.0 * Q_FLOOR) - size))


class GridEncoder(nn.Module):
    """Features `[N, D]` that begin with a picture -> `[N, features]`, in (-1, 1).

    A convolution 3x3 and `depth` residual ones of width `width` over the picture; then a layer each
    of `hidden` and of `features` over all its cells and the rest of the features.
    """

    picture: tuple[int, int, int]
    width: int
    depth: int
    hidden: int
    features: int

    @nn.compact
    def __call__(self, x: Array) -> Array:
        channels, rows, columns = self.picture
        size = channels * rows * columns
        picture = x[:, :size].reshape(-1, channels, rows, columns).transpose(0, 2, 3, 1)

        def layer(inputs: Array, name: str) -> Array:
            scale = nn.initializers.variance_scaling(2.0, "fan_in", "truncated_normal")
            kernel = self.param(name, scale, (3, 3, inputs.shape[-1], self.width))
            bias = self.param(f"{name}_bias", nn.initializers.zeros, (self.width,))
            return networks.conv(inputs, kernel) + bias.reshape(1, 1, 1, -1)

        y = jax.nn.relu(layer(picture, "conv_0"))
        for number in range(self.depth):
            y = jax.nn.relu(y + layer(y, f"conv_{number + 1}"))
        flat = y.reshape(len(x), -1)
        return MLP([self.hidden], self.features, nn.tanh, name="dense")(flat, x[:, size:])


def _check_options(
    world: World, encoder: str, q_encoder: str, x_h: str, u_r: str, v_r: str, max_goals: int
) -> None:
    if encoder not in ("mlp", "conv", "identity"):
        raise ValueError(f"model.encoder={encoder!r}: choose mlp, conv or identity")
    if encoder == "conv" and world.channels is None:
        raise ValueError(
            "model.encoder='conv' needs a world whose features begin with a picture, as those of "
            "empo:maps/SOURCE do: choose mlp or identity"
        )
    for name, value in (("u_r", u_r), ("v_r", v_r)):
        if value not in ("formula", "network"):
            raise ValueError(f"model.{name}={value!r}: choose formula or network")
    if q_encoder not in ("shared", "own"):
        raise ValueError(f"model.q_encoder={q_encoder!r}: choose shared or own")
    if q_encoder == "own" and encoder == "identity":
        raise ValueError("model.q_encoder='own' with model.encoder='identity': there is no encoder")
    if x_h not in ("sum", "network"):
        raise ValueError(f"model.x_h={x_h!r}: choose sum or network")
    if world.num_goals > max_goals:
        raise ValueError(f"the world has {world.num_goals} goals a human: at most {max_goals}")


def _describe_goals(world: World) -> Array:
    """What a goal's network reads: whose it is, one-hot, and its features, `[H, G, H + F]`."""
    humans, goals = world.num_humans, world.num_goals
    identity = jnp.eye(humans).reshape(humans, 1, humans)
    whose = jnp.broadcast_to(identity, (humans, goals, humans))
    return jnp.concatenate([whose, world.goal_features], axis=-1)


def network_model(
    world: World,
    *,
    hidden: int,
    encoder: str,
    q_head: str,
    x_h: str,
    eta: float,
    xi: float,
    q_encoder: str = "shared",
    u_r: str = "formula",
    v_r: str = "formula",
    conv: tuple[int, int] | None = None,
    max_goals: int = 4096,
) -> Model:
    """Networks of width `hidden`.

    encoder: "mlp" | "conv" of width and depth `conv`, see `GridEncoder` | "identity" (the heads see
        features only).
    q_encoder: "shared" | "own", another one of that kind that is trained through Q_r.
    u_r, v_r: "formula" | "network" of their own; V_r's has the head of Q_r's.

    Raises ValueError for an unknown option, or more goals than are reasonable to evaluate at once.
    """
    _check_options(world, encoder, q_encoder, x_h, u_r, v_r, max_goals)
    q_from_raw(jnp.zeros(2), q_head, eta, xi)
    num_robot_actions = world.num_actions**world.num_robots
    humans, described = world.num_humans, _describe_goals(world)
    body: Any = MLP([hidden], hidden, nn.tanh)
    if encoder == "conv":
        assert world.channels is not None and conv is not None
        body = GridEncoder(world.channels, *conv, hidden, hidden)
    own_q = q_encoder == "own"
    state_head, goal_head = MLP([hidden], hidden), MLP([hidden], hidden)
    q_head_net, x_head = MLP([hidden, hidden], num_robot_actions), MLP([hidden], humans)
    scalar_head = MLP([hidden], 1)
    scalars = [name for name, kind in (("u_r", u_r), ("v_r", v_r)) if kind == "network"]
    # A network of its own, so that the jitter of the level does not reach the advantage.
    level_net = MLP([hidden, hidden], 1)

    def init(key: Array) -> Params:
        keys = jax.random.split(key, 5)
        features = jnp.zeros((1, *world.features(world.example_state).shape))
        latent = features if encoder == "identity" else jnp.zeros((1, hidden))
        inputs = (features,) if encoder == "identity" else (features, latent)
        of_q = (latent,) if own_q else inputs
        params = {
            "v_h_e": {
                "state": state_head.init(keys[0], latent)["params"],
                "goal": goal_head.init(keys[1], described)["params"],
            },
            "q_r": q_head_net.init(keys[2], *of_q)["params"],
        }
        if q_head == "dueling":
            level = level_net.init(jax.random.fold_in(keys[2], 1), *of_q)["params"]
            params["q_r"] = {"advantage": params["q_r"], "level": level}
        if own_q:
            encoded = body.init(jax.random.fold_in(keys[2], 2), features)["params"]
            params["q_r"] = {"heads": params["q_r"], "encoder": encoded}
        if encoder != "identity":
            params["v_h_e"]["encoder"] = body.init(keys[3], features)["params"]
        if x_h == "network":
            params["x_h"] = x_head.init(keys[4], *inputs)["params"]
        for number, name in enumerate(scalars):
            own_key = jax.random.fold_in(keys[4], 1 + number)
            params[name] = scalar_head.init(own_key, *inputs)["params"]
        return params

    def trunk(params: Params, features: Array) -> tuple[Array, Array]:
        if encoder == "identity":
            return features, features
        return features, body.apply({"params": params["v_h_e"]["encoder"]}, features)

    def inputs_of(latents: tuple[Array, Array]) -> tuple[Array, ...]:
        features, latent = latents
        return (features,) if encoder == "identity" else (features, jax.lax.stop_gradient(latent))

    def value(params: Params, latents: tuple[Array, Array]) -> Array:
        own = params["v_h_e"]
        state = state_head.apply({"params": own["state"]}, latents[1])
        goal = goal_head.apply({"params": own["goal"]}, described)
        return jnp.einsum("nf,hgf->nhg", state, goal)

    def q_r(params: Params, latents: tuple[Array, Array]) -> Array:
        read, own = inputs_of(latents), params["q_r"]
        if own_q:
            read = (body.apply({"params": own["encoder"]}, latents[0]),)
            own = own["heads"]
        if q_head == "dueling":
            level = level_net.apply({"params": own["level"]}, *read)
            advantage = q_head_net.apply({"params": own["advantage"]}, *read)
            raw = jnp.concatenate([level, advantage], axis=-1)
        else:
            raw = q_head_net.apply({"params": own}, *read)
        return q_from_raw(raw, q_head, eta, xi)

    def ability(params: Params, latents: tuple[Array, Array]) -> Array:
        return x_head.apply({"params": params["x_h"]}, *inputs_of(latents))

    def scalar(name: str, params: Params, latents: tuple[Array, Array]) -> Array:
        return scalar_head.apply({"params": params[name]}, *inputs_of(latents))

    def aggregate(params: Params, latents: tuple[Array, Array]) -> Array:
        return 1.0 + jnp.exp(jnp.minimum(scalar("u_r", params, latents)[:, 0], 30.0))

    def robot_value(params: Params, latents: tuple[Array, Array]) -> Array:
        head = "exp" if q_head == "dueling" else q_head
        return q_from_raw(scalar("v_r", params, latents), head, eta, xi)[:, 0]

    return Model(
        init,
        jax.vmap(world.features),
        trunk,
        q_r,
        value,
        ability if x_h == "network" else None,
        aggregate if u_r == "network" else None,
        robot_value if v_r == "network" else None,
    )


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
