"""TD-MPC2's plan and update in PyTorch, timed: what `benchmarks.speed` is compared with.

    python benchmarks/peer_tdmpc2.py --size=1 --batch=256 --compile
    python benchmarks/peer_tdmpc2.py --size=tiny --batch=128 --task=walker-walk    # steps a second

It needs PyTorch (--task: dm_control, too) and nothing of mbx, so that it runs in an environment of
its own. The networks, the planner and the losses are those of TD-MPC2 (Hansen et al. 2024, sections
3.1 and 3.2, appendix), as its code computes them: heads of values stacked and mapped over
(`torch.func`), one backward pass for the model and one for the policy, two-hot codes over 101 bins.
--compile gives plan and update to `torch.compile`, as its `compile: true` does. Only the time
counts; that mbx computes the same numbers is what `tests/agents/test_tdmpc_golden.py` compares.
Prints the rate of products of 2048^3 beside medians in milliseconds; for a task, environment steps
a second of training with one plan and one update for every two steps, TD-MPC2's own ratio.
"""

import argparse
import copy
import math
import statistics
import time

import torch
from torch import nn
from torch.nn import functional as F

OBS, ACTION, HORIZON, DISCOUNT, RHO = 17, 6, 3, 0.99, 0.5
SAMPLES, PROPOSALS, ELITES, ROUNDS, TEMPERATURE = 512, 24, 64, 6, 0.5
BINS, LOW, HIGH = 101, -10.0, 10.0
# enc_dim, mlp_dim, latent_dim, number of values; two layers in the encoder.
SIZES = {"tiny": (96, 96, 64, 5), "1": (256, 384, 128, 2), "5": (256, 512, 512, 5)}


class SimNorm(nn.Module):
    """Softmax within groups of eight."""

    def forward(self, x):
        return torch.softmax(x.unflatten(-1, (-1, 8)), dim=-1).flatten(-2)


def normed(inputs, outputs, activation, dropout=0.0):
    """A layer with LayerNorm before its activation, dropout before both."""
    drop = [nn.Dropout(dropout)] if dropout else []
    return nn.Sequential(
        nn.Linear(inputs, outputs), *drop, nn.LayerNorm(outputs), activation or nn.Mish()
    )


def mlp(inputs, hidden, outputs, activation=None, dropout=0.0):
    """Two hidden layers; the last is linear unless it has an activation."""
    last = normed(hidden, outputs, activation) if activation else nn.Linear(hidden, outputs)
    return nn.Sequential(normed(inputs, hidden, None, dropout), normed(hidden, hidden, None), last)


class Heads(nn.Module):
    """Networks of one shape, mapped over their stacked parameters; dropout is for losses alone."""

    def __init__(self, networks):
        super().__init__()
        stacked, _ = torch.func.stack_module_state(networks)
        self.names = list(stacked)
        self.stacked = nn.ParameterList(nn.Parameter(x.detach()) for x in stacked.values())
        self.base = [copy.deepcopy(networks[0]).to("meta")]  # not a submodule

    def forward(self, x, detach=False):
        def one(parameters):
            return torch.func.functional_call(self.base[0], parameters, (x,))

        self.base[0].train(torch.is_grad_enabled())
        values = [p.detach() if detach else p for p in self.stacked]
        parameters = dict(zip(self.names, values, strict=True))
        return torch.vmap(one, randomness="different")(parameters)


def symlog(x):
    return torch.sign(x) * torch.log1p(x.abs())


def symexp(x):
    return torch.sign(x) * torch.expm1(x.abs())


def cross_entropy(logits, target):
    """`[..., BINS]` against `[..., 1]` in real units, `[..., 1]`."""
    position = (symlog(target).clamp(LOW, HIGH) - LOW) / ((HIGH - LOW) / (BINS - 1))
    lower = position.floor()
    weight = position - lower
    code = torch.zeros_like(logits)
    code.scatter_(-1, lower.long(), 1.0 - weight)
    code.scatter_(-1, (lower.long() + 1) % BINS, weight)
    return -(code * F.log_softmax(logits, dim=-1)).sum(-1, keepdim=True)


