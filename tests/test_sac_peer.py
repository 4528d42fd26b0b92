"""Small tasks that mbx and SAC are compared on, and the table of that comparison."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks import peer_sac
from benchmarks.peer_sac import TwoTanks
from mbx import envs
from mbx.training import run


def episode(seed, act):
    """Return, length and last step of an episode; `act(observation) -> action`."""
    env, total, length = TwoTanks(), 0.0, 0
    obs, _ = env.reset(seed=seed)
    for _ in range(TwoTanks.max_episode_steps):
        obs, reward, failed, _, _ = env.step(act(obs))
        total, length = total + reward, length + 1
        if failed:
            break
    return total, length, (obs, reward, failed)


def controlled(obs):
    error = obs["set_point"][0] - obs["levels"][1]
    pump = 0.6 + 20.0 * error if obs["levels"][0] < 1.8 else 0.0
    return np.array([np.clip(pump, 0.0, 2.5), np.clip(0.5 - 10.0 * error, -0.2, 1.0)])


def test_tanks_are_for_a_controller_and_not_for_chance():
    draw = np.random.default_rng(0)
    low, high = TwoTanks.action_space.low, TwoTanks.action_space.high
    played = [episode(seed, lambda _: draw.uniform(low, high)) for seed in range(20)]
    assert -10.0 < np.mean([total for total, _, _ in played]) < 10.0
    assert all(failed and length < 100 for _, length, (_, _, failed) in played)
    assert np.mean([episode(seed, controlled)[0] for seed in range(20)]) > 385.0


@pytest.mark.parametrize("action, level", [((2.5, 1.0), 2.0), ((0.0, 1.0), 0.05)])
def test_tanks_that_overflow_or_run_dry_end_with_an_alarm(action, level):
    _, length, (obs, reward, failed) = episode(0, lambda _: np.array(action))
    assert failed and reward == -20.0 and obs["alarm"] == 1 and length < 200
    assert (obs["levels"].max() > level) if level > 1.0 else (obs["levels"].min() < level)
    assert TwoTanks.observation_space.contains(obs)


def test_what_mbx_trains_and_when_it_is_evaluated(monkeypatch):
    class Logger:
        def log(self, kind, step, values):
            pass

    def train(settings, workdir):
        assert settings.train.steps == 3_000 and settings.train.utd_ratio == 1.0
        assert settings.eval.interval == settings.train.log_interval == 500
        made = envs.make(settings.env.name, 2)
        assert (made.spec.obs_shape, made.spec.action_dim) == ((5,), 2)
        run.RunLogger().log("train", 500, {})
        run.RunLogger().log("eval", 500, {"return_mean": 7.0})

    written = []
    monkeypatch.setattr(run, "RunLogger", Logger)
    monkeypatch.setattr(run, "train", train)
    given = peer_sac.flags().parse_known_args(["mbx", "--config.train.utd_ratio=1"])
    peer_sac.train_mbx(*given, lambda *row: written.append(row))
    assert written == [(500, 7.0)]


def test_the_table_has_the_first_evaluation_that_is_as_good():
    def rows(task, seed, *points):
        return [
            dict(task=task, seed=seed, step=n, seconds=s, **{"return": r}) for n, s, r in points
        ]

    sac = rows("tanks", 0, (2_500, 40.4, 999), (3_000, 50.4, 360)) + rows(
        "tanks", 1, (3_000, 52, 380)
    )
    mbx = rows("tanks", 0, (500, 20, 300), (1_000, 34.6, 370), (1_500, 50, 390))
    mbx += rows("tanks", 1, (500, 20, 300), (1_000, 35, 369.9)) + rows("stand", 0, (500, 9, 999))
    head, row = peer_sac.table(sac, quick=mbx)
    assert row == ["tanks", "3,000", "370", "50, 52", "1,000, never", "35, -"]
    assert head[-2:] == ["steps of quick", "s of quick"] and len(head) == len(row)
