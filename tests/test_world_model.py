"""The world model written again in NumPy: what enters each network, and what its output becomes."""

from __future__ import annotations

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mbx import observations, returns, world_model
from mbx.types import Part, TaskSet
from mbx.world_model import WorldModelConfig

SIZES = dict(enc_dim=6, mlp_dim=5, latent_dim=4, simnorm_dim=2, num_bins=5, bin_min=-2, bin_max=2)
TASKS = TaskSet(("a", "b"), (2, 1), embedding_dim=3)
CONFIGS = {
    "priors": WorldModelConfig(
        (3,),
        2,
        **SIZES,
        num_values=3,
        num_dynamics=2,
        num_rewards=2,
        num_aux=2,
        aux_joint=True,
        prior_scale=0.5,
        episodic=True,
        num_enc_layers=3,
        normalize_observations=True,
    ),
    "tasks": WorldModelConfig(
        (5,),
        2,
        **SIZES,
        num_values=2,
        num_aux=2,
        critic="v",
        policy="tanh_mean",
        tasks=TASKS,
        log_std_min=-3.0,
        log_std_max=1.0,
    ),
}
B = 4


def mish(x):
    return x * np.tanh(np.log1p(np.exp(x)))


def normed(p, x):
    x = x @ p["dense"]["kernel"] + p["dense"]["bias"]
    x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
    return x * p["norm"]["scale"] + p["norm"]["bias"]


def hidden(p, x):
    for name in sorted(name for name in p if name.startswith("layer_")):
        x = mish(normed(p[name], x))
    return x


def linear(p, x):
    """A network with a plain last layer."""
    return hidden(p, x) @ p["out"]["kernel"] + p["out"]["bias"]


def softmax(x):
    x = np.exp(x - x.max(-1, keepdims=True))
    return x / x.sum(-1, keepdims=True)


def simplex(x):
    x = np.exp(x.reshape(*x.shape[:-1], -1, 2))
    return (x / x.sum(-1, keepdims=True)).reshape(*x.shape[:-2], -1)


def prior(p, x):
    for i in range(3):
        x = x @ p[f"layer_{i}"]["kernel"] + p[f"layer_{i}"]["bias"]
        x = np.maximum(x, 0) if i < 2 else x
    return 0.5 * x


def of_head(params, k):
    return jax.tree.map(lambda x: x[k], params)


class Oracle:
    """All functions of a model, for latents `[H, B, L]`."""

    def __init__(self, config, params):
        self.config, self.params = config, params
        self.bins = np.linspace(-2, 2, 5)

    def encode(self, obs):
        p, tail = self.params["encoder"], np.zeros((B, 0))
        if "statistics" in self.params:
            known = self.params["statistics"]
            obs = (obs - known["mean"]) / np.sqrt(known["variance"] + 1e-4)
        if self.config.tasks:
            one_hot = obs[:, 3:]
            embedding = one_hot @ self.params["task"]
            obs = np.concatenate([obs[:, :3], embedding], -1)
            tail = np.concatenate([embedding, one_hot], -1)
        return np.concatenate([simplex(normed(p["out"], hidden(p, obs))), tail], -1)

    def mask(self, z):
        """Task "b" has one action of two."""
        return np.where(z[..., -1:] == 1, [1.0, 0.0], 1.0) if self.config.tasks else 1.0

    def z(self, z):
        return z[..., :-2] if self.config.tasks else z

    def joined(self, z, action):
        action = np.broadcast_to(action, (*z.shape[:-1], 2)) * self.mask(z)
        return np.concatenate([self.z(z), action], -1)

    def step(self, z, action):
        found = []
        for k in range(self.config.num_dynamics):
            p, x = of_head(self.params["dynamics"], k), self.joined(z, action)[k]
            main = p.get("main", p)
            out = normed(main["out"], hidden(main, x))
            new = simplex(out + (prior(p["prior"], x) if "prior" in p else 0))
            tail = z[k, :, 4:]
            found.append(np.concatenate([new, tail], -1))
        return np.stack(found)

    def distribution(self, name, x):
        """Logits `[K, ...]` of an ensemble."""
        found = []
        for k in range(len(jax.tree.leaves(self.params[name])[0])):
            p = of_head(self.params[name], k)
            logits = linear(p.get("main", p), x)
            if "prior" in p:
                logits = np.log(self.moved(softmax(logits), prior(p["prior"], x)))
            found.append(logits)
        return np.stack(found)

    def moved(self, mass, shift):
        """Every bin's mass `[..., K]` where it is by `shift` `[..., 1]` further, in real space."""
        to = np.sign(self.bins) * np.expm1(np.abs(self.bins)) + shift
        to = np.clip(np.sign(to) * np.log1p(np.abs(to)), -2, 2)
        # Bins are 1 apart: a mass is shared by those nearer than that.
        share = np.maximum(0, 1 - np.abs(to[..., None] - self.bins))
        return (mass[..., None] * share).sum(-2) + 1e-8

    def decode(self, logits):
        mean = softmax(logits) @ self.bins
        return np.sign(mean) * np.expm1(np.abs(mean))

    def critic(self, z, action):
        return self.joined(z, action) if self.config.critic == "q" else self.z(z)

    def policy(self, z):
        mean, raw = np.split(linear(self.params["policy"], self.z(z)), 2, -1)
        low, high = self.config.log_std_min, self.config.log_std_max
        return mean * self.mask(z), (low + (high - low) * (np.tanh(raw) + 1) / 2) * self.mask(z)


