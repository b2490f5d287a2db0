"""Rounded weights and activations, against loops over single values and products of integers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from rounding_by_loops import activations_by_loops, static_ends, to_even, weight_by_loops
from torch import Tensor, nn

from gatelab.evaluate.quantisation.layers import Place
from gatelab.evaluate.quantisation.rounding import integer_grid, range_of, rounded, rounded_weight
from gatelab.evaluate.quantisation.schemes import (
    SCHEMES,
    ActivationRounding,
    Levels,
    Scheme,
    WeightRounding,
    find_scheme,
    parse_schemes,
)
from gatelab.evaluate.quantisation.simulated import calibrate, quantised

INPUTS, OUTPUTS, TOKENS, TEXTS = 64, 7, 13, 3


class OneLayer(nn.Module):
    """A list of one layer, so that it looks like a decoder."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None):
        super().__init__()
        linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, dtype=weight.dtype)
        linear.weight.data = weight.clone()
        if bias is not None:
            linear.bias.data = bias.clone()
        self.layers = nn.ModuleList([nn.Sequential(linear)])

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[0](x)


def normal(*shape: int, seed: int = 0) -> Tensor:
    """Values with a few that are far out, and an off-centre mean."""
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    values.view(-1)[:: 5 * shape[-1] + 3] *= 30
    return values + 0.4


@pytest.fixture
def weight() -> Tensor:
    found = normal(OUTPUTS, INPUTS)
    found[2] = 0
    return found


@pytest.mark.parametrize("name", SCHEMES)
def test_schemes_are_those_of_loops(name: str, weight: Tensor) -> None:
    scheme, bias = SCHEMES[name], normal(OUTPUTS, seed=8)
    calibration, x = normal(TEXTS, TOKENS, INPUTS, seed=1), 3 * normal(TOKENS - 2, INPUTS, seed=2)
    model = OneLayer(weight, bias)
    with quantised(model, scheme, calibration=calibration) as clipped:
        found = model(x)
        weights = model.layers[0].get_parameter("0.weight").clone()
    expected_weight, read = weight.tolist(), x.tolist()
    if scheme.weights is not None:
        expected_weight = weight_by_loops(weight.tolist(), scheme.weights)
    torch.testing.assert_close(weights, torch.tensor(expected_weight, dtype=torch.float64), rtol=1e-12, atol=1e-12)
    if scheme.activations is not None:
        ends = static_ends(calibration.flatten().tolist(), scheme.activations)
        read = activations_by_loops(x.tolist(), scheme.activations, ends)
        if scheme.needs_calibration:
            outside = sum(not ends[0] <= value <= ends[1] for value in x.flatten().tolist())
            assert outside and clipped[Place(0, "0")].value == outside / x.numel()
    expected = [
        [sum(a * b for a, b in zip(token, row, strict=True)) + float(b0) for row, b0 in
         zip(expected_weight, bias, strict=True)]
        for token in read
    ]  # fmt: skip
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=1e-9, atol=1e-9)
    assert (found - model(x)).abs().max() > 1e-4, "a scheme that changes nothing"


