"""Maps drawn at random, in which a robot matters: `generate("doors", 64, seed=0)`.

A wall with one gap divides a board of 7x7. In the gap stands a rock, which only robots push;
further walls and unlocked doors, which humans open for themselves, are strewn over both rooms. A
map is kept if no human gets to its far goals by itself, and a search over a robot's actions finds
that it can let all of them get there before any human stands in front of the gap, where it would
be in the robot's way.

Every human has four goals: anywhere (weight 1/6, always within reach, so that power is never
nothing), a cell of its own room (1/6) and two in the other (1/3 each).
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterator

import numpy as np

from mbx.empo.multigrid.layout import Layout, parse_map
from mbx.empo.multigrid.objects import HUMANS, ROBOTS

SIZE = 7
_MOVES = ((1, 0), (0, 1), (-1, 0), (0, -1))
_WEIGHTS = (1, 1, 2, 2)
_TRIES = 20_000

Cell = tuple[int, int]


@dataclasses.dataclass(frozen=True)
class Kind:
    """What a generator draws."""

    humans: int = 1  # how many
    robots: int = 1  # how many
    doors: int = 0  # most unlocked doors
    walls: float = 0.2  # probability of a further wall in a cell


KINDS = {"rocks": Kind(), "rocks_2h2r": Kind(humans=2, robots=2, walls=0.1), "doors": Kind(doors=2)}


def generate(name: str, number: int, *, seed: int = 0) -> list[Layout]:
    """Different maps: no two have the same walls, things and goals.

    Args:
        name: one of KINDS.
        number: how many.
        seed: of the draws; the first maps of a longer list are those of a shorter one.

    Raises:
        ValueError: for an unknown name, and where too few different maps are found.
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
            found.setdefault(drawn.ground, drawn.layout())
    return list(found.values())


@dataclasses.dataclass
class _Drawn:
    """A map's text by cell, who stands where, and where humans want to be."""

    cells: np.ndarray
    agents: list[tuple[Cell, str]]
    goals: list[list[Cell]]

    @property
    def ground(self) -> str:
        """What makes maps different."""
        return "\n".join("".join(row) for row in self.cells) + repr(self.goals)

    def layout(self) -> Layout:
        cells = self.cells.copy()
        for (x, y), symbol in self.agents:
            cells[y, x] = symbol
        anywhere = [1, 1, SIZE - 2, SIZE - 2]
        goals = [[anywhere, *([*cell, *cell] for cell in own)] for own in self.goals]
        text = "\n".join("".join(row) for row in cells)
        return parse_map(text, goals=goals, goal_weight=_WEIGHTS, horizon=0, drop=False)


def _draw(kind: Kind, rng: np.random.Generator) -> _Drawn | None:
    """A map, or None where what was drawn is of no use."""
    cells = np.full((SIZE, SIZE), ".")
    cells[[0, -1]] = cells[:, [0, -1]] = "#"
    wall, gap = int(rng.integers(2, SIZE - 2)), int(rng.integers(1, SIZE - 1))
    strewn = rng.random((SIZE, SIZE)) < kind.walls
    cells[strewn] = "#"
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
    passages = [cell for cell in order if _is_passage(cells, cell)]
    for x, y in passages[: kind.doors]:
        cells[y, x] = "D"
    turned = bool(rng.integers(2))
    headings = rng.integers(0, 4, len(people))
    goals = []
    for human in humans:
        near, far = _rooms(cells, human)
        near = [cell for cell in order if cell in near and cells[cell[1], cell[0]] == "."]
        far = [cell for cell in order if cell in far and cells[cell[1], cell[0]] == "."]
        if not near or len(far) < 2:
            return None
        goals.append([near[0], far[0], far[1]])
    waits = min(_steps_to(cells, human, (wall, gap)) for human in humans)
    helped = [
        _helps(cells, robot, headings[kind.humans + number], humans, goals, waits)
        for number, robot in enumerate(robots)
    ]
    if not any(helped):
        return None
    agents = [
        (cell, (HUMANS if number < kind.humans else ROBOTS)[headings[number]])
        for number, cell in enumerate(people)
    ]
    if turned:
        flip = lambda cell: (cell[1], cell[0])  # noqa: E731
        cells, agents = cells.T.copy(), [(flip(cell), symbol) for cell, symbol in agents]
        goals = [[flip(cell) for cell in own] for own in goals]
    return _Drawn(cells, agents, goals)


def _is_passage(cells: np.ndarray, cell: Cell) -> bool:
    """Whether walls stand on two opposite sides and none on the others."""
    x, y = cell
    across = [cells[y, x - 1] == "#", cells[y, x + 1] == "#"]
    along = [cells[y - 1, x] == "#", cells[y + 1, x] == "#"]
    return (all(across) and not any(along)) or (all(along) and not any(across))


def _near(cell: Cell) -> Iterator[Cell]:
    for dx, dy in _MOVES:
        yield cell[0] + dx, cell[1] + dy


def _reach(start: Cell, closed: set[Cell]) -> set[Cell]:
    """Cells that one gets to without entering closed ones."""
    found, queue = {start}, deque([start])
    while queue:
        for cell in _near(queue.popleft()):
            if cell not in closed and cell not in found:
                found.add(cell)
                queue.append(cell)
    return found


def _places(cells: np.ndarray, symbols: str) -> set[Cell]:
    return {(int(x), int(y)) for y, x in np.argwhere(np.isin(cells, list(symbols)))}


def _rooms(cells: np.ndarray, human: Cell) -> tuple[set[Cell], set[Cell]]:
    """Where a human gets by itself, and where it would get if somebody helped."""
    own = _reach(human, _places(cells, "#o"))
    every = _reach(human, _places(cells, "#"))
    return own - {human}, every - own


def _steps_to(cells: np.ndarray, human: Cell, gap: Cell) -> int:
    """Steps forward, turns not counted, that a human needs to the cell before the gap."""
    closed = _places(cells, "#o")
    distance, queue = {human: 0}, deque([human])
    while queue:
        at = queue.popleft()
        if gap in _near(at):
            return distance[at]
        for cell in _near(at):
            if cell not in closed and cell not in distance:
                distance[cell] = distance[at] + 1
                queue.append(cell)
    return SIZE * SIZE


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
    walls, doors, rocks = _places(cells, "#"), _places(cells, "D"), frozenset(_places(cells, "o"))
    start = (robot, int(heading), rocks)
    steps, queue = {start: 0}, deque([start])
    while queue:
        now = queue.popleft()
        at, heading, rocks = now
        closed = walls | rocks
        if all(
            set(wanted) <= _reach(human, closed)
            for human, wanted in zip(humans, goals, strict=True)
        ):
            return True
        if steps[now] == most:
            continue
        dx, dy = _MOVES[heading]
        ahead, beyond = (at[0] + dx, at[1] + dy), (at[0] + 2 * dx, at[1] + 2 * dy)
        options = [(at, (heading + turn) % 4, rocks) for turn in (1, 3)]
        if ahead in rocks:
            if beyond not in closed | doors | set(humans):
                options.append((ahead, heading, (rocks - {ahead}) | {beyond}))
        elif ahead not in closed:
            options.append((ahead, heading, rocks))
        for option in options:
            if option not in steps:
                steps[option] = steps[now] + 1
                queue.append(option)
    return False
