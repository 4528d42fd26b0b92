"""Maps drawn at random, in which a robot matters: `generate("doors", 64, seed=0)`.

A wall with a gap divides a board of 7x7; in the gap stands a rock, which only robots push. A map is
kept if no human gets to its far goals by itself, and a search over a robot's actions lets all of
them get there before any stands in front of the gap, in the robot's way. Every human has four
goals: anywhere (weight 1/6), a cell of its own room (1/6) and two in the other (1/3 each)."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from mbx.empo.multigrid.layout import Layout, parse_map
from mbx.empo.multigrid.objects import HUMANS, ROBOTS

SIZE = 7
_MOVES = ((1, 0), (0, 1), (-1, 0), (0, -1))
_WEIGHTS = (1, 1, 2, 2)
_TRIES = 20_000

Cell = tuple[int, int]


class Kind(NamedTuple):
    """What a generator draws."""

    humans: int = 1  # how many
    robots: int = 1  # how many
    doors: int = 0  # most unlocked doors
    walls: float = 0.2  # probability of a further wall in a cell


KINDS = {"rocks": Kind(), "rocks_2h2r": Kind(humans=2, robots=2, walls=0.1), "doors": Kind(doors=2)}


def generate(name: str, number: int, *, seed: int = 0) -> list[Layout]:
    """Different maps: no two have the same walls, things and goals.
    name: one of KINDS. number: how many. seed: of the draws; the first maps of a longer list are
    those of a shorter one.
    Raises ValueError for an unknown name, and where too few different maps are found.
    """
    if name not in KINDS:
        raise ValueError(f"maps {name!r}: choose one of {tuple(KINDS)}, or a path with a /")
    kind, rng = KINDS[name], np.random.default_rng(seed)
    found: dict[str, Layout] = {}
    tries = 0
    while len(found) < number:
        tries += 1
        if tries > _TRIES * (1 + number):
            raise ValueError(f"{name}: only {len(found)} different maps in {tries} draws")
        drawn = _draw(kind, rng)
        if drawn is not None:
            found.setdefault(*drawn)
    return list(found.values())


def _draw(kind: Kind, rng: np.random.Generator) -> tuple[str, Layout] | None:
    """A map with what makes it different from others; None where what was drawn is of no use."""
    cells = np.full((SIZE, SIZE), ".")
    cells[[0, -1]] = cells[:, [0, -1]] = "#"
    wall, gap = int(rng.integers(2, SIZE - 2)), int(rng.integers(1, SIZE - 1))
    cells[rng.random((SIZE, SIZE)) < kind.walls] = "#"
    cells[:, wall] = "#"
    rng.random()  # maps of a seed stay the same: a locked door was drawn here
    cells[gap, wall] = "o"
    free = [(int(x), int(y)) for y, x in np.argwhere(cells == ".")]
    if len(free) < 6 + kind.humans + kind.robots:
        return None
    order = [free[i] for i in rng.permutation(len(free))]
    by_way = sorted(order, key=lambda cell: abs(cell[0] - wall) + abs(cell[1] - gap))
    robots = [by_way[i] for i in rng.permutation(4)[: kind.robots]]
    humans = [by_way[-1 - i] for i in rng.permutation(4)[: kind.humans]]
    people = [*humans, *robots]
    order = [cell for cell in order if cell not in people]
    for x, y in [cell for cell in order if _is_passage(cells, cell)][: kind.doors]:
        cells[y, x] = "D"
    turned = bool(rng.integers(2))
    headings = rng.integers(0, 4, len(people))
    goals = []
    for human in humans:
        own, every = (_reach(human, _places(cells, closed)) for closed in ("#o", "#"))
        empty = [cell for cell in order if cells[cell[1], cell[0]] == "."]
        near = [cell for cell in empty if cell in own]
        far = [cell for cell in empty if cell in every - own]
        if not near or len(far) < 2:
            return None
        goals.append([near[0], *far[:2]])
    waits = min(_steps_to(cells, human, (wall, gap)) for human in humans)
    facing = zip(robots, headings[kind.humans :], strict=True)
    if not any(_helps(cells, *robot, humans, goals, waits) for robot in facing):
        return None
    if turned:
        cells, people = cells.T.copy(), [cell[::-1] for cell in people]
        goals = [[cell[::-1] for cell in own] for own in goals]
    ground = _text(cells) + repr(goals)
    for number, ((x, y), heading) in enumerate(zip(people, headings, strict=True)):
        cells[y, x] = (HUMANS if number < kind.humans else ROBOTS)[heading]
    anywhere = [1, 1, SIZE - 2, SIZE - 2]
    rectangles = [[anywhere, *([*cell, *cell] for cell in own)] for own in goals]
    fixed = {"goal_weight": _WEIGHTS, "horizon": 0, "drop": False}
    return ground, parse_map(_text(cells), goals=rectangles, **fixed)


def _text(cells: np.ndarray) -> str:
    return "\n".join("".join(row) for row in cells)


def _is_passage(cells: np.ndarray, cell: Cell) -> bool:
    """Whether walls stand on two opposite sides and none on the others."""
    x, y = cell
    across = [cells[y, x - 1] == "#", cells[y, x + 1] == "#"]
    along = [cells[y - 1, x] == "#", cells[y + 1, x] == "#"]
    return (all(across) and not any(along)) or (all(along) and not any(across))


def _search(
    start: Any, options: Callable[[Any], Iterator[Any]], most: int = SIZE**4
) -> Iterator[tuple[Any, int]]:
    """Everything within `most` steps of `start`, the nearest first, with its distance."""
    steps, queue = {start: 0}, deque([start])
    while queue:
        now = queue.popleft()
        yield now, steps[now]
        for after in options(now) if steps[now] < most else ():
            if after not in steps:
                steps[after] = steps[now] + 1
                queue.append(after)


def _near(cell: Cell, closed: set[Cell]) -> Iterator[Cell]:
    """The neighbours of a cell that are not closed."""
    every = ((cell[0] + dx, cell[1] + dy) for dx, dy in _MOVES)
    return (other for other in every if other not in closed)


def _reach(start: Cell, closed: set[Cell]) -> set[Cell]:
    """Cells that one gets to without entering closed ones."""
    return {cell for cell, _ in _search(start, lambda cell: _near(cell, closed))}


def _places(cells: np.ndarray, symbols: str) -> set[Cell]:
    return {(int(x), int(y)) for y, x in np.argwhere(np.isin(cells, list(symbols)))}


def _steps_to(cells: np.ndarray, human: Cell, gap: Cell) -> int:
    """Steps forward, turns not counted, that a human needs to the cell before the gap."""
    closed = _places(cells, "#o")
    found = _search(human, lambda cell: _near(cell, closed))
    return next((steps for cell, steps in found if gap in _near(cell, set())), SIZE * SIZE)


def _helps(
    cells: np.ndarray,
    robot: Cell,
    heading: int,
    humans: list[Cell],
    goals: list[list[Cell]],
    most: int,
) -> bool:
    """Whether the robot alone can let every human get to all of its goals in `most` actions.
    The robot walks through humans and doors in this search; a rock is pushed to cells that are
    empty at the start alone.
    """
    walls, filled = _places(cells, "#"), _places(cells, "#D") | set(humans)

    def options(now: tuple[Cell, int, frozenset[Cell]]) -> Iterator[Any]:
        at, heading, rocks = now
        yield from ((at, (heading + turn) % 4, rocks) for turn in (1, 3))
        dx, dy = _MOVES[heading]
        ahead, beyond = (at[0] + dx, at[1] + dy), (at[0] + 2 * dx, at[1] + 2 * dy)
        if ahead in rocks:
            if beyond not in filled | rocks:
                yield ahead, heading, (rocks - {ahead}) | {beyond}
        elif ahead not in walls:
            yield ahead, heading, rocks

    @functools.cache  # most actions move no rock
    def open_to_all(rocks: frozenset[Cell]) -> bool:
        pairs = zip(humans, goals, strict=True)
        return all(set(own) <= _reach(human, walls | rocks) for human, own in pairs)

    start = (robot, int(heading), frozenset(_places(cells, "o")))
    return any(open_to_all(rocks) for (*_, rocks), _ in _search(start, options, most))
