"""EMPO's settings: each one works or is refused by name."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest

from mbx import envs, replay
from mbx.empo.agent import make_agent, resolve
from mbx.empo.agent.settings import Settings
from mbx.empo.multigrid.family import family_world, make_family
from mbx.empo.multigrid.layout import parse_map
from mbx.power import HumanModel
from mbx.settings import describe, from_dict, inactive, to_dict
from mbx.training import build
from tests.empo.helpers import (
    AVERAGING,
    TABLES,
    digest,
    environment_of,
    load,
    problem_of,
    settings_of,
)
from tests.helpers import other_value, recorded


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (dict(model=dict(kind="trees")), "config.model.kind='trees': choose one of"),
        (dict(model=dict(encoder="cnn")), "config.model.encoder='cnn'"),
        (dict(model=dict(dropout=1.0)), "config.model.dropout=1.0: give.*at most 0.99"),
        (dict(model=AVERAGING | dict(dropout=0.5)), "config.model.dropout=0.5 has no effect"),
        (dict(model=TABLES, loss=dict(target_rate=0.1)), "target_rate=0.1 has no effect.*networks"),
        (
            dict(loss=dict(target_rate=0.1, target_interval=5)),
            "loss.target_interval=5 has no effect with target_rate=0.1",
        ),
        (dict(model=dict(conv_width=8)), "conv_width=8 has no effect.*model.encoder='conv'"),
        (dict(env=dict(held_out=3)), "config.env.held_out=3 has no effect.*empo:maps/SOURCE"),
        (dict(model=AVERAGING | dict(table_min_rate=2.0)), "table_min_rate=2.0.*at most 1"),
        (dict(model=TABLES, loss=dict(human_expectation="fresh")), "drawn targets are noisy"),
        (dict(model=AVERAGING | dict(hidden=64)), "config.model.hidden=64 has no effect.*networks"),
        (dict(model=AVERAGING, optimizer=dict(weight_decay=0.0)), "optimizer.weight_decay=0.0 has"),
        (dict(model=AVERAGING, loss=dict(q_loss="mse")), "config.loss.q_loss='mse' has no effect"),
        (dict(model=dict(table_min_rate=0.1)), "table_min_rate=0.1 has no effect.*'tables'"),
        (dict(loss=dict(human_expectation="all")), "config.loss.human_expectation='all'"),
        (dict(loss=dict(human_samples=2)), "loss.human_samples=2 has no effect.*'fresh'"),
        (dict(loss=dict(batch_size=0)), "config.loss.batch_size=0: give at least 1"),
        (dict(loss=dict(room=-1.0)), "config.loss.room=-1.0: give at least 0"),
        (dict(curriculum=dict(x_h_steps=7)), "x_h_steps=7 has no effect.*model.x_h='network'"),
        (dict(curriculum=dict(v_r_steps=7)), "v_r_steps=7 has no effect.*model.v_r='network'"),
        (dict(model=AVERAGING | dict(u_r="network")), "u_r='network' with kind='tables': choose"),
        (dict(model=dict(x_h="table")), "x_h='table' with kind='networks': choose kind=mixed"),
        (dict(model=dict(kind="mixed", x_h="network")), "'mixed', but nothing is a table: choose"),
        (
            dict(model=dict(kind="mixed", q_r="table", q_head="softplus")),
            "q_head='softplus' has no",
        ),
        (dict(model=dict(v_h_e="table")), "v_h_e='table' has no effect.*'mixed'"),
        (dict(model=AVERAGING | dict(table_q_r=0.5)), "table_q_r=0.5: give a number below 0"),
        (dict(loss=dict(target_intervals=("q_r=0",))), "'q_r=0': give NAME=UPDATES"),
        (
            dict(loss=dict(target_rate=0.1, target_intervals=("q_r=5",))),
            "target_intervals=.* has no effect with target_rate=0.1",
        ),
        (dict(curriculum=dict(gamma_h_start=0.5)), "gamma_h_start=0.5 has no effect"),
        (dict(power=dict(source="paper")), "config.power.source='paper'"),
        (dict(power=dict(zeta=0.5)), "config.power.zeta=0.5: give at least 1"),
        (dict(power=dict(eta=-1.0)), "config.power.eta=-1.0: give at least 1"),
        (dict(power=dict(gamma_r=1.5)), "config.power.gamma_r=1.5: give more than 0 and at most 1"),
        (dict(power=dict(gamma_r=1.0)), "config.power.gamma_r=1.0: give a discount below 1"),
        (
            dict(curriculum=dict(epsilon_start=0.1, epsilon_steps=7)),
            "epsilon_steps=7 has no effect with epsilon_start=epsilon_end=0.1",
        ),
        (dict(power=dict(terminal_v_r=5.0)), "config.power.terminal_v_r=5.0: give a number below"),
    ],
)
def test_impossible_settings_are_refused(sections, message):
    with pytest.raises(ValueError, match=message):
        settings_of(**sections)


def test_settings_that_do_not_go_with_the_world_are_refused():
    found, plain = load("grid_rock_1h1r"), settings_of()
    with pytest.raises(ValueError, match="table_rows=0: this world's states are not listed"):
        unnumbered = found.world._replace(num_states=None)
        problem_of(power_world(unnumbered), settings_of(model=TABLES | dict(table_rows=0)))
    with pytest.raises(ValueError, match="table_rows=9 has no effect.*its states are listed"):
        problem_of(found, settings_of(model=TABLES | dict(table_rows=9)))
    spec = envs.make("empo:grid_rock_1h1r", 1).spec
    with pytest.raises(ValueError, match="encoder='conv' needs a world whose features begin"):
        problem_of(power_world(found.world), settings_of(model=dict(encoder="conv")))
    with pytest.raises(ValueError, match="q_encoder='own' with model.encoder='identity'"):
        problem_of(found, settings_of(model=dict(encoder="identity", q_encoder="own")))
    with pytest.raises(ValueError, match="q_encoder='split' with model.q_head='exp'"):
        problem_of(found, settings_of(model=dict(q_encoder="split")))
    weights = found.world._replace(goal_weight=jnp.ones((1, 5)))
    with pytest.warns(UserWarning, match="X_h may exceed 1, as the paper's plain sum does"):
        make_agent(plain, spec._replace(world=power_world(weights)))
    with pytest.raises(ValueError, match="goal_weight sums to .*model.x_h=network has at most 1"):
        learned = settings_of(model=dict(x_h="network"))
        make_agent(learned, spec._replace(world=power_world(weights)))
    with pytest.raises(ValueError, match="beta_r=500.0 has no effect.*beta_r=10.0.*source=config"):
        problem_of(found, settings_of(power=dict(beta_r=500.0)))
    with pytest.raises(ValueError, match="beta_r=10.0: make the environment with the same power"):
        resolve(settings_of(power=dict(source="config", gamma_h=0.99, gamma_r=0.99)), spec)
    own = problem_of(found, settings_of(power=dict(beta_r=500.0, source="config")))
    assert own.params.beta_r == 500.0 and own.params.zeta == 1.0


def power_world(world):
    """A world without parameters of its own."""
    from mbx.empo.power.named import NamedWorld

    return NamedWorld(world)


@pytest.mark.parametrize(
    "sections",
    [
        {},
        dict(model=dict(x_h="network", q_head="dueling"), loss=dict(advantage_coef=1.0)),
        dict(model=dict(u_r="network", v_r="network", q_encoder="own")),
        dict(loss=dict(human_expectation="exact", unique=9)),
        dict(model=dict(kind="tables")),
        dict(model=dict(kind="tables", x_h="table", u_r="table", v_r="table")),
        dict(model=dict(kind="mixed", q_r="table", x_h="table")),
        dict(model=dict(kind="mixed", v_h_e="table", q_encoder="own", v_r="network")),
    ],
    ids=["default", "x_h", "u_r", "exact", "tables", "all tables", "q_r table", "v_h_e table"],
)
def test_exactly_the_settings_that_have_an_effect_are_read(sections):
    values = sections | dict(loss=dict(batch_size=2) | sections.get("loss", {}))
    settings, spec = from_dict(Settings(), values), environment_of(load("dag_2h2r")).spec
    noted, key = recorded(settings, read := set()), jax.random.key(0)
    agent = make_agent(noted, spec._replace(world=power_world(spec.world.world)))
    train = jax.eval_shape(agent.init, key)
    buffer = jax.eval_shape(lambda: replay.init(agent.example_row(), num_envs=2, capacity=8))
    jax.make_jaxpr(agent.update)(train, buffer, key)
    agent.check({})
    own = {"power", "model", "loss", "optimizer", "curriculum"}
    names = {d.name for d in describe(settings) if d.name.partition(".")[0] in own}
    names -= own | {"power.source"}  # chosen by before the agent is made
    idle = set(inactive(settings))
    assert names - idle - read == set()
    # Schedules are made of all their numbers at once, of which some then have nothing to act on.
    found = {name for name in read & idle if not name.startswith("curriculum.")}
    defaults = {"model.q_head", "model.x_h", "model.u_r", "model.v_r"}
    defaults |= {"humans.max_states", "humans.habit", "model.table_rows"}  # by the world, `idle`
    defaults |= {"model.v_h_e", "model.q_r", "model.q_encoder"}  # by conditions
    assert found <= defaults  # looked at where they must be that


def trace(settings):
    """Digests of the agent's programs."""
    found = drawn_world() if settings.model.encoder == "conv" else load("dag_2h2r").world
    spec = environment_of(power_world(found)).spec
    agent = make_agent(settings, spec)
    key = jax.random.key(0)
    train = jax.eval_shape(agent.init, key)
    buffer = jax.eval_shape(lambda: replay.init(agent.example_row(), num_envs=2, capacity=8))
    given = agent.init_actor(2), jnp.zeros((2, *spec.obs_shape), spec.obs_dtype), jnp.zeros(2, bool)
    act = lambda t, key, evaluate: agent.act(t, *given, key, evaluate)  # noqa: E731
    acts = [digest(functools.partial(act, evaluate=e), train, key) for e in (False, True)]
    return *acts, digest(agent.init, key), digest(agent.update, train, buffer, key)


