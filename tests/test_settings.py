"""Settings: YAML round trip, dotted overrides, errors that name the way out."""

from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gatelab.settings import Settings, difference, nearest


class Engine(Settings):
    power: float = 1.5
    fuel: Literal["diesel", "petrol"] = "diesel"


class Car(Settings):
    engine: Engine = Engine()
    spares: tuple[Engine, ...] = (Engine(), Engine(power=2.0))
    trailer: Engine | None = None
    name: str = "car"


def test_overrides_reach_nested_fields_lists_and_whole_records():
    car = Car().with_overrides(
        ["engine.power=3e-4", "spares.1.fuel=petrol", "trailer={power: 7}", "name=null and void"]
    )
    assert car.engine.power == 3e-4
    assert [spare.fuel for spare in car.spares] == ["diesel", "petrol"]
    assert car.trailer == Engine(power=7)
    assert car.name == "null and void"


def test_words_go_into_a_record_that_a_word_has_set():
    car = Car().with_overrides(["trailer={}", "trailer.power=7", "spares=[{fuel: petrol}]", "spares.0={}"])
    assert car.trailer == Engine(power=7)
    assert car.spares == (Engine(),)
    with pytest.raises(ValueError, match="trailer has no field 'powr'; did you mean 'power'"):
        Car().with_overrides(["trailer={}", "trailer.powr=7"])


def test_settings_are_frozen():
    with pytest.raises(ValueError, match="frozen"):
        Car().name = "other"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "engine.powr=1",
            "engine has no field 'powr'; did you mean 'power'? the choices are",
        ),
        ("engin.power=1", "the settings has no field 'engin'; did you mean 'engine'?"),
        (
            "engine.fuel=petroll",
            "fuel cannot be 'petroll'; did you mean 'petrol'? the choices are: diesel, petrol",
        ),
        ("engine.power=much", "engine.power cannot be 'much': input should be a valid number"),
        ("spares.2.power=1", "spares has 2 entries, numbered from 0, not '2'"),
        ("spares.first.power=1", "spares has 2 entries, numbered from 0, not 'first'"),
        ("trailer.power=1", "trailer is None and has no field 'power'; set trailer itself first"),
        ("trailer={weight: 1}", "'trailer.weight' is unknown; the choices are: power, fuel"),
        ("engine.power", "'engine.power' is not an assignment: write dotted.path=value"),
        ("engine=[1", "is not readable as YAML"),
    ],
)
def test_mistakes_are_named(override, message):
    with pytest.raises(ValueError) as error:
        Car().with_overrides([override])
    assert message in str(error.value)


def test_several_mistakes_are_one_line_each():
    with pytest.raises(ValueError) as error:
        Car.parse({"engine": {"powr": 1, "fuel": "coal"}, "wheels": 4})
    assert len(str(error.value).splitlines()) == 3


def test_numbers_are_finite():
    with pytest.raises(ValueError, match=r"engine.power cannot be inf: input should be a finite number"):
        Car().with_overrides(["engine.power=.inf"])


def test_a_file_that_is_no_yaml_is_refused():
    with pytest.raises(ValueError, match="a Car file is not readable as YAML"):
        Car.from_yaml("engine: [1")


def test_a_file_that_is_no_mapping_is_refused():
    with pytest.raises(ValueError, match="a Car file holds a mapping of names to values, not list"):
        Car.from_yaml("- 1\n")


@settings(deadline=None)
@given(st.floats(allow_nan=False, allow_infinity=False), st.text())
def test_yaml_round_trip(power, name):
    car = Car(engine=Engine(power=power), name=name)
    assert Car.from_yaml(car.to_yaml()) == car


def test_difference_names_every_leaf():
    other = Car().with_overrides(["engine.power=2", "trailer={}"])
    assert difference(Car(), other) == {
        "engine.power": (1.5, 2.0),
        "trailer.power": (None, 1.5),
        "trailer.fuel": (None, "diesel"),
    }
    assert difference(other, other) == {}


def test_nearest_guesses_only_what_is_near():
    assert nearest("sdpa_head", ["sdpa_headwise", "value"]).startswith("did you mean 'sdpa_headwise'?")
    assert nearest("zzz", ["a", "b"]) == "the choices are: a, b"
