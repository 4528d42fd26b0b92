"""One episode of a trained agent as a video: `mbx evaluate RUN --video=episode.gif`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mbx import envs
from mbx.agents.pictures import to_gif, to_png
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
        played = play(*parts, renderer, wanted) if renderer else _play_host(*parts, wanted)
        for picture, reward, _ in played:
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
    """Write an episode to a .gif atomically. Raises ValueError for another ending."""
    write_picture(path, episode.frames, milliseconds=episode.milliseconds)


def play(
    environment: JaxEnvironment,
    act: Callable,
    actor: Any,
    train_state: Any,
    key: Array,
    renderer: Renderer | None,
    wanted: Callable[[int], bool] = lambda i: True,
) -> Iterator[tuple[Any, float, bool]]:
    """Steps of an episode: picture of the state before, reward, and whether it terminated.
    Random numbers are drawn as in an evaluation. The picture is None without a renderer and where
    `wanted` is false.
    """

    @jax.jit
    def advance(train: Any, carry: Any, i: Array, key: Array) -> Any:
        env_state, obs, actor = carry
        raw = jax.tree.map(lambda x: x[0], env_state.raw)
        view = None if renderer is None else renderer.view(raw)
        act_key, env_key = jax.random.split(jax.random.fold_in(key, i))
        action, actor = act(train, actor, obs, jnp.full(1, i == 0), act_key, True)
        env_state, now = environment.step(env_state, action, env_key)
        shown = view, now.reward[0], now.terminated[0], now.truncated[0]
        return (env_state, now.obs, actor), shown

    reset_key, step_key = jax.random.split(key)
    carry = (*jax.jit(environment.reset)(reset_key), actor)
    for i in itertools.count():
        carry, shown = advance(train_state, carry, jnp.int32(i), step_key)
        view, reward, terminated, truncated = jax.device_get(shown)
        picture = renderer.draw(view) if renderer is not None and wanted(i) else None
        yield picture, float(reward), bool(terminated)
        if terminated or truncated:
            return


def _play_host(
    environment: SteppedEnvironment,
    act: Callable,
    actor: Any,
    train_state: Any,
    key: Array,
    wanted: Callable[[int], bool],
) -> Iterator[tuple[Any, float, bool]]:
    """`play` of an environment on the host, which draws itself."""
    seed_key, step_key = jax.random.split(key)

    @jax.jit
    def choose(train: Any, actor: Any, obs: Array, first: Array, key: Array) -> tuple:
        return act(train, actor, obs, first, rng.unrolled(key), True)

    obs = environment.reset(int(jax.random.randint(seed_key, (), 0, 2**31 - 1)))
    for i in itertools.count():
        picture = environment.render() if wanted(i) else None
        now = jax.random.fold_in(step_key, i)
        action, actor = choose(train_state, actor, jnp.asarray(obs), jnp.full(1, i == 0), now)
        timestep = environment.step(np.asarray(action))
        obs = timestep.obs
        yield picture, float(timestep.reward[0]), bool(timestep.terminated[0])
        if timestep.terminated[0] or timestep.truncated[0]:
            return


def write_picture(path: str, images: Any, **options: Any) -> None:
    """Write a `.png` (one picture) or a `.gif` (several; options as `to_gif`).
    Raises ValueError for another ending, and for arrays that are not pictures.
    """
    if path.endswith(".png"):
        data = to_png(images)
    elif path.endswith(".gif"):
        data = to_gif(images, **options)
    else:
        raise ValueError(f"path={path!r}: must end in .png or .gif")
    atomic_write(path, data)
