"""A task that MuJoCo simulates in JAX (MJX): an arm of two links with a motor in each joint.

It hangs, and its tip shall stand straight up; neither motor can lift what hangs on it at once, so
that both have to swing.
"""

from __future__ import annotations

import math
from typing import Any

import jax

from .planner_tasks import Task

XML = """
<mujoco>
  <option timestep="0.02" integrator="implicitfast"/>
  <default>
    <joint type="hinge" axis="0 1 0" damping="0.05"/>
    <geom type="capsule" size="0.03" mass="0.5" contype="0" conaffinity="0"/>
  </default>
  <worldbody>
    <body>
      <joint name="shoulder"/>
      <geom fromto="0 0 0 0 0 0.5"/>
      <body pos="0 0 0.5">
        <joint name="elbow"/>
        <geom fromto="0 0 0 0 0 0.5"/>
      </body>
    </body>
  </worldbody>
  <actuator>
    <motor joint="shoulder" gear="2.5" ctrlrange="-1 1" ctrllimited="true"/>
    <motor joint="elbow" gear="0.6" ctrlrange="-1 1" ctrllimited="true"/>
  </actuator>
</mujoco>
"""
REPEAT = 2  # simulated steps of a decision: 25 decisions a second


def arm() -> Task:
    """States are the two angles (0 upright, the elbow's relative) and their velocities."""
    import mujoco  # a second, for this task alone
    from mujoco import mjx

    model = mujoco.MjModel.from_xml_string(XML)
    simulated, empty = mjx.put_model(model), mjx.make_data(model)

    def one(state: Any, action: Any) -> tuple[Any, Any]:
        data = empty.replace(qpos=state[:2], qvel=state[2:], ctrl=action)
        data = jax.lax.fori_loop(0, REPEAT, lambda _, data: mjx.step(simulated, data), data)
        after = jax.numpy.concatenate([data.qpos, data.qvel])
        low = 1.0 - 0.5 * jax.numpy.cos(after[0]) - 0.5 * jax.numpy.cos(after[0] + after[1])
        cost = low + 0.005 * (data.qvel**2).sum() + 0.001 * (action**2).sum()
        return after, cost

    simulate = jax.jit(jax.vmap(one))

    def step(xp: Any, state: Any, action: Any) -> tuple[Any, Any]:
        lead = state.shape[:-1]
        states, costs = simulate(state.reshape(-1, 4), action.reshape(-1, 2))
        return states.reshape(*lead, 4), costs.reshape(lead)

    low, high = (math.pi - 0.3, -0.3, 0.0, 0.0), (math.pi + 0.3, 0.3, 0.0, 0.0)
    return Task(step, low, high, horizon=25, length=100, actions=2)
