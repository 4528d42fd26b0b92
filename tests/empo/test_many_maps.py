"""Worlds of many maps by name: from a folder, a file or a generator, some held out."""

from __future__ import annotations

from types import SimpleNamespace

import jax
import numpy as np
import pytest

from mbx import envs
from mbx.empo import named_world
from mbx.empo.agent.settings import Settings
from mbx.empo.multigrid import family
from mbx.power import HumanModel, PowerParams
from mbx.settings import from_dict
from mbx.training import rundir

TEXT = """map: |
  ######
  #{row}#
  ######
goals: [[1, 1, 4, 1]]
horizon: 0
power: {{zeta: 2.0}}
humans: {{model: uniform}}
"""
ROWS = (">..1", ">.1.", ">1..", "1.>.")


@pytest.fixture
def folder(tmp_path):
    """Four maps that differ in where the agents stand."""
    for number, row in enumerate(ROWS):
        (tmp_path / f"{number}.yaml").write_text(TEXT.format(row=row))
    return f"{tmp_path}/"


def begins(world):
    """Where the human and the robot may stand when an episode begins."""
    states = jax.jit(jax.vmap(world.init))(jax.random.split(jax.random.key(0), 40))
    return {tuple(x) for x in np.asarray(states.now.agents)[:, :, 0].tolist()}


def test_which_maps_and_whose_power_are_choices(folder, monkeypatch):
    monkeypatch.setattr(
        family, "make_family", lambda layouts, names: SimpleNamespace(layouts=names)
    )
    monkeypatch.setattr(family, "family_world", lambda *given: given)

    def chosen(*choice, **given):
        found = family.make_many(folder, family.Choice(*choice), **given)
        return found, tuple(found.world[0].layouts[i][-6:] for i in found.world[1])

    names = [f"{number}.yaml" for number in range(4)]
    assert sorted(chosen(9, 0)[1]) == names and chosen(9, 0)[0].held_out is None
    assert len({chosen(9, 1, seed)[1] for seed in range(9)}) > 1
    two, trained = chosen(2, 1)
    assert trained == chosen(9, 1)[1][:2]
    assert two.held_out[1].tolist() == [0] and two.world[1].tolist() == [1, 2]
    assert two.world[2:] == (HumanModel("uniform"), PowerParams(zeta=2.0)) == two.held_out[2:]
    paths, params = HumanModel("paths"), PowerParams(nu_h=0.4)
    given = chosen(2, 1, humans=paths, params=params, default=PowerParams())[0]
    assert given.params == params and given.world[2:] == (paths, params) == given.held_out[2:]
    assert chosen(2, 1, default=params)[0].params == PowerParams(zeta=2.0)
    assert two.prior == "uniform" and given.prior == "paths"


def test_environments_begin_on_the_maps_they_are_for(folder):
    settings = from_dict(
        Settings(),
        {"env": {"name": f"empo:maps/{folder}", "held_out": 2, "maps": 1, "map_seed": 3}},
    )
    seen, worlds = {}, []
    for training in (True, False):
        options = settings.environment_options(training)
        environment = envs.make(settings.env.name, 8, **options)
        _, obs = jax.jit(environment.reset)(jax.random.key(0))
        seen[training] = np.unique(np.asarray(obs), axis=0)
        worlds.append(environment.spec.world)
    assert worlds[0] is worlds[1]  # made once
    assert len(seen[True]) == 1 and len(seen[False]) > 1
    assert not (seen[False] == seen[True]).all(axis=1).any()


def test_a_run_keeps_a_folder_as_one_file(folder, tmp_path):
    run = tmp_path / "run"
    settings = from_dict(Settings(), {"env": {"name": f"empo:maps/{folder}@stored"}})
    assert settings.files() == {"env.name": folder}
    rundir.keep_inputs(settings.files(), str(run))
    rundir.check_inputs(settings.files(), str(run))
    kept = rundir.with_kept_inputs(settings, str(run))
    assert kept.env.name == f"empo:maps/{run}/inputs/env.name.yaml@stored"
    again = family.make_many(str(run / "inputs/env.name.yaml"), family.Choice(9, 1, 2))
    want = family.make_many(folder, family.Choice(9, 1, 2))
    assert begins(again.world) == begins(want.world)
    assert begins(again.held_out) == begins(want.held_out)
    (tmp_path / "9.yaml").write_text(TEXT.format(row=".>1."))
    with pytest.raises(ValueError, match="env.name=.* is not what the run .* began with"):
        rundir.check_inputs(settings.files(), str(run))
    assert from_dict(Settings(), {"env": {"name": "empo:maps/rocks"}}).files() == {}


def test_choices_that_cannot_be_made_are_told(folder, tmp_path):
    with pytest.raises(ValueError, match="has 4 maps, of which env.held_out=4"):
        family.make_many(folder, family.Choice(1, 4))
    with pytest.raises(ValueError, match="maps 'caves': choose one of"):
        named_world("maps/caves")
    with pytest.raises(ValueError, match="env.maps=0"):
        family.make_many(folder, family.Choice(0, 1))
    with pytest.raises(FileNotFoundError, match="nowhere"):
        named_world(f"maps/{tmp_path}/nowhere.yaml")
    with pytest.raises(ValueError, match="has 2 maps: for many"):
        (tmp_path / "two.yaml").write_text("\n---\n".join([TEXT.format(row=ROWS[0])] * 2))
        named_world(f"multigrid/{tmp_path}/two.yaml")
    (tmp_path / "two.yaml").write_text(TEXT.format(row=">1..").replace("zeta: 2.0", "zeta: 1.5"))
    with pytest.raises(ValueError, match="says other things of power or humans"):
        family.make_many(folder, family.Choice(1, 1))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="holds no .yaml file"):
        family.make_many(f"{tmp_path}/empty", family.Choice(1, 1))
