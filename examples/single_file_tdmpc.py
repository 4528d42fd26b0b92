"""The default agent of mbx in one file: TD-MPC with planner-made targets, on gymnax's Pendulum.

    python examples/single_file_tdmpc.py            # 10,000 steps, about 5 minutes on two cores

Read it from top to bottom: settings, networks, model, planner, one learner step, replay, loop. It
imports nothing of mbx; `tests/test_single_file_tdmpc.py` holds its learner step to the numbers of
`mbx.agents.tdmpc`. Left out: what Pendulum does not need (terminations, pixels, several devices),
and what makes mbx faster without changing a number. Sources: TD-MPC2 (arXiv 2310.16828);
docs/sources.md, entry planner-targets.
Axes: E environments, T transitions of a window (S = T + 1 states), B windows or states, N candidate
actions, n of them stored, O observation, A action, L latent, V value heads, K bins.
"""

import functools
import sys
from collections import namedtuple

import gymnax
import jax
import jax.numpy as jnp
import optax

PENDULUM, DEFAULT = gymnax.make("Pendulum-v1")
OBS, ACTION, ENVS = 3, 1, 4
WIDTH, LATENT, HEADS, DROPOUT = 96, 64, 2, 0.01  # layers, latent, value heads
BINS = jnp.linspace(-10.0, 10.0, 101)  # of rewards and values, in symlog space
MIN_LOG_STD, MAX_LOG_STD = -3.0, 1.0
DISCOUNT, TAU = 0.975, 0.01  # TAU: of the target network, and of the running range of values
HORIZON, BATCH, RHO = 3, 128, 0.5  # a window's transitions; each counts RHO times the one before
CONSISTENCY, REWARD, VALUE, ENTROPY = 20.0, 0.1, 0.1, 1e-4  # coefficients
RATE, FINAL_RATE, FALLS_AT, FALLS_OVER = 1e-3, 3e-4, 10_000, 30_000  # of the model, by updates
ENCODER_SHARE, POLICY_RATE, CLIP = 0.3, 3e-4, 20.0
SEED_STEPS, HOLD, PRETRAIN, UPDATES = 1_000, 4, 500, 2  # random steps; updates, then per step
STORED, BEST = 8, 4  # planner actions that a row keeps; those that a value target averages
REANALYZE_EVERY, REANALYZE_ROWS = 10, 128  # updates between two passes; rows of a pass
ACTING = dict(samples=128, elites=16, sharpness=0.5, max_std=2.0)
PLAN, PROPOSALS = 3, 8  # steps of an acting plan; candidates that are the policy's trajectories
TRAINING = dict(samples=32, elites=8, sharpness=2.0, max_std=1.0)
ROUNDS, MIN_STD = 3, 0.05  # of both planners

# A planner's last round: candidates [B, N, T, A], values [B, N], the Gaussian [B, T, A], elites.
Plan = namedtuple("Plan", "actions values mean std elites weights")
# Windows: obs [S, B, O], action [T, B, A], reward and mask [T, B] (0 behind an episode's end),
# plan_actions [S, B, n, A], plan_values [S, B, n].
Batch = namedtuple("Batch", "obs action reward mask plan_actions plan_values")
# Random numbers of a learner step: eps [S, B, A]; what dropout keeps, [V, T or S, B, hidden].
Noise = namedtuple("Noise", "eps value_keep policy_keep")
# All that learning changes; scale is the running range of values, the unit of the policy's loss.
Learner = namedtuple("Learner", "params target_value model_state policy_state scale step")
# What a step of the loop hands to the next; plan is the acting planner's mean, [E, T, A].
Carry = namedtuple("Carry", "learner replay size env obs reward is_last plan")
# The replay: arrays [rows, E, ...]. Reward and is_last arrive with the observation that they belong
# to; made is the learner step of the plan. A run is shorter than it: nothing is overwritten.
ROW = dict(obs=(OBS,), action=(ACTION,), reward=(), is_last=(), made=())
ROW |= dict(plan_actions=(STORED, ACTION), plan_values=(STORED,))


