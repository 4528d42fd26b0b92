"""What the TD-MPC agent's tests use: small settings, models, batches, rows of a replay."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from mbx import replay
from mbx.agents.tdmpc import losses
from mbx.agents.tdmpc.agent import resolve, world_config
from mbx.agents.tdmpc.policies import policy_of
from mbx.agents.tdmpc.settings import Settings
from mbx.agents.tdmpc.types import Batch, Rows, TrainState
from mbx.types import EnvSpec
from mbx.world_model import WorldModelConfig, make_world_model
from tests.helpers import compiled

T, B, N, A = 2, 4, 5, 2
SPEC = EnvSpec("toy:small", (3,), jnp.float32, A, 50, 1)

# Without noise, dropout or options, so that a test's expected values are short formulas.
PLAIN = dict(
    model=dict(
        num_values=2, num_bins=11, dropout=0.0, log_std_min=-10.0, log_std_max=2.0, episodic="False"
    ),
    planner=dict(
        iterations=2,
        num_samples=8,
        num_elites=3,
        num_proposals=2,
        rescore_proposals=True,
        action_noise=0.0,
        extra_iterations=0,
        evaluation_selection="sample",
    ),
    training_planner=dict(iterations=2, num_samples=N, num_elites=3, max_std=2.0),
    replay=dict(keep_targets=0, capacity=1000),
    reanalyze=dict(batch_size=6, stale_exponent=0.0),
    optimizer=dict(learning_rate=1e-3),
    loss=dict(
        batch_size=B,
        horizon=T,
        discount=0.9,
        value_weighting="weighted",
        policy_loss="awr",
        termination="hard",
    ),
)


def make_settings(**sections) -> Settings:
    """Small settings for `SPEC` with some replaced: make_settings(loss=dict(value_target="td")).

    They are not checked, so that a test need not put back what has no effect in it. A learning
    rate stays what it is.
    """
    own = sections.get("optimizer", {})
    if "learning_rate" in own:
        sections["optimizer"] = dict(final_learning_rate=own["learning_rate"]) | own
    return replaced(resolve(replaced(Settings(), **PLAIN), SPEC), **sections)


def replaced(settings: Settings, **sections) -> Settings:
    """`settings` with some of their sections' settings replaced."""
    new = {
        name: dataclasses.replace(getattr(settings, name), **values)
        for name, values in sections.items()
    }
    return dataclasses.replace(settings, **new)


def make_world(settings: Settings, **overrides) -> WorldModelConfig:
    """The world model of settings, eight wide."""
    widths = dict(enc_dim=8, mlp_dim=8, latent_dim=8)
    return dataclasses.replace(world_config(settings, SPEC), **{**widths, **overrides})


def make_model(settings: Settings, **overrides):
    """That model, its networks one program each."""
    return compiled(make_world_model(make_world(settings, **overrides)))


def make_batch(key=0, **overrides) -> Batch:
    keys = jax.random.split(jax.random.key(key), 5)
    batch = Batch(
        obs=jax.random.normal(keys[0], (T + 1, B, 3)),
        action=jax.random.uniform(keys[1], (T, B, A), minval=-1.0),
        reward=jax.random.normal(keys[2], (T, B)),
        terminated=jnp.zeros((T, B)),
        mask=jnp.ones((T, B)),
        plan_actions=jax.random.uniform(keys[3], (T + 1, B, N, A), minval=-1.0),
        plan_values=jax.random.normal(keys[4], (T + 1, B, N)),
        plan_valid=jnp.ones((T + 1, B), bool),
    )
    return batch._replace(**overrides)


def weighed(*shape, mask=None, rho=0.5) -> Rows:
    """Rows `[T, B]` of a mask (all ones), as `losses.step_weights` makes them."""
    mask = jnp.ones(shape) if mask is None else jnp.asarray(mask)
    return Rows(mask, mask.sum(1), rho)


def train_state(params, step=0, **fields) -> TrainState:
    """A train state of these fields; the others are None."""
    given = dict(params=params, step=jnp.int32(step)) | fields
    return TrainState(**{name: given.get(name) for name in TrainState.__dataclass_fields__})


