"""Robots to compare with, by their names."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from mbx.empo.agent.evaluation import make_robot
from mbx.empo.power.named import NamedWorld
from tests.empo.helpers import load

KEY = jax.random.key(0)


def test_robots_by_name():
    found = load("dag_2h2r")
    assert int(make_robot("frozen", found)(jnp.int32(0), KEY)) == 0
    drawn = [int(make_robot("random", found)(0, jax.random.key(i))) for i in range(8)]
    assert {*drawn} <= {0, 1, 2, 3} and len({*drawn}) > 1
    sure = found.solution._replace(pi_r=jnp.eye(2)[jnp.array([1, 0, 1])])
    exact = make_robot("exact", NamedWorld(found.world, None, found.table, sure))
    assert [int(exact(jnp.int32(s), KEY)) for s in range(3)] == [1, 0, 1]
    open_world = NamedWorld(found.world)
    with pytest.raises(ValueError, match="robot='exact': this world's states are not"):
        make_robot("exact", open_world)
    with pytest.raises(ValueError, match="robot='learned': needs a run"):
        make_robot("learned", found)
    with pytest.raises(ValueError, match="robot='best': choose one of"):
        make_robot("best", found)
