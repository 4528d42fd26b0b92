"""Options of the official configuration, and losses without a decoder, against NumPy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mbx import returns
from mbx.agents.dreamer import agent as dreamer
from mbx.agents.dreamer import behaviour, encoders, optimizers, policy, types, update, world_model
from mbx.agents.dreamer import networks as nets
from mbx.agents.dreamer.settings import Settings
from mbx.settings import from_dict
from mbx.types import EnvSpec
from tests.agents.dreamer_helpers import change
from tests.agents.test_dreamer import CONFIG, rows, trained
from tests.helpers import in_parts

H, N = 3, 5


class Norm:
    """The official `Normalize`, in NumPy."""

    def __init__(self, kind, rate=0.01):
        self.kind, self.rate, self.first, self.second, self.weight = kind, rate, 0.0, 0.0, 0.0

    def stats(self):
        weight = max(self.rate, self.weight)
        first, second = self.first / weight, self.second / weight
        if self.kind == "percentiles":
            return first, max(1e-8, second - first)
        return first, max(1e-8, np.sqrt(max(second - first**2, 0.0)))

    def __call__(self, x):
        percentiles = self.kind == "percentiles"
        new = np.percentile(x, [5, 95]) if percentiles else (np.mean(x), np.mean(np.square(x)))
        self.first, self.second, self.weight = (
            (1 - self.rate) * old + self.rate * now
            for old, now in zip((self.first, self.second, self.weight), (*new, 1.0), strict=True)
        )
        return self.stats()

    def as_state(self):
        return returns.RunningNorm(*map(jnp.float32, (self.first, self.second, self.weight)))


@pytest.mark.parametrize("gradient", ["reinforce", "reparam"])
@pytest.mark.parametrize("kind", ["meanstd", "percentiles"])
def test_values_and_advantages_are_normalised_as_officially(kind, gradient):
    """`imag_loss` and the normalised targets of `repl_loss`, in NumPy."""
    settings = change(
        CONFIG,
        actor=dict(advantage_norm=kind, gradient=gradient, entropy_coef=0.0),
        critic=dict(value_norm=kind),
    )
    net, rng = settings.model, np.random.default_rng(0)

    def array(*shape):
        return rng.normal(size=shape).astype(np.float32)

    out, logits = array(H, N, policy.output_dim(net)), array(H, N, net.num_bins)
    rewards, values, slow = array(H + 1, N), array(H + 1, N), array(H, N)
    actions = np.eye(net.action_dim, dtype=np.float32)[rng.integers(2, size=(H + 1, N))]
    continues = 1.0 / (1.0 + np.exp(-array(H + 1, N)))
    norms = {name: Norm(kind) for name in ("value", "advantage")}
    for _ in range(3):
        [norm(2.0 + 3.0 * array(40)) for norm in norms.values()]
    given = {name: norm.as_state() for name, norm in norms.items()}

    offset, scale = norms["value"].stats()
    real, gamma, lam = values * scale + offset, settings.critic.gamma, settings.critic.lambda_
    ret = [real[-1]]
    for t in reversed(range(H)):
        after = (1 - lam) * real[t + 1] + lam * ret[-1]
        ret.append(rewards[t + 1] + gamma * continues[t + 1] * after)
    ret = np.stack(ret[:0:-1])
    low, high = 0.01 * np.percentile(ret, [5, 95])
    advantage = (ret - real[:-1]) / max(1.0, high - low)
    offset, scale = norms["advantage"](advantage)
    weights = (np.cumprod(gamma * continues, axis=0) / gamma)[:-1]
    objective = (advantage - offset) / scale
    if gradient == "reinforce":
        objective *= np.asarray(policy.log_prob(net, jnp.asarray(out), actions[:-1]))
    offset, scale = norms["value"](ret)
    targets = jnp.asarray((ret - offset) / scale)
    main, towards = (nets.two_hot_loss(net, jnp.asarray(logits), x) for x in (targets, slow))

    imagined = types.Imagined(None, *map(jnp.asarray, (actions, rewards, continues)))
    args = imagined, *map(jnp.asarray, (out, values, logits, slow)), returns.init_return_ema()
    found = jax.jit(lambda *args: behaviour.imagined_losses(settings, *args))(*args, given)
    np.testing.assert_allclose(found.returns, ret, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(found.losses["policy"], -weights * objective, rtol=2e-3, atol=2e-4)
    np.testing.assert_allclose(found.losses["value"], weights * (main + towards), rtol=1e-4)
    for name, norm in norms.items():
        wanted = (norm.first, norm.second, norm.weight)
        np.testing.assert_allclose(jax.tree.leaves(found.norms[name]), wanted, rtol=1e-4)

    data = update.make_batch(settings, rows(jax.random.key(0)))[0]
    shape = data.reward.shape
    seen, zeros = jnp.asarray(array(*shape, net.num_bins)), jnp.zeros(shape)
    loss = behaviour.replay_critic(settings, seen, zeros, zeros, data, found.norms)
    targets, last = behaviour.replay_returns(settings, zeros, data)
    offset, scale = norms["value"].stats()
    main = nets.two_hot_loss(net, seen[:-1], (targets - offset) / scale)
    expected = (1.0 - last[:-1]) * (main + nets.two_hot_loss(net, seen[:-1], zeros[:-1]))
    np.testing.assert_allclose(loss, expected, rtol=1e-4)


def test_norms_move_with_imagined_and_with_replayed_returns():
    settings = change(
        CONFIG, critic=dict(value_norm="meanstd"), actor=dict(advantage_norm="percentiles")
    )
    train = trained(settings)
    assert set(train.norms) == {"value", "advantage"} and trained(CONFIG).norms is None
    batch, carry = update.make_batch(settings, rows(jax.random.key(1)))
    noise = update.by_trajectory(update.draw_noise(settings, jax.random.key(2)))
    new = jax.jit(lambda *args: update.update_from_batch(settings, *args)[0])(
        train, batch, carry, noise
    )
    # Of the value once for each of both losses, in this order.
    np.testing.assert_allclose(new.norms["value"].weight, 1 - 0.99**2, rtol=1e-5)
    np.testing.assert_allclose(new.norms["advantage"].weight, 0.01, rtol=1e-5)
    started = dreamer.start_from(trained(settings, key=3), new, None)
    assert started.norms["value"] is new.norms["value"]


@pytest.mark.parametrize("name", ["adam", "laprop"])
def test_kernels_decay_and_nothing_else(name):
    params = {"one": {"kernel": jnp.full((2, 2), 3.0), "bias": jnp.full(2, 3.0)}}
    grads = jax.tree.map(jnp.zeros_like, params)
    solver = optimizers.make(name, 0.1, clip=0.0, eps=1e-8, decay=0.01)
    found = solver.update(grads, solver.init(params), params)[0]["one"]
    np.testing.assert_allclose(found["kernel"], -0.1 * 0.01 * 3.0, rtol=1e-5)
    np.testing.assert_array_equal(found["bias"], 0.0)


@pytest.mark.parametrize("name", ["adam", "laprop"])
@pytest.mark.parametrize("schedule", ["const", "linear", "cosine"])
def test_rates_rise_and_fall_as_scheduled(schedule, name):
    """Steps along a constant gradient are as long as the rate."""
    rate, warmup, anneal = 0.5, 4, 12
    rest = dict(warmup=warmup, schedule=schedule, anneal=anneal)
    solver = optimizers.make(name, rate, clip=0.0, eps=1e-12, **rest)
    params = {"kernel": jnp.zeros(())}

    def step(state, _):
        updates, state = solver.update({"kernel": jnp.float32(2.0)}, state, params)
        return state, -updates["kernel"]

    found = jax.jit(lambda: jax.lax.scan(step, solver.init(params), None, 16)[1])()
    time = np.arange(16.0)
    done = np.clip((time - warmup) / (anneal - warmup), 0, 1)
    later = dict(
        const=rate,
        linear=rate * (1 - 0.9 * done),
        cosine=rate * ((1 - 0.1 * rate) * 0.5 * (1 + np.cos(np.pi * done)) + 0.1 * rate),
    )[schedule]
    np.testing.assert_allclose(
        found, np.where(time < warmup, rate * time / warmup, later), rtol=1e-4
    )


@pytest.mark.parametrize("kind", ["barlow", "infonce"])
def test_losses_without_a_decoder(kind):
    own = dict(redundancy=0.3) if kind == "barlow" else {}
    settings, rng = change(CONFIG, loss=dict(representation=kind, **own)), np.random.default_rng(1)
    guess, tokens = (rng.normal(size=(3, 4, 6)).astype(np.float32) for _ in range(2))
    x, y = guess.reshape(12, 6).astype(float), tokens.reshape(12, 6).astype(float)
    if kind == "barlow":
        x, y = ((a - a.mean(0)) / (a.std(0, ddof=1) + 1e-8) for a in (x, y))
        c = x.T @ y / 12
        expected = sum(
            (c[i, j] - 1) ** 2 if i == j else 0.3 * c[i, j] ** 2 for i in range(6) for j in range(6)
        )
    else:
        logits = x @ y.T
        expected = np.mean([np.log(np.exp(row - row[i]).sum()) for i, row in enumerate(logits)])

    def of(guess, tokens):
        loss = world_model.representation_loss(settings, guess, tokens)
        return update.total_loss(settings, {"loss": loss})

    given = jnp.asarray(guess), jnp.asarray(tokens)
    np.testing.assert_allclose(jax.jit(of)(*given), expected, rtol=1e-5)
    # Devices compare all rows of the batch.
    shares = jax.jit(lambda *args: in_parts(of, (1, 1), *args))(*given)
    np.testing.assert_allclose(jnp.sum(shares), expected, rtol=1e-5)


def test_a_world_model_without_a_decoder():
    """It has a projector, whose targets get no gradient, and refuses a decoder's settings."""
    settings = change(CONFIG, loss=dict(representation="barlow"))
    net, train = settings.model, trained(settings)
    model = train.params["model"]
    assert "decoder" not in model
    assert model["projector"]["kernel"].shape == (net.feature_dim, encoders.token_dim(net))
    batch, carry = update.make_batch(settings, rows(jax.random.key(0)))
    draws = update.draw_noise(settings, jax.random.key(1)).posterior

    def losses(model):
        return world_model.model_losses(settings, model, batch, carry, draws).losses

    found, grads = jax.jit(jax.value_and_grad(lambda model: losses(model)["barlow"]))(model)
    assert found > 0 and np.any(np.asarray(grads["encoder"]["vector"]["layer_0"]["kernel"]))
    assert set(jax.eval_shape(losses, model)) >= {"barlow", "reward", "dynamics"}
    weighed = [
        update.total_loss(change(settings, loss=dict(barlow_coef=x)), {"barlow": found})
        for x in (0.05, 2.0)
    ]
    np.testing.assert_allclose(weighed, [0.05 * found, 2.0 * found], rtol=1e-6)
    spec = EnvSpec("x", (3,), jnp.float32, 2, 10, 1)
    barlow = from_dict(Settings(), {"loss": dict(representation="barlow")})
    with pytest.raises(ValueError, match="decoder_layers=2 has no effect .*a vector and a dec"):
        dreamer.resolve(change(barlow, model=dict(decoder_layers=2)), spec)
    with pytest.raises(ValueError, match="redundancy=0.1 has no effect.*representation='barlow'"):
        from_dict(Settings(), {"loss": dict(redundancy=0.1)})
    with pytest.raises(ValueError, match="anneal=500: schedule='linear' needs more updates than"):
        from_dict(Settings(), {"optimizer": dict(schedule="linear", anneal=500, warmup=500)})
    with pytest.raises(ValueError, match="optimizer.anneal=500 has no effect"):
        from_dict(Settings(), {"optimizer": dict(anneal=500)})


