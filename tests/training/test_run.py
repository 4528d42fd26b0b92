"""Whole runs through the public function and the command: files, resume, kill, errors."""

from __future__ import annotations

import csv
import functools
import gc
import itertools
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mbx.agents.tdmpc.settings import Env, Settings, Train
from mbx.envs import custom
from mbx.settings import flatten, to_dict
from mbx.training import levels, run
from mbx.training.checkpoint import Checkpointer
from mbx.training.job import fresh_state, prepare
from mbx.training.logging import read_rows
from mbx.training.rundir import load_config
from tests.faults.small import small_config
from tests.helpers import FUSED, counting, once, programs_of, register_toy, tiny_config

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run of 80 steps without interruption, its directory, and what was compiled for it."""
    workdir = str(tmp_path_factory.mktemp("whole"))
    with counting() as counter:
        return run.train(tiny_config(), workdir), workdir, counter


def final_state(workdir: str):
    """Every leaf of a run's newest checkpoint, as numpy."""
    register_toy()  # the run was another process's
    parts = prepare(load_config(workdir))
    example = jax.eval_shape(functools.partial(fresh_state, parts), jax.random.key(0))
    checkpointer = Checkpointer(workdir)
    state, meta = checkpointer.restore(example)
    checkpointer.close()
    raw = jax.tree.map(
        lambda x: jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x,
        state,
    )
    return jax.tree.map(np.asarray, raw), meta


def assert_same(a, b):
    leaves = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    assert all(np.array_equal(x, y, equal_nan=x.dtype.kind == "f") for x, y in leaves)


def test_the_last_line_says_what_the_return_means(tmp_path):
    """Episodes of the seed phase are random; the threshold is the one that Gymnasium registers."""
    config = to_dict(Settings(env=Env(name="gymnax:CartPole-v1"), train=Train(seed_steps=20)))
    for name, rows in {
        "seed-0": "10,0,,-3.0,9\n11,1,,4\0.,9\n12,1,,nan,9\n21,0,,50,9",
        "seed-1": "20,1,,-1,9",
    }.items():
        (tmp_path / name).mkdir()
        text = f"step,environment,task,return,length\n{rows}\n1"  # a killed run's last line
        (tmp_path / name / "training_episodes.csv").write_text(text)
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    known = levels.of_run(str(tmp_path))
    assert known == (-2, 475)
    result = run.Result("runs/a", 100, [(100, 0.955)], 3.0, 100, seeds=2, levels=known)
    assert str(result) == (
        "100 environment steps in 3 s, last evaluation 0.955 (mean of 2 seeds; random actions: -2; "
        "solved: 475); everything is in runs/a"
    )
    for name, solved in {
        "gymnax:Pendulum-v1": -150,
        "dmc:walker-walk": None,
        "gym:x/No": None,
    }.items():
        config["env"]["name"] = name
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert levels.of_run(str(tmp_path)).solved == solved


def test_a_run_leaves_everything_behind(whole):
    result, workdir, _ = whole
    names = set(os.listdir(workdir))
    assert {
        "config.json",
        "metrics.jsonl",
        "metrics.csv",
        "episodes.csv",
        "training_episodes.csv",
        "checkpoints",
        "best",
        "tb",
    } <= names
    rows = read_rows(os.path.join(workdir, "metrics.jsonl"))
    assert [r["step"] for r in rows if r["kind"] == "train"] == [20, 40, 60, 80]
    assert [r["step"] for r in rows if r["kind"] == "eval"] == [40, 80]
    with open(os.path.join(workdir, "episodes.csv")) as file:
        played = [(int(x["step"]), int(x["episode"])) for x in csv.DictReader(file)]
    assert played == [(40, 0), (40, 1), (80, 0), (80, 1)]
    assert result.steps == 80 and [s for s, _ in result.evaluations] == [40, 80]
    setup = next(r for r in rows if r["kind"] == "setup")
    assert setup["parameters"] > 1e5 and setup["replay/bytes_targets"] > 0


def test_every_training_episode_stands_in_a_file_of_its_own(whole):
    workdir = whole[1]
    rows = [r for r in read_rows(os.path.join(workdir, "metrics.jsonl")) if r["kind"] == "train"]
    with open(os.path.join(workdir, "training_episodes.csv")) as file:
        episodes = list(csv.DictReader(file))
    assert sum(row["episodes"] for row in rows) == len(episodes) > 0
    ends = {}  # of each environment: an episode's steps lie behind the last one's
    for one in episodes:
        step, length = int(one["step"]), int(one["length"])
        assert step % 2 == 0 and step == ends.get(one["environment"], 0) + 2 * length
        ends[one["environment"]] = step
    assert set(ends) == {"0", "1"}
    for row in rows:
        now = [x for x in episodes if row["step"] - 20 < int(x["step"]) <= row["step"]]
        assert len(now) == row["episodes"]
        if now:
            mean = np.mean([float(x["return"]) for x in now])
            assert mean == pytest.approx(row["episode/return"], rel=1e-5)


