"""Hypothesis strategies for Gymnasium spaces and environments that record what reaches them."""

from __future__ import annotations

import copy

import gymnasium
import numpy as np
from gymnasium import spaces
from hypothesis import strategies as st

from mbx.envs.checks import leaves

SHAPES = st.sampled_from([(), (1,), (3,), (2, 3)])
TENTHS = st.integers(-30, 30).map(lambda n: n / 10)


@st.composite
def boxes(draw, dtypes=("float32", "float64", "int64", "int8")):
    """A bounded Box with other bounds in every place."""
    shape, dtype = draw(SHAPES), draw(st.sampled_from(dtypes))
    size = int(np.prod(shape))
    numbers = TENTHS if dtype.startswith("f") else st.integers(-20, 20)
    ends = [sorted(draw(st.tuples(numbers, numbers))) for _ in range(size)]
    low, high = (np.array([pair[i] for pair in ends], dtype).reshape(shape) for i in (0, 1))
    return spaces.Box(low, high, shape, np.dtype(dtype).type)


DISCRETE = st.builds(
    lambda n, start: spaces.Discrete(n, start=start), st.integers(1, 4), st.integers(-3, 3)
)
SEVERAL = st.builds(
    spaces.MultiDiscrete,
    st.lists(st.integers(1, 3), min_size=2, max_size=2),
    start=st.lists(st.integers(-2, 2), min_size=2, max_size=2),
)


def joined(part):
    """Dictionaries and tuples, also in each other, of such spaces."""
    return st.one_of(
        st.builds(lambda a, b: spaces.Dict(arm=spaces.Dict(turn=a), grip=b), part, part),
        st.builds(lambda a, b: spaces.Tuple((a, spaces.Tuple((b,)))), part, part),
    )


CHOICES = st.one_of(DISCRETE, SEVERAL, st.builds(spaces.MultiBinary, st.integers(1, 2)))
ACTIONS = st.one_of(boxes(), CHOICES, joined(CHOICES), joined(boxes()))
LEAVES = st.one_of(
    boxes(),
    DISCRETE,
    st.builds(lambda shape: spaces.Box(0, 1, shape, bool), SHAPES),
    st.builds(lambda n: spaces.Box(0, 200, (n,), np.uint8), st.integers(1, 3)),
    st.builds(spaces.MultiBinary, st.integers(1, 3)),
    st.builds(spaces.MultiDiscrete, st.lists(st.integers(1, 3), min_size=1, max_size=2)),
)
OBSERVATIONS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3).map(lambda found: spaces.Tuple(tuple(found))),
        st.dictionaries(st.sampled_from("abc"), inner, min_size=1).map(spaces.Dict),
    ),
    max_leaves=4,
)


class Recorder(gymnasium.Env):
    """Insists on its action space, changes actions in place, and keeps what came and went."""

    max_episode_steps = 7

    def __init__(self, observation_space, action_space, infos=({},), log=None):
        self.observation_space, self.action_space = copy.deepcopy((observation_space, action_space))
        self.infos, self.log = infos, [] if log is None else log

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        assert seed is None or 0 <= seed < 2**31
        self.observation_space.seed(int(self.np_random.integers(2**31)))
        self.count = 0
        return self.observation_space.sample(), {}

    def step(self, action):
        assert self.action_space.contains(action), f"{action!r} is not in {self.action_space}"
        obs = self.observation_space.sample()
        self.log.append((copy.deepcopy(action), obs))
        for _, space, x in leaves(self.action_space, action):
            assert x.dtype == space.dtype and x.shape == space.shape
            if x.ndim:
                x[...] = 0
        info = self.infos[self.count % len(self.infos)]
        self.count += 1
        return obs, 1.0, False, False, info
