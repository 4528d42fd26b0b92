"""Discrete actions: draws by counting, the planner by loops in NumPy, TD-MPC's losses by hand."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

import mbx
from mbx import categorical, mppi, planners
from mbx.agents.tdmpc import planning, policies
from mbx.agents.tdmpc.agent import example_row, make_agent, world_config
from mbx.agents.tdmpc.types import PolicyInputs, Scales
from mbx.returns import RunningScale
from mbx.world_model import UNIMIX, make_world_model
from tests.agents.tdmpc_helpers import SPEC, loud, make_settings, weighed
from tests.helpers import in_programs

categorical = in_programs(categorical)

B, N, P, T, A, K, ROUNDS = 2, 13, 2, 3, 4, 3, 3
WANTED = np.array([2, 0, 3])
LEAST = 0.2


def score(key, actions):
    right = (jnp.argmax(actions, axis=-1) == WANTED[None, None]).astype(jnp.float32)
    return jnp.sum(right * jnp.array([[[3.0, 2.0, 1.0]]]), axis=-1)


def score_by_loop(candidate):
    return sum(
        w * (step.argmax() == a) for w, step, a in zip((3, 2, 1), candidate, WANTED, strict=True)
    )


@pytest.fixture(scope="module")
def problem():
    rng = np.random.default_rng(0)
    noise = rng.normal(size=(ROUNDS, B, N - P, T, A)).astype(np.float32)
    mean = rng.dirichlet(np.ones(A), (B, T)).astype(np.float32)
    mean[1] = 0.0  # nothing is known: uniform
    proposals = np.eye(A, dtype=np.float32)[rng.integers(A, size=(B, P, T))]
    proposals[..., 1] = 0.0
    proposals = np.where(proposals.sum(-1, keepdims=True) > 0, proposals, np.eye(A)[0])
    draws = mppi.Draws(
        candidate=lambda i: jnp.asarray(noise)[i],
        score=lambda i: jax.random.key(0),
        gumbel=jnp.asarray(rng.gumbel(size=(B, K)), jnp.float32),
        action=jnp.asarray(rng.normal(size=(B, A)), jnp.float32),
    )
    return noise, mean, proposals.astype(np.float32), draws


def by_hand(problem, mask, noise_share):
    """The whole planner in loops: action, probabilities, last candidates, values."""
    noise, means, proposals, draws = problem
    gumbel = -np.log(-np.log(scipy.stats.norm.cdf(noise.astype(np.float64))))
    last = -np.log(-np.log(scipy.stats.norm.cdf(np.asarray(draws.action, np.float64))))
    results = []
    for b in range(B):
        probs = means[b].astype(np.float64) * mask
        probs = np.array([p / p.sum() if p.sum() else mask / mask.sum() for p in probs])
        for i in range(ROUNDS):
            candidates = list(proposals[b])
            for n in range(N - P):
                with np.errstate(divide="ignore"):
                    chosen = (np.log(probs) + gumbel[i, b, n]).argmax(-1)
                if n < A and mask[n]:
                    chosen[0] = n
                candidates.append(np.eye(A)[chosen])
            candidates = np.stack(candidates)
            values = np.array([score_by_loop(c) for c in candidates], float)
            best = np.argsort(-values, kind="stable")[:K]
            weights = np.exp(0.5 * (values[best] - values[best][0]))
            weights /= weights.sum()
            probs = np.einsum("k,kta->ta", weights, candidates[best])
            least = min(LEAST**2, 1 / mask.sum())
            probs = mask * ((1 - mask.sum() * least) * probs + least)
        elite = (np.log(weights) + np.asarray(draws.gumbel[b])).argmax()
        first = candidates[best][elite][0]
        mixed = (1 - noise_share) * first + noise_share * probs[0]
        with np.errstate(divide="ignore"):
            action = np.eye(A)[(np.log(mixed) + last[b]).argmax()]
        results.append((action, first, probs, candidates, values))
    return [np.stack(x) for x in zip(*results, strict=True)]


@pytest.mark.parametrize(("masked", "noise"), [(False, 0.0), (True, 0.7)])
def test_the_planner_is_its_loops_in_numpy(problem, masked, noise):
    _, mean, proposals, draws = problem
    mask = np.array([1.0, 0.0, 1.0, 1.0]) if masked else np.ones(A)
    own = dict(iterations=ROUNDS, num_samples=N, num_elites=K, min_std=LEAST, action_noise=noise)
    given = dict(proposals=jnp.asarray(proposals), config=mppi.MPPIConfig(**own))
    if masked:
        given["action_mask"] = jnp.asarray(mask)
    plan = categorical.plan(draws, score, jnp.asarray(mean), jnp.ones((B, T, A)), **given)
    action, first, probs, candidates, values = by_hand(problem, mask, noise)
    np.testing.assert_array_equal(plan.actions, candidates)
    np.testing.assert_array_equal(plan.values, values)
    np.testing.assert_allclose(plan.mean, probs, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(plan.chosen, first)
    np.testing.assert_array_equal(plan.action, action)


def test_the_likeliest_action_is_chosen_by_mean_and_what_has_no_meaning_is_refused():
    config = mppi.MPPIConfig(num_samples=16, num_elites=4, selection="mean")
    zeros = jnp.zeros((1, T, A))
    plan = categorical.plan(jax.random.key(0), score, zeros, zeros, config=config)
    np.testing.assert_array_equal(plan.chosen, np.eye(A)[plan.mean[:, 0].argmax(-1)])
    np.testing.assert_array_equal(plan.mean[0].argmax(-1), WANTED)
    with pytest.raises(ValueError, match="selection='mean' chooses no candidate"):
        categorical.plan(jax.random.key(0), score, zeros, zeros, has_aux=True, config=config)
    with pytest.raises(ValueError, match="planner.name='cem' plans continuous actions alone"):
        planners.plan("cem", jax.random.key(0), score, zeros, zeros, discrete=True, config=config)


def parts_of(monkeypatch, num_samples, min_std, mean):
    """What a plan draws in round one, and what it makes of weights: [B, N, T, A], [B, T, A]."""
    eps = np.random.default_rng(3).normal(size=(1, num_samples, T, A)).astype(np.float32)
    draws = mppi.Draws(candidate=lambda i: jnp.asarray(eps), score=None, gumbel=None, action=None)

    made = []

    def plan(draws, score_fn, mean, std, *, method, config):
        mask = jnp.ones((1, 1, A))
        rounds = method(mppi.Frame(draws, mean, std, mask, num_samples, 1, config))
        last = mppi.Refit(rounds.begin, std, None, None, None)
        made.extend((rounds.sample(0, last), rounds.blend(None, last).mean))

    monkeypatch.setattr(mppi, "plan", plan)
    config = mppi.MPPIConfig(num_samples=num_samples, num_elites=2, min_std=min_std)
    mbx.categorical.plan(draws, score, mean, mean, config=config)
    drawn = categorical.draw(jnp.log(mean)[:, None], jnp.asarray(eps))
    return *made, np.array(drawn)


@pytest.mark.parametrize(("num", "min_std"), [(2 * A - 1, 2.0), (2 * A, 0.3)])
def test_every_action_begins_a_candidate_where_there_are_twice_as_many(monkeypatch, num, min_std):
    """And its least probability is min_std squared, or one in A where that is more."""
    probs = np.array([0.7, 0.1, 0.1, 0.1])
    mean = jnp.broadcast_to(jnp.asarray(probs), (1, T, A))
    actions, floored, drawn = parts_of(monkeypatch, num, min_std, mean)
    if num == 2 * A:
        drawn[0, :A, 0] = np.eye(A)
    np.testing.assert_array_equal(actions, drawn)
    wanted = 0.64 * probs + 0.09 if min_std < 1.0 else np.full(A, 0.25)
    np.testing.assert_allclose(floored, np.broadcast_to(wanted, (1, T, A)), rtol=1e-6)


def test_the_first_round_can_be_given_and_is_not_changed():
    config = mppi.MPPIConfig(iterations=1, num_samples=2 * A, num_elites=2)
    given = jnp.broadcast_to(jnp.eye(A)[3], (1, 2 * A, T, A))
    zeros = jnp.zeros((1, T, A))
    plan = categorical.plan(jax.random.key(0), score, zeros, zeros, initial=given, config=config)
    np.testing.assert_array_equal(plan.actions, given)


def test_a_share_of_proposals_is_drawn_uniformly(discrete):
    _, _, model, _, _, _ = discrete
    actions = jnp.broadcast_to(jnp.eye(2)[1], (20_000, 2))
    noise = jax.random.normal(jax.random.key(0), actions.shape)
    found = planning._disturbed(model, actions, 0.4, noise)
    np.testing.assert_array_equal(found.sum(-1), 1.0)
    np.testing.assert_allclose(found.mean(0), [0.2, 0.8], atol=0.01)


def test_weights_become_probabilities_of_what_there_is():
    weights = jnp.array([[2.0, 5.0, 6.0], [0.0, 7.0, 0.0], [0.5, 0.0, 0.0]])
    mask = jnp.array([1.0, 0.0, 1.0])
    found = categorical.probabilities(weights, mask[None], 0.1)
    wanted = [[0.8 * 0.25 + 0.1, 0.0, 0.8 * 0.75 + 0.1], [0.5, 0.0, 0.5], [0.9, 0.0, 0.1]]
    np.testing.assert_allclose(found, wanted, rtol=1e-6)
    slope = jax.grad(lambda x: categorical.probabilities(x, mask[None], 0.1)[..., 0].sum())(weights)
    wanted = 0.8 * np.array([[6 / 64, 0, -2 / 64], [0, 0, 0], [0, 0, -2.0]])
    np.testing.assert_allclose(slope, wanted, atol=1e-6)  # none where all weights are 0
    whole = categorical.probabilities(weights)
    np.testing.assert_allclose(whole, [[2 / 13, 5 / 13, 6 / 13], [0, 1, 0], [1, 0, 0]], rtol=1e-6)


def test_draws_far_out_where_a_distribution_function_is_1_in_float32():
    far = categorical.draw(jnp.zeros(2), jnp.array([8.0, 9.0]))
    np.testing.assert_array_equal(far, [0.0, 1.0])


@pytest.fixture(scope="module")
def discrete():
    settings = make_settings(loss=dict(policy_loss="awr"))
    spec = SPEC._replace(discrete=True)
    model = make_world_model(world_config(settings, spec))
    params = loud(model.init(jax.random.key(0)))
    z = jax.random.normal(jax.random.key(1), (T, B, model.config.latent))
    return settings, spec, model, params, z, model.policy(params, z)


def test_the_policy_is_categorical_with_a_share_of_uniform(discrete):
    _, _, model, params, z, (log_probs, zeros) = discrete
    assert log_probs.shape == (T, B, 2) and not zeros.any()
    probs = np.exp(log_probs)
    np.testing.assert_allclose(probs.sum(-1), 1.0, rtol=1e-5)
    kernels = jax.tree.leaves(params["policy"])
    assert not any(4 in np.shape(x) for x in kernels)  # one number an action, not two
    extreme = jax.tree.map(lambda x: 100.0 * x, params["policy"])
    least = np.exp(model.policy({**params, "policy": extreme}, z)[0]).min()
    np.testing.assert_allclose(least, UNIMIX / 2, rtol=1e-4)


def test_losses_of_a_categorical_policy_by_hand(discrete):
    settings, _, model, _, z, (log_probs, zeros) = discrete
    p = np.exp(np.asarray(log_probs, np.float64))
    actions = np.eye(2)[np.random.default_rng(0).integers(2, size=(T, B))]
    got = policies.policy_log_prob(model, log_probs, zeros, jnp.asarray(actions))
    np.testing.assert_allclose(got, np.log(p[actions == 1].reshape(T, B)), rtol=1e-5)
    entropy = policies.policy_entropy(settings, model, log_probs, zeros, zeros)
    np.testing.assert_allclose(entropy, -(p * np.log(p)).sum(-1), rtol=1e-4)

    # Distillation: an expert's 0 counts as EXPERT_LEAST.
    expert = np.stack([actions, np.ones_like(actions)], axis=-2)
    inputs = PolicyInputs(
        z, weighed(T, B), None, None, plans=weighed(T, B), expert=jnp.asarray(expert),
        behaviour=jnp.asarray(actions[:-1]),
    )  # fmt: skip
    e = np.where(actions == 1, 1 - policies.EXPERT_LEAST, policies.EXPERT_LEAST)
    scales = Scales(*[RunningScale(jnp.float32(2.0))] * 3, None)
    for forward, wanted in ((True, e * np.log(e / p)), (False, p * np.log(p / e))):
        own = make_settings(loss=dict(policy_loss="kl", kl_forward=forward))
        policy = policies.Policy(own, model, {}, log_probs, zeros, inputs)
        loss, _, new, _ = policies.distil(policy, scales)
        np.testing.assert_allclose(loss * new.kl_scale.value, wanted.sum(-1)[:-1], rtol=1e-4)

    cloned, *_ = policies.clone(policy, scales)
    np.testing.assert_allclose(cloned, -got[:-1], rtol=1e-6)

    old = jnp.log(jnp.full((T, B, 2), 0.5))
    trust, moved = policies.trust_region(policy, old, zeros, scales)
    kl = (0.5 * np.log(0.5 / p)).sum(-1)
    np.testing.assert_allclose(trust * moved.trust_scale.value, kl, rtol=1e-4)


def test_svg_reaches_a_categorical_policy_through_its_draw(discrete):
    _, _, model, _, _, _ = discrete
    eps = jnp.array([0.3, -0.2])
    logits = jnp.array([0.4, -0.1])

    def value(logits):
        log_probs = jax.nn.log_softmax(logits)
        return jnp.dot(model.act(log_probs, jnp.zeros(2), eps), jnp.array([3.0, 1.0]))

    p = np.exp(logits) / np.exp(logits).sum()
    assert float(value(logits)) == 3.0  # the draw itself
    slope = 2.0 * p[0] * p[1]  # d (3 p0 + p1) / d logit 0
    np.testing.assert_allclose(jax.grad(value)(logits), [slope, -slope], rtol=1e-5)


def test_a_discrete_agent_acts_and_stores_one_hot_actions(discrete):
    _, spec, _, _, _, _ = discrete
    own = make_settings(planner=dict(action_noise=1.0), loss=dict(policy_loss="kl"))
    agent = make_agent(own, spec)
    train = jax.jit(agent.init)(jax.random.key(0))
    act = jax.jit(agent.act, static_argnums=5)
    obs, first = jax.random.normal(jax.random.key(1), (4, 3)), jnp.ones(4, bool)
    action, actor = act(train, agent.init_actor(4), obs, first, jax.random.key(2), False)
    np.testing.assert_array_equal(np.sort(action, axis=-1), np.tile([0.0, 1.0], (4, 1)))
    np.testing.assert_allclose(actor.sum(-1), 1.0, rtol=1e-5)
    targets = jax.jit(agent.store.targets)(train, None, obs, jax.random.key(3))
    np.testing.assert_array_equal(np.sort(targets.actions, axis=-1)[..., 1], 1.0)
    np.testing.assert_allclose(targets.expert[:, 0].sum(-1), 1.0, rtol=1e-5)


def test_boards_are_read_as_vectors_and_small_images_refused():
    settings = make_settings()
    board = SPEC._replace(obs_shape=(4, 3, 2))
    flat = world_config(settings, board)
    model, vector = (
        make_world_model(world)
        for world in (flat, world_config(settings, SPEC._replace(obs_shape=(24,))))
    )
    params = vector.init(jax.random.key(0))
    same = jax.tree.map(lambda a, b: a.shape == b.shape, params, model.init(jax.random.key(1)))
    assert all(jax.tree.leaves(same))
    obs = jax.random.normal(jax.random.key(2), (5, 2, 4, 3, 2))
    wanted = vector.encode(params, obs.reshape(5, 2, 24))
    np.testing.assert_array_equal(model.encode(params, obs), wanted)
    assert example_row(model)["obs"].shape == (4, 3, 2)
    with pytest.raises(ValueError, match="64x64"):
        world_config(settings, board._replace(obs_dtype=np.uint8))
    image = SPEC._replace(obs_shape=(64, 64, 3))
    assert world_config(settings, image._replace(obs_dtype=np.uint8)).pixels
    with pytest.raises(ValueError, match="images of float32"):
        world_config(settings, image)


@pytest.mark.slow
def test_the_default_learns_to_catch_and_does_not_without_learning(tmp_path):
    """gymnax:Catch-bsuite, whose best return is 1 and a random one's -0.5: 3,000 steps, twice."""
    returns = []
    for rate in (3e-4, 0.0):
        _, _, rows = mbx.train(
            "gymnax:Catch-bsuite",
            config="tdmpc",
            steps=3_000,
            workdir=str(tmp_path / str(rate)),
            eval=dict(interval=3_000, episodes=20, model=False),
            optimizer=dict(learning_rate=rate),
        )
        returns.append([r["return_mean"] for r in rows if "return_mean" in r][-1])
    assert returns[0] >= 0.9 and returns[1] <= 0.5