def test_every_program_is_traced_and_compiled_once(whole):
    assert programs_of(whole[2]) == once(*FUSED)


def test_resumed_run_equals_the_whole_one_bit_for_bit(whole, tmp_path):
    """From a checkpoint before the last: rows of what was lost are written again."""
    workdir = str(tmp_path / "stopped")
    shutil.copytree(whole[1], workdir)
    shutil.rmtree(os.path.join(workdir, "checkpoints", "80"))
    with counting() as counter:
        run.train(tiny_config(resume=True), workdir)
    assert programs_of(counter) == once(*FUSED)
    a, b = final_state(whole[1]), final_state(workdir)
    assert a[1]["interval"] == b[1]["interval"] == 4
    assert_same(a[0], b[0])
    own, other = (
        [
            {k: v for k, v in r.items() if k not in ("time", "seconds", "steps_per_second")}
            for r in read_rows(os.path.join(w, "metrics.jsonl"))
        ]
        for w in (whole[1], workdir)
    )
    assert own == other


def test_load_gives_the_best_and_the_latest(whole):
    workdir = whole[1]
    agent, best, config = run.load(workdir)
    _, latest, _ = run.load(workdir, which="latest")
    assert config.env.name == "toy:point"
    assert int(latest.step) >= int(best.step) > 0
    # Only traced; what a loaded agent does stands in tests/training/test_policy.py.
    first, key = jnp.ones(1, bool), jax.random.key(0)
    action, _ = jax.eval_shape(
        lambda: agent.act(best, agent.init_actor(1), jnp.zeros((1, 2)), first, key, True)
    )
    assert action.shape == (1, 2)


RATES = {
    "tdmpc": "optimizer.learning_rate",
    "dreamer": "optimizer.learning_rates",
    "empo": "optimizer.learning_rate_v",
}


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_a_metric_that_is_not_finite_is_told_unless_that_is_not_wanted(value):
    metrics = {"loss/value": value, "loss/reward": 1.0}
    for agent, rate in RATES.items():
        settings = run.build.settings_class(agent)()
        with pytest.raises(
            FloatingPointError, match=f"value is not finite at step 40: lower {rate},"
        ):
            run.check_finite(metrics, 40, settings)
        assert rate in dict(flatten(to_dict(settings)))  # the advice names a setting of the agent
        run.check_finite({"loss/reward": 1.0}, 40, settings)


class Counted(gymnasium.Env):
    """A simulator that counts its instances: how many are open, and the most at one time."""

    max_episode_steps = 10
    observation_space = gymnasium.spaces.Box(-9, 9, (3,), np.float32)
    action_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)
    made, opened, most, breaks = 0, 0, 0, False

    def __init__(self):
        Counted.made += 1
        Counted.opened += 1
        Counted.most = max(Counted.most, Counted.opened)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(3, np.float32), {}

    def step(self, action):
        if Counted.breaks:
            raise ConnectionError("gone")
        return np.zeros(3, np.float32), float(action[0]), False, False, {}

    def close(self):
        Counted.opened -= 1


@pytest.fixture
def counted():
    """A run in `Counted`, of which no instance is open yet."""
    config = small_config()
    config["env"]["name"], config["env"]["kwargs"] = custom.name_of(Counted)
    Counted.made, Counted.opened, Counted.most, Counted.breaks = 0, 0, 0, False
    return config


def test_every_environment_that_a_run_made_is_closed(counted, tmp_path):
    run.train(counted, str(tmp_path / "a"))
    run.load(str(tmp_path / "a"), which="latest", trusted=True)
    assert Counted.made > 4 and Counted.opened == 0
    Counted.breaks = True  # also of a run that fails, and of one that cannot be prepared
    with pytest.raises(RuntimeError, match="gone"):
        run.train(counted, str(tmp_path / "b"))
    with pytest.raises(ValueError, match="seed_steps"):
        prepare(counted | {"train": counted["train"] | dict(seed_steps=0)})
    assert Counted.opened == 0


def test_without_evaluations_one_instance_is_enough(counted, tmp_path):
    counted["env"].update(num_envs=1)
    counted["eval"].update(interval=0, episodes=0)
    assert run.train(counted, str(tmp_path / "a")).evaluations == []
    assert Counted.most == 1
    counted["eval"].update(interval=40)
    with pytest.raises(ValueError, match="episodes=0 with eval.interval=40"):
        run.train(counted, str(tmp_path / "b"))


def test_a_run_in_which_nothing_learns_is_warned_of(tmp_path):
    with pytest.warns(UserWarning, match="seed_steps=90 of train.steps=80: every action is random"):
        run.train(small_config(train=dict(seed_steps=90)), str(tmp_path / "a"))


def test_fewer_steps_than_a_run_has_are_refused(tmp_path):
    workdir = str(tmp_path / "a")
    run.train(small_config(train=dict(steps=80)), workdir)
    with pytest.raises(ValueError, match="train.steps=40, but the run has made 80"):
        run.train(small_config(resume=True, train=dict(steps=40)), workdir)
    assert load_config(workdir)["train"]["steps"] == 80
    assert run.train(small_config(resume=True, train=dict(steps=80)), workdir).steps == 80


