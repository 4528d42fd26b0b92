"""Playing a human by keys: `session` writes the map after every one, `pressed` reads them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, TextIO

import numpy as np

from mbx.empo.agent.game import Game, look

KEYS = {
    "w": "forward",
    "a": "left",
    "d": "right",
    "s": "still",
    " ": "still",
    "e": "toggle",
    "p": "pick up",
    "o": "drop",
}


def session(
    game: Game,
    keys: Iterable[str],
    out: TextIO,
    *,
    values: Callable[[Any], np.ndarray] | None = None,
    color: bool = False,
) -> None:
    """Play by keys until they end, the world ends or `q`.

    Args:
        game: what is played.
        keys: one character each; unknown ones are explained.
        out: where the map goes, once before every key.
        values: state -> V_h^e `[H, G]`, what the robots reckon; shown for the player.
        color: mark the player's cell, for terminals.
    """

    def show(line: str) -> None:
        text = game.text()
        if color:
            text = look(game.world.views, text, game.position)
        column, row = game.position
        print(f"\n{text}", file=out)
        print(
            f"step {game.steps}: you are at column {column + 1}, line {row + 1}, after goal "
            f"{game.goal + 1} (=); {game.arrivals} reached",
            file=out,
        )
        if values is not None:
            each = values(game.state)[game.human]
            numbers = ", ".join(f"{number + 1}: {v:.2f}" for number, v in enumerate(each))
            print(f"the robots reckon that you reach goal {numbers}", file=out)
        print(line, file=out, flush=True)

    known = {key: action for key, action in KEYS.items() if action in game.actions}
    explained = (
        ", ".join(f"{'space' if k == ' ' else k} {a}" for k, a in known.items()) + ", q quit"
    )
    show(explained)
    for key in keys:
        if key == "q" or game.over:
            break
        if key not in known:
            if not key.isspace():
                print(f"{key!r} is no key here: {explained}", file=out, flush=True)
            continue
        turn = game.step(known[key])
        others = [
            f"human {number + 1}: {action}"
            for number, action in enumerate(turn.humans)
            if number != game.human
        ]
        others += [f"robot {number + 1}: {action}" for number, action in enumerate(turn.robots)]
        show(", ".join(others) + ("; YOU ARE THERE" if turn.reached else ""))
        if game.over:
            break
    ending = "the world has ended" if game.over else "you left"
    print(f"{ending} after {game.steps} steps, {game.arrivals} goals reached", file=out)


def pressed(stream: TextIO) -> Iterator[str]:
    """Keys as they are pressed, in a terminal; otherwise the stream's characters."""
    if not stream.isatty():
        while key := stream.read(1):
            yield key
        return
    import termios
    import tty

    descriptor = stream.fileno()
    before = termios.tcgetattr(descriptor)
    try:
        tty.setcbreak(descriptor, termios.TCSADRAIN)
        while key := stream.read(1):
            yield key
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
