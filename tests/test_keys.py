"""Named keys: a stream each, refused where two would share one."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from mbx import types


def test_every_name_has_a_stream_of_its_own_and_a_name_twice_is_refused():
    key = jax.random.key(3)
    found = types.streams(key, "act", "learn", "plan")
    assert list(found) == ["act", "learn", "plan"]
    data = np.stack([jax.random.key_data(x) for x in found.values()])
    np.testing.assert_array_equal(data, jax.random.key_data(jax.random.split(key, 3)))
    assert len({tuple(x) for x in [*data, np.asarray(jax.random.key_data(key))]}) == 4
    with pytest.raises(ValueError, match=r"streams \('a', 'b', 'a'\): give every one a name of"):
        types.streams(key, "a", "b", "a")