# ---- Networks: lists of layers -------------------------------------------------------------------
def init_network(key, *sizes, normed=False, zero=False):
    """Dense, LayerNorm, Mish; last dense (0 if `zero`) and, if `normed`, LayerNorm and SimNorm."""
    layers, last = [], len(sizes) - 2
    for i, k in enumerate(jax.random.split(key, len(sizes) - 1)):
        kernel = 0.02 * jax.random.normal(k, sizes[i : i + 2])
        layer = {"kernel": kernel * (i < last or not zero), "bias": jnp.zeros(sizes[i + 1])}
        if i < last or normed:
            layer |= {"scale": jnp.ones(sizes[i + 1]), "shift": jnp.zeros(sizes[i + 1])}
        layers.append(layer)
    return layers


def apply(layers, x, keep=None):
    """`[..., in] -> [..., out]`. keep: which outputs of the first layer dropout leaves, or None."""
    for i, layer in enumerate(layers):
        x = x @ layer["kernel"] + layer["bias"]
        if i == 0 and keep is not None:
            x = jnp.where(keep, x / (1.0 - DROPOUT), 0.0)
        if "scale" in layer:
            x = x - jnp.mean(x, axis=-1, keepdims=True)
            x = x / jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-5)
            x = x * layer["scale"] + layer["shift"]
            if i + 1 < len(layers):
                x = x * jnp.tanh(jax.nn.softplus(x))  # Mish
            else:  # SimNorm: latents stay on a product of simplices
                x = jax.nn.softmax(x.reshape(*x.shape[:-1], -1, 8), axis=-1).reshape(x.shape)
    return x


def two_hot(x):
    """`[...] -> [..., K]`: mass on the two bins around symlog(x)."""
    x = jnp.clip(jnp.sign(x) * jnp.log1p(jnp.abs(x)), BINS[0], BINS[-1])
    position = (x - BINS[0]) / (BINS[1] - BINS[0])
    return jnp.maximum(1.0 - jnp.abs(position[..., None] - jnp.arange(len(BINS))), 0.0)


def decode(logits):
    """`[..., K] -> [...]`: symexp of the distribution's mean."""
    x = jnp.sum(jax.nn.softmax(logits) * BINS, axis=-1)
    return jnp.sign(x) * jnp.expm1(jnp.abs(x))


# ---- World model ---------------------------------------------------------------------------------
def init_params(key):
    """Encoder, dynamics, reward, policy, and value heads stacked on axis 0."""
    keys, pair, out = jax.random.split(key, 5), LATENT + ACTION, len(BINS)
    value = functools.partial(init_network, zero=True)
    heads = [value(k, LATENT, WIDTH, WIDTH, out) for k in jax.random.split(keys[4], HEADS)]
    return {
        "encoder": init_network(keys[0], OBS, WIDTH, LATENT, normed=True),
        "dynamics": init_network(keys[1], pair, WIDTH, WIDTH, LATENT, normed=True),
        "reward": init_network(keys[2], pair, WIDTH, WIDTH, out, zero=True),
        "policy": init_network(keys[3], LATENT, WIDTH, WIDTH, 2 * ACTION),
        "value": jax.tree.map(lambda *x: jnp.stack(x), *heads),
    }


def predict(params, name, z, action):
    """By "dynamics" the next latent `[..., L]`, by "reward" the reward's logits `[..., K]`."""
    return apply(params[name], jnp.concatenate([z, action], axis=-1))


def value_logits(heads, z, keep=None):
    """Of all heads, `[V, ..., K]`. keep: `[V, ..., hidden]` or None."""
    return jax.vmap(apply, (0, None, None if keep is None else 0))(heads, z, keep)


def policy(params, z, eps):
    """An action in [-1, 1]; mean and log standard deviation of the Gaussian around tanh(mean)."""
    mean, raw = jnp.split(apply(params["policy"], z), 2, axis=-1)
    log_std = MIN_LOG_STD + 0.5 * (MAX_LOG_STD - MIN_LOG_STD) * (jnp.tanh(raw) + 1.0)
    return jnp.clip(jnp.tanh(mean) + jnp.exp(log_std) * eps, -1.0, 1.0), mean, log_std


