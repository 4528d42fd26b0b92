"""What is recorded of a planner is what the planner did, and looking on changes nothing."""

from __future__ import annotations

import dataclasses
import functools
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mbx import envs, mppi
from mbx.agents.tdmpc.agent import act, init_actor, make_agent, resolve, world_config
from mbx.agents.tdmpc.planning import plan_to_act
from mbx.agents.tdmpc.settings import Env, Settings
from mbx.analysis import watch
from mbx.analysis.watch import Episode, Round, Step
from mbx.world_model import make_world_model
from tests.agents.tdmpc_helpers import PLAIN, loud, replaced
from tests.browser import look_at

TASK = "gymnax:Pendulum-v1"
PLANNER = {"horizon": 2, "rescore_proposals": False}


@pytest.fixture(scope="module")
def small():
    """Settings, model and parameters of a small agent for Pendulum."""
    spec = envs.make(TASK, 1).spec
    settings = replaced(dataclasses.replace(Settings(), env=Env(name=TASK)), **PLAIN)
    settings = resolve(replaced(settings, planner=PLANNER), spec)
    widths = dict(enc_dim=8, mlp_dim=8, latent_dim=8)
    model = make_world_model(dataclasses.replace(world_config(settings, spec), **widths))
    return settings, model, loud(jax.jit(model.init)(jax.random.key(0)))


@dataclasses.dataclass(frozen=True)
class Train:
    """As much of a train state as acting needs."""

    params: object
    step: int = 0


jax.tree_util.register_dataclass(Train, ["params", "step"], [])


@pytest.fixture(scope="module")
def agent(small):
    """An agent of which only acting is used, `watched` as the real one gives it."""
    settings, model, _ = small
    own = make_agent(settings, envs.make(TASK, 1).spec)
    return own._replace(
        act=functools.partial(act, settings, model),
        watched=lambda see: functools.partial(act, settings, model, see=see),
    )


@pytest.fixture(scope="module")
def episode(small, agent):
    settings, _, params = small
    return watch.record(agent, Train(params), settings, jax.random.key(3), most=3)


def test_recorded_values_are_the_plan_s_own(small, episode):
    """Candidates, scores and elites of the last round, and the refit of every round."""
    settings, _, _ = small
    config = settings.planner
    for step in episode.steps:
        assert len(step.rounds) == config.iterations == 2
        last = step.rounds[-1]
        np.testing.assert_array_equal(last.actions, step.plan["actions"])
        np.testing.assert_array_equal(last.values, step.plan["values"])
        # Proposals that are scored once take part in every round.
        proposals = [one.actions[: config.num_proposals] for one in step.rounds]
        np.testing.assert_array_equal(*proposals)
        assert not np.array_equal(step.rounds[0].actions, last.actions)
        refit = mppi.refit(
            *map(jnp.asarray, last),
            num_elites=config.num_elites,
            temperature=config.temperature,
            temperature_mode=config.temperature_mode,
            min_std=config.min_std,
            max_std=config.max_std,
        )
        np.testing.assert_allclose(refit.mean, step.plan["mean"], rtol=1e-5, atol=1e-6)
        chosen = last.actions[last.best(config.num_elites)]
        np.testing.assert_array_equal(chosen, refit.elite_actions)
        assert step.plan["num_elites"] == 3
        np.testing.assert_allclose(step.plan["discount"], 0.9)


def test_looking_on_changes_nothing(small, agent, episode):
    """Actions are those of `act`, played without anyone looking on."""
    settings, model, params = small
    environment = envs.make(TASK, 1)
    reset_key, step_key = jax.random.split(jax.random.key(3))
    env_state, obs = jax.jit(environment.reset)(reset_key)
    actor = init_actor(settings, model, 1)
    act, advance = jax.jit(agent.act, static_argnums=5), jax.jit(environment.step)
    for i, step in enumerate(episode.steps):
        act_key, env_key = jax.random.split(jax.random.fold_in(step_key, i))
        action, actor = act(Train(params), actor, obs, jnp.full(1, i == 0), act_key, True)
        np.testing.assert_allclose(action[0], step.plan["action"], rtol=1e-5, atol=1e-6)
        env_state, now = advance(env_state, action, env_key)
        np.testing.assert_allclose(now.reward[0], step.reward, rtol=1e-5)
        obs = now.obs


def test_the_program_of_training_has_nothing_of_it(small):
    settings, model, params = small
    mean, key, z = jnp.zeros((1, 2, 1)), jax.random.key(0), jnp.zeros((1, 8))

    def program(**also):
        return str(
            jax.make_jaxpr(lambda z: plan_to_act(settings, model, params, z, mean, key, **also))(z)
        )

    assert "callback" in program(see=lambda what, arrays: None)
    assert "callback" not in program()


def made(values, reward=0.0, num_elites=2, discount=0.5) -> Step:
    actions = np.arange(len(values), dtype=np.float32).reshape(-1, 1, 1) / 10
    plan = {"mean": actions[0], "action": actions[0, 0], "num_elites": np.int32(num_elites)}
    plan |= {"discount": np.float32(discount)}
    return Step([Round(actions, np.array(values))], plan, reward, None)


def test_predicted_and_realised_by_hand():
    assert watch.predicted(made([1.0, 5.0, np.nan, 3.0])) == 4
    steps = [made([0.0], reward) for reward in (1.0, 2.0, 4.0)]
    assert watch.realised(Episode(steps, True)) == [3.0, 4.0, 4.0]


def data_of(text: str) -> dict:
    return json.loads(re.search(r'id="data">(.*?)</script>', text)[1])


def test_the_page_holds_elites_first_and_says_what_is_cut_off():
    step = made([1.0, 5.0, np.inf, 3.0, 2.0, -7.0], reward=2.0)
    text = watch.page(Episode([step] * 5, False), "<b>", candidates=4, steps=3)
    data = data_of(text)
    assert [s["number"] for s in data["steps"]] == [0, 2, 4] and data["length"] == 5
    (shown,) = data["steps"][0]["rounds"]
    assert shown["values"] == [5.0, 3.0, 2.0, None]  # both elites, then from the others' ends
    assert shown["actions"] == [[[10]], [[30]], [[40]], [[20]]]
    assert data["steps"][0]["elites"] == 2 and data["predicted"] == [4, 4, 4]
    assert "ended at its time limit" in text and "<b>" not in text
    assert "time limit" not in watch.page(Episode([step], True), "t")


def test_who_does_not_plan_is_refused(small, agent):
    settings, _, params = small
    with pytest.raises(ValueError, match="this agent does not plan"):
        watch.record(agent._replace(watched=None), Train(params), settings, jax.random.key(0))


@pytest.mark.slow
def test_a_browser_shows_it_without_a_word_and_without_the_network(episode, tmp_path):
    pictures = [step._replace(picture=np.full((9, 9, 3), 100, np.uint8)) for step in episode.steps]
    page = tmp_path / "plans.html"
    page.write_text(watch.page(episode._replace(steps=pictures), "a run"))
    assert page.stat().st_size < 5e6
    seen = look_at(page, tmp_path)
    assert seen.console == [] and seen.requests == set()
    assert "round 1 of 2" in seen.document and 'src="data:image/png' in seen.document
    assert re.search(r"Predicted -?[\d.]+, realised -?[\d.]+", seen.document)
