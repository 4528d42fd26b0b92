"""Settings are declared once; dictionaries, checks and refusals follow from that."""

from __future__ import annotations

import dataclasses

import pytest

from mbx import settings
from mbx.settings import NONZERO, section, setting


@dataclasses.dataclass(frozen=True)
class Loss:
    target: str = setting("planner", "of the values", choices=("planner", "lambda"))
    lambda_: float = setting(0.95, "trace", at_most=1, needs={"target": "lambda"})
    optimism: float = setting(0.0, "of targets", at_least=None)
    bound: float = setting(1.0, "of the optimism", above=0, needs={"optimism": NONZERO})
    depth: int = setting(2, "of the bound", needs={"bound": (1.0, 2.0)})

    def check(self):
        if self.optimism > 5:
            yield f"optimism={self.optimism}: more than the critic can follow, lower it"


@dataclasses.dataclass(frozen=True)
class Whole:
    seed: int = setting(0, "of everything")
    names: tuple[str, ...] = setting((), "of tasks")
    arguments: dict = setting({}, "a user's own")
    loss: Loss = section(Loss(), "what is minimised")
    size: int = setting(4, "of a batch", at_least=1, needs={"loss.target": ("planner", "lambda")})
    tail: int = setting(0, "of a name", needs={"several": True})

    @property
    def several(self):
        """two or more names"""
        return len(self.names) > 1

    def check(self):
        if self.size > self.seed + 10:
            yield f"size={self.size} exceeds seed + 10 = {self.seed + 10}: lower it"


def read(**values):
    return settings.from_dict(Whole(), values)


def test_each_number_of_a_tuple_has_its_type():
    assert settings._convert([1.0, 2], tuple[int, ...], "a") == (1, 2)
    assert settings._convert([1, 2.5], tuple[float, float], "a") == (1.0, 2.5)
    for kind in (tuple, tuple[int, float], tuple[str, ...]):
        assert settings._convert([1, 2.5], kind, "a") == (1, 2.5)
    with pytest.raises(ValueError, match=r"config.a=2.5: give a whole number"):
        settings._convert((1, 2.5), tuple[int, ...], "a")


def test_dictionaries_go_out_and_come_back():
    changed = dataclasses.replace(Whole(), seed=3, loss=Loss(target="lambda", lambda_=0.5))
    values = settings.to_dict(changed)
    assert values["loss"]["lambda_"] == 0.5 and list(values) == [
        "seed",
        "names",
        "arguments",
        "loss",
        "size",
        "tail",
    ]
    assert settings.from_dict(Whole(), values) == changed
    assert read() == Whole()
    one, other = read(arguments=dict(mass=1.0)), read(arguments=dict(mass=2.0))
    assert one != other and hash(one) == hash(one) and one.arguments == {"mass": 1.0}


def test_json_and_exponents_are_read_as_the_declared_type():
    loaded = read(names=["a", "b"], seed=1e4, loss={"optimism": 1})
    assert loaded.names == ("a", "b")
    assert loaded.seed == 10_000 and isinstance(loaded.seed, int)
    assert isinstance(loaded.loss.optimism, float)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"sead": 1}, r"config\.sead is not a setting: did you mean seed"),
        ({"loss": {"lambda": 1}}, r"config\.loss\.lambda is not a setting.*lambda_"),
        ({"loss": 3}, r"config\.loss=3: a section"),
        ({"seed": 1.5}, r"config\.seed=1\.5: give a whole number"),
        ({"seed": True}, r"config\.seed=True: give a whole number"),
        ({"names": "ab"}, r"config\.names='ab'"),
        ({"seed": -1}, r"config\.seed=-1: give at least 0"),
        ({"size": 0}, r"config\.size=0: give at least 1"),
        ({"loss": {"optimism": float("nan")}}, r"config\.loss\.optimism=nan: give a finite"),
        ({"loss": {"target": "td"}}, r"config\.loss\.target='td': choose one of \('planner'"),
        ({"loss": {"target": "lambda", "lambda_": 1.5}}, r"lambda_=1\.5: give at least 0 and at m"),
        ({"loss": {"optimism": 1.0, "bound": 0.0}}, r"bound=0\.0: give more than 0"),
        ({"loss": {"optimism": 6.0}}, r"config\.loss\.optimism=6\.0: more than the critic"),
        ({"size": 11}, r"config\.size=11 exceeds seed \+ 10 = 10"),
    ],
)
def test_a_mistake_names_the_setting_its_value_and_the_remedy(values, message):
    with pytest.raises(ValueError, match=message):
        read(**values)


def test_a_changed_setting_without_effect_is_refused():
    with pytest.raises(
        ValueError, match=r"lambda_=0\.5 has no effect.*loss\.target='lambda'.*0\.95"
    ):
        read(loss={"lambda_": 0.5})
    assert read(loss={"target": "lambda", "lambda_": 0.5}).loss.lambda_ == 0.5
    with pytest.raises(
        ValueError, match=r"loss\.bound=2\.0 has no effect.*loss\.optimism=something"
    ):
        read(loss={"bound": 2.0})
    assert read(loss={"bound": 2.0, "optimism": -1.0}).loss.bound == 2.0


def test_a_condition_over_several_settings_is_a_property_and_its_docstring():
    with pytest.raises(ValueError, match=r"config\.tail=3 has no effect.*needs two or more names;"):
        read(tail=3, names=("a",))
    assert read(tail=3, names=("a", "b")).tail == 3


def test_what_needs_an_inactive_setting_is_inactive_too():
    none = {"loss.lambda_", "loss.bound", "loss.depth", "tail"}
    assert set(settings.inactive(Whole())) == none
    assert settings.inactive(Whole())["loss.depth"] == "loss.optimism=something other than 0"
    active = read(loss={"optimism": 1.0, "bound": 3.0})
    assert settings.inactive(active)["loss.depth"] == "loss.bound=1.0 or 2.0"


def test_descriptions_hold_help_limits_and_defaults_of_the_object_described():
    found = {x.name: x for x in settings.describe(dataclasses.replace(Whole(), seed=7))}
    assert found["seed"].default == 7 and found["seed"].help == "of everything"
    assert found["loss"].help == "what is minimised" and found["loss"].default is None
    assert found["loss.target"].allowed == "one of planner, lambda"
    assert found["names"].allowed == ""  # no number, so no limits of one
    assert found["loss.lambda_"].allowed == "at least 0 and at most 1"
    assert found["loss.bound"].allowed == "more than 0" and found["loss.optimism"].allowed == ""
    assert found["loss.bound"].needs == {"loss.optimism": NONZERO}
