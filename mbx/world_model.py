"""The TD-MPC2 latent world model as a record of pure functions over a dict of parameters.

In: a `WorldModelConfig`. Out: `make_world_model`'s `WorldModel`: encode an observation to a latent,
step the latent with an action, predict reward, value, policy and termination from it. Nothing here
samples: noise and ensemble heads come in as arguments.

Axes: H dynamics heads, R reward heads, V value heads, G auxiliary values, L latent dims, A action
dims, K bins; other leading axes `...` are free and inputs may broadcast against each other
(`z [B, 1, L]` with `action [B, N, A]`). Ensembles lead: latents of the dynamics are `[H, ..., L]`.
Sources: TD-MPC2 (arXiv 2310.16828), section 3.1 and its reference code; docs/sources.md, entry
ensembles.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mbx import categorical, networks, observations
from mbx import distributions as dist
from mbx.heads import Heads
from mbx.types import Array, Params, Part, TaskSet, limit_norm, streams

CRITICS = ("q", "v")
POLICIES = ("squashed", "tanh_mean", "categorical")

# TD-MPC2's published sizes by millions of parameters; "tiny" is ours for CPUs: 0.13M, 0.2M with a
# Q critic.
MODEL_SIZES: dict[str, dict[str, int]] = {
    "tiny": dict(
        enc_dim=96, mlp_dim=96, latent_dim=64, num_enc_layers=2, num_values=5, num_channels=8
    ),
    "1": dict(enc_dim=256, mlp_dim=384, latent_dim=128, num_enc_layers=2, num_values=2),
    "5": dict(enc_dim=256, mlp_dim=512, latent_dim=512, num_enc_layers=2, num_values=5),
    "19": dict(enc_dim=1024, mlp_dim=1024, latent_dim=768, num_enc_layers=3, num_values=5),
    "48": dict(enc_dim=1792, mlp_dim=1792, latent_dim=768, num_enc_layers=4, num_values=5),
    "317": dict(enc_dim=4096, mlp_dim=4096, latent_dim=1376, num_enc_layers=5, num_values=8),
}


@dataclasses.dataclass(frozen=True)
class WorldModelConfig:
    """Shapes and options of the world model; defaults are TD-MPC2's 5M model."""

    obs_shape: tuple[int, ...]  # `[D]`, an image `[64, 64, C]`, or, with `flat`, any shape
    action_dim: int
    enc_dim: int = 256
    mlp_dim: int = 512
    latent_dim: int = 512
    num_enc_layers: int = 2
    num_values: int = 5  # V
    num_dynamics: int = 1  # H
    num_rewards: int = 1  # R
    num_aux: int = 0  # auxiliary values G of other discounts, each its own network
    aux_joint: bool = False  # one network for all of them
    # weight of frozen random networks in the heads (docs/sources.md, entry ensembles)
    prior_scale: float = 0.0
    num_channels: int = 32  # of the pixel encoder
    simnorm_dim: int = 8  # latent dims that one softmax normalises
    num_bins: int = 101  # K
    bin_min: float = -10.0  # in symlog space, as bin_max
    bin_max: float = 10.0
    critic: str = "q"  # "q": Q(z, a) (TD-MPC2); "v": V(z)
    # "squashed" Gaussian (TD-MPC2); "tanh_mean": a Gaussian around tanh(mean) with clipped samples
    # (BMPC); "categorical" over one-hot actions
    policy: str = "squashed"
    episodic: bool = False  # learn a termination head
    log_std_min: float = -10.0
    log_std_max: float = 2.0
    dropout: float = 0.01  # in the first hidden layer of each value head
    dtype: str = "float32"
    # several tasks in one model, whose observations end in a one-hot task
    tasks: TaskSet | None = None
    flat: bool = False  # read observations of several axes (boards, stacked vectors) as one vector
    parts: tuple[Part, ...] = ()  # parts that `mbx.observations` joined into an observation
    # normalise vectors by their running statistics, joint over tasks
    normalize_observations: bool = False

    def __post_init__(self) -> None:
        if self.latent % self.simnorm_dim:
            raise ValueError(
                f"latent_dim={self.latent} is not divisible by simnorm_dim={self.simnorm_dim}: "
                "choose a latent_dim that is a multiple of it"
            )
        least = dict(num_values=1, num_dynamics=1, num_rewards=1, num_bins=2)
        for field, number in least.items():
            if getattr(self, field) < number:
                raise ValueError(f"{field}={getattr(self, field)}: must be at least {number}")
        for field, value, choices in (
            ("critic", self.critic, CRITICS),
            ("policy", self.policy, POLICIES),
            ("dtype", self.dtype, ("float32", "bfloat16")),
        ):
            if value not in choices:
                raise ValueError(f"{field}={value!r}: choose one of {choices}")
        image = self.image_shape
        if image is not None and image[:2] != (64, 64):
            raise ValueError(
                f"obs_shape={image}: the pixel encoder takes 64x64xC images; resize them"
            )
        if self.normalize_observations and not self.mixed and (self.pixels or self.flat):
            raise ValueError(
                f"model.normalize_observations=True: obs_shape={self.obs_shape} is an image or has "
                "several axes, and vectors alone are normalised: leave it False"
            )
        if self.pixels and self.tasks is not None:
            raise ValueError(
                f"obs_shape={self.obs_shape} with tasks {self.tasks.names}: several tasks need "
                "vector observations"
            )

    @property
    def mixed(self) -> bool:
        """Whether observations are packed rows of images and numbers (`mbx.observations`)."""
        return observations.is_packed(self.parts)

    @property
    def image_shape(self) -> tuple[int, ...] | None:
        """Shape of an observation's image; None without one."""
        if self.mixed:
            return observations.layout(self.parts).image_shape
        return self.obs_shape if len(self.obs_shape) == 3 and not self.flat else None

    @property
    def pixels(self) -> bool:
        """Whether observations are, or have, images `[H, W, C]`."""
        return self.image_shape is not None

    @property
    def latent(self) -> int:
        """Latent dims L: fixed by the channels for images alone, else `latent_dim`."""
        alone = self.pixels and not self.mixed
        return 16 * self.num_channels if alone else self.latent_dim


