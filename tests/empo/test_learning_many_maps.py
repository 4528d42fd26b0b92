"""A run on many maps, from a folder of maps to pictures, a film and a game."""

from __future__ import annotations

import csv
import os
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest
from PIL import Image

from benchmarks import empo as benchmark
from configs import empo, empo_layouts
from mbx.empo.agent import resolve
from mbx.empo.agent.evaluation import learned_policy
from mbx.empo.agent.game import Game
from mbx.training import build, run, video

MAPS = (
    "######\n##.###\n#>o..#\n##4###\n######",
    "######\n##.#.#\n#>.o.#\n##4#.#\n######",
    "######\n#...##\n#..>1#\n#..D.#\n######",
)
TEXT = "map: |\n  {}\ngoals: [[1, 1, 4, 3], [4, 2, 4, 2]]\nhorizon: 0\n"
TILE = 24


@pytest.mark.slow
def test_a_run_on_many_maps_has_pictures_a_film_and_a_game(tmp_path):
    (tmp_path / "maps").mkdir()
    for number, text in enumerate(MAPS):
        lines = text.replace("\n", "\n  ")
        (tmp_path / "maps" / f"{number}.yaml").write_text(TEXT.format(lines))
    config, workdir = empo.get_config(), str(tmp_path / "run")
    config.env.update(name=f"empo:maps/{tmp_path}/maps/", held_out=1, num_envs=4, episode_length=6)
    config.env.update(varied_starts=0.5)
    config.train.update(steps=160, seed_steps=80, log_interval=80)
    config.eval.update(interval=160, episodes=2, review_episodes=4)
    config.model.update(hidden=8, encoder="conv", conv_width=4)
    config.loss.update(batch_size=2, room=0.0)
    config.replay.capacity = 2_000
    run.train(config.to_dict(), workdir)
    assert {"episode.gif", "value_map.png"} <= {*os.listdir(workdir)}
    agent, train, settings = run.load(workdir)
    spec = build.make_environment(settings, 1, seed=0).spec
    world, held_out = spec.world.world, spec.world.held_out
    text = world.views.text(held_out.example_state)
    assert text in MAPS
    with Image.open(f"{workdir}/episode.gif") as gif:  # of the map held out
        assert gif.size == (6 * TILE, 5 * TILE) and 3 < gif.n_frames <= 3 * 8
        rock = np.asarray(gif.convert("RGB"))[0, 0]
    assert rock.max() < 90  # the corner is wall, whatever this map lacks
    episode = video.record(agent.act, agent.init_actor, train, settings, jax.random.key(0))
    first = np.asarray(jax.jit(world.views.render)(held_out.example_state))
    # Outlines of goals apart it is the same: films, too, are of maps held out.
    assert len(episode.frames) == 6 and (episode.frames[0] == first).mean() > 0.9
    game = Game(held_out, learned_policy(resolve(settings, spec), train), jax.random.key(0))
    assert game.text().replace("=", ".") == text
    turn = game.step("still")
    assert turn.humans == ("still",) and game.text().count(">") == 1
    with Image.open(f"{workdir}/value_map.png") as values:  # two goals and X_h
        assert values.size[0] > 2 * values.size[1]


@pytest.mark.slow
def test_robots_are_compared_on_maps_held_out(tmp_path):
    config, workdir = empo_layouts.get_config(), str(tmp_path / "run")
    config.env.update(maps=2, held_out=3, num_envs=4, episode_length=6)
    config.train.update(steps=160, seed_steps=80, log_interval=80)
    config.eval.interval, config.model.hidden, config.loss.batch_size = 0, 8, 2
    run.train(config.to_dict(), workdir)
    out = str(tmp_path / "rows.csv")
    command = [sys.executable, "-m", "benchmarks.empo", "layouts", f"--workdir={workdir},{workdir}"]
    command += ["--episodes=96", "--length=30", "--states=9000", f"--out={out}"]
    subprocess.run(command, check=True)
    rows = {row["robot"]: row for row in csv.DictReader(pathlib.Path(out).open())}
    assert [*rows] == ["ahead 0", "ahead 1", "frozen", "network 0", "network 1", "random"]
    assert 0 < int(float(rows["random"]["exact_maps"])) < 3  # one map has more states
    assert float(rows["random"]["way"]) == 0.0 < float(rows["random"]["below"])
    for robot in ("network", "ahead"):
        assert rows[f"{robot} 0"] == rows[f"{robot} 1"] | {"robot": f"{robot} 0"}


def test_the_way_is_of_means_and_its_error_a_jackknife():
    own, low, high = np.array([0.5, 0.7, 0.9]), np.full(3, 0.4), np.array([0.8, 1.0, 0.9])
    assert np.isclose(benchmark._way(own, low, high), 0.3 / 0.5)
    assert np.isclose(benchmark._error(own), 0.2 / 3**0.5)