@pytest.fixture(scope="module", params=CONFIGS)
def case(request):
    """(config, oracle, results, latents `[H, B, L]`, actions `[B, A]`)."""
    config = CONFIGS[request.param]
    model = world_model.make_world_model(config)
    rng = np.random.default_rng(0)
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    params = jax.tree.map(lambda x: rng.normal(0, 0.7, x.shape).astype(np.float32), shapes)
    if config.normalize_observations:
        params["statistics"]["variance"] = np.float32([0.01, 1.0, 9.0])
    obs = rng.normal(size=(B, 3)).astype(np.float32)
    if config.tasks:
        obs = np.concatenate([obs, np.eye(2, dtype=np.float32)[[0, 1, 1, 0]]], -1)
    oracle, action = Oracle(config, params), rng.uniform(-1, 1, (B, 2)).astype(np.float32)
    zs = np.stack(
        [
            oracle.encode(obs + 0.3 * k * (np.arange(obs.shape[1]) < 3))
            for k in range(config.num_dynamics)
        ]
    )
    if config.episodic:  # some end, some do not
        logit = linear(params["termination"], zs)
        params["termination"]["out"]["bias"] -= np.float32(np.median(logit))
    zs, given = np.float32(zs), None if config.critic == "v" else action

    @jax.jit
    def everything(params, obs, zs, action):
        value = params["value"]
        heads = jnp.asarray([1, 0])
        given_ = None if given is None else action
        found = dict(
            encode=model.encode(params, obs),
            tile_heads=model.tile_heads(zs[0]),
            step=model.step(params, zs, action),
            policy=model.policy(params, zs),
            reward=model.reward(params, zs, action),
            reward_mean=model.reward_mean(params, zs, action),
            value=model.value(value, zs, given_),
            value_mean=model.value_mean(value, zs, given_),
            two=world_model.head_values(model, value, zs, given_, heads),
            all=world_model.head_values(model, value, zs, given_, None) if config.tasks else None,
            masked=world_model.masked(model, action[None], zs),
            soft=world_model.continue_prob(model, params, zs, "soft"),
            hard=world_model.continue_prob(model, params, zs, "hard"),
            discount=world_model.discount_of(model, (0.9, 0.5) if config.tasks else 0.9, zs),
        )
        if config.num_aux:
            found["aux"] = model.aux_value(params["aux_value"], zs, given_)
        if config.episodic:
            found["termination"] = model.termination(params, zs)
        return found

    return config, oracle, everything(params, obs, zs, action), obs, zs, action


