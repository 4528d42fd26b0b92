"""A human prior for maps that cannot be listed, learned from the exact ones of maps that can.

The maps are those of a configuration's empo:maps/SOURCE: the prior is learned from those to train
on that have at most humans.max_states states, and its errors are of such ones held out.
"""

from __future__ import annotations

import dataclasses
import io
import json
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.traverse_util import flatten_dict

from mbx.commands.jobs import write_rows
from mbx.empo import multigrid
from mbx.empo.multigrid import learned
from mbx.empo.multigrid.compact import make_features, used_channels
from mbx.empo.multigrid.export import TooManyStates
from mbx.empo.multigrid.family import Choice, Family, choose, read_place
from mbx.empo.multigrid.paths import make_paths
from mbx.power import PowerParams, solve
from mbx.training.files import atomic_write

WIDTH, BATCH, RATE = 32, 32, 2e-3
TESTED = 1_024  # states of a map, drawn uniformly, that errors are means over
BETAS = (0.1, 0.3, 1.0, 3.0)  # of paths, to compare with


class Lesson(NamedTuple):
    """States of maps, with their exact priors."""

    maps: Any  # `[S]`, numbers in the family
    states: Any  # `[S, ...]`
    prior: Any  # `[S, H, G, A]`
    open: Any  # `[S, H, G]` bool, the goal is not achieved


def solved(family: Family, number: int, params: PowerParams, limit: int) -> Lesson:
    """Of one map, all its states. Raises TooManyStates for more than `limit`."""
    start = jax.tree.map(lambda x: x[number], family.starts)
    grid = multigrid.make_grid(family.layouts[number])._replace(initial=start)
    table, states = multigrid.export(grid, limit=limit)
    prior = np.moveaxis(np.asarray(solve(table, params).pi_h, np.float32), 2, 0)
    achieved = np.moveaxis(np.asarray(table.achieved), 2, 0) > 0
    return Lesson(np.full(len(prior), number), jax.device_get(states), prior, ~achieved)


def listed(family: Family, numbers: Sequence[int], params: PowerParams, limit: int) -> list[Lesson]:
    """Of the maps that have at most `limit` states."""
    found = []
    for number in numbers:
        try:
            found.append(solved(family, int(number), params, limit))
        except TooManyStates:
            continue
        print(f"map {number}: {len(found[-1].maps)} states", flush=True)
    if not found:
        raise ValueError(f"no map has at most humans.max_states={limit} states: raise it")
    return found


def train(
    family: Family, agreed: dict[str, Any], lessons: list[Lesson], updates: int, seed: int
) -> Any:
    """Weights learned from lessons by cross-entropy, each of their states equally likely."""
    network = learned.Network(agreed, WIDTH)
    features, _ = make_features(family.template, np.asarray(agreed["channels"]))
    every = jax.tree.map(lambda *x: jnp.asarray(np.concatenate(x)), *lessons)
    rate = optax.cosine_decay_schedule(RATE, updates)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(rate))

    def read(number: jax.Array, state: Any) -> jax.Array:
        place = jax.tree.map(lambda x: x[number], family.places)
        return features(read_place(family.template, place), state)

    def step(carry: Any, key: jax.Array) -> tuple[Any, jax.Array]:
        chosen = jax.random.randint(key, (BATCH,), 0, len(every.maps))
        own = jax.tree.map(lambda x: x[chosen], every)
        seen = jax.vmap(read)(own.maps, own.states)

        def loss(params: Any) -> jax.Array:
            logits = network.apply({"params": params}, seen)
            return optax.losses.softmax_cross_entropy(logits, own.prior).mean()

        params, state = carry
        value, gradient = jax.value_and_grad(loss)(params)
        change, state = optimizer.update(gradient, state, params)
        return (optax.apply_updates(params, change), state), value

    init_key, draw_key = jax.random.split(jax.random.key(seed))
    params = network.init(init_key, jnp.zeros((1, agreed["features"])))["params"]
    run = jax.jit(lambda carry, keys: jax.lax.scan(step, carry, keys))
    (params, _), losses = run((params, optimizer.init(params)), jax.random.split(draw_key, updates))
    print(f"seed {seed}: cross-entropy {losses[-updates // 10 :].mean():.4f}", flush=True)
    return params


