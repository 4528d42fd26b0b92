"""Open-loop predictions: what they are made of, and what is written of them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from matplotlib import figure

from mbx import replay, replay_sequences
from mbx.agents import pictures
from mbx.agents.dreamer import agent as dreamer
from mbx.agents.dreamer import diagnostics, update, world_model
from tests.agents.dreamer_helpers import change
from tests.agents.test_dreamer import CONFIG, trained

LENGTH = 8
WINDOWS = change(CONFIG, loss=dict(batch_length=LENGTH))
CONTEXT = diagnostics._context(WINDOWS)
predict = jax.jit(diagnostics.open_loop, static_argnums=0)


def filled(config, ends_at):
    """A replay of one environment whose episodes end every `ends_at` rows."""
    row = dreamer.example_row(config)
    state, insert = replay.init(row, num_envs=1, capacity=40), jax.jit(replay.insert)
    for i in range(30):
        rows = {n: np.zeros((1, *x.shape), x.dtype) for n, x in row.items()}
        rows["obs"] = np.full_like(rows["obs"], 0.1 * (i % ends_at))
        rows["is_first"] = np.array([i % ends_at == 0])
        rows["is_last"] = np.array([(i + 1) % ends_at == 0])
        state = insert(state, rows)
    return state


def test_dreams_ignore_what_comes_after_the_context():
    train, state = trained(WINDOWS), filled(WINDOWS, 1000)

    def dreams(obs):
        changed = state.replace(data=state.data | {"obs": obs})
        truth, dreamed, inside = predict(WINDOWS, train, changed, jax.random.key(0))
        assert inside.all()
        return truth["vector"], dreamed["vector"]

    obs = state.data["obs"]
    truth, one = dreams(obs)
    assert truth.shape == one.shape == (LENGTH, diagnostics.SEQUENCES, 3)
    # The same windows of other observations: if dreams saw nothing, only the context would matter.
    start = jnp.argmin(truth[0, :, 0])
    late = jnp.where(obs > jnp.expm1(truth[CONTEXT, start, 0]) - 1e-6, 1.0, 0.0)
    _, other = dreams(obs + late)
    np.testing.assert_allclose(other[:, start], one[:, start], rtol=1e-4, atol=1e-5)
    assert np.abs(dreams(obs + 1.0)[1] - one).max() > 1e-3


def test_sequences_their_latents_and_those_of_dreams_have_streams_of_their_own(monkeypatch):
    """Of keys that two had in common the same numbers would come: they are as many."""
    assert CONTEXT == LENGTH // 2
    shape, drawn = (CONTEXT, diagnostics.SEQUENCES, WINDOWS.model.stoch), []

    def watch(module, name, draws):
        function = getattr(module, name)

        def call(*args, **kwargs):
            drawn.append(draws(args))
            return function(*args, **kwargs)

        monkeypatch.setattr(module, name, call)

    def draws(*args):
        diagnostics.open_loop(WINDOWS, *args)
        return drawn

    train, state = trained(WINDOWS), filled(WINDOWS, 1000)
    watch(diagnostics.replay_sequences, "sample", lambda args: jax.random.uniform(args[1], shape))
    watch(diagnostics.rssm, "observe", lambda args: args[-1])
    watch(diagnostics.rssm, "imagine", lambda args: args[-1])
    found = jax.jit(draws)(train, state, jax.random.key(0))
    assert [x.shape for x in found] == [shape] * 3
    assert len({tuple(np.ravel(x)[:4].tolist()) for x in found}) == 3


@pytest.mark.parametrize(("shards", "length"), [(1, 8), (3, 8), (5, 8), (1, 1)])
def test_any_number_of_shards_and_rows_can_be_looked_at(shards, length):
    """Sixteen sequences, or as few more as shards divide; of one row there is nothing imagined."""
    config = change(CONFIG, loss=dict(batch_length=length), critic=dict(replay_loss="none"))
    config = change(config, imagination=dict(rows=0))
    given = dict(num_envs=shards, capacity=40, shards=shards)
    state = jax.eval_shape(lambda: replay.init(dreamer.example_row(config), **given))
    train = jax.eval_shape(lambda key: dreamer.init_state(config, key), jax.random.key(0))
    found = jax.eval_shape(
        lambda *args: diagnostics.open_loop(config, *args), train, state, jax.random.key(0)
    )
    num = {1: 16, 3: 18, 5: 20}[shards]
    assert found[0]["vector"].shape == found[1]["vector"].shape == (length, num, 3)
    errors = diagnostics._errors(
        *(np.ones((length, num, 3)) * x for x in (2.0, 1.0)),
        np.ones((length, num), bool),
        diagnostics._context(config),
    )
    assert errors == ({} if length == 1 else {1: 1.0, 4: 1.0})


def test_rows_of_the_next_episode_do_not_count():
    _, _, inside = predict(WINDOWS, trained(WINDOWS), filled(WINDOWS, 6), jax.random.key(0))
    assert inside[:CONTEXT].all()
    assert not inside[-1].all() and (np.diff(inside.astype(int), axis=0) <= 0).all()


def test_diagnostics_hold_errors_and_draw_curves():
    diagnose = diagnostics.make_diagnostics(WINDOWS)
    found = diagnose(trained(WINDOWS), filled(WINDOWS, 9), jax.random.key(1))
    assert set(found.metrics) == {f"open_loop_error_{n}" for n in (1, 4)}
    assert all(value > 0.0 for value in found.metrics.values())
    assert found.files["open_loop.png"].startswith(b"\x89PNG")


def test_a_report_has_every_loss_and_the_norm_of_its_gradient():
    """Where a loss alone moves a group, as the update says; the others by reverse Jacobians."""
    settings = change(
        WINDOWS,
        critic=dict(replay_loss="none"),
        optimizer=dict(learning_rates=(0.0, 0.0, 0.0)),
    )
    train, state = trained(settings), filled(settings, 7)
    # Not what it is a copy of, so that it counts which of the two is read.
    train = train.replace(slow_critic=jax.tree.map(lambda x: x + 0.1, train.slow_critic))
    key = jax.random.key(4)
    found = jax.device_get(
        jax.jit(diagnostics.report, static_argnums=0)(settings, train, state, key)
    )
    sample_key, noise_key = jax.random.split(key)
    size = settings.loss.batch_size
    rows = replay_sequences.sample(state, sample_key, batch_size=size, length=LENGTH + 1).rows
    batch, carry = update.make_batch(settings, rows)
    noise = update.by_trajectory(update.draw_noise(settings, noise_key))
    learn = jax.jit(update.update_from_batch, static_argnums=0)
    told = learn(settings, train, batch, carry, noise)[1]
    names = {"policy": "actor_loss", "value": "critic_loss"}
    losses = ("vector", "reward", "continue", "dynamics", "representation", *names)
    assert set(found) == {f"report/{what}/{n}" for what in ("loss", "grad_norm") for n in losses}
    for name in losses:
        expected = told[names.get(name, f"loss/{name}")]
        np.testing.assert_allclose(found[f"report/loss/{name}"], expected, rtol=1e-5)
    for name, group in (("policy", "actor"), ("value", "critic")):
        expected = told[f"grad_norm/{group}"]
        np.testing.assert_allclose(found[f"report/grad_norm/{name}"], expected, rtol=1e-4)

    def model_loss(params):
        losses = world_model.model_losses(settings, params, batch, carry, noise.posterior).losses
        return jnp.stack([jnp.mean(losses[name]) for name in ("vector", "reward", "dynamics")])

    rows = jax.tree.leaves(jax.jit(jax.jacrev(model_loss))(train.params["model"]))
    expected = np.sqrt(sum(np.square(x).reshape(3, -1).sum(axis=1) for x in jax.device_get(rows)))
    for name, norm in zip(("vector", "reward", "dynamics"), expected, strict=True):
        np.testing.assert_allclose(found[f"report/grad_norm/{name}"], norm, rtol=1e-4)


def test_films_show_truth_prediction_and_difference():
    truth, prediction = np.zeros((2, 3, 2, 8, 8, 4))
    truth[..., 1] = 1.0
    prediction[:, 1, ..., 1] = 0.25
    inside = np.array([[1, 1], [1, 1], [1, 0]], bool)
    frames, line = pictures.film(truth, prediction, inside, context=2), pictures.LINE
    size = 64 + line
    assert len(frames) == 3 and frames[0].shape == (2 * size + line, 3 * size + line, 3)
    full = pictures.to_rgb(truth)[0, 0, 0, 0].astype(float)
    for step, frame in enumerate(frames):
        wanted = np.array([[1.0, 0.0, 1.0], [1.0, 0.25, 0.75]])  # the first is not predicted
        wanted[1] *= pictures.ENDED if step == 2 else 1.0
        for (row, column), share in np.ndenumerate(wanted):
            y, x = line + row * size, line + column * size
            picture = frame[y : y + 64, x : x + 64]
            np.testing.assert_allclose(picture - share * full, np.zeros((64, 64, 3)), atol=1.5)
        colour = pictures.SEEN if step < 2 else pictures.IMAGINED
        inner = [np.arange(line + i * size, (i + 1) * size) for i in range(2)]
        border = np.delete(frame, np.concatenate(inner), axis=0)
        np.testing.assert_array_equal(border, np.broadcast_to(colour, border.shape))
    assert len({tuple(c) for c in pictures.to_rgb(np.eye(4))}) == 4


def test_one_channel_is_grey_two_are_colours_and_three_are_as_they_are():
    grey = pictures.to_rgb(np.array([[[0.0], [0.5], [2.0]]]))
    np.testing.assert_array_equal(grey, [[[0] * 3, [128] * 3, [255] * 3]])
    first, second = pictures.to_rgb(np.eye(2))
    # Two opposite hues: 0.55 + 0.45 cos of 0, 120 and 240 degrees, or of those + 180.
    np.testing.assert_allclose(first / 255, 0.55 + 0.45 * np.array([1.0, -0.5, -0.5]), atol=0.01)
    np.testing.assert_allclose(second / 255, 0.55 - 0.45 * np.array([1.0, -0.5, -0.5]), atol=0.01)
    np.testing.assert_array_equal(pictures.to_rgb(np.eye(3)), 255 * np.eye(3))


def test_curves_are_of_what_was_observed_and_predicted_in_the_episode(monkeypatch):
    drawn, rng = [], np.random.default_rng(0)
    monkeypatch.setattr(figure.Figure, "savefig", lambda self, *_, **__: drawn.append(self))
    seen, predicted = rng.normal(size=(2, 4, 6, 8))
    inside = np.arange(4)[:, None] < np.array([4, 2, 3, 1, 4, 4])
    diagnostics.draw_curves(seen, predicted, inside, 2)
    np.testing.assert_allclose(drawn[0].get_size_inches(), (2.4 * 6, 1.6 * 4 + 0.4))
    for number, (row, column) in enumerate(np.ndindex(4, 6)):
        one, two, line = drawn[0].axes[number].lines
        num = inside[:, row].sum()
        for curve, wanted, style in ((one, seen, "-"), (two, predicted, "--")):
            np.testing.assert_array_equal(curve.get_xdata(), np.arange(num))
            np.testing.assert_array_equal(curve.get_ydata(), wanted[:num, row, column])
            assert curve.get_linestyle() == style
        assert line.get_xdata()[0] == 1.5
