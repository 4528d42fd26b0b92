"""What EMPO's agent learns with: networks or lookup tables, one interface.

A `Model` reads a state as a code (`encode`: features, or the state's number), and gives Q_r, V_h^e
for every human and goal at once, and X_h. Networks have one state encoder, trained through V_h^e;
the heads of Q_r and X_h see its output without a gradient into it, and the features. V_h^e is a
product of a state vector and a goal vector, so that all goals of a state cost one encoding. Tables
have one row a state: its number, where states are listed, else the row that it got in a hash table
when it was first learned from. Axes: N states, H humans, G goals, R joint robot actions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from mbx import networks
from mbx.empo.agent.settings import Model as Options
from mbx.empo.power.codec import layout
from mbx.empo.power.worlds import World
from mbx.networks import MLP
from mbx.types import Array, Params

# What a network cannot tell from 0: actions with -Q_r below twice this count as equally good. Only
# those all of whose successors are terminal, worth nearly 0 to the robot, lie there.
Q_FLOOR = 1e-3
PROBES = 16  # rows of a hash table that a state may have


class Model(NamedTuple):
    """Functions of parameters and codes of N states; None where the model has no such part."""

    init: Callable[[Array], Params]  # key -> params by name, and "rows" of a hash table
    encode: Callable[[Any], Any]  # states `[N, ...]` -> codes
    trunk: Callable[[Params, Any], Any]  # (params, codes) -> latents, evaluated once a state
    q_r: Callable[[Params, Any], Array]  # (params, latents) -> `[N, R]`, below 0
    v_h_e: Callable[[Params, Any], Array]  # likewise, `[N, H, G]`, unclamped
    x_h: Callable[[Params, Any], Array] | None  # `[N, H]`; None: the sum over goals
    y: Callable[[Params, Any], Array] | None = None  # `[N]` >= 1, U_r = -y^eta; None: eq. (8)
    v_r: Callable[[Params, Any], Array] | None = None  # `[N]`, below 0; None: eq. (9)
    dropping: Callable[[Array], Model] | None = None  # key -> the model with dropout, for losses
    row: Callable[[Any], Array] | None = None  # latents -> rows of the tables
    # (hash table, codes, mask `[N]`) -> the table with rows for these, how many of them found none
    grow: Callable[[Any, Any, Array], tuple[Any, Array]] | None = None


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


class _Networks:
    """The modules that the settings `model.*` describe, and what each computes.
    A network's latents are (features, V_h^e's encoding of them); with the encoder "identity", and
    where V_h^e is a table, both are the features.
    """

    def __init__(self, world: World, options: Options, drop_key: Array | None = None) -> None:
        self.world, self.options, self.drop_key = world, options, drop_key
        self.names = options.held("network")
        self.identity = options.encoder == "identity" or "v_h_e" not in self.names
        self.dueling = options.q_head == "dueling"
        hidden, humans, goals = options.hidden, world.num_humans, world.num_goals
        self.body: Any = MLP([hidden], hidden, nn.tanh)
        if options.encoder == "conv":
            self.body = networks.GridEncoder(world.channels, options.conv_width, hidden)
        head: Any = MLP
        if options.dropout:
            head = functools.partial(networks.DroppingMLP, dropout=options.dropout)
        self.state, self.goal = head([hidden], hidden), MLP([hidden], hidden)
        self.pair = head([hidden], 1)  # of a state and a goal, where features say of both
        # What a goal's network reads: whose it is, one-hot, and its features.
        whose = jnp.broadcast_to(jnp.eye(humans)[:, None], (humans, goals, humans))
        self.described = jnp.concatenate([whose, world.goal_features], axis=-1)
        self.advantage = head([hidden, hidden], world.num_actions**world.num_robots)
        # A network of its own, so that the jitter of the level does not reach the advantage.
        self.level = head([hidden, hidden], 1)
        self.ability, self.scalar = head([hidden], humans), head([hidden], 1)
        self.others = [name for name in self.names if name not in ("v_h_e", "q_r")]

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
        params = {}
        if "v_h_e" in self.names:
            goal = _fresh(self.goal, keys[1], self.described)
            params["v_h_e"] = {"state": _fresh(self.state, keys[0], latent), "goal": goal}
            if self.world.of_goals is not None:
                wide = jnp.zeros((1, 1, 1, self.options.hidden))
                seen = wide, wide, features[:, self.world.of_goals]
                pair_key = jax.random.fold_in(keys[0], 1)
                params["v_h_e"]["pair"] = _fresh(self.pair, pair_key, *seen)
            if not self.identity:
                params["v_h_e"]["encoder"] = _fresh(self.body, keys[3], features)
        if "q_r" in self.names:
            params["q_r"] = self._init_q(keys[2], features, read)
        for number, name in enumerate(name for name in self.others if name != "x_h"):
            params[name] = _fresh(self.scalar, jax.random.fold_in(keys[4], 1 + number), *read)
        if "x_h" in self.others:
            params["x_h"] = _fresh(self.ability, keys[4], *read)
        return params

    def _init_q(self, key: Array, features: Array, read: tuple) -> Params:
        kind, number = self.options.q_encoder, functools.partial(jax.random.fold_in, key)
        read = read if kind == "shared" else (jnp.zeros((1, self.options.hidden)),)
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
        if self.world.of_goals is None:
            return jnp.einsum("nf,hgf->nhg", state, goal)
        seen = state[:, None, None], goal[None], latents[0][:, self.world.of_goals]
        return self._head(7, self.pair, own["pair"], *seen)[..., 0]

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
    Raises ValueError for options that do not go together.
    """
    _check_options(world, options)
    return _Networks(world, options).model()


