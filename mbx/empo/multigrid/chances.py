"""Chance in a step: who wins a contest, who stumbles, whom magic walls let through.

An outcome is a number that is read digit by digit, each digit one event with its own number of
ways; a number with something left over at the end stands for nothing and has probability 0. All on
scalars: tuples over agents.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

Array = jax.Array
Scalars = tuple[Array, ...]


def max_winners(num_agents: int) -> int:
    """Largest product of block sizes over the ways to split `num_agents` contenders into blocks."""
    best = [1] * (num_agents + 1)
    for n in range(1, num_agents + 1):
        best[n] = max(size * best[n - size] for size in range(1, n + 1))
    return best[num_agents]


def contend(claims: Scalars, outcome: Array, most: int) -> tuple[Scalars, Array, Array]:
    """Who comes first in the `outcome`-th way to settle all contests.
    claims: N numbers; equal ones contend. outcome: below the static bound `most`.
    Returns (order, N agent numbers: winners and all who contend with nobody, then the rest, each by
    number; probability of the way; what is left of `outcome`).
    """
    num, prob, first = len(claims), jnp.float32(1.0), []
    for i in range(num):
        same = [claims[i] == claims[j] for j in range(num)]
        size = sum(x.astype(jnp.int32) for x in same)
        rank = sum((x.astype(jnp.int32) for x in same[:i]), start=jnp.int32(0))
        leads = rank == 0
        radix = jnp.where(leads, size, 1)
        outcome, digit = divide(outcome, radix, most)
        prob = prob / radix
        # A block's leader draws for it; the others look up whom it drew.
        drawn = digit
        for j in range(i):
            drawn = jnp.where(same[j] & first[j][1], first[j][0], drawn)
        first.append((drawn, leads, rank))
    loses = [(rank != drawn).astype(jnp.int32) for drawn, _, rank in first]
    winners = num - sum(loses)
    place, lost = [], jnp.int32(0)
    for i in range(num):
        place.append(jnp.where(loses[i] > 0, winners + lost, i - lost))
        lost = lost + loses[i]
    order = tuple(
        sum((jnp.where(place[i] == p, i, 0) for i in range(1, num)), start=jnp.int32(0))
        for p in range(num)
    )
    return order, prob, outcome


def draw(affected: Scalars, outcome: Array, shares: Scalars) -> tuple[Scalars, Array, Array]:
    """What befalls each who is affected: (its digit, 0 for others; probability; rest of outcome).
    shares: the probability of each digit.
    """
    digits, prob, ways = [], jnp.float32(1.0), len(shares)
    for here in affected:
        digit = jnp.where(here, outcome % ways, 0)
        outcome = jnp.where(here, outcome // ways, outcome)
        chance = shares[0]
        for number, share in enumerate(shares[1:], start=1):
            chance = jnp.where(digit == number, share, chance)
        prob = prob * jnp.where(here, chance, 1.0)
        digits.append(digit)
    return tuple(digits), prob, outcome


def divide(number: Array, by: Array, most: int) -> tuple[Array, Array]:
    """Quotient and remainder of a number below `most`, by comparisons: these make vector code."""
    quotient = jnp.zeros_like(number)
    for multiple in range(1, most):
        quotient = quotient + (number >= multiple * by)
    return quotient, number - quotient * by
