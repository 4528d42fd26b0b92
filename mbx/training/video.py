"""One episode of a trained agent as a video: `mbx evaluate RUN --video=episode.gif`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mbx import envs
from mbx.agents.pictures import to_gif
from mbx.agents.settings import RunSettings
from mbx.envs.base import JaxEnvironment
from mbx.envs.host import SteppedEnvironment
from mbx.envs.render import Renderer
from mbx.fast import rng
from mbx.training.build import make_environment, opened
from mbx.training.files import atomic_write, prepare_output
from mbx.types import Array

MAX_FRAMES = 250


class Episode(NamedTuple):
    """A rendered episode.

    Attributes:
        frames: uint8 `[height, width, 3]` of the states before actions, possibly subsampled.
        milliseconds: duration of a frame.
        total: the return.
        length: agent steps.
    """

    frames: list[np.ndarray]
    milliseconds: int
    total: float
    length: int


def check(settings: RunSettings, path: str) -> Renderer | None:
    """The renderer for a configuration's environment and a video at `path`.
    None for an environment on the host, which has then drawn a first picture.
    Raises ValueError for a name that does not end in .gif and for environments without pictures,
    OSError for a path that cannot be written, NoRenderer where this machine cannot draw.
    """
    if not path.endswith(".gif"):
        raise ValueError(f"video={path!r}: must end in .gif")
    prepare_output(path)
    if not envs.films(settings.env.name):
        return _renderer(settings)
    with opened(_environment(settings, film=True)) as environment:
        environment.render()
    return None


def _renderer(settings: RunSettings) -> Renderer:
    return envs.make_renderer(settings.env.name, **settings.environment_options(False))


def _environment(settings: RunSettings, film: bool) -> Any:
    return make_environment(settings, 1, seed=0, training=False, film=film)


def record(
    act: Callable,
    init_actor: Callable,
    train_state: Any,
    settings: RunSettings,
    key: Array,
    *,
    renderer: Renderer | None = None,
    max_frames: int = MAX_FRAMES,
) -> Episode:
    """Play one episode without exploration noise and draw it.

    Args:
        act, init_actor: an agent's.
        settings: the run's, with the environment to play.
        renderer: None for the environment's own, and for one on the host.
        max_frames: longer episodes are subsampled by powers of two.

    Raises:
        ValueError, NoRenderer, ImportError: as `mbx.envs.make_renderer`.
    """
    film = renderer is None and envs.films(settings.env.name)
    renderer = None if film else renderer or _renderer(settings)
    frames: list[np.ndarray] = []
    stride, total, length = 1, 0.0, 0
    with opened(_environment(settings, film)) as environment:
        parts = environment, act, init_actor(1), train_state, key
        wanted = lambda i: i % stride == 0  # noqa: E731  drawing takes longer than acting
        for picture, reward, _ in play(*parts, renderer, wanted):
            if picture is not None:
                frames.append(np.array(picture))
            if len(frames) > max_frames:
                frames, stride = frames[::2], 2 * stride
            total, length = total + reward, length + 1
        seconds = (renderer or environment).seconds * environment.spec.action_repeat * stride
    return Episode(frames, int(np.clip(1000 * seconds, 20, 500)), total, length)


def shortened(episode: Episode, *, width: int = 0, seconds: float = 0.0) -> Episode:
    """The first `seconds`, in pictures `width` pixels wide; 0 leaves either unchanged."""
    from PIL import Image

    num = max(1, round(1000 * seconds / episode.milliseconds)) if seconds else None
    frames = episode.frames[:num]
    if width:
        height = max(1, round(width * frames[0].shape[0] / frames[0].shape[1]))
        small = [Image.fromarray(x).resize((width, height), Image.Resampling.BOX) for x in frames]
        frames = [np.asarray(x) for x in small]
    return episode._replace(frames=frames)


def write(path: str, episode: Episode) -> None:
    """Write an episode to a .gif atomically."""
    atomic_write(path, to_gif(episode.frames, milliseconds=episode.milliseconds))


def play(
    environment: JaxEnvironment | SteppedEnvironment,
    act: Callable,
    actor: Any,
    train_state: Any,
    key: Array,
    renderer: Renderer | None,
    wanted: Callable[[int], bool] = lambda i: True,
) -> Iterator[tuple[Any, float, bool]]:
    """Steps of an episode: picture of the state before, reward, and whether it terminated.
    Random numbers are drawn as in an evaluation. The picture is None without a renderer and where
    `wanted` is false; an environment on the host draws itself.
    """
    host = not isinstance(environment, JaxEnvironment)
    reset_key, step_key = jax.random.split(key)

    @jax.jit
    def choose(train: Any, actor: Any, obs: Array, first: Array, key: Array) -> tuple:
        return act(train, actor, obs, first, rng.unrolled(key), True)

    if host:
        obs = environment.reset(int(jax.random.randint(reset_key, (), 0, 2**31 - 1)))
    else:
        state, obs = jax.jit(environment.reset)(reset_key)
        step, view = jax.jit(environment.step), jax.jit(lambda raw: renderer.view(raw))
    for i in itertools.count():
        picture, now_key = None, jax.random.fold_in(step_key, i)
        if host and wanted(i):
            picture = environment.render()
        elif renderer is not None and wanted(i):
            raw = jax.tree.map(lambda x: x[0], state.raw)
            picture = renderer.draw(jax.device_get(view(raw)))
        if not host:
            now_key, env_key = jax.random.split(now_key)
        first = jnp.full(1, i == 0)
        action, actor = choose(train_state, actor, jnp.asarray(obs), first, now_key)
        if host:
            now = environment.step(np.asarray(action))
        else:
            state, now = step(state, action, env_key)
        obs = now.obs
        yield picture, float(now.reward[0]), bool(now.terminated[0])
        if now.terminated[0] or now.truncated[0]:
            return
