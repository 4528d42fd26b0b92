"""One TD-MPC run written again in plain NumPy: rows, planner targets, reanalyze and updates.

Lists, loops and float64; gradients by a tape of a dozen operations. It shares no code with `mbx`.
What is written here is configs/tdmpc.py's agent: a V critic, planner targets of horizon 1 (the
best few by value), advantage-weighted regression, soft termination, one dynamics and reward head.

Random numbers depend on their shape alone (`Draws`), so that nothing here has to know which key
the agent uses for what. Axes: T transitions, B batch, N candidates, A actions, L latents, K bins.
"""

from __future__ import annotations

from typing import Any

import numpy as np

# -------------------------------------------------------------------------------------------------
# Random numbers


class Draws:
    """Numbers that take the place of `jax.random`'s, a fixed sequence for every shape."""

    @staticmethod
    def uniform(shape: tuple[int, ...]) -> np.ndarray:
        """In (0, 1): multiples of the golden ratio, without their whole part."""
        return ((np.arange(1, np.prod(shape, dtype=int) + 1) * 0.61803398875) % 1.0).reshape(shape)

    @staticmethod
    def normal(shape: tuple[int, ...]) -> np.ndarray:
        return 1.5 * np.sin(2.4 * np.arange(1, np.prod(shape, dtype=int) + 1)).reshape(shape)

    @classmethod
    def gumbel(cls, shape: tuple[int, ...]) -> np.ndarray:
        return -np.log(-np.log(cls.uniform(shape)))

    @classmethod
    def integers(cls, shape: tuple[int, ...]) -> np.ndarray:
        """To be taken modulo how many there are."""
        return (cls.uniform(shape) * 1e6).astype(np.int64)


# -------------------------------------------------------------------------------------------------
# Gradients


class Var:
    """An array and how it came about: [(input, gradient of the output -> of the input)]."""

    def __init__(self, value: Any, inputs: tuple = ()) -> None:
        self.value, self.inputs = np.asarray(value, np.float64), inputs
        self.grad: Any = 0.0

    def __add__(self, other: Any) -> Var:
        other = other if isinstance(other, Var) else Var(other)
        return Var(
            self.value + other.value,
            ((self, lambda g: _fit(g, self)), (other, lambda g: _fit(g, other))),
        )

    def __mul__(self, other: Any) -> Var:
        other = other if isinstance(other, Var) else Var(other)
        return Var(
            self.value * other.value,
            (
                (self, lambda g: _fit(g * other.value, self)),
                (other, lambda g: _fit(g * self.value, other)),
            ),
        )

    def __neg__(self) -> Var:
        return self * -1.0

    def __sub__(self, other: Any) -> Var:
        return self + (-other if isinstance(other, Var) else -np.asarray(other))

    def __truediv__(self, other: Var) -> Var:
        return self * other.map(lambda x: 1.0 / x, lambda x: -1.0 / x**2)

    def __matmul__(self, kernel: Var) -> Var:
        x, k = self.value, kernel.value

        def to_kernel(g: np.ndarray) -> np.ndarray:
            return x.reshape(-1, x.shape[-1]).T @ g.reshape(-1, g.shape[-1])

        return Var(x @ k, ((self, lambda g: g @ k.T), (kernel, to_kernel)))

    def __getitem__(self, index: Any) -> Var:
        def back(g: np.ndarray) -> np.ndarray:
            whole = np.zeros_like(self.value)
            whole[index] += g
            return whole

        return Var(self.value[index], ((self, back),))

    def map(self, f: Any, slope: Any) -> Var:
        """An elementwise function and its derivative."""
        return Var(f(self.value), ((self, lambda g: g * slope(self.value)),))

    def sum(self, axis: Any = None, keepdims: bool = False) -> Var:
        def back(g: np.ndarray) -> np.ndarray:
            g = g if keepdims or axis is None else np.expand_dims(g, axis)
            return np.broadcast_to(g, self.value.shape)

        return Var(self.value.sum(axis=axis, keepdims=keepdims), ((self, back),))

    def mean(self, axis: Any = None, keepdims: bool = False) -> Var:
        total = self.sum(axis, keepdims)
        return total * (total.value.size / self.value.size)

    def reshape(self, *shape: int) -> Var:
        return Var(self.value.reshape(shape), ((self, lambda g: g.reshape(self.value.shape)),))

    def backward(self) -> None:
        """Adds the gradient of this number to `grad` of all it came from."""
        order, seen = [], set()

        def visit(node: Var) -> None:
            if id(node) not in seen:
                seen.add(id(node))
                for x, _ in node.inputs:
                    visit(x)
                order.append(node)

        visit(self)
        self.grad = np.ones_like(self.value)
        for node in reversed(order):
            for x, back in node.inputs:
                x.grad = x.grad + back(node.grad)