def policy_loss(settings, model, policy, params, target, inputs, scales):
    """`losses.policy_loss` of a policy's parameters."""
    return losses.policy_loss(policy_of(settings, model, params, policy, inputs), target, scales)


def loud(tree, key=7):
    """Parameters with nothing zero in them, so that every path shows; NumPy compiles nothing."""
    rng = np.random.default_rng(key)
    return jax.tree.map(
        lambda x: jnp.asarray((np.asarray(x) + 0.3 * rng.normal(size=x.shape)).astype(x.dtype)),
        tree,
    )


def changed(before, after) -> bool:
    return any(moved(before, after))


def moved(before, after) -> list[bool]:
    pairs = zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True)
    return [not np.array_equal(a, b) for a, b in pairs]


def row(obs, action=None, *, first=False, last=False):
    """A replay row of every environment, with reward 1."""
    num, no = obs.shape[0], jnp.zeros(obs.shape[0], bool)
    return dict(
        obs=obs,
        action=jnp.zeros((num, A)) if action is None else action,
        reward=jnp.ones(num),
        is_first=no | first,
        is_last=no | last,
        terminated=no,
    )


def empty_replay(agent, num_envs: int, capacity: int) -> replay.ReplayState:
    spec = agent.store.spec if agent.store else None
    return replay.init(agent.example_row(), num_envs=num_envs, capacity=capacity, target_spec=spec)


def toy_model(settings: Settings):
    """A world model of closed form, so that NumPy can say what everything is.

    Latents are observations, `[..., 2]`; see `Toy` for the same in NumPy.
    """
    world = make_world(settings, latent_dim=2, simnorm_dim=2)

    def heads(x, ndim):
        return x.reshape(-1, *[1] * ndim)

    def step(params, z, action):
        action = action if action.ndim == z.ndim else action[None]
        return 0.9 * z + heads(params["dynamics"]["gain"], z.ndim - 1) * action

    def reward(params, z, action):
        action = action if action.ndim == z.ndim else action[None]
        x = jnp.sum(z, axis=-1) + 0.5 * jnp.sum(action, axis=-1)
        return heads(params["reward"]["w"], x.ndim) * x[None]

    def value(params, z, action=None):
        x = jnp.sum(z * jnp.array([1.0, 2.0]).reshape([1] * (z.ndim - 1) + [2]), axis=-1)
        x = x if action is None else x + jnp.sum(action, axis=-1)
        return heads(params["w"], x.ndim) * x[None]

    def policy(params, z):
        own, lead = params["policy"], [1] * (z.ndim - 1) + [2]
        log_std = jnp.broadcast_to(own["log_std"].reshape(lead), z.shape)
        return 0.1 * z + own["mean"].reshape(lead), log_std

    return make_world_model(world)._replace(
        encode=lambda params, obs: obs[..., :2],
        tile_heads=lambda z: jnp.broadcast_to(z, (world.num_dynamics, *z.shape)),
        step=step,
        reward_mean=reward,
        value_mean=value,
        aux_value=lambda params, z, action=None: value(params, z, action)[..., None],
        decode=lambda logits: logits[..., 0],
        policy=policy,
        termination=lambda params, z: params["termination"]["bias"] + jnp.sum(z, axis=-1),
    )


