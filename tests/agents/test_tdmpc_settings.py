"""No setting of the TD-MPC agent is silent: it is read, or refused where it has no effect."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import math
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import pytest

from mbx import envs, presets, replay
from mbx.agents.dreamer import settings as dreamer
from mbx.agents.tdmpc import settings as declared
from mbx.agents.tdmpc.agent import make_agent, resolve, world_config
from mbx.settings import describe, flatten, from_dict, inactive, to_dict
from mbx.training import job
from mbx.training.build import make_environment
from mbx.training.state import make_schedule
from mbx.types import EnvSpec
from mbx.world_model import MODEL_SIZES
from tests.agents.tdmpc_helpers import VARIANTS, make_settings, variant
from tests.helpers import other_value, recorded

FILES = ("tdmpc", "tdmpc2", "bmpc", "tdmpc_ensemble", "efficient_tdmpc", "planner_targets")
SPEC = EnvSpec("toy:ends", (3,), jnp.float32, 2, 50, 2)

# Read by whoever trains (mbx.training), not by the agent.
GENERAL = ("agent", "seed", "num_seeds", "imports", "resume", "matmul_precision", "gpu_compiler")
GENERAL_SECTIONS = ("distributed", "env", "train", "eval", "log", "checkpoint")
SCHEDULE = {"reanalyze.enabled", "reanalyze.interval", "reanalyze.min_step"}
STORAGE = {"replay.capacity", "replay.shards", "replay.save"}
# Looked at, or passed on to where they make no difference, even where they have no effect.
PASSED_ON = {
    "loss.aux_coef",
    "loss.aux_joint",
    "loss.encoder_consistency_warmup",
    "loss.optimist",
    "loss.td_dynamics_reduction",
    "loss.td_ema_policy",
    "loss.td_std_coef",
    "optimizer.lr_decay_start",
    "optimizer.lr_decay_updates",
    "optimizer.policy_tau",
    "planner.disagreement",
    "training_planner.aggregate",
    "training_planner.disagreement",
    "training_planner.enabled",
    "training_planner.extra_iterations_action_dim",
    "training_planner.rescore_proposals",
}


def settings_of(name):
    config = importlib.import_module(f"configs.{name}").get_config().to_dict()
    return from_dict(declared.Settings(), config)


# The programs in which settings of a section show, if at all: those that are traced first.
FIRST = {
    "planner": ("act", "evaluate"),
    "training_planner": ("targets", "update"),
    "reanalyze": ("reanalyze", "update"),
}


def programs(settings, spec=SPEC, section=""):
    """All that the agent does, program by program, as functions that trace it to text."""
    agent = make_agent(settings, spec)
    key = jax.random.key(0)
    train = jax.eval_shape(agent.init, key)
    stored = agent.store.spec if agent.store else None
    state = jax.eval_shape(
        lambda: replay.init(agent.example_row(), num_envs=2, capacity=40, target_spec=stored)
    )
    actor, obs = agent.init_actor(2), jnp.zeros((2, 3))

    def act(evaluate):
        return lambda t: agent.act(t, actor, obs, jnp.zeros(2), key, evaluate)

    found = {
        "update": (agent.update, train, state, key),
        "act": (act(False), train),
        "evaluate": (act(True), train),
        "init": (agent.init, key),
    }
    if agent.store:
        found["targets"] = (lambda t: agent.store.targets(t, actor, obs, key), train)
        found["reanalyze"] = (agent.store.reanalyze, train, state, key, jnp.int32(-1))

    def text(function, *args):
        program = jax.make_jaxpr(function)(*args)
        return f"{program}\n{program.consts}"

    first = [name for name in FIRST.get(section, ()) if name in found]
    order = dict.fromkeys([*first, *found])
    return {name: functools.partial(text, *found[name]) for name in order}


def trace(settings):
    """All programs, traced."""
    return [made() for made in programs(settings).values()]


def differs(settings, base, spec, section):
    """Whether a program of `settings` is another than that of `base`, a function's name."""
    changed = programs(settings, spec, section)
    return any(made() != base(name) for name, made in changed.items())


