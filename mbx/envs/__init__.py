"""Environments by name: `make("gymnax:Pendulum-v1", num_envs=4)`.

    gymnax:Pendulum-v1            JAX, fast
    brax:inverted_pendulum        JAX (backend after an @: brax:ant@mjx)
    playground:CartpoleSwingup    JAX, MuJoCo Playground                      (extra `playground`)
    gym:HalfCheetah-v5            host, Gymnasium
    gym:path/to/file.py:Class     custom, Gymnasium's interface  (docs/custom_environments.md)
    jax:path/to/file.py:make      custom, gymnax's interface or a RawEnvironment
    dmc:cartpole-swingup          host, dm_control                            (extra `dmc`)
    empo:grid_rock_1h1r           JAX, robots among humans, for the agent `empo`
    multi:gymnax:Pendulum-v1+brax:inverted_pendulum      several of the above, trained together

`register` adds custom suites. `make_renderer` draws pictures of their states.
"""

from mbx.envs.base import (
    EnvSpec,
    HostEnvironment,
    JaxEnvironment,
    RawEnvironment,
    Suite,
    Timestep,
    episodic,
)
from mbx.envs.custom import EnvironmentFailure
from mbx.envs.images import Images
from mbx.envs.registry import (
    _SUITES,
    films,
    make,
    make_renderer,
    make_share,
    num_tasks,
    reads,
    register,
)
from mbx.envs.render import NoRenderer, Renderer

__all__ = [
    "_SUITES",
    "EnvSpec",
    "EnvironmentFailure",
    "HostEnvironment",
    "Images",
    "JaxEnvironment",
    "NoRenderer",
    "RawEnvironment",
    "Renderer",
    "Suite",
    "Timestep",
    "episodic",
    "films",
    "make",
    "make_renderer",
    "make_share",
    "num_tasks",
    "reads",
    "register",
]
