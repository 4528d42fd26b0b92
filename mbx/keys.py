"""Random keys by name, so that no stream of random numbers is drawn from twice.

    keys = streams(key, "candidates", "choice")
    noise = jax.random.normal(keys["candidates"], shape)

Split a key once, by all the names that are needed, and use it for nothing else: folding numbers
into a key that is split as well gives the same streams again (`fold_in(key, i)` is
`split(key, n)[i]`).
"""

from __future__ import annotations

import jax

from mbx.types import Array


def streams(key: Array, *names: str) -> dict[str, Array]:
    """Independent keys, one a name, in the order given.

    Raises:
        ValueError: a name given twice.

    Examples:
        >>> found = keys.streams(jax.random.key(0), "act", "learn")
        >>> sorted(found), bool(found["act"] == found["learn"])
        (['act', 'learn'], False)
    """
    if len(set(names)) != len(names):
        raise ValueError(f"streams {names}: give every one a name of its own")
    return dict(zip(names, jax.random.split(key, len(names)), strict=True))
