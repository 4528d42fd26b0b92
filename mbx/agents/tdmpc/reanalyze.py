"""Reanalyze: planner targets of stored rows made again with today's model, and written back.

Between updates (`make_reanalyze`: rows chosen at random, stale ones first, whole windows, or a
sweep over everything), or inside an update for the windows it learns from (`refresh_batch`, as
BMPC).
Source: document 000, section on reanalyze; MuZero Reanalyze (arXiv 2104.06294); BMPC.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from mbx import replay
from mbx.agents.base import Metrics
from mbx.agents.tdmpc.config import TDMPCConfig
from mbx.agents.tdmpc.update import TrainState

Array = jax.Array


def num_rows(config: TDMPCConfig) -> int:
    """Rows of a pass: the batch, in whole windows where it is made of them."""
    window = config.horizon + 1 if config.reanalyze_slices else 1
    return -(-config.reanalyze_batch // window) * window


def make_reanalyze(config: TDMPCConfig, targets: Any) -> Any:
    """`Store.reanalyze`: choose rows, plan for them again, write the targets back by index."""
    num = num_rows(config)

    def choose(train: TrainState, state: replay.ReplayState, key: Array) -> replay.Index:
        if config.reanalyze_slices:
            length = config.horizon
            windows = replay.sample(state, key, batch_size=num // (length + 1), length=length)
            return jax.tree.map(lambda x: x.T.reshape(-1), windows.index)
        if config.stale_exponent > 0.0:
            return replay.sample_stale(
                state, key, train.step, batch_size=num, exponent=config.stale_exponent
            )[1]
        return replay.sample_rows(state, key, batch_size=num)[1]

    def reanalyze(
        train: TrainState, state: replay.ReplayState, key: Array, sweep: Array
    ) -> tuple[replay.ReplayState, Metrics]:
        rows_key, plan_key = jax.random.split(key)
        chosen = choose(train, state, rows_key)
        swept, held = replay.refresh_index(state, sweep * num, num)
        index = jax.tree.map(functools.partial(jnp.where, sweep >= 0), swept, chosen)
        rows = replay.row_at(state, index)
        mask = (held | (sweep < 0)) & ~rows["is_last"]
        old = replay.targets_at(state, index)
        new = targets(train, None, rows["obs"], plan_key)
        # What is written depends, by nothing, on what was read there: so the compiler knows that
        # the read comes first and writes in place instead of copying the whole storage.
        best_before = jnp.nan_to_num(jnp.max(old.values, axis=-1))
        nothing = 0.0 * (best_before + old.step + old.valid)
        if old.expert is not None:
            nothing = nothing + 0.0 * jnp.nan_to_num(old.expert[:, 0, 0])
            new = new.replace(expert=new.expert + nothing[:, None, None])
        new = new.replace(
            values=new.values + nothing[:, None],
            step=new.step + nothing.astype(jnp.int32),
            valid=new.valid & (nothing == 0.0),
        )
        known = old.valid & mask
        count = jnp.maximum(jnp.sum(known), 1)
        age = jnp.where(known, train.step - old.step, 0)
        change = jnp.max(new.values, axis=-1) - best_before
        metrics = {
            "reanalyze/age": jnp.sum(age) / count,
            "reanalyze/value_change": jnp.sum(jnp.where(known, jnp.abs(change), 0.0)) / count,
            "reanalyze/share": jnp.sum(mask) / jnp.maximum(replay.num_transitions(state), 1),
        }
        return replay.update_targets(state, index, new, mask), metrics

    return reanalyze


def refresh_batch(
    config: TDMPCConfig,
    targets: Any,
    train: TrainState,
    state: replay.ReplayState,
    sample: replay.Sample,
    key: Array,
) -> tuple[replay.ReplayState, replay.Sample]:
    """The replay and a batch after the batch's first windows were planned for anew.

    Due every `reanalyze_current` updates; as many windows as hold `reanalyze_batch` rows. What is
    learned from is read back from the replay, so both are the same.
    """
    windows = min(-(-config.reanalyze_batch // (config.horizon + 1)), config.batch_size)
    inside = jnp.concatenate([jnp.ones_like(sample.mask[:1]), sample.mask])
    own = (sample.index, sample.rows["obs"], inside, sample.rows["is_last"])
    index, obs, inside, is_last = replay.leading_columns(state, own, windows)
    due = train.step % config.reanalyze_current == 0

    def plan(_: None) -> replay.Targets:
        flat = targets(train, None, obs.reshape(-1, *obs.shape[2:]), key)
        return jax.tree.map(lambda x: x.reshape(*obs.shape[:2], *x.shape[1:]), flat)

    def nothing(_: None) -> replay.Targets:
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(plan, None))

    new = jax.lax.cond(due, plan, nothing, None)
    mask = inside & ~is_last & due
    state = replay.update_targets(state, index, new, mask)
    return state, sample._replace(targets=replay.targets_at(state, sample.index))