def official_images(net, encoder, decoder, image, features):
    """Tokens and image of the official code's image layers, by JAX's own convolutions."""
    axes, stride = dict(dimension_numbers=("NHWC", "HWIO", "NHWC")), (2, 2)

    def linear(layer, x):
        return x @ layer["kernel"] + layer.get("bias", 0.0)

    def conv(layer, x, stride=(1, 1), apply=jax.lax.conv_general_dilated):
        y = apply(np.float32(x), layer["kernel"], stride, "SAME", **axes)
        return np.asarray(y) + layer.get("bias", 0.0)

    def normed(layer, x):
        x = x - x.mean(-1, keepdims=True) if net.norm == "layer" else x
        epsilon = dict(layer=1e-3, rms=1e-4)[net.norm]
        x = x / np.sqrt(np.square(x).mean(-1, keepdims=True) + epsilon)
        x = x * layer["norm"]["scale"] + layer["norm"].get("shift", 0.0)
        return np.asarray(getattr(jax.nn, net.image_activation)(x))

    def doubled(layer, x):
        if net.image_strided:
            return conv(layer, x, stride, jax.lax.conv_transpose)
        return conv(layer, x.repeat(2, 1).repeat(2, 2))

    x = image / 255.0 - 0.5
    for i, layer in enumerate(encoder.values()):
        if net.image_outer and i == 0:
            x = conv(layer, x)
        elif net.image_strided:
            x = conv(layer, x, stride)
        else:
            x = conv(layer, x).reshape(len(x), x.shape[1] // 2, 2, x.shape[2] // 2, 2, -1)
            x = x.max((2, 4))
        x = normed(layer, x)
    tokens, grid = x.reshape(len(x), -1), x.shape[1:]
    blocks = decoder["deter"]["kernel"]
    deter = features[:, : net.deter].reshape(len(x), len(blocks), -1)
    deter = np.einsum("ngi,gio->ngo", deter, blocks).reshape(len(x), -1)
    deter = deter + decoder["deter"].get("bias", 0.0)
    deter = deter.reshape(len(x), len(blocks), *grid[:2], -1)
    deter = np.moveaxis(deter, 1, 3).reshape(len(x), *grid)
    stoch = normed(decoder["stoch_0"], linear(decoder["stoch_0"], features[:, net.deter :]))
    x = normed(decoder, deter + linear(decoder["stoch_1"], stoch).reshape(len(x), *grid))
    for layer in decoder["convs"].values():
        x = normed(layer, doubled(layer, x))
    return tokens, jax.nn.sigmoid((conv if net.image_outer else doubled)(decoder["out"], x))


@pytest.mark.parametrize(
    "chosen",
    [
        dict(strided=True, kernel=4, activation="gelu"),
        dict(strided=True, outer=True, multipliers=(1, 2, 3)),
        dict(outer=True, activation="relu", kernel=3),
        dict(multipliers=(1, 3), activation="mish"),
        dict(strided=True, multipliers=(2,), activation="elu", kernel=2),
    ],
)
@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_image_layers_are_the_official_ones(chosen, kind):
    sizes = dict(deter=16, units=4, depth=2, stoch=2, classes=4, norm=kind)
    layers = {f"image_{name}": value for name, value in chosen.items()}
    net = nets.ModelConfig(image_shape=(24, 16, 3), **sizes, **layers)
    key, rng = jax.random.key(0), np.random.default_rng(0)
    image = rng.integers(0, 256, (3, *net.image_shape)).astype(np.uint8)
    features = rng.normal(size=(3, net.feature_dim)).astype(np.float32)
    models = [
        jax.tree.map(lambda x: np.float32(x + 0.1 * rng.normal(size=x.shape)), params)
        for params in (encoders.init_encoder(key, net), encoders.init_decoder(key, net))
    ]
    encoder, decoder = models[0]["image"], models[1]["image"]
    tokens, decoded = official_images(net, encoder, decoder, image, features)
    found = encoders.encode(net, models[0], {"image": image})
    assert found.shape[1] == encoders.token_dim(net)
    np.testing.assert_allclose(found, tokens, rtol=2e-4, atol=2e-5)
    found = encoders.decode(net, models[1], features)["image"]
    np.testing.assert_allclose(found, decoded, rtol=2e-4, atol=2e-5)