def config_for_size(model_size: str | int, **overrides: Any) -> WorldModelConfig:
    """The configuration of a published size ("tiny", 1, 5, 19, 48, 317) with overrides.

    Overrides that are None keep the size's value. Raises ValueError for an unknown size.
    """
    name = str(model_size)
    if name not in MODEL_SIZES:
        raise ValueError(f"model_size={model_size!r}: choose one of {tuple(MODEL_SIZES)}")
    fields = {k: v for k, v in overrides.items() if v is not None}
    return WorldModelConfig(**{**MODEL_SIZES[name], **fields})


# Share of the uniform distribution in categorical policies (DreamerV3): logarithms stay finite.
UNIMIX = 0.01


@dataclasses.dataclass(frozen=True, eq=False)
class WorldModel:
    """The model of a configuration: pure functions of its parameters.

    `params` is a dict with one entry a component: encoder, policy and, where episodic, termination;
    stacked heads dynamics `[H, ...]`, reward `[R, ...]` and value `[V, ...]`; "task" `[K, D]` for
    several tasks; "statistics" where observations are normalised.

    Attributes:
        heads: auxiliary heads, whose parameters are "heads".
        reduce_values: a reduction `[V, ...] -> [...]` for `head_values`.
    """

    config: WorldModelConfig
    heads: Heads | None = None
    reduce_values: Callable[[Array], Array] | None = None

    def _replace(self, **changes: Any) -> WorldModel:
        """The model with other fields, or with other functions in the place of methods."""
        for name in changes:
            if not hasattr(self, name):
                raise ValueError(f"a world model has no {name!r}: give a field or a method of it")
        new = copy.copy(self)
        vars(new).update(changes)
        return new

    @functools.cached_property
    def _networks(self) -> dict[str, Any]:
        return _modules(self.config)

    @functools.cached_property
    def init(self) -> Callable[[Array], Params]:
        """Function of a key that makes new parameters."""
        return jax.jit(functools.partial(_init, self.config, self._networks))

    @staticmethod
    def project(params: Params) -> Params:
        """Parameters within their constraints, after an optimiser's step: task embeddings of norm
        at most 1."""
        return {**params, "task": limit_norm(params["task"])} if "task" in params else params

    def bins(self) -> Array:
        """Bins of two-hot distributions, `[K]` in symlog space."""
        return _bins(self.config)

    def decode(self, logits: Array) -> Array:
        """Logits `[..., K]` -> real values `[...]`."""
        return dist.two_hot_mean(logits, self.bins())

    def see(self, params: Params, obs: Array) -> Params:
        """Parameters with observation statistics updated by the batch."""
        if not self.config.normalize_observations:
            return params
        known = observations.update(params["statistics"], _inputs(self.config, obs)[-1])
        return {**params, "statistics": known}

    def encode(self, params: Params, obs: Array) -> Array:
        """Latents `[..., L]`: images by convolutions, numbers by dense layers, packed rows
        (`mbx.observations`) by both."""
        *images, last = _inputs(self.config, obs)
        if self.config.normalize_observations:
            last = observations.normalize(params["statistics"], last)
        encoder, own = self._networks["encoder"], {"params": params["encoder"]}
        if (tasks := self.config.tasks) is None:
            return encoder.apply(own, *images, last)
        one_hot = tasks.split(obs)[1]
        embedding = one_hot @ params["task"]
        tail = jnp.concatenate([embedding, one_hot], axis=-1)
        return tasks.attach(encoder.apply(own, *images, last, embedding), tail)

    def tile_heads(self, z: Array) -> Array:
        """Latents `[H, ..., L]`, identical for every dynamics head."""
        return jnp.broadcast_to(z, (self.config.num_dynamics, *z.shape))

    def step(self, params: Params, z: Array, action: Array) -> Array:
        """Next latents `[H, ..., L]`, head h from row h of `z` `[H, ..., L]`; action `[..., A]` or
        `[H, ..., A]`."""
        own, action = self._pair(z, action)
        action = jnp.broadcast_to(action, (z.shape[0], *action.shape[1:]))
        new = networks.apply_heads(self._networks["dynamics"], params["dynamics"], own, action)
        tasks = self.config.tasks
        return new if tasks is None else tasks.attach(new, tasks.tail(z))

    def reward(self, params: Params, z: Array, action: Array) -> Array:
        """Reward logits `[R, H, ..., K]`, all reward heads on all rows of `z` `[H, ..., L]` (give
        it a leading axis of 1 for a state that no dynamics head has stepped yet)."""
        return self._distribution("reward", params["reward"], *self._pair(z, action))

    def reward_mean(self, params: Params, z: Array, action: Array) -> Array:
        """Decoded rewards `[R, H, ...]`, cheaper than decoding where heads have priors."""
        return self._mean("reward", params["reward"], *self._pair(z, action))

    def value(
        self,
        value_params: Params,
        z: Array,
        action: Array | None = None,
        dropout_key: Array | None = None,
    ) -> Array:
        """Value logits `[V', ..., K]` of the stacked heads given: all of them, those of
        `networks.take_heads`, or the target network's. `action` is None for a V critic."""
        inputs = self._critic(z, action)
        return self._distribution("value", value_params, *inputs, dropout_key=dropout_key)

    def value_mean(self, value_params: Params, z: Array, action: Array | None = None) -> Array:
        """Decoded values without dropout, `[V', ...]`."""
        return self._mean("value", value_params, *self._critic(z, action))

    def aux_value(self, aux_params: Params, z: Array, action: Array | None = None) -> Array:
        """Logits of auxiliary values, `[G, ..., K]`."""
        logits = self._distribution("aux_value", aux_params, *self._critic(z, action))
        if self.config.aux_joint:
            shape = (*logits.shape[1:-1], self.config.num_aux, self.config.num_bins)
            logits = jnp.moveaxis(logits.reshape(shape), -2, 0)
        return logits

    def termination(self, params: Params, z: Array) -> Array:
        """Logits `[...]` that the episode ends in `z` `[..., L]`."""
        return self._apply("termination", params, z)[..., 0]

    def policy(self, params: Params, z: Array) -> tuple[Array, Array]:
        """Mean and log standard deviation `[..., A]`, before any squashing; log-probabilities and
        zeros for a categorical policy."""
        config, out = self.config, self._apply("policy", params, z)
        if config.policy == "categorical":
            log_probs = categorical.mixed_logits(out, UNIMIX)
            return log_probs, jnp.zeros_like(log_probs)
        mean, raw = jnp.split(out, 2, axis=-1)
        log_std = dist.bounded_log_std(raw, config.log_std_min, config.log_std_max)
        return masked(self, mean, z), masked(self, log_std, z)

    def act(self, mean: Array, log_std: Array, eps: Array) -> Array:
        """Actions `[..., A]` in [-1, 1] from the policy's output and noise; one-hot for a
        categorical policy, with the derivative of its probabilities."""
        if self.config.policy == "categorical":
            eps = jnp.broadcast_to(eps, jnp.broadcast_shapes(mean.shape, eps.shape))
            return categorical.straight_through(mean, categorical.draw(mean, eps))
        if self.config.policy == "tanh_mean":
            return jnp.clip(jnp.tanh(mean) + jnp.exp(log_std) * eps, -1.0, 1.0)
        return jnp.tanh(mean + jnp.exp(log_std) * eps)

    def action_mask(self, z: Array) -> Array | None:
        """`[..., A]`: 0 for actions that the latent's task does not have, which no function reads;
        None for one task."""
        tasks = self.config.tasks
        return None if tasks is None else tasks.action_mask(z, self.config.action_dim)

    def _z(self, z: Array) -> Array:
        """What networks read of a latent."""
        return z if self.config.tasks is None else self.config.tasks.inputs(z)

    def _pair(self, z: Array, action: Array) -> tuple[Array, Array]:
        """Inputs of a network: `[H, ..., L']` and `[..., A]` or `[H, ..., A]` with a heads axis."""
        return self._z(z), masked(self, action if action.ndim == z.ndim else action[None], z)

    def _critic(self, z: Array, action: Array | None) -> tuple[Array, ...]:
        return self._pair(z, action) if self.config.critic == "q" else (self._z(z),)

    def _apply(self, name: str, params: Params, z: Array) -> Array:
        return self._networks[name].apply({"params": params[name]}, self._z(z))

    def _distribution(self, name: str, params: Params, *inputs: Array, **options: Any) -> Array:
        return networks.apply_ensemble(self._networks[name], params, *inputs, **options)

    def _mean(self, name: str, params: Params, *inputs: Array) -> Array:
        if not self.config.prior_scale:
            return self.decode(self._distribution(name, params, *inputs))
        joined = self._networks[name].clone(combine=_shift(self.config, dist.shifted_mean))
        return networks.apply_ensemble(joined, params, *inputs)


