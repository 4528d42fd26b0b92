"""Shapes, options and published sizes of the TD-MPC2 latent world model of `mbx.world_model`.

Source: TD-MPC2 (arXiv 2310.16828), and its reference code.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from mbx.observations import is_packed, layout
from mbx.types import Part, TaskSet

CRITICS = ("q", "v")
POLICIES = ("squashed", "tanh_mean", "categorical")

# encoder width, MLP width, latent dims, encoder layers, Q heads (TD-MPC2's published sizes by
# millions of parameters; "tiny" is ours, about 0.2M, for CPUs).
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
    """Shapes and options of the world model; defaults are TD-MPC2's 5M model.

    Attributes:
        obs_shape: of one observation, `[D]`, an image `[64, 64, C]`, or what `flat` makes a vector.
        action_dim: A.
        enc_dim, mlp_dim, latent_dim, num_enc_layers: widths, latent dims L, layers of the encoder.
        num_values, num_dynamics, num_rewards: heads V, H, R.
        num_aux: auxiliary values G (of other discounts), each its own network.
        aux_joint: one network for all of them.
        prior_scale: weight of the frozen random networks beside dynamics, reward and value heads
            (docs/sources.md, entry ensembles); 0 for none.
        num_channels: of the pixel encoder.
        simnorm_dim: group of latent dims that a softmax normalises.
        num_bins, bin_min, bin_max: of predicted rewards and values, in symlog space.
        critic: "q" is Q(z, a) (TD-MPC2), "v" is V(z).
        policy: "squashed" Gaussian (TD-MPC2) or "tanh_mean", a Gaussian around tanh(mean) whose
            samples are clipped (BMPC); "categorical" over discrete actions, which are one-hot.
        episodic: learn a termination head.
        log_std_min, log_std_max: of the policy.
        dropout: in the first hidden layer of each value head.
        dtype: of computations.
        tasks: several tasks in one model (`mbx.types`), whose observations end in a one-hot task.
        flat: observations of several axes (boards, stacked vectors) are read as one vector.
        parts: that `mbx.observations` has joined to an observation; () for one that has none.
        normalize_observations: vectors enter the encoder in standard deviations of what the model
            has learned from, of several tasks of all together.
    """

    obs_shape: tuple[int, ...]
    action_dim: int
    enc_dim: int = 256
    mlp_dim: int = 512
    latent_dim: int = 512
    num_enc_layers: int = 2
    num_values: int = 5
    num_dynamics: int = 1
    num_rewards: int = 1
    num_aux: int = 0
    aux_joint: bool = False
    prior_scale: float = 0.0
    num_channels: int = 32
    simnorm_dim: int = 8
    num_bins: int = 101
    bin_min: float = -10.0
    bin_max: float = 10.0
    critic: str = "q"
    policy: str = "squashed"
    episodic: bool = False
    log_std_min: float = -10.0
    log_std_max: float = 2.0
    dropout: float = 0.01
    dtype: str = "float32"
    tasks: TaskSet | None = None
    flat: bool = False
    parts: tuple[Part, ...] = ()
    normalize_observations: bool = False

    def __post_init__(self) -> None:
        if self.latent % self.simnorm_dim:
            raise ValueError(
                f"latent_dim={self.latent} is not divisible by simnorm_dim={self.simnorm_dim}: "
                "choose a latent_dim that is a multiple of it"
            )
        for field in ("num_values", "num_dynamics", "num_rewards"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field}={getattr(self, field)}: must be at least 1")
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
        return is_packed(self.parts)

    @property
    def image_shape(self) -> tuple[int, ...] | None:
        """Of the image that an observation is, or has beside numbers; None without one."""
        if self.mixed:
            return layout(self.parts).image_shape
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

    Overrides that are None keep the size's value.

    Raises:
        ValueError: an unknown size.
    """
    name = str(model_size)
    if name not in MODEL_SIZES:
        raise ValueError(f"model_size={model_size!r}: choose one of {tuple(MODEL_SIZES)}")
    fields = {k: v for k, v in overrides.items() if v is not None}
    return WorldModelConfig(**{**MODEL_SIZES[name], **fields})
