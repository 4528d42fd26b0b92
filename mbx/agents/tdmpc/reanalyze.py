"""Reanalyze: refresh planner targets of stored rows with the current model.

Between updates (`reanalyze`: rows drawn at random, stale ones first, or a sweep over everything),
or inside an update for the windows it learns from (`reanalyze_batch`, as BMPC).
Sources: MuZero Reanalyze (arXiv 2104.06294); BMPC (arXiv 2503.18871); docs/sources.md,
entry planner-targets.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from mbx import replay
from mbx.agents.base import MakeTargets, Mean
from mbx.agents.tdmpc.types import TrainState
from mbx.fast import collectives
from mbx.types import Array, Metrics, streams

if TYPE_CHECKING:
    from mbx.agents.tdmpc.settings import Settings


def reanalyze(
    settings: Settings,
    make_targets: MakeTargets,
    train: TrainState,
    state: replay.ReplayState,
    key: Array,
    chunk: Array,
) -> tuple[replay.ReplayState, Metrics]:
    """`Store.reanalyze`: choose rows, plan for them, write the targets back by index."""
    own, keys = settings.reanalyze, streams(key, "rows", "plan")
    num, draw = own.batch_size, replay.sample_rows
    if not own.current_batch and own.stale_exponent > 0.0:  # with it only sweeps are left
        draw = functools.partial(replay.sample_stale, step=train.step, exponent=own.stale_exponent)
    chosen = draw(state, keys["rows"], batch_size=num)[1]
    swept, held = replay.refresh_index(state, chunk * num, num)
    index = jax.tree.map(functools.partial(jnp.where, chunk >= 0), swept, chosen)
    rows = replay.row_at(state, index)
    mask = (held | (chunk < 0)) & ~rows["is_last"]
    old = replay.targets_at(state, index)
    new = written_after(old, make_targets(train, None, rows["obs"], keys["plan"]))
    metrics = pass_metrics(state, old, new, mask)
    return replay.update_targets(state, index, new, mask), metrics


def written_after(old: replay.Targets, new: replay.Targets) -> replay.Targets:
    """`new` plus 0 * `old`: XLA then reads before it writes, in place instead of copying the
    storage.
    """
    nothing = 0.0 * (jnp.nan_to_num(jnp.max(old.values, axis=-1)) + old.step + old.valid)
    if old.expert is not None:
        nothing = nothing + 0.0 * jnp.nan_to_num(old.expert[..., 0, 0])
        new = new.replace(expert=new.expert + nothing[..., None, None])
    return new.replace(
        values=new.values + nothing[..., None],
        step=new.step + nothing.astype(jnp.int32),
        valid=new.valid & (nothing == 0.0),
    )


def pass_metrics(
    state: replay.ReplayState, old: replay.Targets, new: replay.Targets, mask: Array
) -> Metrics:
    """Age, change and share of the rows that a pass refreshed.

    Args:
        old, new: targets of the rows, `[M]` or of windows `[T, B]`.
        mask: which of them count.

    Returns:
        Mean age in updates of the rows that had a plan; mean change of the best value of those
        whose plan had values; rows planned for as a share of all transitions (with duplicates).
    """
    axis = mask.ndim - 1  # the batch's

    def sums(old: replay.Targets, new: replay.Targets, mask: Array, held: Array) -> Any:
        known = old.valid & mask
        change = jnp.abs(jnp.max(new.values, axis=-1) - jnp.max(old.values, axis=-1))
        compared = known & jnp.isfinite(change)  # an acting expert's row has no value
        found = dict(
            known=jnp.sum(known),
            age=jnp.sum(jnp.where(known, new.step - old.step, 0)),
            change=jnp.sum(jnp.where(compared, change, 0.0)),
            compared=jnp.sum(compared),
            planned=jnp.sum(mask),
            held=jnp.sum(held),
        )
        return collectives.psum(jax.tree.map(lambda x: x.astype(jnp.float32), found))

    found = collectives.shard_map(sums, (axis, axis, axis, 0), old, new, mask, state.transitions)
    count = jnp.maximum(found["known"], 1.0)
    return {
        "reanalyze/age": found["age"] / count,
        "reanalyze/value_change": found["change"] / jnp.maximum(found["compared"], 1.0),
        "reanalyze/share": found["planned"] / jnp.maximum(found["held"], 1.0),
    }


def reanalyze_batch(
    settings: Settings,
    make_targets: MakeTargets,
    train: TrainState,
    state: replay.ReplayState,
    sample: replay.Sample,
    key: Array,
) -> tuple[replay.ReplayState, replay.Sample, Metrics]:
    """Plan again for the first windows of a batch before learning from it.

    Due every `reanalyze.interval` updates; as many windows as hold `reanalyze.batch_size` rows.

    Returns:
        The replay; the batch with its targets read back from it; and `pass_metrics` of the updates
        in which it was due.
    """
    windows = settings.refreshed_windows
    inside = jnp.concatenate([jnp.ones_like(sample.mask[:1]), sample.mask])
    leading = (sample.index, sample.rows["obs"], inside, sample.rows["is_last"])
    index, obs, inside, is_last = replay.leading_columns(state, leading, windows)
    due = train.step % settings.reanalyze.interval == 0

    def plan(_: None) -> replay.Targets:
        flat = make_targets(train, None, obs.reshape(-1, *obs.shape[2:]), key)
        return jax.tree.map(lambda x: x.reshape(*obs.shape[:2], *x.shape[1:]), flat)

    def nothing(_: None) -> replay.Targets:
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(plan, None))

    new = jax.lax.cond(due, plan, nothing, None)
    mask = inside & ~is_last & due
    old = replay.targets_at(state, index)
    new = written_after(old, new)
    metrics = pass_metrics(state, old, new, mask)
    metrics = {name: Mean(value * due, due.astype(jnp.float32)) for name, value in metrics.items()}
    state = replay.update_targets(state, index, new, mask)
    return state, sample._replace(targets=replay.targets_at(state, sample.index)), metrics