def close(a, b, **more):
    np.testing.assert_allclose(a, b, **(dict(rtol=2e-4, atol=2e-5) | more))


@pytest.mark.parametrize(
    ("field", "least"),
    [("num_values", 1), ("num_dynamics", 1), ("num_rewards", 1), ("num_bins", 2)],
)
def test_a_model_has_enough_heads_and_bins(field, least):
    WorldModelConfig((3,), 2, **SIZES | {field: least})
    with pytest.raises(ValueError, match=f"{field}={least - 1}: must be at least {least}"):
        WorldModelConfig((3,), 2, **SIZES | {field: least - 1})


def test_latents(case):
    config, oracle, found, obs, zs, action = case
    close(found["encode"], oracle.encode(obs))
    close(found["step"], oracle.step(zs, action))
    assert found["tile_heads"].shape == (config.num_dynamics, *zs.shape[1:])


def test_policies(case):
    _, oracle, found, _, zs, action = case
    for ours, wanted in zip(found["policy"], oracle.policy(zs), strict=True):
        close(ours, wanted)
    close(found["masked"], action[None] * oracle.mask(zs))


def test_rewards_and_values(case):
    config, oracle, found, _, zs, action = case
    for name, inputs in (
        ("reward", oracle.joined(zs, action)),
        ("value", oracle.critic(zs, action)),
    ):
        logits = oracle.distribution(name, inputs)
        # Mass of a bin that a prior moves away is 1e-8 and its logarithm no number to compare.
        close(softmax(np.asarray(found[name])), softmax(logits), atol=1e-5)
        close(found[f"{name}_mean"], oracle.decode(logits), rtol=1e-3, atol=1e-4)
    if config.tasks:
        close(found["all"], found["value_mean"])
    close(found["two"], found["value_mean"][np.array([1, 0])])


def test_auxiliary_values(case):
    config, oracle, found, _, zs, action = case
    if config.num_aux:
        logits = oracle.distribution("aux_value", oracle.critic(zs, action))
        if config.aux_joint:  # one network, [..., G, K]
            logits = np.moveaxis(logits[0].reshape(*zs.shape[:-1], 2, 5), -2, 0)
        close(found["aux"], logits)


def test_ends_and_discounts(case):
    config, oracle, found, _, zs, _ = case
    if config.episodic:
        logit = linear(oracle.params["termination"], zs)[..., 0]
        close(found["termination"], logit)
        close(found["soft"], 1 - 1 / (1 + np.exp(-logit)))
        np.testing.assert_array_equal(found["hard"], (logit <= 0).astype(np.float32))
        assert 0 < found["hard"].sum() < found["hard"].size
    else:
        assert found["soft"] is None
    wanted = np.where(zs[..., -1] == 1, 0.5, 0.9) if config.tasks else 0.9
    close(found["discount"], wanted)


def test_only_what_a_model_has_is_replaced():
    model = world_model.make_world_model(WorldModelConfig((3,), 2, **SIZES))
    assert model._replace(decode=jnp.sum).decode is jnp.sum is not model.decode
    with pytest.raises(ValueError, match="a world model has no 'polcy'"):
        model._replace(polcy=jnp.sum)


def test_samples_of_the_policy():
    mean, log_std, eps = (
        np.float32([[0.5, -2.0]]),
        np.float32([[-0.7, 0.3]]),
        np.float32([[2.0, -1.5]]),
    )
    std = np.exp(log_std)
    squashed, clipped = (
        world_model.make_world_model(WorldModelConfig((3,), 2, **SIZES, policy=policy)).act
        for policy in ("squashed", "tanh_mean")
    )
    close(squashed(mean, log_std, eps), np.tanh(mean + std * eps))
    wanted = np.clip(np.tanh(mean) + std * eps, -1, 1)
    assert wanted[0, 0] == 1.0 and wanted[0, 1] == -1.0
    close(clipped(mean, log_std, eps), wanted)
    close(clipped(mean, log_std, eps / 90), np.tanh(mean) + std * eps / 90)