def make_model(world: World, options: Options) -> Model:
    """What the settings `model.*` say is a network and what a table; raises ValueError as both."""
    if not options.held("table"):
        return network_model(world, options)
    tables = table_model(world, options)
    if not options.held("network"):
        return tables
    return _mixed(network_model(world, options), tables, options)


def _mixed(networks: Model, tables: Model, options: Options) -> Model:
    """Codes and latents are pairs: the networks' and the tables'."""

    def read(name: str, field: str) -> Any:
        number = int(name in options.held("table"))
        function = getattr((networks, tables)[number], field)
        return function and (lambda params, latents: function(params, latents[number]))

    fields = {"q_r": "q_r", "v_h_e": "v_h_e", "x_h": "x_h", "u_r": "y", "v_r": "v_r"}
    drop, grow = networks.dropping, tables.grow
    return Model(
        init=lambda key: networks.init(key) | tables.init(key),
        encode=lambda states: (networks.encode(states), tables.encode(states)),
        trunk=lambda params, codes: (
            networks.trunk(params, codes[0]),
            tables.trunk(params, codes[1]),
        ),
        **{field: read(name, field) for name, field in fields.items()},
        dropping=drop and (lambda key: _mixed(drop(key), tables, options)),
        row=lambda latents: latents[1],
        grow=grow and (lambda rows, codes, mask: grow(rows, codes[1], mask)),
    )


def table_model(world: World, options: Options) -> Model:
    """Arrays with a row a state, which starts at the settings' `model.table_*`.
    From V_h^e = 0 every state not yet met would have no ability, and rewards beyond all measure
    would reach those that were.
    Raises ValueError for a world whose states are not listed, without room for tables.
    """
    listed = world.num_states is not None
    if not listed and not options.table_rows:
        raise ValueError("model.table_rows=0: this world's states are not listed, give tables room")
    rows, humans = world.num_states if listed else options.table_rows, world.num_humans
    words, pack, _ = layout(world.example_state)
    shapes = {"v_h_e": (humans, world.num_goals), "q_r": (world.num_actions**world.num_robots,)}
    shapes |= {"x_h": (humans,), "u_r": (), "v_r": ()}
    of = {name: "q_r" if name == "v_r" else name for name in options.held("table")}
    starts = {name: getattr(options, f"table_{own}", 2.0) for name, own in of.items()}  # y: 2

    def init(key: Array) -> Params:
        params = {name: jnp.full((rows, *shapes[name]), start) for name, start in starts.items()}
        known = {"words": jnp.zeros((rows, words), jnp.int32), "used": jnp.zeros(rows, bool)}
        return params if listed else params | {"rows": known}

    def read(name: str) -> Any:
        def value(params: Params, row: Array) -> Array:
            if listed:
                return params[name][row]
            return params[name].at[row].get(mode="fill", fill_value=starts[name])

        return value if name in starts else None

    return Model(
        init=init,
        encode=jax.vmap(world.index if listed else pack),
        trunk=lambda params, codes: codes if listed else find_rows(params["rows"], codes),
        **{field: read(field) for field in ("q_r", "v_h_e", "x_h", "v_r")},
        y=read("u_r"),
        row=lambda row: row,
        grow=None if listed else add_rows,
    )


def _places(words: Array, rows: int) -> Array:
    """`[N, PROBES]`: the rows in which states of these words may lie."""
    powers = np.cumprod(np.full(words.shape[1], 0x9E3779B1, np.uint32), dtype=np.uint32)
    mixed = jnp.sum(words.astype(jnp.uint32) * powers[None], axis=1, dtype=jnp.uint32)
    mixed = (mixed ^ (mixed >> 15)) * jnp.uint32(0x2C1B3C6D)
    first = (mixed ^ (mixed >> 12)) % jnp.uint32(rows)
    return (first[:, None].astype(jnp.int32) + jnp.arange(PROBES, dtype=jnp.int32)[None]) % rows


def find_rows(known: Params, words: Array) -> Array:
    """The rows `[N]` of states by their words `[N, W]`; one behind the last where it has none."""
    rows = len(known["used"])
    places = _places(words, rows)
    same = known["used"][places] & jnp.all(known["words"][places] == words[:, None], axis=-1)
    return jnp.min(jnp.where(same, places, rows), axis=1)


def add_rows(known: Params, words: Array, mask: Array) -> tuple[Params, Array]:
    """The hash table with rows for the states `[N, W]` of a mask; and how many found no room."""
    rows = len(known["used"])

    def add(known: Params, given: tuple[Array, Array]) -> tuple[Params, Array]:
        words, there = given
        places = _places(words[None], rows)[0]
        free = ~known["used"][places]
        wanted = there & (find_rows(known, words[None])[0] == rows)
        place = jnp.where(wanted & jnp.any(free), places[jnp.argmax(free)], rows)
        known = {
            "words": known["words"].at[place].set(words, mode="drop"),
            "used": known["used"].at[place].set(True, mode="drop"),
        }
        return known, wanted & ~jnp.any(free)

    known, lost = jax.lax.scan(add, known, (words, mask))
    return known, jnp.sum(lost)
