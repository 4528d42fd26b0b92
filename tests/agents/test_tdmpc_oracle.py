"""Twenty steps of the real loop beside the same agent in NumPy: rows, targets, ages, weights."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mbx import envs
from mbx.fast import rng
from mbx.training import job
from tests.agents import tdmpc_oracle as oracle
from tests.agents.tdmpc_oracle import Draws, Var, best
from tests.helpers import tiny_config

E, C, STEPS, LIMIT, DISCOUNT = 2, 8, 20, 6, 0.9
MODEL = ("encoder", "dynamics", "reward", "termination", "value")
CONFIG = dict(
    env=dict(name="oracle:cart", num_envs=E),
    train=dict(
        steps=100, seed_steps=8, seed_hold=1, pretrain_updates=2, utd_ratio=0.75, log_interval=E
    ),
    model=dict(episodic="True", dropout=0.0),
    replay=dict(capacity=E * C, keep_targets=3),
    planner=dict(horizon=2, num_samples=7, num_elites=3, num_proposals=2, temperature=0.7),
    training_planner=dict(num_samples=5, num_elites=2),
    loss=dict(batch_size=4, horizon=2, discount=DISCOUNT, value_best_n=2),
    reanalyze=dict(batch_size=4, interval=2, min_step=12),
    optimizer=dict(learning_rate=1e-2, policy_lr_scale=1.0, tau=0.1, grad_clip_norm=2.0),
)


def start(xp: Any, u: Any) -> Any:
    return u - 0.5


def move(xp: Any, x: Any, a: Any) -> tuple:
    """Next state, reward, terminated: a cart that ends its episode on the right."""
    x = xp.stack([x[0] + 0.3 * x[1], 0.9 * x[1] + 0.5 * a[0]])
    return x, -(x[0] ** 2) - 0.1 * a[0] ** 2, x[0] > 0.3


def register() -> None:
    def reset(key):
        x = start(jnp, jax.random.uniform(key, (2,)))
        return x, x

    def step(key, x, action):
        x, reward, terminated = move(jnp, x, action)
        return x, x, reward, terminated

    def factory(task, num_envs, *, action_repeat, episode_length, seed):
        raw = envs.RawEnvironment(f"oracle:{task}", (2,), jnp.float32, 1, LIMIT, reset, step)
        return envs.episodic(raw, num_envs)

    envs.register("oracle", factory)


class Agent:
    """The agent and its loop, one vector step at a time."""

    def __init__(self, config: dict, params: dict, obs: np.ndarray) -> None:
        self.config, self.params, self.obs = config, params, [np.float64(x) for x in obs]
        self.target_value = params["value"]
        c = config["model"]
        self.model = oracle.Model(c["num_bins"], (c["log_std_min"], c["log_std_max"]))
        self.replay = oracle.Replay(E, C)
        self.mean = np.zeros((E, config["planner"]["horizon"], 1))
        self.first, self.reward = [True] * E, [0.0] * E
        self.length = [0] * E
        self.steps = self.updates = 0
        self.credit = 0.0
        self.moments: dict = {}

    def act(self, p: dict, e: int) -> np.ndarray:
        """The acting planner: warm start, policy trajectories scored once, rounds of refitting."""
        c, m, z = self.config["planner"], self.model, self.model.encode(p, self.obs[e])
        horizon, own = c["horizon"], c["num_proposals"]
        mean = np.zeros((horizon, 1))
        if not self.first[e]:
            mean[:-1] = self.mean[e][1:]
        std = np.full((horizon, 1), c["max_std"])
        proposals = m.imagined(p, z, Draws.normal((horizon, E, own, 1))[:, e])
        known = m.returns(p, z, proposals, DISCOUNT)
        for _ in range(c["iterations"]):
            noise = Draws.normal((E, c["num_samples"] - own, horizon, 1))[e]
            sampled = np.clip(mean + std * noise, -1.0, 1.0)
            values = np.concatenate([known, m.returns(p, z, sampled, DISCOUNT)])
            candidates = np.concatenate([proposals, sampled])
            mean, std, elites, weights = oracle.refit(candidates, values, c)
        self.mean[e] = mean
        chosen = elites[np.argmax(np.log(weights) + Draws.gumbel((E, c["num_elites"]))[e])]
        noise = c["action_noise"] * std[0] * Draws.normal((E, 1))[e]
        return np.clip(chosen[0] + noise, -1.0, 1.0)

    def targets(self, rows: list) -> list[dict]:
        """The training planner for observations: its last candidates, the best of them."""
        c, p = self.config["training_planner"], oracle.variables(self.params)
        m, made = self.model, []
        for b, obs in enumerate(rows):
            z = m.encode(p, obs)
            shape = (len(rows), c["num_samples"], 1, 1)
            actions = m.imagined(p, z, Draws.normal((1, *shape[:2], 1))[:, b])
            values = m.returns(p, z, actions, DISCOUNT)
            for _ in range(1, c["iterations"]):
                mean, std = oracle.refit(actions, values, c)[:2]
                actions = np.clip(mean + std * Draws.normal(shape)[b], -1.0, 1.0)
                values = m.returns(p, z, actions, DISCOUNT)
            kept = best(values, self.config["replay"]["keep_targets"])
            made.append(dict(actions=actions[kept, 0], values=values[kept], step=self.updates))
        return made

    def step(self) -> dict:
        """Act, store, learn, reanalyze; returns what it counted."""
        train, before = self.config["train"], self.steps
        p = oracle.variables(self.params)
        if before < train["seed_steps"]:
            actions = 2.0 * Draws.uniform((E, 1)) - 1.0
        else:
            actions = np.stack([self.act(p, e) for e in range(E)])
        planned = self.targets(self.obs)
        for e in range(E):
            self.store(e, actions[e], planned[e])
        self.steps += E
        updates_before, due = self.updates, 0
        starting = before < train["seed_steps"] <= self.steps
        if starting:
            due = train["pretrain_updates"]
        elif before >= train["seed_steps"]:
            self.credit += E * train["utd_ratio"]
            due, self.credit = int(self.credit), self.credit % 1.0
        ages, values = zip(*(self.update() for _ in range(due)), strict=True) if due else ((), ())
        passes = self.reanalyze(updates_before, starting)
        return dict(updates=due, ages=ages, values=values, passes=passes)

    def store(self, e: int, action: np.ndarray, planned: dict) -> None:
        row = dict(obs=self.obs[e], action=action, reward=self.reward[e], is_first=self.first[e])
        self.replay.insert(e, row | planned | dict(is_last=False, terminated=False))
        x, reward, terminated = move(np, self.obs[e], action)
        self.length[e] += 1
        done = terminated or self.length[e] == LIMIT
        self.obs[e], self.reward[e], self.first[e] = x, 0.0 if done else reward, done
        if done:
            last = dict(obs=x, action=np.zeros(1), reward=reward, is_first=False, is_last=True)
            self.replay.insert(e, last | dict(terminated=terminated, actions=None))
            self.obs[e], self.length[e] = start(np, Draws.uniform((2,))), 0

    def reanalyze(self, updates_before: int, starting: bool) -> int:
        """A sweep over everything after pretraining; then stale rows, every few updates."""
        c = self.config["reanalyze"]
        if starting:
            rows = [row for e in range(E) for row in self.replay.rows(e)]
            chunks = [rows[i : i + c["batch_size"]] for i in range(0, len(rows), c["batch_size"])]
            for chunk in chunks:
                # A chunk that is not full plans for other rows in its free places, to no effect.
                obs = [row["obs"] for row in chunk] + [chunk[-1]["obs"]] * (4 - len(chunk))
                self.write(chunk, self.targets(obs))
            return len(chunks)
        passes = self.updates // c["interval"] - updates_before // c["interval"]
        passes *= self.steps >= c["min_step"]
        for _ in range(passes):
            rows = self.replay.stale(c["batch_size"], self.updates, c["stale_exponent"])
            self.write(rows, self.targets([row["obs"] for row in rows]))
        return passes

    def write(self, rows: list[dict], planned: list[dict]) -> None:
        for row, new in zip(rows, planned, strict=False):
            if not row["is_last"]:
                row.update(new)

    def update(self) -> tuple[float, float]:
        """One learner step; returns the mean age of the plans that it read, and value target."""
        c = self.config["loss"]
        length = c["horizon"]
        windows = self.replay.windows(c["batch_size"], length)
        mask = np.array([m for _, m in windows]).T
        rows = [[window[t] for window, _ in windows] for t in range(length + 1)]
        p = oracle.variables(self.params)
        loss, zs, value = self.model_loss(p, rows, mask)
        loss.backward()
        policy = self.policy_loss(p, zs, rows, mask)
        policy.backward()
        lr = self.config["optimizer"]["learning_rate"]
        model = self.adam(
            {n: p[n] for n in MODEL}, 1e-8, lambda name: lr * (0.3 if name == "encoder" else 1.0)
        )
        self.params = model | self.adam({"policy": p["policy"]}, 1e-5, lambda name: lr)
        tau = self.config["optimizer"]["tau"]
        self.target_value = jax.tree.map(
            lambda old, new: (1 - tau) * old + tau * new, self.target_value, self.params["value"]
        )
        self.updates += 1
        read = [
            r["step"] for t in range(length) for r, m in zip(rows[t], mask[t], strict=True) if m
        ]
        return float(np.mean(self.updates - np.array(read))) if read else 0.0, value

    def model_loss(self, p: dict, rows: list, mask: np.ndarray) -> tuple[Var, list[Var], float]:
        c, m, total, told = self.config["loss"], self.model, Var(0.0), []
        z = m.encode(p, np.stack([r["obs"] for r in rows[0]]))
        zs = [z]
        for t in range(c["horizon"]):
            action = np.stack([r["action"] for r in rows[t]])
            reward = np.array([r["reward"] for r in rows[t + 1]])
            ended = np.array([float(r["terminated"]) for r in rows[t + 1]])
            known = np.array([float(r["actions"] is not None) for r in rows[t]])
            real = m.encode(p, np.stack([r["obs"] for r in rows[t + 1]])).value
            new = m.step(p, z, action)
            code, wanted = map(
                np.stack, zip(*(self.value_code(p, r) for r in rows[t]), strict=True)
            )
            told += [x for x, counts in zip(wanted, mask[t] * known, strict=True) if counts]
            gap = new - real
            values = m.values(p["value"], z)
            losses = {
                "consistency": (gap * gap).mean(-1),
                "reward": -(oracle.log_softmax(m.reward(p, z, action)) * m.two_hot(reward)).sum(-1),
                "value": -(
                    (oracle.log_softmax(values[0]) + oracle.log_softmax(values[1])) * code
                ).sum(-1)
                * 0.5,
            }
            for name, each in losses.items():
                counted = mask[t] * (known if name == "value" else 1.0)
                weight = c["rho"] ** t / c["horizon"] / max(counted.sum(), 1.0)
                total = total + (each * counted).sum() * (weight * c[f"{name}_coef"])
            logit = m.termination(p, new)
            entropy = oracle.softplus(logit) - logit * ended
            total = total + (entropy * mask[t]).sum() * (c["termination_coef"] / max(mask.sum(), 1))
            z = new
            zs.append(z)
        return total, zs, np.mean(told) if told else 0.0

    def value_code(self, p: dict, row: dict) -> tuple[np.ndarray, float]:
        """Means over the best stored actions, one step ahead: of two-hot codes, and of values."""
        m, num = self.model, self.config["loss"]["value_best_n"]
        if row["actions"] is None:
            return np.zeros(len(m.bins)), 0.0
        actions = row["actions"][best(row["values"], num)]
        z = Var(np.repeat(m.encode(p, row["obs"]).value[None], num, axis=0))
        new = m.step(p, z, actions)
        value = m.value(oracle.variables(self.target_value), new)
        wanted = m.decode(m.reward(p, z, actions)) + DISCOUNT * m.alive(p, new) * value
        return m.two_hot(wanted).mean(axis=0), wanted.mean()

    def policy_loss(self, p: dict, zs: list[Var], rows: list, mask: np.ndarray) -> Var:
        """Advantage-weighted regression to the stored actions, and the entropy bonus."""
        c, total, half = self.config["loss"], Var(0.0), 0.5 * np.log(2.0 * np.pi)
        noise = Draws.normal((len(zs), len(rows[0]), 1))
        for s, z in enumerate(zs):
            for b, row in enumerate(rows[s]):
                counted = mask[max(s - 1, 0)] * [float(r["actions"] is not None) for r in rows[s]]
                if not counted[b]:
                    continue
                mean, log_std = self.model.policy(p, Var(z.value[b]))
                weights = np.exp(row["values"] / c["awr_temperature"])
                weights = (weights / weights.sum())[:, None]
                eps = (Var(row["actions"]) - oracle.tanh(mean)) * oracle.exp(-log_std)
                log_prob = eps * eps * -0.5 - log_std - half
                own = -log_std - (half + 0.5 * noise[s, b] ** 2)
                loss = -(log_prob * weights).sum() + own.sum() * c["entropy_coef"]
                total = total + loss * (c["rho"] ** s / len(zs) / max(counted.sum(), 1.0))
        return total

    def adam(self, p: dict, eps: float, rate: Any) -> dict:
        """The parameters after a step: one clip of the global norm, Adam, a rate a component."""
        flat, structure = jax.tree.flatten_with_path(p, is_leaf=lambda x: isinstance(x, Var))
        norm = np.sqrt(sum(np.sum(np.square(x.grad)) for _, x in flat))
        clip = min(1.0, self.config["optimizer"]["grad_clip_norm"] / norm)
        new, t = [], self.updates + 1
        for path, x in flat:
            g = x.grad * clip
            m, v = self.moments.get(path, (0.0, 0.0))
            m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g**2
            self.moments[path] = m, v
            step = m / (1 - 0.9**t) / (np.sqrt(v / (1 - 0.999**t)) + eps)
            new.append(x.value - rate(path[0].key) * step)
        return jax.tree.unflatten(structure, new)


def replace_draws(patch: pytest.MonkeyPatch) -> None:
    def uniform(key, shape=(), dtype=jnp.float32, minval=0.0, maxval=1.0):
        return minval + (maxval - minval) * jnp.asarray(Draws.uniform(shape), dtype)

    def randint(key, shape, minval, maxval, dtype=jnp.int32):
        return minval + jnp.asarray(Draws.integers(shape), dtype) % (maxval - minval)

    patch.setattr(jax.random, "uniform", uniform)
    patch.setattr(jax.random, "randint", randint)
    patch.setattr(rng, "normal", lambda key, shape: jnp.asarray(Draws.normal(shape), jnp.float32))
    for name in ("normal", "gumbel"):
        numbers = getattr(Draws, name)
        patch.setattr(
            jax.random,
            name,
            lambda key, shape=(), dtype=jnp.float32, *, f=numbers: jnp.asarray(f(shape), dtype),
        )


@pytest.fixture(scope="module")
def both():
    """The states after every step of the real loop, their metrics, and the oracle beside them."""
    config = tiny_config(**CONFIG)
    register()
    parts = job.prepare(config)
    state = job.fresh_state(parts, jax.random.key(3))
    rng = np.random.default_rng(0)
    # Loud enough that every head matters, and quiet enough that values stay of order 1: at 50 the
    # rounding of float32 (3e-3) chooses among elites and enters awr weights divided by 0.05.
    loud = jax.tree.map(lambda x: np.float32(x + rng.normal(0, 0.15, x.shape)), state.train.params)
    copies = jax.tree.map(jnp.copy, loud["value"])
    state = state.replace(train=state.train.replace(params=loud, target_value=copies))
    mine = Agent(config, jax.tree.map(np.float64, loud), np.asarray(state.obs))
    first, states, metrics, counts = jax.tree.map(np.float64, loud), [], [], []
    with pytest.MonkeyPatch.context() as patch:
        replace_draws(patch)
        for _ in range(STEPS):
            state, sums = parts.advance(state)
            states.append(jax.device_get(state.replace(key=None)))
            metrics.append(jax.device_get(sums))
    for got in states:
        counts.append(mine.step())
        check_rows(mine, got)
        check_parameters(mine, got.train, first)
    return states, metrics, counts


def check_rows(mine: Agent, state: Any) -> None:
    """Every slot of the ring holds the oracle's row, and its targets of the same moment."""
    data, stored = state.replay.data, state.replay.targets
    for e in range(E):
        assert state.replay.position[e] == mine.replay.count[e] % C
        assert state.replay.size[e] == min(mine.replay.count[e], C)
        for slot, row in enumerate(mine.replay.slots[e]):
            if row is None:
                continue
            for name in ("obs", "action", "reward", "is_first", "is_last", "terminated"):
                np.testing.assert_allclose(
                    data[name][e, slot], row[name], rtol=1e-4, atol=1e-5, err_msg=name
                )
            assert stored.valid[e, slot] == (row["actions"] is not None)
            if row["actions"] is not None:
                assert stored.step[e, slot] == row["step"]
                np.testing.assert_allclose(stored.actions[e, slot], row["actions"], atol=1e-4)
                np.testing.assert_allclose(stored.values[e, slot], row["values"], rtol=1e-4)