def one_step(params, heads, z, action, keep=None):
    """Predicted reward of an action plus the discounted value of what follows, `[...]`."""
    values = decode(value_logits(heads, predict(params, "dynamics", z, action), keep))
    return decode(predict(params, "reward", z, action)) + DISCOUNT * jnp.mean(values, axis=0)


# ---- Planner (MPPI): sample sequences, score them in the model, refit a Gaussian to the elites ---
def score(params, z, actions):
    """Discounted rewards along `actions [B, N, T, A]` from `z [B, L]` and the value after them."""
    z, total = jnp.repeat(z[:, None], actions.shape[1], axis=1), 0.0
    for t in range(actions.shape[2] - 1):
        total = total + DISCOUNT**t * decode(predict(params, "reward", z, actions[:, :, t]))
        z = predict(params, "dynamics", z, actions[:, :, t])
    rest = one_step(params, params["value"], z, actions[:, :, -1])
    return total + DISCOUNT ** (actions.shape[2] - 1) * rest


def search(key, params, z, mean, std, samples, elites, sharpness, max_std, first=None, own=None):
    """Plan from `z [B, L]`. first: candidates of round 1; own: candidates that join every round."""
    drawn = samples if own is None else samples - own.shape[1]
    for i in range(ROUNDS):
        noise = jax.random.normal(jax.random.fold_in(key, i), (len(z), drawn, *mean.shape[1:]))
        actions = jnp.clip(mean[:, None] + std[:, None] * noise, -1.0, 1.0)
        actions = first if i == 0 and first is not None else actions
        actions = actions if own is None else jnp.concatenate([own, actions], axis=1)
        values = score(params, z, actions)
        best, index = jax.lax.top_k(values, elites)
        kept = jnp.take_along_axis(actions, index[..., None, None], axis=1)
        weights = jax.nn.softmax(sharpness * best)
        w = weights[..., None, None]
        mean = jnp.sum(w * kept, axis=1)
        std = jnp.sqrt(jnp.sum(w * (kept - mean[:, None]) ** 2, axis=1))
        std = jnp.clip(std, MIN_STD, max_std)
    return Plan(actions, values, mean, std, kept, weights)


def act(params, obs, before, key, evaluate=False):
    """Actions `[E, A]`, and the plan's mean `[E, T, A]`, from which the next plan starts."""
    z, keys = apply(params["encoder"], obs), jax.random.split(key, 4)
    state, own = jnp.repeat(z[:, None], PROPOSALS, axis=1), []
    for eps in jax.random.normal(keys[0], (PLAN, len(obs), PROPOSALS, ACTION)):
        own.append(policy(params, state, eps)[0])
        state = predict(params, "dynamics", state, own[-1])
    start = jnp.concatenate([before[:, 1:], jnp.zeros_like(before[:, :1])], axis=1)
    std = jnp.full_like(start, ACTING["max_std"])
    plan = search(keys[1], params, z, start, std, **ACTING, own=jnp.stack(own, axis=2))
    if evaluate:
        return plan.mean[:, 0], plan.mean
    chosen = jax.random.categorical(keys[2], jnp.log(plan.weights))
    action = plan.elites[jnp.arange(len(obs)), chosen, 0]
    action = action + plan.std[:, 0] * jax.random.normal(keys[3], action.shape)
    return jnp.clip(action, -1.0, 1.0), plan.mean


def plan_targets(params, obs, key):
    """Planner-made targets: actions of `obs [B, O]`, refined from the policy's; values; best n."""
    z, keys = apply(params["encoder"], obs), jax.random.split(key)
    eps = jax.random.normal(keys[0], (len(obs), TRAINING["samples"], ACTION))
    action, mean, log_std = policy(params, z[:, None], eps)
    start, first = (jnp.tanh(mean), jnp.exp(log_std)), action[:, :, None]
    plan = search(keys[1], params, z, *start, **TRAINING, first=first)
    values, index = jax.lax.top_k(plan.values, STORED)
    actions = jnp.take_along_axis(plan.actions[:, :, 0], index[..., None], axis=1)
    return {"plan_actions": actions, "plan_values": values}