def test_int8_by_token_and_channel_is_a_product_of_integers(weight: Tensor) -> None:
    x = normal(TOKENS, INPUTS, seed=3)
    model = OneLayer(weight)
    with quantised(model, SCHEMES["w8a8_per_token"]):
        found = model(x)
    integers, steps = [], []
    for side in (x, weight):
        step = side.abs().amax(1) / 127
        steps.append(torch.where(step == 0, 1, step))
        rows = [[to_even(value / float(one)) for value in row] for row, one in
                zip(side.tolist(), steps[-1], strict=True)]  # fmt: skip
        integers.append(torch.tensor(rows, dtype=torch.int32))
        assert integers[-1].abs().max() == 127
    product = integers[0].to(torch.int64) @ integers[1].T.to(torch.int64)
    torch.testing.assert_close(found, product * steps[0][:, None] * steps[1], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("levels", [Levels(), Levels(bits=4), Levels(bits=3, symmetric=False), Levels(kind="e4m3")])
def test_rounding_twice_is_rounding_once(levels: Levels) -> None:
    x = normal(TOKENS, INPUTS, seed=4)
    ends = range_of(x.amin(), x.amax(), levels)
    once = rounded(x, ends, levels)
    torch.testing.assert_close(rounded(once, ends, levels), once, rtol=1e-15, atol=1e-15)
    assert len(once.unique()) <= 2**levels.bits
    if levels.kind == "integer":
        grid = integer_grid(ends, levels)
        assert torch.equal(grid.integers(grid.values(grid.integers(x))), grid.integers(x))
    if levels.symmetric:
        weight = WeightRounding(levels=levels, per="channel")
        twice = rounded_weight(rounded_weight(x, weight), weight)
        torch.testing.assert_close(twice, rounded_weight(x, weight), rtol=1e-13, atol=1e-13)


def test_zero_stays_zero_and_a_range_of_zeros_has_levels() -> None:
    for levels in (Levels(), Levels(symmetric=False), Levels(kind="e4m3")):
        x = torch.tensor([0.0, 3.0, 5.0], dtype=torch.float64)
        assert rounded(x, range_of(x.amin(), x.amax(), levels), levels)[0] == 0
        zeros = torch.zeros(4, dtype=torch.float64)
        assert torch.equal(rounded(zeros, range_of(zeros.amin(), zeros.amax(), levels), levels), zeros)


def test_values_beyond_a_range_come_to_its_ends() -> None:
    x = torch.tensor([-9.0, -1.0, 0.5, 2.0, 9.0], dtype=torch.float64)
    for levels, expected in ((Levels(symmetric=False), (-1.0, 2.0)), (Levels(), (-2.0, 2.0))):
        ends = range_of(torch.tensor(-1.0).double(), torch.tensor(2.0).double(), levels)
        found = rounded(x, ends, levels)
        step = float(integer_grid(ends, levels).step)
        assert (float(found[0]), float(found[-1])) == pytest.approx(expected, abs=step / 2)
        assert ends.beyond(x).tolist() == [True, False, False, False, True]


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("tail", [0.0, 0.0003, 0.01])
def test_static_ranges_are_the_sorted_values(symmetric: bool, tail: float) -> None:
    rounding = ActivationRounding(levels=Levels(symmetric=symmetric), static=True, tail=tail)
    model, calibration = OneLayer(normal(OUTPUTS, INPUTS)), normal(TEXTS, 40, INPUTS, seed=6)
    place = Place(0, "0")
    linear = model.layers[0].get_submodule("0")
    assert isinstance(linear, nn.Linear)
    found = calibrate(model, {place: linear}, rounding, calibration)[place]
    assert (float(found.low), float(found.high)) == static_ends(calibration.flatten().tolist(), rounding)


def test_bfloat16_is_rounded_in_float32(weight: Tensor) -> None:
    narrow = weight.bfloat16()
    for name in ("w8a8_per_token", "fp8_per_token", "int8_weights"):
        rounding = SCHEMES[name].weights
        assert rounding is not None
        wide = rounded_weight(narrow.float(), rounding).bfloat16()
        if name != "int8_weights":
            assert torch.equal(rounded_weight(narrow, rounding), wide)
        assert rounded_weight(narrow, rounding).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("w8a9", "scheme 'w8a9' is unknown; did you mean 'w8a8'? the choices are: w8a8, w8a8_percentile"),
        ("fp8,w8a8,fp8", "scheme fp8 is given twice; give each scheme once"),
        (" ,", "schemes ' ,' names none; did you mean 'w8a8'?"),
    ],
)
def test_names_that_are_no_schemes(words: str, message: str) -> None:
    with pytest.raises(ValueError) as error:
        parse_schemes(words)
    assert message in str(error.value)


def test_names_with_commas() -> None:
    assert parse_schemes("w8a8, fp8,") == ("w8a8", "fp8")
    assert find_scheme("fp8") is SCHEMES["fp8"]


@pytest.mark.parametrize(
    ("scheme", "message"),
    [
        ({}, "the scheme rounds neither weights nor activations, so it changes nothing; give one"),
        ({"weights": {"levels": {"bits": 1}}}, "weights.levels: bits=1 can't be simulated; take 2 to 8"),
        ({"weights": {"levels": {"bits": 16}}}, "weights.levels: bits=16 can't be simulated; take 2 to 8"),
        ({"weights": {"levels": {"kind": "e4m3", "bits": 4}}}, "e4m3 has 8 bits and is symmetric; leave bits and"),
        ({"weights": {"levels": {"kind": "e5m2"}}}, "kind cannot be 'e5m2'; did you mean 'e4m3'?"),
        ({"weights": {"per": "group"}}, "per=group with group_size=None is impossible; give it with per=group"),
        ({"weights": {"group_size": 32}}, "per=channel with group_size=32 is impossible"),
        ({"weights": {"levels": {"kind": "torchao_int8"}, "per": "tensor"}}, "a step for each channel, not per=tensor"),
        ({"activations": {"static": True, "per": "token"}}, "a static range holds for every token, so per=token is"),
        ({"activations": {"tail": 0.001}}, "tail=0.001 cuts values of a calibration, and there is none; take static"),
        ({"activations": {"levels": {"kind": "torchao_int8"}}}, "torchao_int8 is for weights; take integer for"),
    ],
)
def test_schemes_without_a_meaning_are_refused(scheme: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as error:
        Scheme.parse({"origin": "here", **scheme})
    assert message in str(error.value)


def test_the_documentation_has_every_scheme() -> None:
    text = (Path(__file__).parents[3] / "docs" / "quantisation.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| ([^|]*) \| ([^|]*) \| ([^|]*) \|$", text, re.MULTILINE)
    parts = [(one.weights, one.activations) for one in SCHEMES.values()]
    described = [[part.description if part else "" for part in both] for both in parts]
    assert [tuple(map(str.strip, row)) for row in rows if row[1] and "+" not in row[1]] == [
        (name, *words, scheme.origin) for (name, scheme), words in zip(SCHEMES.items(), described, strict=True)
    ]


def test_schemes_survive_their_file() -> None:
    for scheme in SCHEMES.values():
        assert Scheme.from_yaml(scheme.to_yaml()) == scheme
    assert len({scheme.to_yaml() for scheme in SCHEMES.values()}) == len(SCHEMES)
