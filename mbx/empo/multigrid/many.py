"""Worlds of many maps: a generator's, or a folder's, some of them held out of training."""

from __future__ import annotations

import os
from typing import NamedTuple

import numpy as np

from mbx.empo.multigrid.family import Family, family_world, make_family
from mbx.empo.multigrid.generate import generate
from mbx.empo.multigrid.layout import Layout, read_worlds
from mbx.empo.power.equations import PowerParams
from mbx.empo.power.named import HumanModel, NamedWorld


class Choice(NamedTuple):
    """Which maps."""

    maps: int = 64  # to train on; of a folder at most that many
    held_out: int = 16  # others that only evaluations see
    seed: int = 0  # of the generator, or of the draw of a folder's held-out maps


def make_many(
    source: str,
    choice: Choice,
    humans: HumanModel | None = None,
    *,
    params: PowerParams | None = None,
    default: PowerParams | None = None,
) -> NamedWorld:
    """A world whose episodes begin on the maps to train on, and one on those held out.
    humans and params come from the maps' files where None; default: parameters where they have
    none.

    Raises:
        ValueError: as `choose` does; for maps that do not go together (`make_family`), and humans
            that need a list of states.
    """
    family, own, people = choose(source, choice)
    params = params or own or default
    people = humans or people or HumanModel()
    nu_h = params.nu_h if params else 0.0
    numbers = np.arange(len(family.layouts))
    training, held_out = numbers[choice.held_out :], numbers[: choice.held_out]
    return NamedWorld(
        family_world(family, training, people, nu_h),
        params,
        held_out=family_world(family, held_out, people, nu_h) if choice.held_out else None,
        prior="uniform" if people.model == "uniform" else "paths",
    )


def choose(source: str, choice: Choice) -> tuple[Family, PowerParams | None, HumanModel | None]:
    """The maps, those held out first, with the parameters and humans that their files give.
    source: a generator's name (`generate.KINDS`); or, with a / or a dot in it, the path of a folder
        of YAML files, or of one file with several maps.

    Raises:
        ValueError: for an unknown generator, too few maps, a seed that chooses nothing, and files
            that differ in what they say of power and humans.
        FileNotFoundError: for a path where nothing is.
    """
    if choice.maps < 1 or choice.held_out < 0:
        raise ValueError(
            f"env.maps={choice.maps}, env.held_out={choice.held_out}: at least 1 and 0"
        )
    if "/" not in source and "." not in source:
        made = generate(source, choice.maps + choice.held_out, seed=choice.seed)
        return make_family(made), None, None
    read = _read(source)
    if len(read) <= choice.held_out:
        raise ValueError(
            f"{source} has {len(read)} maps, of which env.held_out={choice.held_out} are for "
            "evaluations: give more maps or hold fewer out"
        )
    if choice.seed and not choice.held_out and choice.maps >= len(read):
        raise ValueError(
            f"env.map_seed={choice.seed} has no effect: {source} has {len(read)} maps, all of "
            "which are trained on; hold some out (env.held_out), or leave it 0"
        )
    names, layouts, params, humans = zip(*read, strict=True)
    for name, *given in zip(names, params, humans, strict=True):
        if given != [params[0], humans[0]]:
            raise ValueError(
                f"{name} says other things of power or humans than {names[0]}: one run has one "
                "robot, give all the same"
            )
    order = np.random.default_rng(choice.seed).permutation(len(read))
    order = order[: choice.held_out + choice.maps]
    family = make_family([layouts[i] for i in order], [names[i] for i in order])
    return family, params[0], humans[0]


def _read(path: str) -> list[tuple[str, Layout, PowerParams | None, HumanModel | None]]:
    """Every map with its name, in the order of names."""
    if not os.path.isdir(path):
        return [(f"{path}, map {n + 1}", *found) for n, found in enumerate(read_worlds(path))]
    files = sorted(os.path.join(path, name) for name in os.listdir(path) if name[-5:] == ".yaml")
    if not files:
        raise ValueError(f"{path} holds no .yaml file: give a folder of maps")
    return [(file, *found) for file in files for found in read_worlds(file)]