@functools.cache
def drawn_world():
    """A world whose features begin with a picture."""
    family = make_family([parse_map("#####\n#>.1#\n#####", goals=[[1, 1, 3, 1]], horizon=0)])
    return family_world(family, [0], HumanModel("uniform"))


SMALL = dict(batch_size=2)
BASES = [
    dict(loss=SMALL),
    dict(loss=dict(SMALL, advantage_coef=1.0), model=dict(x_h="network", q_head="dueling")),
    dict(loss=SMALL, model=dict(u_r="network", v_r="network")),
    dict(loss=dict(SMALL, human_expectation="exact", unique=9)),
    dict(loss=SMALL, model=dict(kind="tables")),
    dict(loss=SMALL, curriculum=dict(gamma_h_ramp=10, gamma_r_ramp=10)),
    dict(loss=SMALL, model=dict(encoder="conv")),
    dict(loss=SMALL, model=dict(kind="mixed", q_r="table", x_h="table", u_r="network")),
]
# Another value where the next best one would be refused for what it is.
OTHER = {
    "power.terminal_v_r": -1e-3,
    "curriculum.constant_fraction": 0.5,
    "curriculum.steps": 100_000,
    "model.table_q_r": -2.0,
    "loss.target_intervals": ("q_r=3",),
}
# Of the world's humans: test_wired.py.
ELSEWHERE = {"power.source", "power.beta_h", "power.nu_h", "power.optimistic"}
OWN = ("power", "model", "loss", "optimizer", "curriculum")
NAMES = [
    found
    for found in describe(Settings())
    if not found.is_section and found.name.partition(".")[0] in OWN and found.name not in ELSEWHERE
]