class Toy:
    """Parameters of `toy_model`, and what it computes, in NumPy."""

    def __init__(self, settings: Settings) -> None:
        model = settings.model
        self.gain = 0.3 * np.arange(1.0, model.num_dynamics + 1)
        self.reward_w = 1.0 + 0.2 * np.arange(model.num_rewards)
        self.value_w = 1.0 + 0.5 * np.arange(model.num_values)
        self.aux_w = 2.0 + 0.5 * np.arange(len(settings.loss.aux_gammas))
        self.mean, self.log_std = np.array([0.2, -0.3]), np.array([-1.0, -2.0])
        self.bias = -0.5

    def params(self) -> dict:
        tree = dict(
            dynamics=dict(gain=self.gain),
            reward=dict(w=self.reward_w),
            value=dict(w=self.value_w),
            aux_value=dict(w=self.aux_w),
            policy=dict(mean=self.mean, log_std=self.log_std),
            termination=dict(bias=np.array(self.bias)),
        )
        return jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), tree)

    def step(self, z, action):
        """`[..., 2]` twice -> `[H, ..., 2]`."""
        return np.stack([0.9 * z + gain * action for gain in self.gain])

    def rewards(self, z, action):
        """-> `[R, ...]`."""
        return np.stack([w * (z.sum(-1) + 0.5 * action.sum(-1)) for w in self.reward_w])

    def values(self, z, action=None, weights=None):
        """-> `[V, ...]`."""
        x = z[..., 0] + 2.0 * z[..., 1] + (0.0 if action is None else action.sum(-1))
        return np.stack([w * x for w in (self.value_w if weights is None else weights)])

    def act(self, z, eps, shift=0.0):
        """The policy's clipped action."""
        mean = np.tanh(0.1 * z + self.mean + shift)
        return np.clip(mean + np.exp(self.log_std) * eps, -1.0, 1.0)

    def alive(self, z):
        """Probability that the episode goes on."""
        return 1.0 / (1.0 + np.exp(self.bias + z.sum(-1)))


SCORED = dict(std_coef=1.0, aggregate=True, disagreement=0.1, discount=1.0)
VARIANTS = {
    "ensemble": dict(
        model=dict(num_dynamics=2, num_rewards=3, num_values=3, prior_scale=1.0, episodic="True"),
        planner=SCORED,
        training_planner=SCORED,
        loss=dict(
            value_target="td",
            value_reduction="local",
            num_heads=3,
            td_std_coef=-0.5,
            td_rollouts=2,
            td_horizon=2,
            td_dynamics_reduction="from_std_coef",
            td_ema_policy=True,
            policy_loss="svg:1+kl:0.5",
            policy_std_coef=1.0,
            trust_region_coef=0.1,
            optimist=True,
            encoder_consistency_coef=1.0,
            final_rho=0.125,
            termination="soft",
            aux_gammas=(0.5, 0.8),
            entropy_coef_end=1e-6,
            entropy_schedule="exponential",
        ),
        optimizer=dict(weight_decay=0.01, ensemble_lr_scaling=True),
    ),
    "q": dict(
        model=dict(num_dynamics=2, num_rewards=2, critic="q"),
        planner=SCORED,
        training_planner=SCORED,
        train=dict(steps=2, seed_steps=0, pretrain_updates=1, pretrain_policy=False, utd_ratio=1.0),
        loss=dict(
            value_target="planner",
            policy_loss="awr:1+bc:0.1",
            td_all_dynamics=False,
            value_reduction="mean",
            td_std_coef=1.0,
            aux_gammas=(0.7,),
            aux_joint=True,
            expert_mean="final",
            jacobian=0.5,
        ),
        optimizer=dict(value_every=2, encoder_lr_step_at=0.5, encoder_lr_step_scale=0.0),
    ),
    "lambda": dict(
        model=dict(num_dynamics=2),
        planner=dict(SCORED, proposal_noise=0.05, prior_start=2, prior_updates=5),
        training_planner=dict(SCORED, horizon=2),
        loss=dict(value_target="lambda", policy_loss="kl", kl_forward=True, expert_source="acting"),
    ),
}


def variant(name):
    return make_settings(**VARIANTS[name])


CLOSE = dict(rtol=2e-5, atol=2e-6)
RNG = np.random.default_rng(0)


def array(*shape):
    return RNG.normal(size=shape).astype(np.float32)


def ensemble(**sections):
    """Settings of ensembles with their toy model and its NumPy twin."""
    model = dict(num_dynamics=2, num_rewards=3, num_values=3, episodic="True")
    loss = dict(num_heads=3, termination="soft") | sections.pop("loss", {})
    settings = make_settings(model=model | sections.pop("model", {}), loss=loss, **sections)
    return settings, toy_model(settings), Toy(settings)


def std(x):
    return x.std(axis=0, ddof=1) if len(x) > 1 else np.zeros(x.shape[1:])
