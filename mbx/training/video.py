"""One episode of a trained agent as a moving picture.

    episode = video.record(agent.act, agent.init_actor, train_state, config, key)
    video.write("episode.gif", episode)

From the command line: `python -m experiments.evaluate RUN --video=episode.gif`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mbx import envs
from mbx.envs.base import JaxEnvironment
from mbx.envs.host import SteppedEnvironment
from mbx.envs.render import Renderer
from mbx.fast import rng
from mbx.files import prepare_output
from mbx.pictures import write_picture
from mbx.training.build import Config, read
from mbx.training.environments import make_environment

Array = jax.Array
MAX_FRAMES = 250


class Episode(NamedTuple):
    """An episode that was drawn.

    Attributes:
        frames: pictures, uint8 `[height, width, 3]`, of the states that actions were chosen in, or
            of every second, third, … of them.
        milliseconds: how long a frame is shown.
        total: the return.
        length: agent steps.
    """

    frames: list[np.ndarray]
    milliseconds: int
    total: float
    length: int


def check(config: Config, path: str) -> Renderer | None:
    """The renderer for a configuration's environment and a video called `path`.

    None for an environment on the host, which draws itself; a first picture has been tried then.

    Raises ValueError for a name that does not end in .gif and for environments that are not drawn,
    NoRenderer where this machine has nothing to draw them with.
    """
    if not path.endswith(".gif"):
        raise ValueError(f"video={path!r}: must end in .gif")
    prepare_output(path)
    if envs.films(read(config).env.name):
        environment = _host(config)
        try:
            environment.render()
        finally:
            environment.close()
        return None
    return _renderer(config)


def _renderer(config: Config) -> Renderer:
    settings = read(config)
    return envs.make_renderer(settings.env.name, **settings.environment_options(False))


def record(
    act: Callable,
    init_actor: Callable,
    train_state: Any,
    config: Config,
    key: Array,
    *,
    renderer: Renderer | None = None,
    max_frames: int = MAX_FRAMES,
) -> Episode:
    """Play one episode without exploration noise and draw it.

    Args:
        act: an agent's.
        init_actor: likewise.
        train_state: likewise.
        config: of the run, whose environment is played.
        key: of the environment and the planner.
        renderer: None for the environment's own, and for one on the host.
        max_frames: of longer episodes fewer states are drawn.

    Raises:
        ValueError, NoRenderer, ImportError: as `mbx.envs.make_renderer`.
    """
    if renderer is None and envs.films(read(config).env.name):
        return _record_host(act, init_actor, train_state, config, key, max_frames)
    renderer = renderer or _renderer(config)
    environment = make_environment(config, 1, seed=0, training=False)
    reset_key, step_key = jax.random.split(key)
    advance = _advance(act, environment, renderer)
    env_state, obs = jax.jit(environment.reset)(reset_key)
    carry, views, total, done = (env_state, obs, init_actor(1)), [], 0.0, False
    while not done:
        carry, shown = advance(train_state, carry, jnp.int32(len(views)), step_key)
        view, reward, done = jax.device_get(shown)
        views.append(view)
        total += float(reward)
    stride = -(-len(views) // max_frames)
    seconds = renderer.seconds * environment.spec.action_repeat * stride
    frames = [np.array(renderer.draw(view)) for view in views[::stride]]
    return Episode(frames, int(np.clip(1000 * seconds, 20, 500)), total, len(views))


def shortened(episode: Episode, *, width: int = 0, seconds: float = 0.0) -> Episode:
    """Its first seconds, in pictures `width` pixels wide; 0 leaves either as it is."""
    from PIL import Image

    num = max(1, round(1000 * seconds / episode.milliseconds)) if seconds else None
    frames = episode.frames[:num]
    if width:
        height = max(1, round(width * frames[0].shape[0] / frames[0].shape[1]))
        small = [Image.fromarray(x).resize((width, height), Image.Resampling.BOX) for x in frames]
        frames = [np.asarray(x) for x in small]
    return episode._replace(frames=frames)


def write(path: str, episode: Episode) -> None:
    """Write an episode to a .gif, whole or not at all. Raises ValueError for another ending."""
    write_picture(path, episode.frames, milliseconds=episode.milliseconds)


def _host(config: Config) -> SteppedEnvironment:
    """One copy of a configuration's environment on the host, which draws itself."""
    environment = make_environment(config, 1, seed=0, training=False, film=True)
    assert isinstance(environment, SteppedEnvironment)
    return environment


def _record_host(
    act: Callable, init_actor: Callable, train_state: Any, config: Config, key: Array, most: int
) -> Episode:
    """`record` of an environment on the host. Draws random numbers as `evaluation` does."""
    environment, stride = _host(config), 1
    seed_key, step_key = jax.random.split(key)

    @jax.jit
    def choose(train: Any, actor: Any, obs: Array, first: Array, key: Array) -> tuple:
        return act(train, actor, obs, first, rng.unrolled(key), True)

    try:
        obs = environment.reset(int(jax.random.randint(seed_key, (), 0, 2**31 - 1)))
        actor, frames, total, length, done = init_actor(1), [], 0.0, 0, False
        while not done:
            if length % stride == 0:
                frames.append(environment.render())
            if len(frames) > most:  # of longer episodes fewer states are drawn
                frames, stride = frames[::2], 2 * stride
            first, now = jnp.full(1, length == 0), jax.random.fold_in(step_key, length)
            action, actor = choose(train_state, actor, jnp.asarray(obs), first, now)
            timestep = environment.step(np.asarray(action))
            obs, total, length = timestep.obs, total + float(timestep.reward[0]), length + 1
            done = bool(timestep.terminated[0] | timestep.truncated[0])
        seconds = environment.seconds * environment.spec.action_repeat * stride
    finally:
        environment.close()
    return Episode(frames, int(np.clip(1000 * seconds, 20, 500)), total, length)


def _advance(act: Callable, environment: JaxEnvironment, renderer: Renderer) -> Callable:
    """One compiled step: what to draw of the state before it, its reward, whether it was the last.

    Draws random numbers as `mbx.training.evaluation` does.
    """

    @jax.jit
    def advance(train: Any, carry: Any, i: Array, key: Array) -> Any:
        env_state, obs, actor = carry
        view = renderer.view(jax.tree.map(lambda x: x[0], env_state.raw))
        act_key, env_key = jax.random.split(jax.random.fold_in(key, i))
        action, actor = act(train, actor, obs, jnp.full(1, i == 0), act_key, True)
        env_state, timestep = environment.step(env_state, action, env_key)
        done = timestep.terminated | timestep.truncated
        return (env_state, timestep.obs, actor), (view, timestep.reward[0], done[0])

    return advance
