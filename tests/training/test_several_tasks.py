"""Runs of several tasks, runs that start from another one, and runs that learn from a dataset."""

from __future__ import annotations

import functools
import json
import os
import shutil

import jax
import numpy as np
import pytest

from configs import dreamer
from mbx import envs
from mbx.agents.base import Agent
from mbx.agents.settings import Train
from mbx.agents.tdmpc.settings import Settings
from mbx.envs import multi
from mbx.training import build, run, transfer
from mbx.training.checkpoint import Checkpointer
from mbx.training.job import begin, fresh_state, prepare
from mbx.training.logging import read_rows
from tests.faults.small import small_config
from tests.helpers import leave_untrained, register_toy, tiny_config

MULTI = "multi:toy:point+toy:line"
# Without planner targets, half as much to compile; plans of several tasks: tests/test_types.py.
LEARNING = dict(model=dict(critic="q"), loss=dict(value_target="td", policy_loss="svg"))
TWO = dict(env=dict(name=MULTI, num_envs=2), train=dict(steps=40))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A short run of two tasks."""
    workdir = str(tmp_path_factory.mktemp("runs") / "multi")
    run.train(tiny_config(**TWO, **LEARNING), workdir)
    return workdir


@pytest.fixture(scope="module")
def untrained(tmp_path_factory):
    """What such a run leaves for another one to start from, before it has learned anything."""
    workdir = str(tmp_path_factory.mktemp("untrained"))
    leave_untrained(workdir, tiny_config(**TWO, **LEARNING), envs.make(MULTI, 2).spec)
    return workdir


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """A run of two tasks, by an agent that compiles in a second, that leaves its dataset behind."""
    workdir = str(tmp_path_factory.mktemp("recorded") / "multi")
    config = small_config(**TWO, replay=dict(save=True))
    run.train(config, workdir)
    return workdir, config


def test_observations_are_padded_labelled_and_actions_cut():
    register_toy()
    environment = envs.make(MULTI, 4)
    assert environment.spec.obs_shape == (4,) and environment.spec.action_dim == 2
    state, obs = environment.reset(jax.random.key(0))
    np.testing.assert_array_equal(obs[:, 2:], [[1, 0], [1, 0], [0, 1], [0, 1]])
    assert not obs[2:, 1].any() and obs[:2, 1].all()
    _, one = environment.step(state, np.zeros((4, 2), np.float32), jax.random.key(1))
    other = np.zeros((4, 2), np.float32)
    other[:, 1] = 1.0  # the second task has no second action
    _, two = environment.step(state, other, jax.random.key(1))
    np.testing.assert_array_equal(one.obs[2:], two.obs[2:])
    assert (np.abs(one.obs[:2] - two.obs[:2]).max(axis=1) > 0.1).all()


def test_host_tasks_join_as_well():
    environment = envs.make("multi:gym:Pendulum-v1+gym:MountainCarContinuous-v0", 2, seed=3)
    obs = environment.reset(3)
    assert obs.shape == (2, 5) and obs[1, 2] == 0.0 and obs[1, 4] == 1.0
    snapshot = environment.get_state()
    action = np.ones((2, 1), np.float32)
    first = environment.step(action)
    environment.set_state(snapshot)
    again = environment.step(action)
    for a, b in zip(first, again, strict=True):
        np.testing.assert_array_equal(a, b)
    environment.close()


@pytest.mark.parametrize(
    ("name", "num_envs", "says"),
    [
        (MULTI, 3, "no multiple of the 2 tasks"),
        ("multi:toy:point+toy:point", 2, "names a task twice"),
        ("multi:toy:point+gymnax:CartPole-v1", 2, "discrete actions"),
        ("multi:toy:point+gym:Pendulum-v1", 2, "mixes JAX and host"),
    ],
)
def test_tasks_that_do_not_go_together_are_refused(name, num_envs, says):
    register_toy()
    with pytest.raises(ValueError, match=says):
        envs.make(name, num_envs)


def test_tasks_of_different_action_repeats_are_refused():
    specs = [envs.EnvSpec(f"toy:{n}", (1,), np.float32, 1, 10, n) for n in (1, 2)]
    with pytest.raises(ValueError, match="env.action_repeat=1"):
        multi._joint_spec("env.name='multi:…'", specs, (0, 0))


def test_a_run_of_several_tasks_reports_each(recorded):
    rows = read_rows(os.path.join(recorded[0], "metrics.jsonl"))
    last = [r for r in rows if r["kind"] == "eval"][-1]
    each = [last[f"return_mean/toy:{name}"] for name in ("point", "line")]
    assert np.isclose(np.mean(each), last["return_mean"]) and each[0] != each[1]


@pytest.mark.slow
def test_fine_tuning_starts_from_the_parameters_and_keeps_known_embeddings(trained, tmp_path):
    old = run.load(trained)[1]
    assert old.params["task"].shape == (2, 96)
    assert (np.linalg.norm(old.params["task"], axis=-1) <= 1.0 + 1e-6).all()
    config = tiny_config(
        env=dict(name="multi:toy:line", num_envs=2),
        train=dict(init_from=trained, steps=20),
        **LEARNING,
        eval=dict(interval=0),
    )
    resolved = transfer.resolve(build.read(config))
    assert resolved.env.pad_to == (2, 2)
    job = prepare(resolved)
    checkpointer = Checkpointer(str(tmp_path / "new"))
    state, done = begin(job, checkpointer)
    checkpointer.close()
    assert done == 0
    new = state.train
    np.testing.assert_array_equal(new.params["task"][0], old.params["task"][1])
    for name in ("encoder", "dynamics", "policy"):
        jax.tree.map(np.testing.assert_array_equal, new.params[name], old.params[name])
    jax.tree.map(np.testing.assert_array_equal, new.target_value, old.params["value"])
    run.train(config, str(tmp_path / "run"))
    saved = json.loads((tmp_path / "run" / "config.json").read_text())
    assert saved["env"]["pad_to"] == [2, 2], "evaluating later must not need the source"
    run.load(str(tmp_path / "run"))


def of_dreamer(**train):
    config = dreamer.get_config()
    config.env.update(name="toy:point", num_envs=2)
    config.model.num_bins = 21
    config.train.update(train)
    return config.to_dict()


@pytest.mark.parametrize("kind", [of_dreamer, lambda **train: tiny_config(train=train)])
def test_parts_of_another_run_are_taken(kind, tmp_path):
    register_toy()
    spec, source = envs.make("toy:point", 2).spec, str(tmp_path)
    leave_untrained(source, kind(), spec, noise=0.1)
    known = {"encoder", "critic", "value", "rssm", "dynamics"}

    def started(pattern, **changes):
        """Names of groups of parameters whose leaves are the other run's, and the state."""
        config = kind(init_from=source, init_parts=pattern)
        for name, value in changes.items():
            config[name] |= value
        settings = build.read(config).for_task(spec)
        agent = build.build_agent(settings, spec)
        fresh = agent.init(jax.random.key(1))
        state = transfer.start_from(source, settings, agent, fresh)
        taken = set()
        for (path, x), y in zip(
            jax.tree_util.tree_leaves_with_path(state.params),
            jax.tree.leaves(fresh.params),
            strict=True,
        ):
            groups = {part.key for part in path if getattr(part, "key", None) in known}
            taken |= groups if not np.array_equal(x, y) else set()
        return taken, state

    every, state = started("")
    copied = ("slow_critic", "critic") if kind is of_dreamer else ("target_value", "value")
    assert copied[1] in every and len(every) == 3
    assert started("encoder")[0] == {"encoder"}
    some, state = started(f"(^|/){copied[1]}/")
    assert some == {copied[1]}
    jax.tree.map(np.testing.assert_array_equal, getattr(state, copied[0]), state.params[copied[1]])
    with pytest.raises(ValueError, match=r"init_parts='\(' is no regular expression: missing \)"):
        started("(")
    with pytest.raises(ValueError, match="'nothing' is found in no parameter's path: "):
        started("nothing")
    with pytest.raises(ValueError, match="other shapes there .* leave it out by train.init_parts"):
        started(copied[1], model=dict(num_bins=11))
    assert started("encoder", model=dict(num_bins=11))[0] == {"encoder"}
    if kind is of_dreamer:
        with pytest.raises(ValueError, match=r"model.bins_space='raw': .* trained with 'symlog'"):
            started("", model=dict(bins_space="raw"))


