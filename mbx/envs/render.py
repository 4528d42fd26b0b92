"""What pictures of an environment are made with: `mbx.envs.make_renderer("gymnax:Pendulum-v1")`.

A `Renderer` is two functions: one picks out of a state what a picture shows, inside a compiled
program; the other draws it. How simulators' models are drawn stands here, too.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

_DISABLED = ("disable", "disabled", "off", "false", "0")


class Renderer(NamedTuple):
    """Pictures of one environment's states.

    Attributes:
        view: raw, un-batched state -> a small pytree, what a picture needs of it; pure.
        draw: view as numpy arrays -> uint8 `[height, width, 3]`; not compiled.
        seconds: that an environment step takes in its world (a chosen pace where there is no
            clock).
    """

    view: Callable[[Any], Any]
    draw: Callable[[Any], np.ndarray]
    seconds: float


class NoRenderer(RuntimeError):
    """There is nothing to draw with on this machine."""


def mujoco_drawing(
    model: Any, *, height: int = 240, width: int = 320
) -> Callable[[dict[str, np.ndarray]], np.ndarray]:
    """`Renderer.draw` of a `mujoco.MjModel`, through its first camera where it has one.

    A view holds the fields of `mujoco.MjData` to set (qpos `[nq]`, mocap_pos `[nmocap, 3]`, …); the
    rest follows by forward kinematics.

    Raises:
        NoRenderer: where OpenGL cannot draw without a window; it is asked for through EGL on Linux
            unless the variable MUJOCO_GL says otherwise.
    """
    import mujoco

    context = _gl_context(width, height)
    data, option = mujoco.MjData(model), mujoco.MjvOption()
    camera = mujoco.MjvCamera()
    if model.ncam:
        camera.type, camera.fixedcamid = mujoco.mjtCamera.mjCAMERA_FIXED, 0
    else:
        mujoco.mjv_defaultFreeCamera(model, camera)
    model.vis.global_.offwidth = max(model.vis.global_.offwidth, width)
    model.vis.global_.offheight = max(model.vis.global_.offheight, height)
    scene = mujoco.MjvScene(model, maxgeom=10_000)
    target = mujoco.MjrContext(model, mujoco.mjtFontScale.mjFONTSCALE_100.value)
    mujoco.mjr_setBuffer(mujoco.mjtFramebuffer.mjFB_OFFSCREEN.value, target)
    whole = mujoco.MjrRect(0, 0, width, height)

    def free() -> None:
        target.free()
        context.free()

    atexit.register(free)  # left to the garbage collector it fails loudly at the interpreter's end

    def draw(view: dict[str, np.ndarray]) -> np.ndarray:
        for field, value in view.items():
            getattr(data, field)[:] = value
        mujoco.mj_forward(model, data)
        context.make_current()
        mujoco.mjv_updateScene(
            model, data, option, None, camera, mujoco.mjtCatBit.mjCAT_ALL.value, scene
        )
        mujoco.mjr_render(whole, scene, target)
        image = np.empty((height, width, 3), np.uint8)
        mujoco.mjr_readPixels(image, None, whole, target)
        return image[::-1]  # OpenGL counts rows from below

    return draw


def _gl_context(width: int, height: int) -> Any:
    """An OpenGL context that needs no window, made current. Raises NoRenderer."""
    chosen = os.environ.get("MUJOCO_GL", "").lower().strip()
    try:
        if chosen in _DISABLED:
            raise RuntimeError(f"MUJOCO_GL={chosen} turns it off")
        if not chosen and sys.platform == "linux":
            from mujoco.egl import GLContext  # mujoco's own default needs a window
        else:
            from mujoco.gl_context import GLContext
        context = GLContext(width, height)
        context.make_current()
    except Exception as error:  # every way to fail has a type of its own
        raise NoRenderer(
            f"no OpenGL renderer ({type(error).__name__}: {error}): install EGL (libegl1) or "
            "OSMesa (libosmesa6, with MUJOCO_GL=osmesa)"
        ) from error
    return context