def _fit(g: np.ndarray, x: Var) -> np.ndarray:
    """A gradient summed over the axes that broadcasting added or repeated."""
    g = g.sum(axis=tuple(range(g.ndim - x.value.ndim)))
    repeated = tuple(i for i, n in enumerate(x.value.shape) if n == 1 and g.shape[i] != 1)
    return g.sum(axis=repeated, keepdims=True) if repeated else g


def exp(x: Var) -> Var:
    return x.map(np.exp, np.exp)


def tanh(x: Var) -> Var:
    return x.map(np.tanh, lambda v: 1.0 - np.tanh(v) ** 2)


def softplus(x: Var) -> Var:
    return x.map(lambda v: np.logaddexp(0.0, v), lambda v: 1.0 / (1.0 + np.exp(-v)))


def log_softmax(x: Var) -> Var:
    shifted = x - x.value.max(axis=-1, keepdims=True)
    return shifted - exp(shifted).sum(-1, True).map(np.log, lambda v: 1.0 / v)


# -------------------------------------------------------------------------------------------------
# The world model


def variables(tree: Any) -> Any:
    """A tree of arrays as variables."""
    if isinstance(tree, dict):
        return {name: variables(x) for name, x in tree.items()}
    return Var(tree)


def head(tree: Any, i: int) -> Any:
    """One network of a stacked ensemble."""
    return {n: head(x, i) for n, x in tree.items()} if isinstance(tree, dict) else tree[i]


def network(p: dict, x: Var, groups: int = 0) -> Var:
    """Dense, layer norm and mish, layer by layer; a plain layer last, or softmax over groups."""
    for name in sorted(p):
        layer = p[name]
        if "dense" not in layer:
            return x @ layer["kernel"] + layer["bias"]
        y = x @ layer["dense"]["kernel"] + layer["dense"]["bias"]
        y = y - y.mean(-1, True)
        spread = (y * y).mean(-1, True) + 1e-5
        y = y * spread.map(lambda v: v**-0.5, lambda v: -0.5 * v**-1.5)
        y = y * layer["norm"]["scale"] + layer["norm"]["bias"]
        x = y if name == "out" else y * tanh(softplus(y))
    shape = x.value.shape
    return exp(log_softmax(x.reshape(*shape[:-1], -1, groups))).reshape(*shape)


def join(a: Var, b: Var) -> Var:
    """Two inputs side by side."""
    n = a.value.shape[-1]
    return Var(
        np.concatenate([a.value, b.value], axis=-1),
        ((a, lambda g: g[..., :n]), (b, lambda g: g[..., n:])),
    )


class Model:
    """The networks, given parameters of variables."""

    def __init__(self, num_bins: int, log_std: tuple[float, float]) -> None:
        self.bins, self.log_std = np.linspace(-10.0, 10.0, num_bins), log_std

    def encode(self, p: dict, obs: Any) -> Var:
        return network(p["encoder"], Var(obs), 8)

    def step(self, p: dict, z: Var, a: Any) -> Var:
        return network(head(p["dynamics"], 0), join(z, Var(a)), 8)

    def reward(self, p: dict, z: Var, a: Any) -> Var:
        return network(head(p["reward"], 0), join(z, Var(a)))

    def values(self, p_value: dict, z: Var) -> list[Var]:
        return [network(head(p_value, i), z) for i in range(2)]

    def termination(self, p: dict, z: Var) -> Var:
        return network(p["termination"], z)[..., 0]

    def policy(self, p: dict, z: Var) -> tuple[Var, Var]:
        out, (low, high) = network(p["policy"], z), self.log_std
        num = out.value.shape[-1] // 2
        return out[..., :num], (tanh(out[..., num:]) + 1.0) * (0.5 * (high - low)) + low

    def decode(self, logits: Var) -> np.ndarray:
        mean = (np.exp(log_softmax(logits).value) * self.bins).sum(-1)
        return np.sign(mean) * np.expm1(np.abs(mean))

    def two_hot(self, x: np.ndarray) -> np.ndarray:
        """Codes of real numbers, one at a time."""
        codes = np.zeros((*np.shape(x), len(self.bins)))
        for place, value in np.ndenumerate(x):
            y = np.clip(np.sign(value) * np.log1p(abs(value)), self.bins[0], self.bins[-1])
            k = min(int((y - self.bins[0]) / (self.bins[1] - self.bins[0])), len(self.bins) - 2)
            share = (y - self.bins[k]) / (self.bins[k + 1] - self.bins[k])
            codes[place][k], codes[place][k + 1] = 1.0 - share, share
        return codes

    def value(self, p_value: dict, z: Var) -> np.ndarray:
        return np.mean([self.decode(logits) for logits in self.values(p_value, z)], axis=0)

    def alive(self, p: dict, z: Var) -> np.ndarray:
        return 1.0 / (1.0 + np.exp(self.termination(p, z).value))

    def act(self, p: dict, z: Var, eps: np.ndarray) -> np.ndarray:
        mean, log_std = self.policy(p, z)
        return np.clip(np.tanh(mean.value) + np.exp(log_std.value) * eps, -1.0, 1.0)

    def returns(self, p: dict, z: Var, actions: np.ndarray, discount: float) -> np.ndarray:
        """What sequences `[N, T, A]` are worth from one latent `[L]`: `[N]`."""
        state = Var(np.repeat(z.value[None], len(actions), axis=0))
        total, factor = 0.0, 1.0
        for t in range(actions.shape[1]):
            total = total + factor * self.decode(self.reward(p, state, actions[:, t]))
            state = self.step(p, state, actions[:, t])
            factor = factor * discount * self.alive(p, state)
        return total + factor * self.value(p["value"], state)

    def imagined(self, p: dict, z: Var, eps: np.ndarray) -> np.ndarray:
        """Actions of the policy along its own rollout, eps `[T, P, A]`: `[P, T, A]`."""
        state, actions = Var(np.repeat(z.value[None], eps.shape[1], axis=0)), []
        for noise in eps:
            actions.append(self.act(p, state, noise))
            state = self.step(p, state, actions[-1])
        return np.stack(actions, axis=1)