@pytest.mark.parametrize("name", FILES)
def test_exactly_the_settings_that_have_an_effect_are_read(name):
    settings, read = settings_of(name), set()
    idle = set(inactive(settings))
    trace(recorded(settings, read))
    agents = {
        n
        for n, _ in flatten(to_dict(settings))
        if n not in GENERAL and n.partition(".")[0] not in GENERAL_SECTIONS
    }
    assert agents - idle - read <= SCHEDULE | STORAGE
    assert read & idle & agents <= PASSED_ON


def test_bmpc_is_bmpc():
    s = settings_of("bmpc")
    acting, expert = s.planner, s.training_planner
    assert expert.search == "acting" and expert.proposal_log_std == (-2.0, 1.0)
    for name in ("horizon", "iterations", "num_samples", "num_elites", "num_proposals", "max_std"):
        assert getattr(expert, name) == getattr(acting, name), name
    assert (expert.extra_iterations, expert.temperature_mode) == (2, "multiply")
    assert s.reanalyze.current_batch and s.reanalyze.interval == 10
    assert s.reanalyze.batch_size == 20 * (s.loss.horizon + 1)
    assert not s.train.pretrain_policy and s.loss.expert_mean == "chosen"


@pytest.mark.parametrize("size", ["tiny", "5"])
@pytest.mark.parametrize("name", ["tdmpc2", "bmpc", "tdmpc_ensemble", "planner_targets"])
def test_presets_of_published_agents_train_at_the_published_rate_at_every_size(name, size):
    settings = settings_of(name)
    model = dataclasses.replace(settings.model, size=size)
    own = dataclasses.replace(settings, model=model).for_task(SPEC).optimizer
    rates = own.learning_rate, own.final_learning_rate, own.learning_rate * own.policy_lr_scale
    assert rates == (3e-4, 3e-4, 3e-4)


def test_the_ensemble_reanalyzes_every_ten_agent_steps():
    s = settings_of("tdmpc_ensemble")
    assert s.reanalyze.interval / s.train.utd_ratio == 10


def test_planner_targets_holds_its_designs_table():
    s = settings_of("planner_targets")
    planner, acting = s.training_planner, s.planner
    assert (planner.iterations, planner.num_samples, planner.horizon) == (3, 128, 1)
    assert (planner.temperature, planner.temperature_mode, planner.min_std) == (0.5, "divide", 0.05)
    assert planner.num_elites == 128 and s.replay.keep_targets == 0  # all of them
    assert (acting.iterations, acting.num_samples, acting.horizon) == (6, 512, 3)
    assert (acting.temperature, acting.temperature_mode) == (0.5, "multiply")
    assert s.stores_plans and s.model.critic == "v"
    assert (s.loss.value_target, s.loss.value_weighting) == ("planner", "weighted")
    assert (s.loss.policy_loss, s.loss.awr_temperature) == ("awr", 0.5)
    assert (s.reanalyze.batch_size, s.reanalyze.stale_exponent) == (256, 0.0)
    assert (s.reanalyze.interval, s.reanalyze.min_step) == (500, 1000)


def test_the_task_decides_what_is_left_to_it():
    spec = EnvSpec("toy:task", (3,), "float32", 2, episode_length=200, action_repeat=2)
    left = declared.Settings().for_task(spec)
    assert (left.env.action_repeat, left.train.utd_ratio, left.loss.discount) == (2, 2.0, 0.975)
    assert left.updates_per_step() == 2.0 and left.train.seed_hold == 4
    # 9,000 environment steps after the random ones are 4,500 agent steps.
    assert left.total_updates() == 2 * 4_500 + 500
    discrete = declared.Settings().for_task(spec._replace(discrete=True))
    assert (discrete.updates_per_step(), discrete.train.seed_hold) == (0.5, 1)
    own = declared.Settings(
        train=declared.Train(utd_ratio=0.25, seed_hold=2), loss=declared.Loss(discount=0.9)
    ).for_task(spec)
    assert (own.updates_per_step(), own.loss.discount, own.train.seed_hold) == (0.25, 0.9, 2)
    schedule = make_schedule(left, spec)
    assert (schedule.utd_ratio, schedule.seed_hold) == (2.0, 4)
    assert left.train.reset_solved == 0  # its rewards are not known
    several = spec._replace(tasks=(spec, spec._replace(episode_length=500)))
    assert declared.Settings().for_task(several).loss.discount == (0.975, 0.99)