def test_fine_tuning_refuses_another_model(untrained, tmp_path):
    config = tiny_config(
        env=dict(name=MULTI),
        train=dict(init_from=untrained),
        model=dict(critic="q", num_bins=11),
        loss=LEARNING["loss"],
    )
    with pytest.raises(ValueError, match="component .* has other shapes"):
        run.train(config, str(tmp_path / "run"))


def test_fine_tuning_refuses_other_bins(untrained, tmp_path, monkeypatch):
    config = tiny_config(
        env=dict(name=MULTI), train=dict(init_from=untrained), loss=LEARNING["loss"]
    )

    def start(config):
        """As a run begins; it refuses before it looks at a state."""
        parts, settings = prepare(config), build.read(config)
        chosen = settings.for_task(parts.environment.spec)
        transfer.start_from(settings.train.init_from, chosen, parts.agent, None)

    for name, trained_with in (("bin_min", -10.0), ("bin_max", 10.0)):
        own = {**config, "model": {**config["model"], name: 4.0}}
        with pytest.raises(ValueError, match=f"model.{name}=4.0: .* trained with {trained_with};"):
            start(own)
    # Those that follow from the task's rewards are looked at as they are then.
    joint = multi._joint_spec
    ranged = lambda *given: joint(*given)._replace(reward_range=(0.0, 1.0))  # noqa: E731
    monkeypatch.setattr(multi, "_joint_spec", ranged)
    own = {**config, "model": {**config["model"], "bins": "auto"}}
    with pytest.raises(ValueError, match=r"model.bin_min=-1.0: .* trained with -10.0;"):
        start(own)
    source = shutil.copytree(untrained, tmp_path / "source")
    saved = json.loads((source / "config.json").read_text())
    saved["model"]["bins"] = "auto"
    (source / "config.json").write_text(json.dumps(saved))
    config["train"]["init_from"] = str(source)
    with pytest.raises(ValueError, match=r"model.bin_min=-10.0: .* trained with -1.0;"):
        start(config)