class Agent:
    """TD-MPC2 for one task without terminations."""

    def __init__(self, size, compiled=False, obs=OBS):
        if compiled:
            self.plan, self.update = torch.compile(self.plan), torch.compile(self.update)
        encoder, hidden, latent, values = SIZES[size]
        self.encoder = nn.Sequential(normed(obs, encoder, None), normed(encoder, latent, SimNorm()))
        self.dynamics = mlp(latent + ACTION, hidden, latent, SimNorm())
        self.reward = mlp(latent + ACTION, hidden, BINS)
        self.policy = mlp(latent, hidden, 2 * ACTION)
        self.values = Heads([mlp(latent + ACTION, hidden, BINS, None, 0.01) for _ in range(values)])
        self.targets = copy.deepcopy(self.values).requires_grad_(False)
        self.bins, self.num, self.scale = torch.linspace(LOW, HIGH, BINS), values, torch.ones(())
        world = (self.encoder, self.dynamics, self.reward, self.values)
        self.parameters = [p for module in world for p in module.parameters()]
        rest = [p for module in world[1:] for p in module.parameters()]
        groups = [{"params": self.encoder.parameters(), "lr": 9e-5}, {"params": rest}]
        self.solver = torch.optim.Adam(groups, lr=3e-4)
        self.policy_solver = torch.optim.Adam(self.policy.parameters(), lr=3e-4, eps=1e-5)

    def decode(self, logits):
        return symexp((logits.softmax(-1) * self.bins).sum(-1, keepdim=True))

    def step(self, z, action):
        return self.dynamics(torch.cat([z, action], -1))

    def act(self, z):
        """A sample of the policy and its scaled entropy."""
        mean, raw = self.policy(z).chunk(2, -1)
        log_std = -10.0 + 6.0 * (torch.tanh(raw) + 1.0)
        noise = torch.randn_like(mean)
        log_prob = (-0.5 * noise.square() - log_std - 0.9189385).sum(-1, keepdim=True)
        return torch.tanh(mean + noise * log_std.exp()), -ACTION * log_prob

    def value(self, z, action, kind, heads=None, detach=False):
        """All heads' logits, or the mean or the smaller of two heads' values."""
        logits = (heads or self.values)(torch.cat([z, action], -1), detach)
        if kind == "all":
            return logits
        if self.num > 2:  # of two, the order changes nothing, and inductor stops at a slice of all
            logits = logits[torch.randperm(self.num)[:2]]
        two = self.decode(logits)
        return two.min(0).values if kind == "min" else two.sum(0) / 2.0

    @torch.no_grad()
    def plan(self, obs, before):
        """MPPI from one observation `[1, OBS]`; the action and the plan to start the next from."""
        z = self.encoder(obs)
        rolled, state = [], z.repeat(PROPOSALS, 1)
        for t in range(HORIZON):
            state = self.step(state, rolled[-1]) if t else state
            rolled.append(self.act(state)[0])
        actions = torch.empty(HORIZON, SAMPLES, ACTION)
        actions[:, :PROPOSALS] = torch.stack(rolled)
        z, mean = z.repeat(SAMPLES, 1), torch.zeros(HORIZON, ACTION)
        std = torch.full((HORIZON, ACTION), 2.0)
        mean[:-1] = before[1:]
        for _ in range(ROUNDS):
            noise = torch.randn(HORIZON, SAMPLES - PROPOSALS, ACTION)
            actions[:, PROPOSALS:] = (mean.unsqueeze(1) + std.unsqueeze(1) * noise).clamp(-1, 1)
            total, factor, state = 0.0, 1.0, z
            for t in range(HORIZON):
                pair = torch.cat([state, actions[t]], -1)
                total = total + factor * self.decode(self.reward(pair))
                state, factor = self.step(state, actions[t]), factor * DISCOUNT
            total = total + factor * self.value(state, self.act(state)[0], "mean")
            best = torch.topk(total.nan_to_num(0.0).squeeze(1), ELITES)
            elites = actions[:, best.indices]
            score = torch.exp(TEMPERATURE * (best.values - best.values.max()))
            score = (score / score.sum()).view(1, -1, 1)
            mean = (score * elites).sum(1)
            std = (score * (elites - mean.unsqueeze(1)).square()).sum(1).sqrt().clamp(0.05, 2.0)
        chosen = elites[0, torch.multinomial(score.flatten(), 1)][0]
        action = chosen + std[0] * torch.randn(ACTION)
        return action.clamp(-1, 1), mean

    def update(self, obs, action, reward):
        """A step on `[HORIZON + 1, B, OBS]`, `[HORIZON, B, ACTION]` and `[HORIZON, B, 1]`."""
        with torch.no_grad():
            after = self.encoder(obs[1:])
            following = self.value(after, self.act(after)[0], "min", self.targets)
            target = reward + DISCOUNT * following
        zs = [self.encoder(obs[0])]
        consistency = reward_loss = value_loss = 0.0
        for t in range(HORIZON):
            zs.append(self.step(zs[-1], action[t]))
            consistency = consistency + RHO**t * F.mse_loss(zs[-1], after[t])
        latents = torch.stack(zs)
        logits = self.value(latents[:-1], action, "all")
        rewards = self.reward(torch.cat([latents[:-1], action], -1))
        for t in range(HORIZON):
            reward_loss = reward_loss + RHO**t * cross_entropy(rewards[t], reward[t]).mean()
            for head in logits[:, t]:
                value_loss = value_loss + RHO**t * cross_entropy(head, target[t]).mean()
        loss = (20.0 * consistency + 0.1 * reward_loss + 0.1 * value_loss / self.num) / HORIZON
        loss.backward()
        nn.utils.clip_grad_norm_(self.parameters, 20.0)
        self.solver.step()
        self.solver.zero_grad(set_to_none=True)

        latents = latents.detach()
        own, entropy = self.act(latents)
        value = self.value(latents, own, "mean", detach=True)
        with torch.no_grad():
            low, high = torch.quantile(value[0].flatten(), torch.tensor([0.05, 0.95]))
            self.scale = self.scale.lerp((high - low).clamp(min=1.0), 0.01)
            weight = RHO ** torch.arange(HORIZON + 1.0)
        loss = -((value / self.scale + 1e-4 * entropy).mean(dim=(1, 2)) * weight).mean()
        loss.backward()
        nn.utils.clip_grad_norm_(self.policy.parameters(), 20.0)
        self.policy_solver.step()
        self.policy_solver.zero_grad(set_to_none=True)
        with torch.no_grad():
            for slow, fast in zip(self.targets.stacked, self.values.stacked, strict=True):
                slow.lerp_(fast, 0.01)
        return loss.detach()


