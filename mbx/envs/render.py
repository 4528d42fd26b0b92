"""Renderers: `mbx.envs.make_renderer("gymnax:Pendulum-v1")`, and drawing of MuJoCo models.

A `Renderer` has two functions: `view` selects what a picture shows inside a compiled program;
`draw` draws it.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

_DISABLED = ("disable", "disabled", "off", "false", "0")


class Renderer(NamedTuple):
    """Pictures of one environment's states."""

    view: Callable[[Any], Any]  # raw state -> a small pytree; pure
    draw: Callable[[Any], np.ndarray]  # view as NumPy arrays -> uint8 `[height, width, 3]`
    seconds: float  # simulated time of an environment step


class NoRenderer(RuntimeError):
    """This machine cannot draw."""


def mujoco_drawing(
    model: Any, *, height: int = 240, width: int = 320
) -> Callable[[dict[str, np.ndarray]], np.ndarray]:
    """`Renderer.draw` of a `mujoco.MjModel`, through its first camera where it has one.
    A view holds the fields of `mujoco.MjData` to set (qpos `[nq]`, mocap_pos `[nmocap, 3]`, …); the
    rest follows by forward kinematics. Raises NoRenderer where OpenGL cannot draw without a window;
    the default on Linux is EGL unless MUJOCO_GL says otherwise.
    """
    import mujoco

    pictures, data = MujocoPictures(model, height, width), mujoco.MjData(model)

    def draw(view: dict[str, np.ndarray]) -> np.ndarray:
        for field, value in view.items():
            getattr(data, field)[:] = value
        mujoco.mj_forward(model, data)
        return pictures(model, data)

    return draw


class MujocoPictures:
    """Pictures of MuJoCo's states, `[height, width, 3]`, by a shared OpenGL context.
    The camera is a fixed one by its number, or a free one where there is none. Calls may pass
    copies of `model`. Plain pictures have no shadows, reflections and smoothed edges, which take
    nearly all of the time on a CPU. Raises NoRenderer as `mujoco_drawing`.
    """

    def __init__(
        self, model: Any, height: int, width: int, *, camera: int = 0, plain: bool = False
    ) -> None:
        import mujoco

        chosen = os.environ.get("MUJOCO_GL", "").lower().strip()
        with _drawing():
            if chosen in _DISABLED:
                raise RuntimeError(f"MUJOCO_GL={chosen} turns it off")
            if not chosen and sys.platform == "linux":
                from mujoco.egl import GLContext  # mujoco's own default needs a window
            else:
                from mujoco.gl_context import GLContext
            self._context = GLContext(width, height)
            self._context.make_current()
        self._option, self._camera = mujoco.MjvOption(), mujoco.MjvCamera()
        if model.ncam:
            self._camera.type = mujoco.mjtCamera.mjCAMERA_FIXED
            self._camera.fixedcamid = camera
        else:
            mujoco.mjv_defaultFreeCamera(model, self._camera)
        vis = model.vis
        vis.global_.offwidth = max(vis.global_.offwidth, width)
        vis.global_.offheight = max(vis.global_.offheight, height)
        self._scene = mujoco.MjvScene(model, maxgeom=10_000)
        smoothed = vis.quality.offsamples
        if plain:
            vis.quality.offsamples = 0
            for flag in (mujoco.mjtRndFlag.mjRND_SHADOW, mujoco.mjtRndFlag.mjRND_REFLECTION):
                self._scene.flags[flag] = 0
        with _drawing():
            self._target = mujoco.MjrContext(model, mujoco.mjtFontScale.mjFONTSCALE_100.value)
        vis.quality.offsamples = smoothed
        mujoco.mjr_setBuffer(mujoco.mjtFramebuffer.mjFB_OFFSCREEN.value, self._target)
        self._whole = mujoco.MjrRect(0, 0, width, height)
        # Left to the garbage collector they fail loudly at the interpreter's end.
        atexit.register(self._context.free)
        atexit.register(self._target.free)

    def __call__(self, model: Any, data: Any) -> np.ndarray:
        """uint8 `[height, width, 3]` of a `mujoco.MjData` after forward kinematics."""
        import mujoco

        self._context.make_current()
        every = mujoco.mjtCatBit.mjCAT_ALL.value
        mujoco.mjv_updateScene(model, data, self._option, None, self._camera, every, self._scene)
        mujoco.mjr_render(self._whole, self._scene, self._target)
        image = np.empty((self._whole.height, self._whole.width, 3), np.uint8)
        mujoco.mjr_readPixels(image, None, self._whole, self._target)
        return image[::-1]  # OpenGL counts rows from below


@contextlib.contextmanager
def _drawing() -> Iterator[None]:
    """Raise NoRenderer where OpenGL cannot draw."""
    try:
        yield
    except Exception as error:  # every way to fail has a type of its own
        raise NoRenderer(
            f"no OpenGL renderer ({type(error).__name__}: {error}): install EGL (libegl1) and set "
            "MUJOCO_GL=egl, or OSMesa (libosmesa6) and MUJOCO_GL=osmesa"
        ) from error