# ---- One learner step ----------------------------------------------------------------------------
MODEL_OPTIMIZER = optax.chain(optax.clip_by_global_norm(CLIP), optax.scale_by_adam())
POLICY_OPTIMIZER = optax.chain(optax.clip_by_global_norm(CLIP), optax.adam(POLICY_RATE, eps=1e-5))


def init_learner(params):
    """A learner that has seen nothing."""
    model = {name: p for name, p in params.items() if name != "policy"}
    optimizers = MODEL_OPTIMIZER.init(model), POLICY_OPTIMIZER.init(params["policy"])
    return Learner(params, params["value"], *optimizers, jnp.float32(1.0), jnp.int32(0))


def mean_of(loss, mask):
    """Mean over time of rho^t times the batch's mean over what counts: `[T, B]` -> scalar."""
    means = jnp.sum(loss * mask, axis=1) / jnp.maximum(jnp.sum(mask, axis=1), 1.0)
    return jnp.mean(RHO ** jnp.arange(len(loss)) * means)


def model_loss(model, batch, encoded, target, keep):
    """Loss of world model and values, latents `[S, B, L]` rolled out. target: two-hot values."""
    latents = [apply(model["encoder"], batch.obs[0])]
    for action in batch.action:
        latents.append(predict(model, "dynamics", latents[-1], action))
    zs = jnp.stack(latents)

    def cross_entropy(logits, wanted):
        return -jnp.sum(wanted * jax.nn.log_softmax(logits), axis=-1)

    consistency = jnp.mean((zs[1:] - encoded) ** 2, axis=-1)
    reward = cross_entropy(predict(model, "reward", zs[:-1], batch.action), two_hot(batch.reward))
    value = jnp.mean(cross_entropy(value_logits(model["value"], zs[:-1], keep), target), axis=0)
    return mean_of(CONSISTENCY * consistency + REWARD * reward + VALUE * value, batch.mask), zs


def policy_loss(actor, params, zs, mask, scale, noise):
    """Minus value (through the model) and entropy of the policy's action, in units of the scale."""
    action, _, log_std = policy({"policy": actor}, zs, noise.eps)
    q = one_step(params, params["value"], zs, action, noise.policy_keep)
    # The scale moves first: the running range of values, 5th to 95th percentile, at least 1.
    low, high = jnp.percentile(jax.lax.stop_gradient(q[0]), jnp.array([5.0, 95.0]))
    scale = scale + TAU * (jnp.maximum(high - low, 1.0) - scale)
    log_prob = jnp.sum(-0.5 * noise.eps**2 - log_std - 0.5 * jnp.log(2.0 * jnp.pi), axis=-1)
    return mean_of((-q + ENTROPY * ACTION * log_prob) / scale, mask), scale


def update(learner, batch, noise):
    """Model and values, then the policy on the latents, then the target network."""
    model = {name: p for name, p in learner.params.items() if name != "policy"}
    actor, z = learner.params["policy"], apply(model["encoder"], batch.obs)
    # The value's target: one step from the best stored actions, by model and target network.
    _, index = jax.lax.top_k(batch.plan_values[:-1], BEST)
    actions = jnp.take_along_axis(batch.plan_actions[:-1], index[..., None], axis=-2)
    root = jnp.repeat(z[:-1, :, None], BEST, axis=2)
    target = jnp.mean(two_hot(one_step(model, learner.target_value, root, actions)), axis=-2)

    grads, zs = jax.grad(model_loss, has_aux=True)(model, batch, z[1:], target, noise.value_keep)
    moves, model_state = MODEL_OPTIMIZER.update(grads, learner.model_state)
    fallen = jnp.clip((learner.step - FALLS_AT) / FALLS_OVER, 0.0, 1.0)
    rate = RATE + fallen * (FINAL_RATE - RATE)
    moves = optax.tree.scale(-rate, moves)
    moves["encoder"] = optax.tree.scale(ENCODER_SHARE, moves["encoder"])
    model = optax.apply_updates(model, moves)

    mask = jnp.concatenate([batch.mask[:1], batch.mask])
    given = model, jax.lax.stop_gradient(zs), mask, learner.scale, noise
    grads, scale = jax.grad(policy_loss, has_aux=True)(actor, *given)
    moves, policy_state = POLICY_OPTIMIZER.update(grads, learner.policy_state)
    params = model | {"policy": optax.apply_updates(actor, moves)}
    target_value = optax.incremental_update(params["value"], learner.target_value, TAU)
    return Learner(params, target_value, model_state, policy_state, scale, learner.step + 1)