def test_what_is_initialised(case):
    config, oracle = case[:2]
    shapes = oracle.params
    wanted = {"encoder", "dynamics", "reward", "policy", "value"}
    wanted |= {"aux_value"} if config.num_aux else set()
    wanted |= {"termination"} if config.episodic else set()
    wanted_more = {"task"} if config.tasks else set()
    wanted_more |= {"statistics"} if config.normalize_observations else set()
    assert set(shapes) == wanted | wanted_more
    heads = {"dynamics": config.num_dynamics, "reward": config.num_rewards}
    for part, num in (heads | {"value": config.num_values}).items():
        assert {x.shape[0] for x in jax.tree.leaves(shapes[part])} == {num}
    out = shapes["aux_value"]["out"]["kernel"].shape
    assert out == ((1, 5, 10) if config.aux_joint else (2, 5, 5))
    assert shapes["policy"]["out"]["bias"].shape == (4,)  # means and deviations of two actions
    modules = world_model._modules(config)
    zero = {name for name in wanted if getattr(modules.get(name), "zero_last", False)}
    assert zero == {"reward", "value", "aux_value"}


@pytest.mark.parametrize("tasks_", [None, TASKS])
def test_what_was_seen_is_normalised(tasks_):
    """Each batch of five steps of two rows counts alike; the one-hot task does not count."""
    size = 3 + (2 if tasks_ else 0)
    config = WorldModelConfig((size,), 2, **SIZES, tasks=tasks_, normalize_observations=True)
    model = world_model.make_world_model(config)
    params = {"statistics": observations.init(3), "encoder": {}}
    rng = np.random.default_rng(1)
    batches = rng.normal(size=(3, 5, 2, size)).astype(np.float32) * [[[[0.1, 1, 9, 1, 1][:size]]]]
    batches += 50 * np.arange(3)[:, None, None, None]  # they differ in the mean, too
    new = params
    for batch in batches:
        new = model.see(new, jnp.float32(batch))
    rows = batches[..., :3].reshape(-1, 3)
    close(new["statistics"]["mean"], rows.mean(0))
    close(new["statistics"]["variance"], rows.var(0), rtol=1e-3)
    assert new["statistics"]["count"] == 3 and params["statistics"]["count"] == 0
    assert {name for name in params if new[name] is not params[name]} == {"statistics"}
    off = world_model.make_world_model(dataclasses.replace(config, normalize_observations=False))
    assert off.see(params, batches) is params


def test_normalising_what_is_no_vector_is_refused():
    for more in (dict(obs_shape=(64, 64, 3)), dict(obs_shape=(4, 3), flat=True)):
        config = WorldModelConfig(action_dim=2, **SIZES, **more)
        with pytest.raises(
            ValueError, match=r"model.normalize_observations=True: obs_shape=\(\d+, "
        ):
            dataclasses.replace(config, normalize_observations=True)


def test_of_packed_rows_the_numbers_are_normalised():
    parts = (Part("v", (3,)), Part("i", (64, 64, 1)))
    rng = np.random.default_rng(0)
    vector = np.float32(rng.normal(size=(4, 3)) * [0.1, 1.0, 9.0])
    image = rng.integers(0, 256, (4, 64, 64, 1), dtype=np.uint8)
    rows = jnp.asarray(observations.join(parts, dict(v=vector, i=image)))
    sizes = SIZES | dict(num_channels=2)
    shape = rows.shape[1:]
    config = WorldModelConfig(shape, 2, **sizes, parts=parts, normalize_observations=True)
    model = world_model.make_world_model(config)
    params = model.see({"statistics": observations.init(3)}, rows)
    close(params["statistics"]["mean"], vector.mean(0))
    close(params["statistics"]["variance"], vector.var(0), rtol=1e-3)


