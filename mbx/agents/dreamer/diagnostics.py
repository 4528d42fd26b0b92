"""DreamerV3's diagnostics: open-loop predictions, and losses on a batch of their own.

The model observes the first CONTEXT rows of replayed sequences and then imagines what follows from
the actions that were taken, seeing nothing more.

open_loop_error_N   squared error of the N-th imagined observation, mean over its entries (in symlog
    units for vectors, of pixels in [0, 1] for images; open_loop_error_image_N of images that come
    with a vector)
open_loop.png       for vectors: what was observed and what was predicted, entry by entry
open_loop.gif       for images: observed, predicted, and their difference, side by side; the lines
                    between them turn orange where the model sees no more
report/loss/NAME, report/grad_norm/NAME
                    with eval.report: each loss on a batch drawn for it, and the norm of its
                    gradient by all parameters
"""

from __future__ import annotations

import functools
import io

import jax
import jax.numpy as jnp
import numpy as np
import optax

from mbx import distributions as dist
from mbx import replay, replay_sequences
from mbx.agents.base import Diagnostics, MakeDiagnostics
from mbx.agents.dreamer import encoders, rssm
from mbx.agents.dreamer.behaviour import behaviour_losses
from mbx.agents.dreamer.settings import Settings
from mbx.agents.dreamer.types import TrainState
from mbx.agents.dreamer.update import by_trajectory, draw_noise, make_batch
from mbx.agents.dreamer.world_model import model_losses
from mbx.agents.pictures import SHOWN, film, to_gif
from mbx.fast import compiler
from mbx.types import Array, Metrics, Params

CONTEXT = 5
SEQUENCES = 16  # that errors are averaged over, or as few more as replay shards divide
ENTRIES = 6  # of a vector in pictures


def make_diagnostics(settings: Settings) -> MakeDiagnostics:
    """`Agent.diagnostics` of Dreamer's agent."""
    options = compiler.for_once(jax.default_backend())
    predict = jax.jit(functools.partial(open_loop, settings), compiler_options=options)
    measure = None
    if settings.eval.report:
        measure = jax.jit(functools.partial(report, settings), compiler_options=options)

    def diagnose(train: TrainState, state: replay.ReplayState, key: Array) -> Diagnostics:
        files, numbers, truth, context = {}, {}, {}, _context(settings)
        if settings.loss.representation == "decoder":
            truth, prediction, inside = jax.device_get(predict(train, state, key))
        if measure is not None:
            found = jax.device_get(measure(train, state, jax.random.fold_in(key, 3)))
            numbers = {name: float(x) for name, x in found.items()}
        for kind, seen in truth.items():
            among = "image_" if kind == "image" and len(truth) > 1 else ""
            errors = _errors(seen, prediction[kind], inside, context)
            numbers |= {f"open_loop_error_{among}{n}": error for n, error in errors.items()}
            if kind == "vector":
                files["open_loop.png"] = draw_curves(seen, prediction[kind], inside, context)
            else:
                frames = film(seen, prediction[kind], inside, context)
                files["open_loop.gif"] = to_gif(frames, milliseconds=200)
        return Diagnostics(numbers, files)

    return diagnose


