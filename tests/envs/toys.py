"""Tasks whose every number is known, in JAX and on the host, and steps in them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from mbx import envs
from mbx.envs.host import SteppedEnvironment


def one(count):
    return 1.0


def never(count):
    return False


def counting(show, reward=one, ends=never, **fields):
    """A JAX task. Its state is the number of its steps, which `show` makes an observation."""

    def step(key, state, action):
        return state + 1, show(state + 1), reward(state + 1), ends(state + 1)

    start = jnp.float32(0)
    shape, dtype = show(start).shape, show(start).dtype
    fields = dict(time_limit=100) | fields
    begin = lambda key: (start, show(start))  # noqa: E731
    return envs.RawEnvironment(
        "toy:clock", shape, dtype, action_dim=1, reset=begin, step=step, **fields
    )


class Counting:
    """The same on the host."""

    num_actions, action_low, action_high = 0, np.float32([-1]), np.float32([1])
    time_limit, ends_at, can_terminate = 100, None, True

    def __init__(self, show, reward=one, ends=never, **fields):
        self.show, self.reward, self.ends = show, reward, ends
        self.obs_shape, self.obs_dtype = show(0).shape, show(0).dtype
        vars(self).update(fields)

    def reset(self, seed):
        self.count = 0
        return self.show(0)

    def step(self, action):
        self.count += 1
        return self.show(self.count), float(self.reward(self.count)), self.ends(self.count), False

    def get_state(self):
        return b"%d" % self.count

    def set_state(self, snapshot):
        self.count = int(snapshot)


def on_host(num_envs, show, reward=one, ends=never, *, seed=0, fields=(), **options):
    """`num_envs` tasks `Counting`, vectorized."""
    tasks = [Counting(show, reward, ends, **dict(fields)) for _ in range(num_envs)]
    return SteppedEnvironment("toy:clock", tasks, seed=seed, **options)


def rollout(environment, steps, action=0.0, seed=0):
    """First observations, and the `Timestep` of every step with one action; of both kinds."""
    actions = np.broadcast_to(
        np.float32(action), (environment.num_envs, environment.spec.action_dim)
    )
    if isinstance(environment, envs.HostEnvironment):
        return environment.reset(seed), [environment.step(actions) for _ in range(steps)]
    state, obs = environment.reset(jax.random.key(seed))
    step, rows = jax.jit(environment.step, donate_argnums=0), []
    for i in range(steps):
        state, timestep = step(state, jnp.asarray(actions), jax.random.key(i + 1))
        rows.append(jax.device_get(timestep))
    return np.asarray(obs), rows
