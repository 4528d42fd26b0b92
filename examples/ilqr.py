"""iLQR through the world model: `jax.jacfwd` needs `gradients.forward_mode`.

    python examples/ilqr.py

Actions are sought that bring a latent to a goal. The model here is a small one that has learnt
nothing; `mbx.training.run.load` hands out a trained one's parameters.
"""

import functools

import jax
import jax.numpy as jnp

from mbx.fast import gradients
from mbx.world_model import config_for_size, make_world_model


def solve(step, cost, final_cost, z, actions, *, iterations=15):
    """iLQR from latent `z` `[L]`, beginning with `actions` `[T, A]`: those found, and all costs.

    step (z, a) -> next z; cost (z, a) and final_cost (z) -> numbers. Actions stay in [-1, 1]. Of
    several dampings (Levenberg and Marquardt's: the larger, the shorter a step, along the gradient)
    each iteration takes the one whose actions cost least; the largest leaves them as they are.
    """
    dampings = jnp.append(10.0 ** jnp.arange(-4.0, 4.0), 1e20)

    def follow(z, actions, feedback, planned):
        """Act with feedback on the way planned: total cost, states and actions."""

        def one(z, x):
            a, gain, z_planned = x
            a = jnp.clip(a + gain @ (z - z_planned), -1.0, 1.0)
            return step(z, a), (z, a, cost(z, a))

        last, (states, actions, costs) = jax.lax.scan(one, z, (actions, feedback, planned))
        return costs.sum() + final_cost(last), states, actions, last

    def backward(damping, carry, x):
        """One step of the Riccati recursion: change `k` and feedback `K` of its action."""
        V, v = carry
        (fz, fa), (cz, ca), ((czz, _), (caz, caa)) = x
        qaa = caa + fa.T @ V @ fa + damping * jnp.eye(fa.shape[1])
        qaz, qz, qa = caz + fa.T @ V @ fz, cz + fz.T @ v, ca + fa.T @ v
        K, k = -jnp.linalg.solve(qaa, qaz), -jnp.linalg.solve(qaa, qa)
        return (czz + fz.T @ V @ fz + qaz.T @ K, qz + qaz.T @ k), (k, K)

    def improve(actions, _):
        feedback = jnp.zeros((*actions.shape, z.shape[0]))
        before, states, actions, last = follow(z, actions, feedback, jnp.zeros((len(actions), 1)))
        with gradients.forward_mode():
            of_step = jax.vmap(jax.jacfwd(step, (0, 1)))(states, actions)
            of_cost = jax.vmap(jax.grad(cost, (0, 1)))(states, actions)
            curvature = jax.vmap(jax.hessian(cost, (0, 1)))(states, actions)
            end = jax.hessian(final_cost)(last), jax.grad(final_cost)(last)

        def propose(damping):
            xs, riccati = (of_step, of_cost, curvature), functools.partial(backward, damping)
            change, feedback = jax.lax.scan(riccati, end, xs, reverse=True)[1]
            return follow(z, actions + change, feedback, states)

        tried = jax.vmap(propose)(dampings)
        return tried[2][jnp.nanargmin(tried[0])], before

    return jax.lax.scan(improve, actions, None, length=iterations)


def main():
    """From one latent to where unknown actions lead: found and unknown actions, and all costs."""
    model = make_world_model(config_for_size("tiny", obs_shape=(3,), action_dim=2, latent_dim=32))
    params = model.init(jax.random.key(0))
    z = model.encode(params, jnp.array([0.3, -1.0, 2.0]))
    unknown = 0.8 * jnp.sin(jnp.arange(10.0).reshape(5, 2))
    step = jax.jit(lambda z, a: model.step(params, z[None], a)[0])
    goal = z
    for action in unknown:
        goal = step(goal, action)
    cost, final = lambda z, a: 1e-4 * a @ a, lambda z: 100.0 * jnp.sum((z - goal) ** 2)
    found, costs = jax.jit(lambda: solve(step, cost, final, z, jnp.zeros_like(unknown)))()
    print("cost by iteration:", ", ".join(f"{c:.4f}" for c in costs))
    return found, unknown, costs


if __name__ == "__main__":
    main()