def test_an_encoder_of_images_and_numbers_gives_its_layers_to_the_numbers():
    fields = dataclasses.asdict(CONFIGS["priors"]) | dict(prior_scale=0.0, num_enc_layers=4)
    config = types.SimpleNamespace(**fields, mixed=True, pixels=True, latent=4)
    encoder = world_model._modules(config)["encoder"]
    parts = {name: getattr(encoder, name) for name in ("image", "vector", "both")}
    assert {name: part.hidden for name, part in parts.items()} == dict(
        image=(), vector=(6, 6), both=()
    )
    assert {name: part.features for name, part in parts.items()} == dict(image=6, vector=6, both=4)
    assert encoder.conv.simnorm_dim == 0 and encoder.conv.channels == config.num_channels


def test_projection_shortens_embeddings_of_tasks_alone():
    long = {"task": np.float32([[3.0, 4.0], [0.3, 0.4]]), "w": np.float32([9.0])}
    project = world_model.WorldModel.project
    short = project(long)
    close(short["task"], [[0.6, 0.8], [0.3, 0.4]])
    assert short["w"] is long["w"] and project({"w": 1}) == {"w": 1}


@pytest.mark.parametrize(
    ("how", "coef", "wanted"),
    [
        ("mean", 1.0, 2.0),
        ("min", 1.0, 0.0),
        ("max", -1.0, 5.0),
        ("from_std_coef", 0.0, 2.0),
        ("from_std_coef", 1.0, 5.0),
        ("from_std_coef", -1.0, 0.0),
    ],
)
def test_dynamics_heads_are_equally_likely(how, coef, wanted):
    x = jnp.asarray([[1.0, 1.0], [5.0, 5.0], [0.0, 0.0]])
    np.testing.assert_allclose(returns.reduce_heads(x, how, coef), [wanted, wanted], 1e-6)
    assert returns.reduce_heads(x[:1], how, coef).tolist() == [1.0, 1.0]


def test_heads_are_chosen_without_repetition():
    assert world_model.choose_heads(jax.random.key(0), 3, 3) is None
    keys = jax.random.split(jax.random.key(0), 40)
    chosen = jax.jit(jax.vmap(lambda key: world_model.choose_heads(key, 3, 2)))(keys)
    assert {tuple(x) for x in chosen.tolist()} == {
        (a, b) for a in range(3) for b in range(3) if a != b
    }


@pytest.mark.parametrize(("low", "high"), [(-1.0, 6.9), (-5.0, 0.5), (-2.0, 2.0), (0.0, 4.0)])
def test_logits_that_know_nothing_have_mean_zero(low, high):
    config = dataclasses.replace(CONFIGS["tasks"], num_bins=21, bin_min=low, bin_max=high)
    logits, bins = np.float64(world_model._ignorance(config)), np.linspace(low, high, 21)
    if high == 2.0 or low == 0.0:
        assert not logits.any()
    else:
        np.testing.assert_allclose(softmax(logits) @ bins, 0.0, atol=1e-6)
        # Of all with that mean the widest: the logits lie on a line over the bins.
        slopes = np.diff(logits) / (bins[1] - bins[0])
        np.testing.assert_allclose(slopes, slopes[0], rtol=1e-3)
        assert (slopes < 0).all() == (high == 6.9)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_new_head_knows_nothing(name):
    config = dataclasses.replace(CONFIGS[name], bin_min=-1.0)
    params = world_model.make_world_model(config).init(jax.random.key(0))
    heads = dict(reward=config.num_rewards, value=config.num_values, aux_value=config.num_aux)
    for head, num in heads.items():
        last = params[head].get("main", params[head])["out"]
        wanted = np.tile(world_model._ignorance(config), (num, 1))
        assert wanted.any() and not np.asarray(last["kernel"]).any()
        np.testing.assert_array_equal(np.asarray(last["bias"]).reshape(num, -1), wanted)