def test_bins_follow_from_the_rewards_that_a_suite_declares():
    spec = EnvSpec("dmc:a", (3,), "float32", 2, 500, 2, reward_range=(0.0, 1.0))

    def found(bins="auto", spec=spec, **loss):
        model = dataclasses.replace(declared.Model(), bins=bins, bin_min=-3.0, bin_max=4.0)
        left = declared.Settings(model=model, loss=declared.Loss(**loss)).for_task(spec)
        return left.model.bin_min, left.model.bin_max

    def symlog(x):  # of a number above 0
        return pytest.approx(math.log(1.0 + x))

    assert found() == (-1.0, symlog(1000))  # 500 agent steps of two rewards of 1
    assert found("fixed") == found(spec=spec._replace(reward_range=())) == (-3.0, 4.0)
    low, high = found(spec=spec._replace(reward_range=(-16.0, -0.1), episode_length=100))
    assert (-low, high) == (symlog(3200), 1.0)
    assert found(spec=spec._replace(reward_range=(0.0, 0.001))) == (-1.0, 1.0)
    # A discount that looks beyond the episode: 1 / (1 - 0.999) agent steps.
    assert found(discount=0.999) == found(aux_gammas=(0.9, 0.999)) == (-1.0, symlog(2000))
    assert found(discount=1.0) == (-1.0, symlog(1000))
    auto = declared.Model(bins="auto")
    world = world_config(resolve(declared.Settings(model=auto), spec), spec)
    assert (world.bin_min, world.bin_max) == (-1.0, symlog(1000))
    again = resolve(resolve(declared.Settings(model=auto), spec), spec)
    assert (again.model.bin_min, again.model.bin_max) == (-1.0, symlog(1000))
    for name in ("bin_min", "bin_max"):
        settings = declared.Settings(model=dataclasses.replace(auto, **{name: 3.0}))
        with pytest.raises(ValueError, match=rf"model.{name}=3.0: with model.bins='auto' .*dmc:a"):
            resolve(settings, spec)
    with pytest.raises(ValueError, match=r"model.bins='auto': env.name='dmc:a' does not say what"):
        resolve(declared.Settings(model=auto), spec._replace(reward_range=()))


def test_models_are_not_read_with_other_bins_or_normalisation():
    def told(own, other):
        return list(declared.Settings(model=own).check_start(declared.Settings(model=other)))

    usual = declared.Model()
    for name in ("bin_min", "bin_max"):
        moved = dataclasses.replace(usual, **{name: 3.0})
        (reason,) = told(usual, moved)
        assert f"model.{name}={getattr(usual, name)}: the heads" in reason
        assert reason.endswith(
            f"were trained with 3.0; set model.bins='fixed' and model.{name}=3.0"
        )
    normed = dataclasses.replace(usual, normalize_observations=True)
    (reason,) = told(normed, usual)
    assert "normalize_observations=True: the encoder of train.init_from='' was trained" in reason
    assert reason.endswith("with False, set that") and told(normed, normed) == []
    assert told(usual, usual) == []
    assert list(declared.Settings().check_start(dreamer.Settings())) == []


def test_episodes_begin_again_where_a_task_is_solved_if_rewards_are_known():
    def chosen(given=0, num_envs=4, name="dmc:reacher-easy", dataset="", **spec):
        settings = declared.Settings(
            train=declared.Train(reset_solved=given, dataset=dataset),
            env=dataclasses.replace(declared.Settings().env, name=name, num_envs=num_envs),
        )
        assert settings.environment_options(training=False) == {}
        wanted = settings.environment_options(training=True)["reset_solved"]
        return settings.for_task(one._replace(**spec)).train.reset_solved, wanted

    one = EnvSpec("a", (3,), "float32", 2, 200, 2, reset_solved=50)  # as its suite has chosen
    assert chosen() == (50, None)
    assert chosen(-1) == (-1, 0) and chosen(30) == (30, 30)
    assert chosen(reset_solved=0) == (0, None)
    assert chosen(num_envs=1) == chosen(dataset="rows.npz") == (0, None)
    pair = dict(name="multi:dmc:reacher-easy+dmc:reacher-hard", reset_solved=0)
    for other in (one, one._replace(reset_solved=0)):
        assert chosen(**pair, tasks=(other, one)) == (50, None)
        assert chosen(**pair, tasks=(other, one), num_envs=2) == (0, None)
    assert chosen(**pair, tasks=(other, other)) == (0, None)
    for name, given in zip(FILES, (0, -1, -1, -1, 0, -1), strict=True):
        assert settings_of(name).train.reset_solved == given


