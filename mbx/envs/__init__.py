"""Environments by name: `make("gymnax:Pendulum-v1", num_envs=4)`.

    gymnax:Pendulum-v1            JAX, fast
    brax:inverted_pendulum        JAX (backend after an @: brax:ant@mjx)
    playground:CartpoleSwingup    JAX, MuJoCo Playground                      (extra `playground`)
    gym:HalfCheetah-v5            host, Gymnasium
    gym:path/to/file.py:Class     custom, Gymnasium's interface  (docs/custom_environments.md)
    jax:path/to/file.py:make      custom, gymnax's interface or a RawEnvironment
    dmc:cartpole-swingup          host, dm_control                            (extra `dmc`)
    atari:Pong, crafter:reward, bsuite:catch/0      host         (extras of the same names)
    empo:grid_rock_1h1r           JAX, robots among humans, for the agent `empo`
    multi:gymnax:Pendulum-v1+brax:inverted_pendulum      several of the above, trained together

`register` adds custom suites. `make_renderer` draws pictures of their states.
"""

from mbx.envs.base import EnvSpec as EnvSpec
from mbx.envs.base import HostEnvironment as HostEnvironment
from mbx.envs.base import JaxEnvironment as JaxEnvironment
from mbx.envs.base import RawEnvironment as RawEnvironment
from mbx.envs.base import Suite as Suite
from mbx.envs.base import Timestep as Timestep
from mbx.envs.base import episodic as episodic
from mbx.envs.custom import EnvironmentFailure as EnvironmentFailure
from mbx.envs.images import Images as Images
from mbx.envs.registry import _SUITES as _SUITES
from mbx.envs.registry import films as films
from mbx.envs.registry import make as make
from mbx.envs.registry import make_renderer as make_renderer
from mbx.envs.registry import make_share as make_share
from mbx.envs.registry import num_tasks as num_tasks
from mbx.envs.registry import register as register
from mbx.envs.render import NoRenderer as NoRenderer
from mbx.envs.render import Renderer as Renderer
