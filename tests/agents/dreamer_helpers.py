"""Settings of Dreamer's tests; the references' parameters as this project's trees."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mbx.agents.dreamer.networks import ModelConfig
from mbx.agents.dreamer.settings import Settings
from mbx.types import EnvSpec

Params = dict[str, Any]


def change(settings: Settings, **sections: Any) -> Settings:
    """`settings` with some of them replaced: change(settings, loss=dict(batch_size=2))."""
    new = {
        name: dataclasses.replace(getattr(settings, name), **values)
        for name, values in sections.items()
    }
    return dataclasses.replace(settings, **new)


def make_settings(net: ModelConfig, **sections: Any) -> Settings:
    """Resolved settings with the published numbers, from which `configs/dreamer.py` deviates."""
    published = change(
        dataclasses.replace(Settings(), model=net),
        loss=dict(batch_length=64, free_nats=1.0, representation_coef=0.1),
        imagination=dict(rows=0),
        actor=dict(gradient="reinforce"),
        optimizer=dict(learning_rates=(1e-4, 8e-5, 8e-5), clips=(1000.0, 100.0, 100.0)),
    )
    return change(published, **sections)


def batch_major(x: Any) -> Any:
    """[B, T, ...] -> [T, B, ...]; NumPy's stay NumPy's, which compiles nothing."""
    return x.swapaxes(0, 1)


# Official code: kernels [in, out], block kernels [G, in/G, out/G]


class Official:
    """Reads parameters by their official names; `layer` and `linear` make our dicts."""

    def __init__(self, arrays: Mapping[str, np.ndarray], prefix: str):
        self.arrays, self.prefix = arrays, prefix

    def __call__(self, name: str) -> jax.Array:
        return jnp.asarray(self.arrays[self.prefix + name])

    def linear(self, name: str) -> Params:
        return {"kernel": self(f"{name}/kernel"), "bias": self(f"{name}/bias")}

    def layer(self, name: str, norm: str) -> Params:
        return self.linear(name) | {"norm": {"scale": self(f"{norm}/scale")}}

    def mlp(self, name: str, layers: int) -> Params:
        return {
            f"layer_{i}": self.layer(f"{name}/linear{i}", f"{name}/norm{i}") for i in range(layers)
        }

    def head(self, name: str, layers: int, out: str) -> Params:
        return self.mlp(f"{name}/mlp", layers) | {"out": self.linear(f"{name}/head/{out}")}


def official_rssm(read: Official, config: ModelConfig) -> Params:
    """The recurrent model."""
    width, hidden, deter = config.deter // config.blocks, config.hidden, config.deter
    kernel = read("dyn/dynhid0/kernel")  # [G, D/G + 3 hidden, D/G]
    inputs = jnp.moveaxis(kernel[:, width:], 0, 1).reshape(3 * hidden, deter)
    obs = read("dyn/obs0/kernel")
    params = {
        "in_h": read.layer("dyn/dynin0", "dyn/dynin0norm"),
        "in_z": read.layer("dyn/dynin1", "dyn/dynin1norm"),
        "in_a": read.layer("dyn/dynin2", "dyn/dynin2norm"),
        "hidden_h": {"kernel": kernel[:, :width]},
        "hidden_x": {"kernel": inputs[: 2 * hidden]},
        "hidden_a": {"kernel": inputs[2 * hidden :], "bias": read("dyn/dynhid0/bias")},
        "hidden_norm": {"scale": read("dyn/dynhid0norm/scale")},
        "gru": read.linear("dyn/dyngru"),
        "prior": {
            f"layer_{i}": read.layer(f"dyn/prior{i}", f"dyn/prior{i}norm")
            for i in range(config.prior_layers)
        },
        "posterior": {
            "deter": {"kernel": obs[:deter]},
            "tokens": {"kernel": obs[deter:], "bias": read("dyn/obs0/bias")},
            "norm": {"scale": read("dyn/obs0norm/scale")},
            "rest": {},
            "out": read.linear("dyn/obslogit"),
        },
    }
    params["prior"]["out"] = read.linear("dyn/priorlogit")
    return params


def _conv(read: Official, name: str, norm: str) -> Params:
    return read.linear(name) | {"norm": {"scale": read(f"{norm}/scale")}}


def official_params(read: Official, config: ModelConfig, n: Mapping[str, Any]) -> Params:
    """Everything but the slow critic. The decoder there reads [z, h], ours [h, z]."""
    flat, model = config.stoch * config.classes, {"rssm": official_rssm(read, config)}
    model["encoder"], model["decoder"] = {}, {}
    if config.vector_dim:
        model["encoder"]["vector"] = {
            f"layer_{i}": read.layer(f"enc/mlp{i}", f"enc/mlp{i}norm")
            for i in range(n["enc_layers"])
        }
        decoder = read.mlp("dec/mlp", n["dec_layers"])
        kernel = decoder["layer_0"]["kernel"]
        decoder["layer_0"]["kernel"] = jnp.concatenate([kernel[flat:], kernel[:flat]])
        outs = [read.linear(f"dec/vec/{key}/pred") for key in vector_keys(read.arrays)]
        decoder["out"] = jax.tree.map(lambda *x: jnp.concatenate(x, axis=-1), *outs)
        model["decoder"]["vector"] = decoder
    if config.image_shape is not None:
        stages = range(len(n["mults"]))
        model["encoder"]["image"] = {
            f"layer_{i}": _conv(read, f"enc/cnn{i}", f"enc/cnn{i}norm") for i in stages
        }
        model["decoder"]["image"] = {
            "deter": read.linear("dec/sp0"),
            "stoch_0": read.layer("dec/sp1", "dec/sp1norm"),
            "stoch_1": read.linear("dec/sp2"),
            "norm": {"scale": read("dec/spnorm/scale")},
            "convs": {
                f"layer_{i}": _conv(read, f"dec/conv{i}", f"dec/conv{i}norm") for i in stages[:-1]
            },
            "out": read.linear("dec/imgout"),
        }
    model["reward"] = read.head("rew", n["rew_layers"], "logits")
    model["continue"] = read.head("con", n["con_layers"], "logit")
    actor = read.mlp("pol/mlp", n["pol_layers"])
    outs = ["logits"] if config.discrete else ["mean", "stddev"]
    outs = [read.linear(f"pol/head/action/{out}") for out in outs]
    actor["out"] = jax.tree.map(lambda *x: jnp.concatenate(x, axis=-1), *outs)
    return {"model": model, "actor": actor, "critic": read.head("val", n["val_layers"], "logits")}


def vector_keys(arrays: Mapping[str, np.ndarray]) -> list[str]:
    """Vector observations of a fixture, sorted."""
    return sorted({k.split("/")[3] for k in arrays if k.startswith("p/dec/vec/")})


# sheeprl: weights [out, in], LayerNorm with weight and bias


class Sheeprl(Official):
    """As `Official`; features there are [z, h], ours [h, z]."""

    def norm(self, name: str) -> Params:
        return {"scale": self(f"{name}.weight"), "shift": self(f"{name}.bias")}

    def linear(self, name: str) -> Params:
        return {"kernel": self(f"{name}.weight").T, "bias": self(f"{name}.bias")}

    def layer(self, name: str, flat: int = 0) -> Params:
        kernel = self(f"{name}.0.weight").T
        kernel = jnp.concatenate([kernel[flat:], kernel[:flat]])
        return {"kernel": kernel, "norm": self.norm(f"{name}.1")}


def sheeprl_rssm(read: Sheeprl, config: ModelConfig) -> Params:
    """The recurrent model with its learned initial state."""
    flat, deter = config.stoch * config.classes, config.deter
    inputs = read("recurrent_model.mlp._model.0.weight").T
    posterior = read("representation_model._model.0.weight").T
    return {
        "in_z": {"kernel": inputs[:flat]},
        "in_a": {"kernel": inputs[flat:]},
        "in_norm": read.norm("recurrent_model.mlp._model.1"),
        "gru": {"kernel": read("recurrent_model.rnn.linear.weight").T},
        "gru_norm": read.norm("recurrent_model.rnn.layer_norm"),
        "prior": {
            "layer_0": read.layer("transition_model._model"),
            "out": read.linear("transition_model._model.3"),
        },
        "posterior": {
            "deter": {"kernel": posterior[:deter]},
            "tokens": {"kernel": posterior[deter:]},
            "norm": read.norm("representation_model._model.1"),
            "rest": {},
            "out": read.linear("representation_model._model.3"),
        },
        "initial": read("initial_recurrent_state"),
    }


def sheeprl_params(arrays: Mapping[str, np.ndarray], prefix: str, config: ModelConfig) -> Params:
    """Everything but the slow critic."""
    flat = config.stoch * config.classes
    world = Sheeprl(arrays, f"{prefix}/world_model/")
    rssm = Sheeprl(arrays, f"{prefix}/world_model/rssm.")
    actor = Sheeprl(arrays, f"{prefix}/actor/")
    decoder = "observation_model.mlp_decoder"
    model = {
        "encoder": {"vector": {"layer_0": world.layer("encoder.mlp_encoder.model._model")}},
        "rssm": sheeprl_rssm(rssm, config),
        "decoder": {
            "vector": {
                "layer_0": world.layer(f"{decoder}.model._model", flat),
                "out": world.linear(f"{decoder}.heads.0"),
            }
        },
    }
    for ours in ("reward", "continue"):
        theirs = f"{ours}_model._model"
        model[ours] = {"layer_0": world.layer(theirs, flat), "out": world.linear(f"{theirs}.3")}
    outs = [actor.linear(f"mlp_heads.{i}") for i in range(len(config.factors) or 1)]
    out = jax.tree.map(lambda *x: jnp.concatenate(x, axis=-1), *outs)
    return {
        "model": model,
        "actor": {"layer_0": actor.layer("model._model", flat), "out": out},
        "critic": sheeprl_critic(Sheeprl(arrays, f"{prefix}/critic/"), flat),
    }


def sheeprl_critic(read: Sheeprl, flat: int) -> Params:
    """A critic, or the slow one."""
    return {"layer_0": read.layer("_model", flat), "out": read.linear("_model.3")}


NET = ModelConfig(
    **dict(vector_dim=2, action_dim=2, deter=8, hidden=6, stoch=2, classes=4, units=8, blocks=2),
    **dict(policy_layers=1, value_layers=1, encoder_layers=1, decoder_layers=1, num_bins=21),
)


CONTEXT = make_settings(
    NET,
    loss=dict(batch_size=2, batch_length=5, updates="joint", continue_discount=True),
    imagination=dict(horizon=2, continues="soft", first_continue="predicted"),
    critic=dict(replay_gradient=True),
    replay=dict(context=True, online=True),
    optimizer=dict(name="laprop", learning_rates=(0.0, 0.0, 0.0), warmup=0),
)


SPEC = EnvSpec("x", (2,), jnp.float32, 2, 10, 1)


def moved(params):
    """Parameters none of which is the exact zero that many start with."""

    def move(x):
        return jnp.asarray(x + 0.1 * np.cos(np.arange(x.size)).reshape(x.shape), x.dtype)

    return jax.tree.map(move, jax.device_get(params))