def test_a_run_trains_with_short_episodes_and_evaluates_with_whole_ones(monkeypatch):
    def still():
        start = jnp.zeros((1,))
        return envs.RawEnvironment(
            "still:task",
            (1,),
            jnp.float32,
            1,
            200,
            lambda key: (start, start),
            lambda key, state, action: (state, state, 1.0, False),
            can_terminate=False,
            reward_range=(0.0, 1.0),
        )

    monkeypatch.setitem(envs._SUITES, "still", envs.Suite(raw=lambda task: still()))
    settings = declared.Settings(train=declared.Train(reset_solved=2))
    own = dataclasses.replace(settings.env, name="still:task")
    for training in (True, False):
        made = make_environment(
            dataclasses.replace(settings, env=own), 2, seed=0, training=training
        )
        state, _ = made.reset(jax.random.key(0))
        for i in range(2):
            state, step = jax.jit(made.step)(state, jnp.zeros((2, 1)), jax.random.key(i))
        assert step.truncated.tolist() == [False, training]
        usual = declared.Settings(env=own)
        made = make_environment(usual, 4, seed=0, training=training)
        assert usual.for_task(made.spec).train.reset_solved == 50 * training
    pair = "multi:gymnax:Pendulum-v1+gymnax:Reacher-misc"
    for name, tasks in (("gymnax:Pendulum-v1", 1), (pair, 2)):
        for copies in (1, 2):
            env = dataclasses.replace(settings.env, name=name, num_envs=copies * tasks)
            refused = [x for x in dataclasses.replace(settings, env=env).check() if "reset" in x]
            assert bool(refused) == (copies == 1)
            never = dataclasses.replace(settings, env=env, train=declared.Train(reset_solved=-1))
            assert not [x for x in never.check() if "reset" in x]
    for given in (2, 0, -1):
        offline = declared.Train(reset_solved=given, dataset="rows.npz")
        told = list(dataclasses.replace(settings, train=offline).check())
        refused = [x for x in told if "train.reset_solved=2: with train.dataset" in x]
        assert bool(refused) == (given == 2) and (refused or "reset_solved" not in str(told))


@pytest.mark.parametrize(("name", "given"), [("gym:Pendulum-v1", (2, 6)), (None, (8, 0))])
def test_every_process_knows_which_of_the_environments_on_the_host_are_its_own(
    name, given, monkeypatch
):
    class Asked(Exception):
        pass

    def ask(settings, num_envs, *, seed, first):
        raise Asked(num_envs, first)

    env = dataclasses.replace(declared.Settings().env, num_envs=8)
    env = dataclasses.replace(env, name=name or env.name)
    several = types.SimpleNamespace(processes=4, own_seed=lambda seed: seed)
    monkeypatch.setattr(job, "make_partition", lambda settings, devices: several)
    monkeypatch.setattr(job, "make_environment", ask)
    monkeypatch.setattr(jax, "process_index", lambda: 3)
    with pytest.raises(Asked) as asked:
        job.prepare(dataclasses.replace(declared.Settings(), env=env))
    assert asked.value.args == given