def errors(prior: Callable[..., Any], family: Family, lessons: list[Lesson]) -> dict[str, float]:
    """Means over maps, with standard errors: total variation and KL divergence from the exact prior
    where goals are not achieved, and total variation where they are."""

    @jax.jit
    @jax.vmap
    def of(number: jax.Array, state: Any) -> jax.Array:
        place = jax.tree.map(lambda x: x[number], family.places)
        return prior(read_place(family.template, place), state)

    each = []
    for lesson in lessons:
        drawn = np.random.default_rng(0).integers(0, len(lesson.maps), TESTED)
        own = jax.tree.map(lambda x, drawn=drawn: x[drawn], lesson)
        found = np.maximum(np.asarray(of(own.maps, own.states)), 1e-12)
        off = 0.5 * np.abs(found - own.prior).sum(-1)
        kl = (own.prior * np.log(np.maximum(own.prior, 1e-12) / found)).sum(-1)
        each.append((off[own.open].mean(), kl[own.open].mean(), off[~own.open].mean()))
    mean, error = np.mean(each, axis=0), np.std(each, axis=0) / np.sqrt(len(each))
    names = ("tv", "kl", "tv_achieved")
    numbers = [(name, mean[i]) for i, name in enumerate(names)]
    numbers += [(f"{name}_error", error[i]) for i, name in enumerate(names)]
    return {"maps": len(each)} | {name: float(x) for name, x in numbers}


def run(out: str, settings: Any, seeds: Sequence[int], updates: int) -> None:
    """Write the network of each seed, and as CSV the errors of these and of simpler priors.
    Raises ValueError for settings of another kind of run, and where no map can be listed.
    """
    root, ending = os.path.splitext(out)
    if ending != ".npz" or not settings.env.name.startswith("empo:maps/"):
        raise ValueError(
            f"--out={out}, env.name={settings.env.name}: NAME.npz and empo:maps/SOURCE"
        )
    if settings.humans.habit != "uniform":
        raise ValueError(f"humans.habit={settings.humans.habit!r}: a learned prior has none")
    env, limit = settings.env, settings.humans.max_states
    source = env.name.removeprefix("empo:maps/")
    family, own, _ = choose(source, Choice(env.maps, env.held_out, env.map_seed))
    given = dataclasses.asdict(settings.power)
    params = own if given.pop("source") == "world" and own else PowerParams(**given)
    lessons, held_out = (
        listed(family, numbers, params, limit)
        for numbers in (range(env.held_out, len(family.layouts)), range(env.held_out))
    )
    agreed, rows = learned.agreement(family, params, used_channels(family.places)), []

    def compare(own: Callable[..., Any], prior: str, seed: int = 0) -> None:
        rows.append({"prior": prior, "seed": seed} | errors(own, family, held_out))
        print(rows[-1], flush=True)

    shape = (agreed["humans"], agreed["goals"], agreed["actions"])
    compare(lambda layout, state: jnp.full(shape, 1.0 / shape[2]), prior="uniform")
    for beta in BETAS:
        compare(lambda layout, state, b=beta: make_paths(layout, b)(state), prior=f"paths {beta:g}")
    for seed in seeds:
        weights = train(family, agreed, lessons, updates, seed)
        about = {"agreed": agreed, "env.name": env.name, "env.map_seed": env.map_seed}
        about |= {"maps": len(lessons), "seed": seed, "updates": updates}
        path = out if seed == seeds[0] else f"{root}-{seed}.npz"
        file = io.BytesIO()
        np.savez(file, about=json.dumps(about), **flatten_dict(jax.device_get(weights), sep="/"))
        atomic_write(path, file.getvalue())
        compare(learned.load(path, family, params), prior="learned", seed=seed)
    write_rows(f"{root}.csv", rows)