def _context(settings: Settings) -> int:
    return min(CONTEXT, max(settings.loss.batch_length // 2, 1))


def report(settings: Settings, train: TrainState, state: replay.ReplayState, key: Array) -> Metrics:
    """Mean of every loss, without its coefficient, and the norm of its gradient."""
    sample_key, noise_key = jax.random.split(key)
    size, length = settings.loss.batch_size, settings.loss.batch_length
    rows = replay_sequences.sample(state, sample_key, batch_size=size, length=length + 1).rows
    batch, carry = make_batch(settings, rows)
    noise = by_trajectory(draw_noise(settings, noise_key))

    def losses(params: Params) -> Metrics:
        output = model_losses(settings, params["model"], batch, carry, noise.posterior)
        result = behaviour_losses(
            settings, params, train.slow_critic, output, batch, train.ema, noise, train.norms
        )
        return jax.tree.map(jnp.mean, output.losses | result.losses)

    found, gradients = jax.vjp(losses, train.params)

    def norm(of: Array) -> Array:
        return optax.tree.norm(gradients(dict(zip(found, of, strict=True))))

    norms = jax.lax.map(norm, jnp.eye(len(found)))  # in turn: one program, one gradient in memory
    norms = dict(zip(found, norms, strict=True))
    return {f"report/loss/{n}": x for n, x in found.items()} | {
        f"report/grad_norm/{n}": x for n, x in norms.items()
    }


def open_loop(
    settings: Settings, train: TrainState, state: replay.ReplayState, key: Array
) -> tuple[dict[str, Array], dict[str, Array], Array]:
    """Observed and predicted `[T, B, ...]`, and which rows are of the imagined episode, `[T, B]`.
    By kind: "vector" in symlog space, "image" in [0, 1].
    """
    sample_key, seen_key, imagine_key = jax.random.split(key, 3)
    net, model = settings.model, train.params["model"]
    length, context = settings.loss.batch_length, _context(settings)
    num = -(-SEQUENCES // state.shards) * state.shards
    rows = replay_sequences.sample(state, sample_key, batch_size=num, length=length + 1).rows
    batch, carry = make_batch(settings, rows)
    tokens = encoders.encode(net, model["encoder"], batch.obs)
    draws = jax.random.uniform(seen_key, (context, num, net.stoch))
    given = (x[:context] for x in (tokens, batch.action, batch.is_first))
    seen = rssm.observe(net, model["rssm"], carry, *given, draws)
    last = jax.tree.map(lambda x: x[-1], seen.states)
    actions = jnp.concatenate([batch.action[context:], batch.action[-1:]])
    draws = jax.random.uniform(imagine_key, (length - context, num, net.stoch))
    imagined, _ = rssm.imagine(net, model["rssm"], last, lambda _, action: action, actions, draws)
    states = jax.tree.map(lambda a, b: jnp.concatenate([a, b[1:]]), seen.states, imagined)
    prediction = encoders.decode(net, model["decoder"], rssm.features(states))
    begun = batch.is_first & (jnp.arange(length)[:, None] >= context)
    inside = jnp.cumsum(begun, axis=0) == 0
    truth = {}
    if "vector" in prediction:
        truth["vector"] = dist.symlog(batch.obs["vector"])
    if "image" in prediction:
        truth["image"] = batch.obs["image"].astype(jnp.float32) / net.image_scale
        prediction["image"] = jnp.clip(prediction["image"], 0.0, 1.0)
    return truth, prediction, inside


def _errors(
    truth: np.ndarray, prediction: np.ndarray, inside: np.ndarray, context: int
) -> dict[int, float]:
    error = np.square(truth - prediction).mean(axis=tuple(range(2, truth.ndim)))
    error = np.where(inside, error, 0.0).sum(axis=1) / np.maximum(inside.sum(axis=1), 1)
    imagined = error[context:]  # none where a sequence is one row
    steps = {min(n, len(imagined)) for n in (1, 5, 15)} - {0}
    return {n: float(imagined[n - 1]) for n in sorted(steps)}


def draw_curves(
    truth: np.ndarray, prediction: np.ndarray, inside: np.ndarray, context: int
) -> bytes:
    """A PNG file's content: a row a sequence, a column an entry of the vector."""
    from matplotlib.figure import Figure

    rows, columns = min(SHOWN, truth.shape[1]), min(ENTRIES, truth.shape[2])
    figure = Figure(figsize=(2.4 * columns, 1.6 * rows + 0.4), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, sharex=True)
    for row, column in np.ndindex(rows, columns):
        axis, shown = axes[row, column], inside[:, row]
        time = np.arange(len(truth))[shown]
        axis.plot(time, truth[shown, row, column], label="observed")
        axis.plot(time, prediction[shown, row, column], label="predicted", linestyle="--")
        axis.axvline(context - 0.5, color="grey", linewidth=0.5)
        axis.tick_params(labelsize=7)
        if row == 0:
            axis.set_title(f"entry {column + 1} (symlog)", fontsize=8)
    axes[0, 0].legend(fontsize=7)
    target = io.BytesIO()
    figure.savefig(target, format="png", dpi=100)
    return target.getvalue()