def check_parameters(mine: Agent, train: Any, first: dict) -> None:
    """Each component is where the oracle's is, compared with how far it has moved."""
    assert train.step == mine.updates
    pairs = {name: (train.params[name], mine.params[name], first[name]) for name in first}
    pairs["target"] = (train.target_value, mine.target_value, first["value"])
    for name, trees in pairs.items():
        got, wanted, before = (
            np.concatenate([np.ravel(x) for x in jax.tree.leaves(tree)]) for tree in trees
        )
        moved = np.linalg.norm(wanted - before)
        assert np.linalg.norm(got - wanted) <= 5e-4 * moved + 1e-6, name


def test_twenty_steps_are_those_of_the_oracle(both):
    states, metrics, counts = both
    for sums, count in zip(metrics, counts, strict=True):
        assert sums["updates"] == count["updates"] and sums["passes"] == count["passes"]
        if count["updates"]:
            np.testing.assert_allclose(sums["update/targets/age"], sum(count["ages"]), rtol=1e-5)
            told = sums["update/value/target"]
            np.testing.assert_allclose(told, sum(count["values"]), rtol=2e-3, atol=1e-4)
    last = states[-1]
    assert last.steps == E * STEPS and last.updates == 2 + int((E * STEPS - 8) * 0.75)


def test_the_run_had_everything_in_it(both):
    """Without which the comparison would show less than it says."""
    states, _, counts = both
    data = [state.replay.data for state in states]
    assert any(d["terminated"].any() for d in data)
    assert any((d["is_last"] & ~d["terminated"]).any() for d in data)
    assert (states[-1].replay.size == C).all() and sum(c["passes"] for c in counts) > 8
