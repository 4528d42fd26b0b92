"""Draws begin anew with every test, so that tests hold in any order."""

import numpy as np
import pytest

from tests.agents import tdmpc_helpers


@pytest.fixture(autouse=True)
def own_draws(monkeypatch):
    monkeypatch.setattr(tdmpc_helpers, "RNG", np.random.default_rng(0))