# ---- Replay --------------------------------------------------------------------------------------
def draw(replay, size, key):
    """Windows that begin in any of `size` rows, and the random numbers of a learner step."""
    keys, many = jax.random.split(key, 5), (HORIZON + 1, BATCH)
    time = jax.random.randint(keys[0], (BATCH,), 0, size - HORIZON) + jnp.arange(many[0])[:, None]
    env = jax.random.randint(keys[1], (BATCH,), 0, ENVS)
    rows = {name: x[time, env] for name, x in replay.items()}
    mask = jnp.cumprod(1.0 - rows["is_last"][:-1], axis=0)
    plans = rows["plan_actions"], rows["plan_values"]
    batch = Batch(rows["obs"], rows["action"][:-1], rows["reward"][1:], mask, *plans)
    keep = [jax.random.bernoulli(k, 1.0 - DROPOUT, (HEADS, *many, WIDTH)) for k in keys[2:4]]
    return batch, Noise(jax.random.normal(keys[4], (*many, ACTION)), keep[0][:, 1:], keep[1])


def refresh(replay, learner, time, env, key):
    """Plan again for some rows, and write their new targets back."""
    new = plan_targets(learner.params, replay["obs"][time, env], key)
    new["made"] = jnp.full(time.shape, learner.step, jnp.float32)
    return replay | {name: replay[name].at[time, env].set(x) for name, x in new.items()}


def reanalyze(replay, size, learner, key):
    """Refresh rows that are drawn with probabilities in proportion to their targets' age."""
    keys, many = jax.random.split(key, 4), (8 * REANALYZE_ROWS,)
    time = jax.random.randint(keys[0], many, 0, size)
    env = jax.random.randint(keys[1], many, 0, ENVS)
    age = jnp.log1p(learner.step - replay["made"][time, env])
    _, chosen = jax.lax.top_k(age + jax.random.gumbel(keys[2], many), REANALYZE_ROWS)
    return refresh(replay, learner, time[chosen], env[chosen], keys[3])


# ---- The loop: act, step the environments, store with targets, learn, reanalyze; all compiled ----
def env_step(key, env, action, is_last):
    """One environment's state, observation, reward and is_last; after an end it is reset."""
    obs, after, reward, done, _ = PENDULUM.step_env(key, env, 2.0 * action, DEFAULT)
    new = PENDULUM.reset_env(key, DEFAULT)
    obs, after = jax.tree.map(lambda a, b: jnp.where(is_last, a, b), new, (obs, after))
    return after, obs, jnp.where(is_last, 0.0, jnp.squeeze(reward)), done & ~is_last