@pytest.mark.parametrize(
    ("model", "optimizer", "discrete", "rate", "last", "of_policy"),
    [
        ({}, {}, False, 1e-3, 3e-4, 3e-4),
        ({}, {}, True, 3e-4, 3e-4, 3e-4),
        (dict(size="5"), {}, False, 3e-4, 3e-4, 3e-4),
        ({}, dict(learning_rate=6e-4), False, 6e-4, 6e-4, 3e-4),
        ({}, dict(final_learning_rate=1e-4), False, 1e-3, 1e-4, 3e-4),
        (dict(size="5"), dict(final_learning_rate=1e-4), False, 3e-4, 1e-4, 3e-4),
        ({}, dict(learning_rate=6e-4, final_learning_rate=1e-4), False, 6e-4, 1e-4, 3e-4),
        ({}, dict(policy_lr_scale=1.0), False, 1e-3, 3e-4, 1e-3),
        ({}, dict(learning_rate=3e-4, policy_lr_scale=2.0), False, 3e-4, 3e-4, 6e-4),
    ],
)
def test_learning_rates_of_model_and_policy(model, optimizer, discrete, rate, last, of_policy):
    """The policy's is 3e-4 unless it is asked for; the model's goes by its size and the actions,
    and falls where nobody chose it."""
    spec = EnvSpec("toy:task", (3,), "float32", 2, episode_length=200, action_repeat=1)
    spec = spec._replace(discrete=discrete)
    given = declared.Settings(
        model=declared.Model(**model), optimizer=declared.Optimizer(**optimizer)
    )
    task = given.for_task(spec)
    found = task.optimizer
    assert (found.learning_rate, found.final_learning_rate) == (rate, last)
    assert task.rate_falls == (rate != last)
    assert found.learning_rate * found.policy_lr_scale == pytest.approx(of_policy)


@pytest.mark.parametrize(
    ("optimizer", "allowed"),
    [
        ({}, True),
        (dict(final_learning_rate=1e-4), True),
        (dict(learning_rate=6e-4, final_learning_rate=1e-4), True),
        (dict(learning_rate=6e-4), False),
        (dict(learning_rate=6e-4, final_learning_rate=6e-4), False),
    ],
)
@pytest.mark.parametrize("size", ["tiny", "5"])
@pytest.mark.parametrize("name", ["lr_decay_start", "lr_decay_updates"])
def test_a_decay_is_refused_where_the_rate_stays(name, size, optimizer, allowed):
    allowed = allowed and (size == "tiny" or bool(optimizer))
    values = dict(model=dict(size=size), optimizer={name: 7, **optimizer})
    if allowed:
        from_dict(declared.Settings(), values)
    else:
        with pytest.raises(ValueError, match=name):
            from_dict(declared.Settings(), values)


@pytest.mark.parametrize("name", ["lr_decay_start", "lr_decay_updates"])
def test_a_decay_is_refused_where_the_task_keeps_the_rate(name):
    settings = declared.Settings(optimizer=declared.Optimizer(**{name: 7}))
    assert getattr(resolve(settings, SPEC).optimizer, name) == 7
    with pytest.raises(ValueError, match=rf"{name}=7.*'toy:ends' stays at 0\.0003"):
        resolve(settings, SPEC._replace(discrete=True))
    given = dataclasses.replace(
        settings, optimizer=dataclasses.replace(settings.optimizer, final_learning_rate=1e-4)
    )
    assert resolve(given, SPEC._replace(discrete=True)).rate_falls


def test_settings_need_no_jax():
    names = "sys, mbx.agents.tdmpc.settings, mbx.agents.dreamer.settings"
    code = f"import {names}; assert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_sizes_are_those_of_the_world_model():
    assert declared.MODEL_SIZES == tuple(MODEL_SIZES)


@pytest.mark.parametrize(("size", "heads"), [("1", 2), ("5", 5), ("317", 8)])
def test_a_published_size_has_its_number_of_value_heads(size, heads):
    from configs import tdmpc2

    config = tdmpc2.get_config()
    config.model.size = size
    agent = make_agent(from_dict(declared.Settings(), config.to_dict()), SPEC)
    value = jax.eval_shape(agent.init, jax.random.key(0)).params["value"]
    assert {x.shape[0] for x in jax.tree.leaves(value)} == {heads}


def test_only_the_published_preset_has_the_entropy_bonus_in_the_unit_of_its_loss():
    # arXiv 2310.16828 adds it to Q / S. No fixture can say: S is 1 in all of them.
    assert presets.load("tdmpc2").loss.entropy_scale == "none"
    assert declared.Settings().loss.entropy_scale == "value"


