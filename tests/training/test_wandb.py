"""Mirroring the log to Weights & Biases, with a stand-in for the package (it is optional)."""

from __future__ import annotations

import json
import math
import sys
import types

import pytest

from mbx.agents.dreamer import settings as dreamer
from mbx.agents.settings import Log
from mbx.settings import to_dict
from mbx.training import run, rundir
from mbx.training.metrics import RunLogger, read_rows
from tests.helpers import tiny_config

LOG = Log(wandb="walks")
CONFIG = {"seed": 1, "log": to_dict(LOG)}


class StandInRun:
    def __init__(self, options):
        self.options, self.rows, self.metrics, self.finished = options, [], [], False

    def define_metric(self, name, step_metric=None):
        self.metrics.append((name, step_metric))

    def log(self, row):
        assert not self.finished
        self.rows.append(row)

    def finish(self):
        self.finished = True


@pytest.fixture
def wandb(monkeypatch):
    """A module that has what the sink uses of wandb; its `runs` are those opened."""
    module = types.ModuleType("wandb")
    module.Error, module.runs = type("Error", (Exception,), {}), []

    def init(**options):
        module.runs.append(StandInRun(options))
        return module.runs[-1]

    module.init = init
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


def test_rows_are_mirrored_over_environment_steps(wandb, tmp_path):
    logger = RunLogger(str(tmp_path / "a"), config=CONFIG, log=LOG)
    logger.log("train", 10, {"loss/value": 0.5})
    with pytest.warns(UserWarning, match="not finite"):
        logger.log("eval", 20, {"return_mean": float("nan")})
    logger.close()
    (opened,) = wandb.runs
    assert opened.rows[0] == {"environment_steps": 10, "train/loss/value": 0.5}
    assert opened.rows[1]["environment_steps"] == 20
    assert math.isnan(opened.rows[1]["eval/return_mean"])
    assert ("*", "environment_steps") in opened.metrics and opened.finished
    assert opened.options["project"] == "walks" and opened.options["entity"] is None
    assert opened.options["name"] == "a" and opened.options["config"] == CONFIG
    assert opened.options["dir"] == str(tmp_path / "a")
    assert len(read_rows(str(tmp_path / "a" / "metrics.jsonl"))) == 2


def test_a_resumed_run_keeps_its_id_and_a_new_one_gets_another(wandb, tmp_path):
    for workdir, resume_step in (("a", None), ("a", 10), ("b", None), ("c", 10)):
        RunLogger(str(tmp_path / workdir), config=CONFIG, log=LOG, resume_step=resume_step).close()
    ids = [opened.options["id"] for opened in wandb.runs]
    assert ids[0] == ids[1] and len(set(ids)) == 3
    assert all(opened.options["resume"] == "allow" for opened in wandb.runs)
    assert json.loads((tmp_path / "a" / "wandb.json").read_text())["id"] == ids[0]


def test_seeds_are_runs_of_their_own_named_after_theirs(wandb, tmp_path):
    loggers = [RunLogger(str(tmp_path / "a" / f"seed-{i}"), config=CONFIG, log=LOG) for i in (0, 1)]
    loggers[1].log("train", 10, {"x": 1.0})
    assert [len(opened.rows) for opened in wandb.runs] == [0, 1]
    assert [opened.options["name"] for opened in wandb.runs] == ["a/seed-0", "a/seed-1"]
    assert {opened.options["reinit"] for opened in wandb.runs} == {"create_new"}
    for logger in loggers:
        logger.close()


def test_without_the_setting_nothing_is_opened(wandb, tmp_path):
    RunLogger(str(tmp_path), config={}).close()
    assert wandb.runs == [] and not (tmp_path / "wandb.json").exists()


def test_a_missing_package_is_told_before_anything_is_made(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "wandb", None)
    config = tiny_config(log=dict(wandb="walks"))
    with pytest.raises(ImportError, match=r"log\.wandb='walks' .* pip install -e '\.\[wandb\]'"):
        run.train(config, str(tmp_path / "a"))
    assert not (tmp_path / "a").exists()


def test_a_run_that_wandb_does_not_open_leaves_the_directory_free(wandb, monkeypatch, tmp_path):
    def init(**options):
        raise wandb.Error("no key")

    monkeypatch.setattr(wandb, "init", init)
    with pytest.raises(ValueError, match=r"log\.wandb='walks': no key: run `wandb login`"):
        RunLogger(str(tmp_path), config=CONFIG, log=LOG)
    rundir.check(to_dict(dreamer.Settings()), str(tmp_path), str(tmp_path))