def test_a_dataset_keeps_every_row(recorded):
    workdir, config = recorded
    path = os.path.join(workdir, "dataset.npz")
    spec = envs.make(MULTI, 2).spec
    planning = build.build_agent(
        build.read(tiny_config(env=config["env"])), spec
    )  # one that stores targets
    loaded = transfer.load_dataset(path, planning, spec)
    full = jax.eval_shape(functools.partial(fresh_state, prepare(config)), jax.random.key(0))
    checkpointer = Checkpointer(workdir)
    kept = checkpointer.restore(full)[0].replay
    checkpointer.close()
    size = np.asarray(kept.size)
    np.testing.assert_array_equal(loaded.size, size)
    np.testing.assert_array_equal(loaded.transitions, kept.transitions)
    assert not loaded.targets.valid.any()
    for name, leaf in kept.data.items():
        for env in range(2):
            np.testing.assert_array_equal(
                loaded.data[name][env, : size[env]], leaf[env, : size[env]]
            )


@pytest.mark.slow
def test_learning_from_a_dataset_acts_nowhere(recorded, tmp_path):
    workdir, _ = recorded
    path = os.path.join(workdir, "dataset.npz")
    config = tiny_config(
        env=dict(name=MULTI, num_envs=8),
        train=dict(steps=40, dataset=path),
        eval=dict(interval=20),
        checkpoint=dict(interval=20),
    )
    result = run.train(config, str(tmp_path / "offline"))
    rows = read_rows(str(tmp_path / "offline" / "metrics.jsonl"))
    train = [row for row in rows if row["kind"] == "train"]
    assert len(result.evaluations) == 2 and sum(row["updates"] for row in train) == 3 + 20
    assert all("episodes" not in row for row in train)
    # Already the pretraining, of which the first row is, has targets to learn values from.
    assert all(row["targets/valid"] == 1.0 and row["loss/value"] > 0.0 for row in train)
    agent, latest, _ = run.load(str(tmp_path / "offline"), which="latest")
    assert int(latest.step) == 23


def test_a_small_agent_learns_from_a_dataset_and_acts_nowhere(tmp_path):
    run.train(small_config(replay=dict(save=True)), str(tmp_path / "run"))
    path = str(tmp_path / "run" / "dataset.npz")
    config = small_config(env=dict(num_envs=4), train=dict(dataset=path), eval=dict(interval=20))
    result = run.train(config, str(tmp_path / "offline"))
    rows = read_rows(str(tmp_path / "offline" / "metrics.jsonl"))
    train = [row for row in rows if row["kind"] == "train"]
    assert sum(row["updates"] for row in train) == 2 + 80 // 2
    assert len(result.evaluations) == 4 and all("episodes" not in row for row in train)
    assert int(run.load(str(tmp_path / "offline"), which="latest")[1].step) == 42


def test_agents_that_cannot_start_from_another_run_say_so():
    settings = Settings(agent="mine", train=Train(init_from="runs/a"))
    with pytest.raises(ValueError, match="init_from='runs/a': agent 'mine' cannot start"):
        transfer.check(settings, Agent(None, None, None, None, None))


@pytest.mark.parametrize("what", ["no file", "other task", "seeds"])
def test_datasets_that_do_not_fit_are_refused(recorded, tmp_path, what):
    path = os.path.join(recorded[0], "dataset.npz")
    config = tiny_config(env=dict(name=MULTI), train=dict(dataset=path))
    if what == "no file":
        config["train"]["dataset"] = str(tmp_path / "none.npz")
    elif what == "other task":
        config["env"].update(name="toy:point")
    else:
        config["num_seeds"] = 2
    says = {
        "no file": "cannot be read",
        "other task": "was recorded on",
        "seeds": "num_seeds=2",
    }
    with pytest.raises(ValueError, match=says[what]):
        run.train(config, str(tmp_path / "run"))