def make_world_model(config: WorldModelConfig) -> WorldModel:
    """The world model of a configuration."""
    return WorldModel(config)


# -------------------------------------------------------------------------------------------------
# Networks and their parameters


def _modules(config: WorldModelConfig) -> dict[str, Any]:
    c = config
    norm = functools.partial(networks.sim_norm, group_size=c.simnorm_dim)
    wide = dict(hidden=(c.mlp_dim, c.mlp_dim), dtype=jnp.dtype(c.dtype))
    mlp = functools.partial(networks.MLP, **wide)
    head, distributional = mlp, mlp
    if c.prior_scale:
        head = functools.partial(networks.MLPWithPrior, **wide, scale=c.prior_scale)
        combine = _shift(c, dist.shift_logits)
        distributional = functools.partial(head, prior_features=1, combine=combine)
    hidden = (c.enc_dim,) * max(c.num_enc_layers - 1, 1)
    encoder: Any = mlp(hidden=hidden, features=c.latent, out_activation=norm)
    if c.mixed:
        normed = functools.partial(mlp, features=c.enc_dim, out_activation=networks.mish)
        encoder = networks.MixedEncoder(
            networks.ConvEncoder(c.num_channels, simnorm_dim=0),
            normed(hidden=()),
            normed(hidden=hidden[1:]),
            mlp(hidden=(), features=c.latent, out_activation=norm),
        )
    elif c.pixels:
        encoder = networks.ConvEncoder(c.num_channels, c.simnorm_dim)
    return dict(
        encoder=encoder,
        dynamics=head(features=c.latent, out_activation=norm),
        reward=distributional(features=c.num_bins, zero_last=True),
        policy=mlp(features=c.action_dim * (1 if c.policy == "categorical" else 2)),
        termination=mlp(features=1),
        value=distributional(features=c.num_bins, zero_last=True, dropout=c.dropout),
        aux_value=mlp(features=c.num_bins * (c.num_aux if c.aux_joint else 1), zero_last=True),
    )