@functools.cache
def base_trace(number):
    return trace(from_dict(Settings(), BASES[number]))


@pytest.mark.slow
@pytest.mark.parametrize("found", NAMES, ids=lambda found: found.name)
def test_every_setting_changes_a_program_or_is_refused(found):
    bases = [from_dict(Settings(), base) for base in BASES]
    number = next((i for i, base in enumerate(bases) if found.name not in inactive(base)), None)
    assert number is not None, f"{found.name} has an effect in none of the bases"
    values = to_dict(bases[number])
    section, _, name = found.name.partition(".")
    now = values[section][name]
    other = OTHER.get(found.name, other_value(found._replace(default=now)))
    assert other != now
    values[section][name] = other
    try:
        changed = trace(from_dict(Settings(), values))
    except ValueError as error:
        assert name in str(error)
        return
    assert changed != base_trace(number)


def test_the_configuration_builds_the_agent_and_names_its_mistakes():
    from configs import empo as default

    config = default.get_config().to_dict()
    settings = from_dict(Settings(), config)
    environment = envs.make(config["env"]["name"], 2)
    assert build.build_agent(build.read(config), environment.spec).store is None
    problem = resolve(settings, environment.spec)
    assert problem.params.beta_r == 40.0 and problem.capacity == 1.5 * 32 * 16
    assert problem.curriculum.steps == 10_000 and problem.target_intervals["q_r"] == 20
    rock = envs.make("empo:grid_rock_1h1r", 2).spec
    problem = resolve(settings, rock)  # a world with parameters of its own
    assert problem.params.beta_r == 10.0 and problem.params.eta == pytest.approx(1.1)
    assert problem.capacity == 1.5 * 32 * 4
    pendulum = envs.make("gymnax:Pendulum-v1", 1).spec
    with pytest.raises(ValueError, match="lists its successors"):
        build.build_agent(build.read(config), pendulum)
    with pytest.raises(ValueError, match="empo:nowhere' is unknown"):
        envs.make("empo:nowhere", 1)
    with pytest.raises(ValueError, match="action_repeat=2"):
        envs.make("empo:grid_rock_1h1r", 1, action_repeat=2)