@pytest.mark.slow
def test_a_loss_that_is_not_finite_stops_the_run(tmp_path):
    config = tiny_config(optimizer=dict(learning_rate=1e30))
    finite = pytest.raises(FloatingPointError, match="not finite at step")
    with pytest.warns(UserWarning, match="is not finite"), finite:
        run.train(config, str(tmp_path))


def command(workdir, *extra):
    code = (
        "import sys; from tests.helpers import tiny_config; from mbx.training import run; "
        "print(run.train(tiny_config(train=dict(steps=400), resume='--resume' in sys.argv), "
        "sys.argv[1]))"
    )
    environment = dict(os.environ, JAX_PLATFORMS="cpu", PYTHONPATH=str(ROOT))
    return subprocess.Popen(
        [sys.executable, "-c", code, str(workdir), *extra],
        env=environment,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(workdir, *extra):
    """The output of a run that comes to its end."""
    process = command(workdir, *extra)
    output = process.communicate()[0]
    assert process.returncode == 0, output
    return output


def wait_for_step(workdir, step, process):
    path = os.path.join(workdir, "metrics.jsonl")
    for _ in range(2400):
        if any(r["step"] >= step for r in read_rows(path)):
            return
        assert process.poll() is None, process.stdout.read()
        time.sleep(0.05)
    raise AssertionError("the run did not get anywhere")


@pytest.mark.slow
def test_kill_and_interrupt_resume_exactly(tmp_path):
    """kill -9 at a random moment, then Ctrl-C, then to the end: as if nothing had happened."""
    whole_dir, broken_dir = str(tmp_path / "whole"), str(tmp_path / "broken")
    finish(whole_dir)
    process = command(broken_dir)
    wait_for_step(broken_dir, 100, process)
    time.sleep(float(np.random.default_rng().uniform(0, 0.3)))
    process.send_signal(signal.SIGKILL)
    process.communicate()
    process = command(broken_dir, "--resume")
    time.sleep(0.5)
    wait_for_step(broken_dir, 200, process)
    process.send_signal(signal.SIGINT)
    output = process.communicate()[0]
    assert "of 400 steps, saved; continue with" in output
    assert "400 environment steps" in finish(broken_dir, "--resume")
    a, b = final_state(whole_dir), final_state(broken_dir)
    assert_same(a[0], b[0])
    steps = [
        r["step"]
        for r in read_rows(os.path.join(broken_dir, "metrics.jsonl"))
        if r["kind"] == "train"
    ]
    assert steps == sorted(set(steps))


@pytest.mark.slow
def test_twenty_kills_change_nothing(tmp_path):
    """kill -9 at twenty random moments: in starts, steps, evaluations, saves. Runs that came to
    their end nevertheless equal the one that nobody killed."""
    whole_dir = str(tmp_path / "whole")
    finish(whole_dir)
    began = time.time()
    finish(str(tmp_path / "timed"))  # now that every program is in the cache
    lasts, rng, kills = time.time() - began, np.random.default_rng(), 0
    for number in itertools.count():
        workdir = str(tmp_path / f"broken-{number}")
        began, before = time.time(), kills
        while True:
            process = command(workdir, *["--resume"] * os.path.isdir(workdir))
            try:
                moment = rng.uniform(0.2, 0.9) * lasts if kills < 20 else None
                output = process.communicate(timeout=moment)[0]
                break
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()
                kills += 1
        assert process.returncode == 0, output
        assert_same(final_state(whole_dir)[0], final_state(workdir)[0])
        if kills >= 20:
            return
        if kills == before:  # never interrupted: how long a run lasts now
            lasts = time.time() - began


def cli(*arguments):
    environment = dict(os.environ, JAX_PLATFORMS="cpu")
    return subprocess.run(
        [sys.executable, "-m", "experiments.train", *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_command_tells_a_mistake_in_a_line():
    """Mistakes of every kind, in this process: tests/test_loading.py."""
    with pytest.raises(ValueError, match="did you mean"):
        prepare(tiny_config(env=dict(name="gymnax:Pendulun-v1")))
    result = cli("--config=configs/tdmpc.py", "--config.resume=True")
    assert result.returncode != 0
    assert "--workdir" in result.stderr.strip().splitlines()[-1], result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    "given, within",
    [
        ((700, 10, 10), (100_000, 10, 10)),
        ((0, 10, 10), (0, 10, 10)),
        ((200_000, 5, 5), (200_000, 5, 5)),
    ],
)
def test_a_run_collects_garbage_rarely_and_only_its_own(given, within, tmp_path, monkeypatch):
    seen = []

    def begin(*_):
        seen.append(gc.get_threshold())
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "begin", begin)
    before = gc.get_threshold()
    try:
        gc.set_threshold(*given)
        with pytest.raises(KeyboardInterrupt):
            run.train(small_config(), str(tmp_path))
        assert seen == [within] and gc.get_threshold() == given
    finally:
        gc.set_threshold(*before)