def interact(carry, key, explore=False):
    """Act, store the row with its targets, step all environments."""
    keys, params = jax.random.split(key, 3), carry.learner.params
    if explore:  # uniform actions, each held for 4 steps
        drawn = jax.random.uniform(keys[0], (ENVS, ACTION), minval=-1.0)
        action = jnp.where(carry.size % HOLD == 0, drawn, carry.plan[:, 0])
        plan = carry.plan.at[:, 0].set(action)
    else:
        action, plan = act(params, carry.obs, carry.plan, keys[0])
        plan = jnp.where(carry.is_last[:, None, None], 0.0, plan)
    row = dict(obs=carry.obs, action=action, reward=carry.reward, is_last=carry.is_last)
    row |= dict(made=carry.learner.step, **plan_targets(params, carry.obs, keys[1]))
    replay = {name: x.at[carry.size].set(row[name]) for name, x in carry.replay.items()}
    env_keys = jax.random.split(keys[2], ENVS)
    env = jax.vmap(env_step)(env_keys, carry.env, action, carry.is_last)
    return Carry(carry.learner, replay, carry.size + 1, *env, plan)


def learn(carry, key, updates):
    """Learner steps; after the pretraining a pass of reanalyze with every tenth."""

    def one(i, carry):
        keys = jax.random.split(jax.random.fold_in(key, i))
        learner = update(carry.learner, *draw(carry.replay, carry.size, keys[0]))
        again = functools.partial(reanalyze, size=carry.size, learner=learner, key=keys[1])
        due = (learner.step > PRETRAIN) & (learner.step % REANALYZE_EVERY == 0)
        replay = jax.lax.cond(due, again, lambda replay: replay, carry.replay)
        return carry._replace(learner=learner, replay=replay)

    return jax.lax.fori_loop(0, updates, one, carry)


@jax.jit
def begin(carry, keys):
    """Random actions, then the pretraining, then all targets again: no model had made them."""
    carry, _ = jax.lax.scan(lambda c, key: (interact(c, key, explore=True), None), carry, keys)
    carry = learn(carry._replace(plan=0.0 * carry.plan), keys[0], PRETRAIN)
    time, env = (x.reshape(-1) for x in jnp.mgrid[: len(keys), :ENVS])
    return carry._replace(replay=refresh(carry.replay, carry.learner, time, env, keys[1]))


@functools.partial(jax.jit, donate_argnums=0)
def train(carry, keys):
    """A step of acting and its learner steps with each key."""

    def one(carry, key):
        own = jax.random.split(key)
        return learn(interact(carry, own[0]), own[1], UPDATES * ENVS), None

    return jax.lax.scan(one, carry, keys)[0]


@jax.jit
def evaluate(params, key):
    """Mean return of 20 episodes without noise."""
    keys, going = jax.random.split(key, 20), jnp.zeros(20, bool)
    obs, env = jax.vmap(PENDULUM.reset_env, (0, None))(keys, DEFAULT)

    def one(carry, key):
        env, obs, plan = carry
        action, plan = act(params, obs, plan, key, evaluate=True)
        env, obs, reward, _ = jax.vmap(env_step)(keys, env, action, going)
        return (env, obs, plan), reward

    start = env, obs, jnp.zeros((20, PLAN, ACTION))
    return jnp.mean(jnp.sum(jax.lax.scan(one, start, jax.random.split(key, 200))[1], axis=0))


def main(steps=10_000, seed=0):
    """Train; prints and returns the mean return (random actions: -1,200; solved: about -150)."""
    keys = jax.random.split(jax.random.key(seed), steps // ENVS)  # one per step of the loop
    replay = {name: jnp.zeros((len(keys), ENVS, *shape)) for name, shape in ROW.items()}
    obs, env = jax.vmap(PENDULUM.reset_env, (0, None))(keys[:ENVS], DEFAULT)
    rest = jnp.zeros(ENVS), jnp.zeros(ENVS, bool), jnp.zeros((ENVS, PLAN, ACTION))
    learner = init_learner(init_params(jax.random.key(seed)))
    carry = begin(Carry(learner, replay, 0, env, obs, *rest), keys[: SEED_STEPS // ENVS])
    for own in jnp.split(keys[SEED_STEPS // ENVS :], (steps - SEED_STEPS) // 1_000):
        carry = train(carry, own)
        found = float(evaluate(carry.learner.params, own[0]))
        print(f"step {ENVS * int(carry.size):6,}  return {found:7.1f}", flush=True)
    return found


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