# Settings that would do nothing beside the others, and what they are said to need.
LAMBDA = dict(loss=dict(value_target="lambda"), model=dict(num_dynamics=2))
Q_MIN = dict(model=dict(critic="q"), loss=dict(value_reduction="min"))
Q_TD = dict(model=dict(critic="q"), loss=dict(value_target="td"))
TD_SVG = dict(loss=dict(value_target="td", policy_loss="svg"))
CURRENT = dict(reanalyze=dict(current_batch=True))
AWR = dict(loss=dict(policy_loss="awr"))
LOCAL = dict(model=dict(num_dynamics=2), loss=dict(value_reduction="local"))
ONE_HEAD = dict(model=dict(num_dynamics=2), loss=dict(td_all_dynamics=False))
ONE_SAMPLE = dict(training_planner=dict(search="acting", num_proposals=1))
PLAN_MIN = dict(planner=dict(value_reduction="min"))
TARGET_MIN = dict(training_planner=dict(value_reduction="min"))
SVG_MIN = dict(
    loss=dict(policy_loss="svg", policy_reduction="min"), model=dict(critic="q", num_rewards=2)
)
ONE_VALUE = dict(model=dict(num_values=1), loss=dict(policy_loss="svg"))
SEVERAL = "model.num_values and loss.num_heads above 1"
STALE = dict(reanalyze=dict(enabled=False))
AVERAGED = "heads that value targets average"


@pytest.mark.parametrize(
    ("base", "name", "value", "words"),
    [
        (LAMBDA, "loss.value_reduction", "min", "loss.value_target='planner' or 'td'"),
        (LAMBDA, "loss.td_std_coef", 1.0, AVERAGED),
        (LAMBDA, "loss.td_dynamics_reduction", "min", "model.critic=v"),
        (LAMBDA, "loss.td_all_dynamics", False, "model.critic=v"),
        (LAMBDA, "loss.value_weighting", "uniform", "loss.value_target='planner'"),
        (Q_MIN, "loss.td_std_coef", 1.0, AVERAGED),
        (Q_TD, "loss.td_horizon", 3, "model.critic='v'"),
        (CURRENT, "reanalyze.stale_exponent", 0.5, "reanalyze.current_batch=False"),
        (CURRENT, "reanalyze.min_step", 5, "reanalyze.current_batch=False"),
        ({}, "planner.disagreement", 0.1, "model.num_dynamics above 1"),
        ({}, "training_planner.disagreement", 0.1, "model.num_dynamics above 1"),
        ({}, "loss.td_ema_policy", True, "loss.value_target=td, model.critic=q"),
        (AWR, "loss.policy_std_coef", 1.0, "svg in loss.policy_loss"),
        ({}, "loss.kl_forward", True, "kl in loss.policy_loss"),
        ({}, "loss.awr_temperature", 2.0, "loss.value_weighting=weighted"),
        (LOCAL, "loss.td_std_coef", 5.0, AVERAGED),
        (ONE_HEAD, "loss.td_dynamics_reduction", "min", "loss.td_all_dynamics=True"),
        (ONE_SAMPLE, "loss.optimist", True, "two or more samples of the policy"),
        (TD_SVG, "training_planner.iterations", 4, "a loss that reads planner actions"),
        (TD_SVG, "replay.keep_targets", 4, "a loss that reads planner actions"),
        (PLAN_MIN, "planner.std_coef", 1.0, "planner.value_reduction=mean"),
        (PLAN_MIN, "planner.evaluation_std_coef", 1.0, "planner.value_reduction=mean"),
        (TARGET_MIN, "training_planner.std_coef", 1.0, "training_planner.value_reduction=mean"),
        (SVG_MIN, "loss.policy_std_coef", 1.0, "loss.policy_reduction=mean"),
        (ONE_VALUE, "planner.value_reduction", "min", SEVERAL),
        (ONE_VALUE, "training_planner.value_reduction", "min", SEVERAL),
        (ONE_VALUE, "loss.policy_reduction", "min", SEVERAL),
        (AWR, "loss.policy_reduction", "min", "svg in loss.policy_loss"),
        (STALE, "reanalyze.interval", 3, "enabled=True"),
    ],
)
def test_a_setting_without_effect_is_refused(base, name, value, words):
    assert from_dict(declared.Settings(), base)
    section, _, own = name.partition(".")
    merged = base | {section: base.get(section, {}) | {own: value}}
    with pytest.raises(ValueError, match=rf"config\.{name}=.*no effect.*needs") as refused:
        from_dict(declared.Settings(), merged)
    assert words in str(refused.value)


