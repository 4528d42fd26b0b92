"""A human that is played: steps by hand, keys from a string, what is refused."""

from __future__ import annotations

import io
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mbx.commands.play import session
from mbx.empo import multigrid as mg
from mbx.empo.agent import game as games
from mbx.empo.agent.evaluation import frozen_policy
from mbx.empo.agent.game import Game, Turn
from mbx.power import HumanModel

ROOM = "######\n#>..1#\n#<...#\n######"
GOALS = [[[2, 1, 2, 1], [1, 2, 1, 2]], [[4, 2, 4, 2], [3, 2, 4, 2]]]


@pytest.fixture(scope="module")
def world():
    """Two humans that act at random, and a robot; the episode ends after three steps."""
    layout = mg.parse_map(ROOM, goals=GOALS, horizon=3)
    return mg.make_world(layout, HumanModel("uniform", max_states=1)).world


def test_a_game_by_hand(world, monkeypatch):
    """The robot turns left, and right in its last step."""
    turns = lambda state, key: jnp.where(state.time < 2, 1, 2)  # noqa: E731
    game = Game(world, turns, jax.random.key(1), human=0, goal=0)
    other = int(game.goals[1])
    monkeypatch.setattr(games, "draw_goals", lambda world, key: jnp.array([1, 1 - other]))
    assert game.actions == ("still", "left", "right", "forward")
    assert game.text() == "######\n#>=.1#\n#<...#\n######"
    assert (game.goal, game.position, game.steps, game.over) == (0, (1, 1), 0, False)
    turn = game.step("still")
    assert turn.humans[0] == "still" and turn.robots == ("left",) and not turn.reached
    assert game.text().splitlines()[1] == "#>=.4#" and game.arrivals == 0
    turn = game.step("forward")
    assert turn.reached and game.arrivals == 1 and game.position == (2, 1)
    # Another goal is drawn for who has arrived.
    assert np.asarray(game.goals).tolist() == [1, other]
    turn = game.step("left")
    assert turn.robots == ("right",) and game.text().splitlines()[1] == "#.^.4#"
    assert game.over and game.steps == 3
    with pytest.raises(ValueError, match="the world has ended"):
        game.step("left")


def test_the_other_human_is_played_with_its_own_goals(world):
    game = Game(world, frozen_policy, jax.random.key(0), human=1, goal=1)
    assert game.text().splitlines()[2] == "#<.==#" and game.position == (1, 2)
    for action, row in (("right", "#^.==#"), ("left", "#<.==#"), ("left", "#v.==#")):
        turn = game.step(action)
        assert turn.humans[1] == action and turn.robots == ("still",)
        assert game.text().splitlines()[2] == row and game.goals[1] == 1
    with pytest.raises(ValueError, match=r"action='jump': choose one of \('still', 'left'"):
        game.step("jump")
    for options, message in (
        (dict(human=2), "human=3: the world has humans 1 to 2"),
        (dict(human=-1), "human=0"),
        (dict(goal=2), "goal=3: the world has goals 1 to 2"),
    ):
        with pytest.raises(ValueError, match=message):
            Game(world, frozen_policy, jax.random.key(0), **options)
    with pytest.raises(ValueError, match="cannot be shown as text: play on a map"):
        Game(world._replace(views=None), frozen_policy, jax.random.key(0))


class Script:
    """Stands for a game: arrives with every third step, ends after four."""

    human, goal, position, actions = 0, 1, (1, 0), ("still", "left", "right", "forward")

    def __init__(self):
        self.steps = self.arrivals = 0
        self.over, self.taken, self.state = False, [], None
        self.world = None

    def text(self):
        return ".>\n1."

    def step(self, action):
        self.taken.append(action)
        self.steps, self.over = self.steps + 1, self.steps == 3
        self.arrivals = self.steps // 3
        return Turn((action, "left"), ("right", "still"), self.steps % 3 == 0)


def test_keys_are_actions_until_q_or_the_end():
    game, out = Script(), io.StringIO()
    values = lambda state: np.array([[0.25, 1.0], [0.5, 0.5]])  # noqa: E731
    session(game, "wa\nxs qd", out, values=values)
    text = out.getvalue()
    assert game.taken == ["forward", "left", "still", "still"] and game.over
    assert text.count("'x' is no key here: w forward, a left, d right, s still, space still") == 1
    assert "'\\n'" not in text and "toggle" not in text
    assert text.count("human 2: left, robot 1: right, robot 2: still\n") == 3
    assert text.count("robot 2: still; YOU ARE THERE\n") == 1
    assert text.count("goal 1: 0.25, 2: 1.00") == 5 and text.count("\n.>\n1.\n") == 5
    assert "step 2: you are at column 2, line 1, after goal 2 (=); 0 reached" in text
    assert text.endswith("the world has ended after 4 steps, 1 goals reached\n")
    game, out = Script(), io.StringIO()
    session(game, "wq", out)
    assert game.taken == ["forward"] and "reckon" not in out.getvalue()
    assert out.getvalue().endswith("you left after 1 steps, 0 goals reached\n")


@pytest.mark.slow
def test_the_command_plays_without_a_terminal():
    command = [sys.executable, "-m", "experiments.play", "--world=multigrid/rock_gate"]
    rest = ["--robot=exact", "--goal=2"]
    told = subprocess.run([*command, *rest], input="ssss wwwq", capture_output=True, text=True)
    assert told.returncode == 0, told.stderr
    assert "###o###" in told.stdout and "1 reached\nrobot 1: " in told.stdout
    assert told.stdout.count("YOU ARE THERE") == 1
    by_flag = subprocess.run([*command, *rest, "--keys=ssss wwwq"], capture_output=True, text=True)
    assert by_flag.stdout == told.stdout
    wrong = subprocess.run([*command, "--robot=learned"], capture_output=True, text=True)
    assert wrong.returncode == 1 and "error: robot='learned': needs a run" in wrong.stderr