def median(function, repeats):
    """Median milliseconds of calls, after three that warm up."""
    times = []
    for number in range(repeats + 3):
        began = time.perf_counter()
        function()
        if number >= 3:
            times.append(1e3 * (time.perf_counter() - began))
    return statistics.median(times)


def train(size, compiled, task, batch, steps):
    """Environment steps a second on a dm_control task, after 50 plans and updates that warm up.

    Every two environment steps take a plan and, on random windows of a buffer, an update.
    """
    from dm_control import suite

    env, rows = suite.load(*task.split("-", 1), {"random": 0}), steps // 2 + 50
    width = sum(math.prod(spec.shape) for spec in env.observation_spec().values())
    agent = Agent(size, compiled, width)
    data = [torch.zeros(rows, *shape) for shape in ((width,), (ACTION,), (1,))]
    before, now = torch.zeros(HORIZON, ACTION), env.reset()
    for i in range(rows):
        if i == 50:
            began = time.perf_counter()
        parts = [torch.as_tensor(x).float().reshape(-1) for x in now.observation.values()]
        obs = torch.cat(parts)
        action, before = agent.plan(obs[None], before)
        first, now = env.step(action.numpy()), env.step(action.numpy())
        new = obs, action, torch.tensor(first.reward + now.reward)
        for kept, row in zip(data, new, strict=True):
            kept[i] = row
        if now.last():
            before, now = torch.zeros_like(before), env.reset()
        window = torch.randint(max(1, i - HORIZON), (batch,)) + torch.arange(HORIZON + 1)[:, None]
        obs, action, reward = (kept[window] for kept in data)
        agent.update(obs, action[:-1], reward[:-1])
    return 2 * (rows - 50) / (time.perf_counter() - began)


def main():
    flags = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    flags.add_argument("--size", choices=SIZES, default="5")
    flags.add_argument("--batch", type=int, default=256)
    flags.add_argument("--threads", type=int, default=2)
    flags.add_argument("--repeats", type=int, default=15)
    flags.add_argument("--compile", action="store_true", help="plan and update by torch.compile")
    flags.add_argument("--task", help="a dm_control task to train on, as walker-walk")
    flags.add_argument("--steps", type=int, default=1_000, help="environment steps of --task")
    asked = flags.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(asked.threads)
    how = "compiled" if asked.compile else "eager"
    told = f"PyTorch {torch.__version__}, {how}, TD-MPC2 of size {asked.size}, batch {asked.batch}"
    told += f", {asked.threads} threads"
    if asked.task:
        rate = train(asked.size, asked.compile, asked.task, asked.batch, asked.steps)
        return print(f"{told}: {rate:.1f} environment steps a second on {asked.task}")
    agent, square = Agent(asked.size, asked.compile), torch.randn(2048, 2048)
    batch = (
        torch.randn(HORIZON + 1, asked.batch, OBS),
        torch.rand(HORIZON, asked.batch, ACTION) * 2.0 - 1.0,
        torch.randn(HORIZON, asked.batch, 1),
    )
    obs, before = torch.randn(1, OBS), torch.zeros(HORIZON, ACTION)
    rate = 2 * 2048**3 / median(lambda: square @ square, 9) / 1e6
    plan = median(lambda: agent.plan(obs, before), asked.repeats)
    update = median(lambda: agent.update(*batch), asked.repeats)
    print(f"{told}: plan {plan:.1f} ms, update {update:.1f} ms, products {rate:.0f} GFLOP/s")


if __name__ == "__main__":
    main()