# What this task has no use for: several tasks (tests/test_types.py), large action spaces
# (tests/test_mppi.py).
OF_THE_TASK = {
    "model.task_dim",
    "planner.extra_iterations",
    "training_planner.extra_iterations",
    "training_planner.extra_iterations_action_dim",
}
ICEM = dict(name="icem", horizon=4)
# Where a setting is changed: in the first of these in which it has an effect.
BASES = [("tdmpc", lambda: settings_of("tdmpc"))]
BASES += [(name, functools.partial(settings_of, name)) for name in FILES[1:]]
BASES += [(name, functools.partial(variant, name)) for name in VARIANTS]
BASES += [("icem", lambda: make_settings(planner=ICEM, training_planner=ICEM))]
# Other values of settings whose default says too little about them.
OTHER = {
    "loss.aux_gammas": (0.9,),
    "loss.entropy_coef_end": 0.0,  # below 0 is none
    "loss.policy_loss": "awr",
    "model.episodic": "False",
    "planner.extra_iterations_action_dim": 2,
    "planner.name": "cem",
    "training_planner.name": "cem",
    "training_planner.proposal_log_std": (-2.5, 0.5),
}
NAMES = [
    found
    for found in describe(declared.Settings())
    if not found.is_section
    and found.name not in {*GENERAL, *SCHEDULE, *STORAGE, *OF_THE_TASK}
    and found.name.partition(".")[0] not in GENERAL_SECTIONS
]


@functools.cache
def base_programs(base, spec=SPEC):
    return programs(dict(BASES)[base](), spec)


@functools.cache
def base_text(base, spec, name):
    made = base_programs(base, spec)
    return made[name]() if name in made else None


@pytest.mark.slow
@pytest.mark.parametrize("found", NAMES, ids=lambda found: found.name)
def test_every_setting_changes_a_program_or_is_refused(found):
    base = next((n for n, make in BASES if found.name not in inactive(make())), None)
    assert base, f"{found.name} has an effect in none of the bases"
    values = to_dict(dict(BASES)[base]())
    section, _, name = found.name.partition(".")
    now = values[section][name]
    values[section][name] = (
        OTHER[found.name] if found.name in OTHER else other_value(found._replace(default=now))
    )
    assert values[section][name] != now
    try:
        checked = base in FILES  # the others are made without a look at what has no effect
        changed = from_dict(declared.Settings(), values, check_effects=checked)
        of = functools.partial(base_text, base, SPEC)
        assert differs(changed, of, SPEC, section)
    except ValueError as error:
        assert name in str(error)


# Kinds of tasks, with a base in which settings are in use, and the numbers that are changed there.
DISCRETE = SPEC._replace(action_dim=3, discrete=True)
KINDS = {
    "discrete": (DISCRETE, "bmpc", ("model.log_std", "planner.", "training_planner.", "expert")),
    "endless": (SPEC._replace(can_terminate=False), "tdmpc", ("loss.termination",)),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "found"),
    [
        pytest.param(kind, found, id=f"{kind}-{found.name}")
        for kind, (_, base, names) in KINDS.items()
        for found in NAMES
        if any(name in found.name for name in names)
        and isinstance(found.default, float | tuple)
        and found.name not in inactive(settings_of(base))
    ],
)
def test_a_setting_that_a_kind_of_task_has_no_use_for_is_refused(kind, found):
    spec, base, _ = KINDS[kind]
    values = to_dict(settings_of(base))
    section, _, name = found.name.partition(".")
    now = values[section][name]
    values[section][name] = OTHER.get(found.name, other_value(found._replace(default=now)))
    try:
        changed = from_dict(declared.Settings(), values)
        of = functools.partial(base_text, base, spec)
        assert differs(changed, of, spec, section)
    except ValueError as error:
        assert name in str(error)
