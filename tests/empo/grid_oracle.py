"""The multigrid's rules once more, slowly: plain Python over dictionaries, chance by brute force.

Nothing here is shared with `mbx.empo.multigrid` but the layout, so that the two can be
compared.
"""

from __future__ import annotations

import copy
import itertools

import numpy as np

from mbx.empo.multigrid import state as grid_state
from mbx.empo.multigrid.layout import DROP, FORWARD, LEFT, PICK_UP, RIGHT, STILL, TOGGLE

AHEAD = [(1, 0), (0, 1), (-1, 0), (0, -1)]
KEY, BOX = 0, 2
KILL, PAUSE, CONTROL, DISABLE = range(4)


class Oracle:
    """All outcomes of a joint action: `outcomes(state, actions)` -> {state key: probability}."""

    def __init__(self, layout):
        self.layout = layout
        self.group = [0 if human else 1 for human in layout.is_human]

    def outcomes(self, state, actions):
        world = self.read(state)
        acts = self.commanded(world, list(actions))
        found: dict = {}
        stumble = self.layout.stumble
        ways = [(0, 1 - stumble), (-1, stumble / 2), (1, stumble / 2)]
        shaky = [self.layout.unsteady[agent[1::-1]] for agent in world["agents"]]
        slips = [
            ways if shaky[i] and self.walks(world, acts, i) else [(0, 1.0)]
            for i in range(len(acts))
        ]
        for slip in itertools.product(*slips):
            turned = copy.deepcopy(world)
            for i, (by, _) in enumerate(slip):
                x, y, d = turned["agents"][i]
                turned["agents"][i] = (x, y, (d + by) % 4)
            chance = np.prod([p for _, p in slip])
            for answer, p in self.magic_answers(turned, acts):
                for order, q in self.orders(turned, acts):
                    after = self.run(turned, world, acts, order, answer)
                    key = self.key(after, int(state.time) + 1)
                    found[key] = found.get(key, 0.0) + chance * p * q
        return {key: p for key, p in found.items() if p > 0}

    # State <-> dictionaries

    def read(self, state):
        s = [np.asarray(x).tolist() for x in state]
        return dict(
            agents=[tuple(a) for a in s[0]],
            alive=[bool(a) for a in s[1]],
            movable=[tuple(m) for m in s[2]],
            doors=list(s[3]),
            items=[tuple(i) for i in s[4]],
            buttons=[list(b) for b in s[5]],
            forced=list(s[6]),
            solid=[bool(w) for w in s[7]],
        )

    def key(self, world, time):
        parts = [np.ravel(part).astype(int) for part in world.values()]  # in the order of `State`
        return (*np.concatenate(parts).tolist(), time)

    # Before the step, and chance

    def commanded(self, world, actions):
        for i in range(len(actions)):
            if world["forced"] and world["forced"][i]:
                actions[i] = world["forced"][i] - 1
            for u, (enabled, on, *_) in enumerate(world["buttons"]):
                if self.layout.button_kind[u] == PAUSE and enabled and on:
                    if self.layout.button_target[u] == self.group[i]:
                        actions[i] = STILL
        world["forced"] = [0] * len(world["forced"])
        return actions

    def walks(self, world, actions, i):
        return world["alive"][i] and actions[i] == FORWARD

    def ahead(self, world, i):
        x, y, d = world["agents"][i]
        return (x + AHEAD[d][0], y + AHEAD[d][1])

    def asks(self, world, actions, i):
        """Number of the magic wall or bush that agent i asks, or None."""
        for w, place in enumerate(self.layout.magic.tolist()):
            who = self.layout.is_human if self.layout.bush[w] else self.layout.may_enter_magic
            if not self.walks(world, actions, i) or not who[i]:
                continue
            side = self.layout.magic_side[w]
            right = side == 4 or world["agents"][i][2] == (side + 2) % 4
            if tuple(place) == self.ahead(world, i) and right and not world["solid"][w]:
                return w
        return None

    def magic_answers(self, world, actions):
        entry, hard = self.layout.magic_entry, self.layout.magic_solidify
        ways = [("in", entry), ("out", (1 - entry) * (1 - hard)), ("stone", (1 - entry) * hard)]
        each = [
            [("none", 1.0)] if self.asks(world, actions, i) is None else ways
            for i in range(len(actions))
        ]
        for combination in itertools.product(*each):
            yield [a for a, _ in combination], np.prod([p for _, p in combination])

    def orders(self, world, actions):
        claims: dict = {}
        for i, action in enumerate(actions):
            reaching = world["alive"][i] and action >= FORWARD
            claim = self.ahead(world, i) if reaching else ("own", i)
            if reaching and self.layout.physics == "reference":
                row = self.row(world, [a[:2] for a in world["agents"]], i)
                item = ("item", claim) if claim in world["items"] else ("own", i)
                pushed = ("own", i) if row is None else row[1]
                claim = {FORWARD: pushed, PICK_UP: item}.get(action, ("own", i))
            claims.setdefault(claim, []).append(i)
        blocks = list(claims.values())
        for winners in itertools.product(*blocks):
            losers = [i for block in blocks for i in block if i not in winners]
            share = 1.0 / np.prod([len(b) for b in blocks])
            yield sorted(winners) + sorted(losers), share

    # One order of turns

    def run(self, turned, before, actions, order, answer):
        world = copy.deepcopy(turned)
        began = [a[:2] for a in before["agents"]]
        for i in order:
            if not world["alive"][i]:
                continue
            x, y, d = world["agents"][i]
            if actions[i] in (LEFT, RIGHT):
                world["agents"][i] = (x, y, (d + (1 if actions[i] == RIGHT else -1)) % 4)
            elif actions[i] == FORWARD:
                self.forward(world, began, i, answer[i], actions)
            elif actions[i] == TOGGLE:
                self.toggle(world, before, i)
            elif actions[i] == PICK_UP and not self.carried(world, i):
                for q, place in enumerate(world["items"]):
                    if place == self.ahead(world, i):
                        world["items"][q] = (grid_state.CARRIED, i)
            elif actions[i] == DROP and self.carried(world, i):
                cell = self.ahead(world, i)
                fixed = [*self.layout.magic.tolist(), *self.layout.doors.tolist()]
                if not (
                    self.closed(world, began, cell, None)
                    or self.layout.lava[cell[::-1]]
                    or cell in world["movable"]
                    or list(cell) in fixed
                ):
                    world["items"][self.carried(world, i)[0]] = cell
        for u, (_, waits, _, learner) in enumerate(before["buttons"]):
            now = world["buttons"][u]
            if self.layout.button_kind[u] == CONTROL and waits and now[3] == learner:
                now[1], now[2] = 0, actions[learner - 1] + 1
        return world

    def carried(self, world, i):
        return [q for q, place in enumerate(world["items"]) if place == (grid_state.CARRIED, i)]

    def closed(self, world, began, cell, me):
        """To agent `me`; None: to everybody."""
        if self.layout.wall[cell[::-1]]:
            return True
        for u, place in enumerate(self.layout.doors.tolist()):
            if tuple(place) == cell and world["doors"][u] != 0:
                return True
        if cell in world["items"] or list(cell) in self.layout.buttons.tolist():
            return True
        others = [i for i in range(len(began)) if i != me]
        there = any(world["agents"][i][:2] == cell or began[i] == cell for i in others)
        return there and not self.layout.lava[cell[::-1]]

    def forward(self, world, began, i, answer, actions):
        cell = self.ahead(world, i)
        x, y, d = world["agents"][i]
        if self.closed(world, began, cell, i):
            return
        for w, place in enumerate(self.layout.magic.tolist()):
            if tuple(place) != cell:
                continue
            bush = self.layout.bush[w]
            if bush and (world["solid"][w] or not self.layout.is_human[i]):
                world["solid"][w] = True
            elif self.asks(world, actions, i) is None:
                return
            elif answer != "in":
                world["solid"][w] |= answer == "stone" and not bush
                return
            elif bush:
                world["solid"][w] = True
        row = self.row(world, began, i)
        if row is None:
            return
        for m in row[0]:
            mx, my = world["movable"][m]
            world["movable"][m] = (mx + AHEAD[d][0], my + AHEAD[d][1])
        for j in row[2]:
            world["alive"][j], world["agents"][j] = False, (0, 0, world["agents"][j][2])
        world["agents"][i] = (*cell, d)
        if self.layout.lava[cell[::-1]]:
            world["alive"][i] = False

    def row(self, world, began, i):
        """The things that agent i pushes by going ahead, where the last one lands and whom it hits;
        None where they are stuck."""
        (dx, dy), cell, row = AHEAD[world["agents"][i][2]], self.ahead(world, i), []
        while cell in world["movable"] and (not row or self.layout.physics == "reference"):
            row.append(world["movable"].index(cell))
            cell = (cell[0] + dx, cell[1] + dy)
        heavy, strong = self.layout.heavy, self.layout.may_push
        if not row:
            return [], cell, []
        if any(heavy[m] for m in row) and not strong[i]:
            return None
        hit = [
            j
            for j, agent in enumerate(world["agents"])
            if agent[:2] == cell and world["alive"][j] and not strong[j] and strong[i]
        ]
        hit = hit if heavy[row[-1]] and self.layout.rocks_kill else []
        standing = [
            place
            for w, place in enumerate(self.layout.magic.tolist())
            if not (self.layout.bush[w] and world["solid"][w])
        ]
        stuck = (
            self.closed(world, began, cell, None)
            or cell in world["movable"]
            or self.layout.lava[cell[::-1]]
            or list(cell) in standing
        )
        return None if stuck and not hit else (row, cell, hit)

    def toggle(self, world, before, i):
        cell = self.ahead(world, i)
        for n, place in enumerate(self.layout.doors.tolist()):
            if tuple(place) != cell:
                continue
            keys = [
                q
                for q in self.carried(world, i)
                if self.layout.item_kind[q] == KEY
                and self.layout.item_color[q] == self.layout.door_color[n]
            ]
            used = cell in [a[:2] for a in world["agents"]] or cell in world["movable"]
            if world["doors"][n] == 1 or (world["doors"][n] == 2 and keys):
                world["doors"][n] = 0
            elif world["doors"][n] == 0 and not used:
                world["doors"][n] = 1
        for q, kind in enumerate(self.layout.item_kind):
            if kind == BOX and world["items"][q] == cell:
                world["items"][q] = (grid_state.GONE, 0)
                for other, place in enumerate(world["items"]):
                    if place == (grid_state.INSIDE, q):
                        world["items"][other] = cell
        for u, place in enumerate(self.layout.buttons.tolist()):
            if tuple(place) == cell:
                self.press(world, before, i, u)

    def press(self, world, before, i, u):
        kind, target = self.layout.button_kind[u], self.layout.button_target[u]
        trigger = self.layout.button_trigger[u] == self.group[i]
        button = world["buttons"][u]
        if kind == DISABLE and trigger:
            for v, other in enumerate(world["buttons"]):
                if self.layout.button_kind[v] == target:
                    other[0] = 1 - other[0]
        elif kind == KILL and trigger and button[0]:
            for j, group in enumerate(self.group):
                world["alive"][j] = world["alive"][j] and group != target
        elif kind == PAUSE and trigger and button[0]:
            button[1] = 1 - button[1]
        elif kind == CONTROL and button[0]:
            if trigger and button[3] and button[2]:
                world["forced"][button[3] - 1] = button[2]
            listened = before["buttons"][u][1] and button[3] == i + 1
            if target == self.group[i] and not listened:
                button[1], button[3] = 1, i + 1