def _bins(config: WorldModelConfig) -> Array:
    return jnp.linspace(config.bin_min, config.bin_max, config.num_bins)


def _shift(config: WorldModelConfig, how: Callable[..., Array]) -> Callable[[Array, Array], Array]:
    """`how` of a predicted distribution shifted by a prior `[..., 1]` in real space."""
    return lambda logits, prior: how(logits, _bins(config), prior[..., 0])


def _init(config: WorldModelConfig, modules: dict[str, Any], key: Array) -> Params:
    tasks = config.tasks
    z = jnp.zeros((1, config.latent + (tasks.embedding_dim if tasks else 0)))
    a, obs = jnp.zeros((1, config.action_dim)), jnp.zeros((1, *config.obs_shape))
    encoded = _inputs(config, obs.astype(jnp.uint8) if config.mixed else obs)
    embedding = (jnp.zeros((1, tasks.embedding_dim)),) if tasks else ()
    critic = (z, a) if config.critic == "q" else (z,)
    # By component: its inputs, and how many heads are stacked (None: it is no ensemble).
    components: dict[str, tuple[tuple[Array, ...], int | None]] = dict(
        encoder=((*encoded, *embedding), None),
        dynamics=((z, a), config.num_dynamics),
        reward=((z, a), config.num_rewards),
        policy=((z,), None),
        termination=((z,), None),
        value=(critic, config.num_values),
        aux_value=(critic, 1 if config.aux_joint else config.num_aux),
    )
    if not config.num_aux:
        del components["aux_value"]
    if not config.episodic:
        del components["termination"]
    keys = streams(key, *components, *(["task"] if tasks else []))
    params: Params = {}
    for name, (inputs, num) in components.items():
        if num is None:
            params[name] = modules[name].init(keys[name], *inputs)["params"]
        else:
            params[name] = networks.init_ensemble(modules[name], keys[name], num, *inputs)
    for name in ("reward", "value", *(["aux_value"] if config.num_aux else [])):
        last = params[name].get("main", params[name])["out"]  # with or without a prior
        *copies, width = last["bias"].shape
        last["bias"] = jnp.tile(_ignorance(config), (*copies, width // config.num_bins))
    if tasks:
        params["task"] = tasks.init(keys["task"])
    if config.normalize_observations:
        params["statistics"] = observations.init(encoded[-1].shape[-1])
    return params


def _ignorance(config: WorldModelConfig) -> np.ndarray:
    """Logits `[K]` of an untrained head: the maximum-entropy distribution with mean 0.

    -s bins with the slope s that makes the mean 0 (Jaynes 1957); uniform for symmetric bins, or
    where all bins are on one side of 0.
    """
    bins = np.linspace(config.bin_min, config.bin_max, config.num_bins)
    if not bins[0] < 0.0 < bins[-1] or abs(bins.sum()) < 1e-6 * np.abs(bins).sum():
        return np.zeros(len(bins), np.float32)
    low, high = -1e3, 1e3  # between them the mean falls from the last bin to the first
    for _ in range(60):
        slope = 0.5 * (low + high)
        weights = np.exp(-slope * bins - np.max(-slope * bins))
        low, high = (slope, high) if weights @ bins > 0.0 else (low, slope)
    return (-slope * bins).astype(np.float32)


def _inputs(config: WorldModelConfig, obs: Array) -> tuple[Array, ...]:
    """The encoder's inputs: image and numbers of a packed row, or one vector without the task."""
    if config.mixed:
        found = observations.split(config.parts, obs)
        return found["image"], found["vector"]
    if config.flat:
        return (obs.reshape(*obs.shape[: obs.ndim - len(config.obs_shape)], -1),)
    return (config.tasks.split(obs)[0] if config.tasks else obs,)


# -------------------------------------------------------------------------------------------------
# What a model says about latents


def action_mean(model: WorldModel, mean: Array) -> Array:
    """A policy's `mean` `[..., A]` as an action: its tanh, or probabilities if discrete."""
    return jnp.exp(mean) if model.config.policy == "categorical" else jnp.tanh(mean)


def discount_of(model: WorldModel, discount: float | tuple[float, ...], z: Array) -> Any:
    """The discount of a latent's task: one number, or `[...]` with one for each task."""
    if isinstance(discount, tuple):
        assert model.config.tasks is not None  # several discounts are those of several tasks
        return model.config.tasks.look_up(discount, z)
    return discount


def masked(model: WorldModel, action: Array, z: Array) -> Array:
    """`action` with zeros where the latent's task has no such action."""
    mask = model.action_mask(z)
    return action if mask is None else action * mask


def continue_prob(model: WorldModel, params: Params, z: Array, how: str) -> Array | None:
    """Probability `[...]` that the episode continues in `z` `[..., L]`; None without terminations.

    Args:
        how: "soft": 1 - p of the termination head; "hard": 1 where p <= 0.5, else 0 (TD-MPC2).
    """
    if not model.config.episodic:
        return None
    probability = jax.nn.sigmoid(model.termination(params, z))
    return 1.0 - probability if how == "soft" else (probability <= 0.5).astype(jnp.float32)


def choose_heads(key: Array, num_values: int, num_used: int) -> Array | None:
    """Indices `[num_used]` of different value heads, or None when all are used."""
    if num_used >= num_values:
        return None
    return jax.random.permutation(key, num_values)[:num_used]


def head_values(
    model: WorldModel,
    value_params: Params,
    z: Array,
    action: Array | None,
    heads: Array | None,
    dropout: Array | None = None,
    reduction: str = "mean",
) -> Array:
    """Decoded values of `heads` (None: all): `z [..., L] -> [V', ...]`; dropout: a key.

    With reduction "min" their least value, V' = 1; another reduction is the caller's.
    """
    used = value_params if heads is None else networks.take_heads(value_params, heads)
    if dropout is not None:
        values = model.decode(model.value(used, z, action, dropout))
    else:
        values = model.value_mean(used, z, action)
    if model.reduce_values is not None:
        return model.reduce_values(values)[None]
    return jnp.min(values, axis=0, keepdims=True) if reduction == "min" else values


def count_parameters(params: Any) -> int:
    """Number of scalars in a parameter tree."""
    return sum(x.size for x in jax.tree.leaves(params))
