r"""A head that predicts the next observation (a vector) from the latent predicted for it.

    python -m experiments.train --import=examples/observation_head.py --config=tdmpc \
        --config.loss.heads=next_observation

TD-MPC2 predicts no observations. What this does to its returns: docs/notes/learning_history.md.
"""

from mbx import distributions, heads, networks

next_observation = heads.Head(
    network=lambda spec: networks.MLP(hidden=(96,), features=spec.obs_shape[0]),
    inputs=lambda window: (window.latents[1:],),
    target=lambda window: distributions.symlog(window.obs[1:]),
)
heads.register("next_observation", next_observation)