def refit(actions: np.ndarray, values: np.ndarray, c: dict) -> tuple:
    """Mean, deviation, elites and weights of the best candidates `[N, T, A]`."""
    elites = best(values, c["num_elites"])
    gap = values[elites] - values[elites[0]]
    times = c["temperature"] if c["temperature_mode"] == "multiply" else 1.0 / c["temperature"]
    weights = np.exp(gap * times) / np.exp(gap * times).sum()
    mean = np.einsum("k,kta->ta", weights, actions[elites])
    variance = np.einsum("k,kta->ta", weights, (actions[elites] - mean) ** 2)
    return mean, np.clip(np.sqrt(variance), c["min_std"], c["max_std"]), actions[elites], weights


def best(values: np.ndarray, num: int) -> np.ndarray:
    """Places of the largest, largest first."""
    return np.argsort(-values, axis=-1, kind="stable")[..., :num]


# -------------------------------------------------------------------------------------------------
# The replay


class Replay:
    """A ring of rows for every environment: dicts in lists."""

    def __init__(self, num_envs: int, capacity: int) -> None:
        self.slots: list[list[dict | None]] = [[None] * capacity for _ in range(num_envs)]
        self.count = [0] * num_envs

    def insert(self, env: int, row: dict) -> None:
        self.slots[env][self.count[env] % len(self.slots[env])] = row
        self.count[env] += 1

    def rows(self, env: int) -> list[dict]:
        """Oldest first."""
        capacity, count = len(self.slots[env]), self.count[env]
        return [self.slots[env][i % capacity] for i in range(max(0, count - capacity), count)]

    def transitions(self, num: int) -> list[tuple[list[dict], int, bool]]:
        """Draws: (rows of an environment, place of the first row, whether it was found)."""
        held = [self.rows(e) for e in range(len(self.slots))]
        firsts = [(rows, i) for rows in held for i in range(len(rows) - 1)]
        drawn = []
        for tries in (Draws.integers((4, num)) % len(firsts)).T:
            places = [firsts[i] for i in tries]
            good = [not r[i]["is_last"] and not r[i + 1]["is_first"] for r, i in places]
            chosen = good.index(True) if any(good) else 0
            drawn.append((*places[chosen], good[chosen]))
        return drawn

    def windows(self, num: int, length: int) -> list[tuple[list[dict], list[float]]]:
        """Rows of `length` transitions, and which of these count."""
        found = []
        for rows, first, good in self.transitions(num):
            window = [rows[min(first + t, len(rows) - 1)] for t in range(length + 1)]
            mask, inside = [], good
            for t in range(length):
                exists = first + t + 1 < len(rows)
                inside &= exists and not window[t]["is_last"] and not window[t + 1]["is_first"]
                mask.append(float(inside))
            found.append((window, mask))
        return found

    def stale(self, num: int, step: int, exponent: float) -> list[dict]:
        """Different rows, old targets more often: the best by score and Gumbel noise."""
        drawn = self.transitions(8 * num)
        noise, scores = Draws.gumbel((8 * num,)), []
        for i, (rows, first, good) in enumerate(drawn):
            row = rows[first]
            again = any(r[j] is row and ok for r, j, ok in drawn[i + 1 :])
            score = exponent * np.log1p(step - row["step"])
            scores.append(noise[i] + (-1e9 if not good else -1e6 if again else score))
        return [drawn[i][0][drawn[i][1]] for i in best(np.array(scores), num)]
