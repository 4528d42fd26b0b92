"""Settings that a world leaves without effect: `check_world` refuses them by name.

What other settings leave without effect is declared with them (`settings`, `mbx.settings`); these
depend on what is known only once the world is made.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mbx.empo.agent.settings import Settings
from mbx.types import EnvSpec


def check_world(settings: Settings, spec: EnvSpec) -> None:
    """Raises ValueError for the first setting that has no effect in the world of `spec`."""
    assert spec.world is not None
    for section, name, why in _idle(settings, spec):
        own = getattr(settings, section)
        value, normal = getattr(own, name), getattr(type(own)(), name)
        if value != normal:
            raise ValueError(
                f"{section}.{name}={value!r} has no effect with env.name={spec.name!r}: {why}; "
                f"leave it {normal!r}"
            )


def _idle(settings: Settings, spec: EnvSpec) -> Iterator[tuple[str, str, str]]:
    """Section, name and reason of every setting that does nothing in this world."""
    found: Any = spec.world
    room, most = settings.loss.room, found.world.max_successors
    if room > most:
        yield "loss", "room", f"a joint action has at most {most} successors there"
    if (not room or room >= most) and (found.table is not None or found.prior):
        yield "loss", "max_lost", f"loss.room={room} has room for every successor"
    prior = found.prior or "exact"  # of one's own humans nobody knows what they reckon with
    if settings.env.varied_starts and found.world.states is not None:
        yield "env", "walk", "its states are listed, and each is as likely"
    if prior != "exact":
        for name in ("beta_h", "optimistic"):
            yield "power", name, f"its humans are {prior!r}, and only exact ones are of eq. (2)"
    if prior in ("uniform", "file"):
        yield "power", "nu_h", f"its humans are {prior!r}, which are taken as they are"
    if found.prior and prior != "paths":
        yield "humans", "beta", f"its humans are {prior!r}, not 'paths'"
    if not spec.name.startswith("empo:multigrid/"):
        for name in ("max_states", "max_joint"):
            yield "humans", name, "it is for empo:multigrid/MAP"
    elif settings.humans.model == "exact":
        yield "humans", "max_joint", "humans.model='exact' lists states however many actions are"
