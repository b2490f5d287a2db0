"""What the benchmarks of mixtures, data and growth compute from their measurements, and their pages."""

import argparse

import pytest
from data_page import data_page
from goals import goal, goals_table, interval_text
from mixture_step import DENSE, MIXTURE, PEER, contenders, found_in, mixture_words, work_of
from mixture_step_page import mixture_step_page
from scaling import exponent, fit_of, shape_of
from scaling_page import scaling_page
from side_by_side import command_line, median

import data
from gatelab.recipes.table import resolve
from gatelab.report.page import render

MACHINE = {"allocator": "the C library's"}
EXPERTS = {"num_experts": 4, "experts_per_token": 2, "expert_width": 64}
SHAPE = {
    "vocab_size": 512,
    "width": 64,
    "num_layers": 2,
    "num_heads": 2,
    "num_kv_heads": 1,
    "head_size": 32,
    "feedforward_width": 128,
    "context": 32,
    "sequences": 2,
}


@pytest.mark.parametrize(
    ("low", "high", "relation", "outcome"),
    [
        (1.1, 1.2, "at most", "met"),
        (1.2, 1.4, "at most", "open"),
        (1.4, 1.5, "at most", "missed"),
        (1.4, 1.5, "at least", "met"),
        (1.1, 1.2, "at least", "missed"),
    ],
)
def test_a_goal_is_decided_by_the_whole_interval(low, high, relation, outcome):
    row = goal("time", {"value": (low + high) / 2, "low": low, "high": high}, relation, 1.3)
    assert row["outcome"] == outcome
    assert goals_table([row]).cells()[0][1::2] == [f"{relation} 1.3", outcome]


def test_the_command_on_a_page_has_no_folder_and_no_default():
    parser = argparse.ArgumentParser()
    for name, default in (("--rounds", 6), ("--tokens-each", 4), ("--out", "here"), ("--allocator", None)):
        parser.add_argument(name, default=default)
    parser.add_argument("--sizes", nargs="*", default=[1])
    words = ["--tokens-each", "8", "--out", "/there", "--allocator", "/lib/fast.so", "--sizes", "2", "3"]
    command = command_line("it.py", parser, parser.parse_args(words))
    assert command == "python benchmarks/it.py --tokens-each 8 --allocator fast.so --sizes 2 3"


def test_a_value_that_was_measured_once_has_no_interval():
    assert interval_text({"value": 1.234, "low": 1.234, "high": 1.234}, ".2f") == "1.23"
    assert interval_text({"value": 1.234, "low": 1.0, "high": 2.0}, ".2f") == "1.23 [1.00, 2.00]"


def test_the_exponent_of_a_power_is_found_whatever_its_factor():
    sizes = [512, 1024, 4096]
    assert exponent(sizes, [7 * size**1.5 for size in sizes]) == pytest.approx(1.5)


def rows_that_grow(model, axis="context"):
    """Six rounds in which time goes with the size to powers from 1 to 1.5, and memory to 0.5."""
    return [
        {
            "axis": axis,
            "model": model,
            "size": size,
            "seconds": [size ** (1 + number / 10) for number in range(6)],
            "time": median([size ** (1 + number / 10) for number in range(6)]),
            "flops": float(size**2),
            "memory_bytes": [1e6 * size**0.5] * 6,
            "memory": median([size**0.5] * 6),
            "start": {"ready": 1.0},
        }
        for size in (512, 1024, 2048)
    ]


def test_exponents_are_fitted_round_by_round():
    fit = fit_of(rows_that_grow("gated"))
    assert fit["time"] == pytest.approx({"value": 1.25, "low": 1.0, "high": 1.5})
    assert fit["flops"] == pytest.approx(2)
    assert fit["memory"] == pytest.approx({"value": 0.5, "low": 0.5, "high": 0.5})


def test_the_page_of_growth_names_its_exponents():
    rows = [*rows_that_grow("gated"), *rows_that_grow("ungated")]
    fits = [fit_of(rows[:3]), fit_of(rows[3:])]
    page = render(
        scaling_page({"machine": MACHINE, "rounds": 6, "tokens": 8192, "rows": rows, "fits": fits}, "command")
    )
    assert "ungated, exponent 1.25 [1.00, 1.50]" in page and "Memory of a step against context" in page


@pytest.mark.parametrize("sizes", [{"context": 3000}, {"width": 128}, {"width": 100}])
def test_a_shape_that_cannot_be_divided_is_refused(sizes):
    with pytest.raises(ValueError, match=f"{next(iter(sizes.values()))}"):
        shape_of(8192, **sizes)


def test_shapes_keep_their_proportions():
    shape = shape_of(8192, width=576, context=2048)
    assert (shape["num_heads"], shape["num_kv_heads"], shape["feedforward_width"], shape["sequences"]) == (
        9,
        3,
        1536,
        4,
    )


def test_the_mixture_and_the_dense_model_differ_by_the_router_alone():
    works = {one.name: work_of(one, EXPERTS) for one in contenders(SHAPE, EXPERTS) if one.name != "limit"}
    assert works[MIXTURE]["router_flops"] == 6 * 64 * 4 * 2 * 64
    assert works[MIXTURE]["flops"] - works[MIXTURE]["router_flops"] == works[DENSE]["flops"]
    assert works[DENSE]["router_flops"] == 0
    assert len([name for name in works if name.startswith(PEER)]) == 6


def test_the_words_of_a_mixture_make_it():
    mixture = resolve("dense_tiny", mixture_words(EXPERTS)).model.mixture
    assert mixture is not None and (mixture.num_experts, mixture.experts_per_token, mixture.expert_width) == (4, 2, 64)


def test_the_mixture_is_judged_against_the_fastest_way_of_its_peer():
    entries = list(contenders(SHAPE, EXPERTS))
    seconds_of = {MIXTURE: 1.2, DENSE: 1.0, entries[-1].name: 2.4}
    measured = [
        {
            "name": entry.name,
            "seconds": [seconds_of.get(entry.name, 3.0)] * 6,
            "peak_bytes": [10**9] * 6,
            "start": {"ready": 1.0},
            "figures": {"flops": 1e12} if entry.name == "limit" else {},
        }
        for entry in entries
    ]
    found = found_in(entries, measured, EXPERTS)
    works = {row["name"]: row["flops"] for row in found["rows"]}
    assert found["limit_flops"] == pytest.approx(1e12 / 3)
    for row in found["rows"]:
        seconds = seconds_of.get(row["name"], 3.0)
        assert row["limit_share"] == pytest.approx(works[row["name"]] / seconds / (1e12 / 3))
    dense, peer = found["goals"]
    assert (dense["value"], dense["outcome"]) == (1.2, "met")
    assert (peer["value"], peer["outcome"]) == (2.0, "met") and entries[-1].name in peer["name"]
    about = {"machine": MACHINE, "rounds": 6, "shape": SHAPE, "mixture": EXPERTS}
    assert "1.2 (met)" in render(mixture_step_page(found | about, "command"))


def test_memory_is_judged_by_what_a_further_byte_of_text_takes():
    once = {"value": 2.0, "low": 2.0, "high": 2.0}
    memory = [
        {
            "work": work,
            "tokens_per_shard": 1024,
            "text_bytes": text,
            "peak_bytes": (10**8 if text > 10**7 else 10**6) + share * text,
            "own_bytes": None,
            "seconds": 1.0,
        }
        for work, share in (("preparing", 0), ("reading", 0.5))
        for text in (128 * 10**6, 32 * 10**6, 8 * 10**6)
    ]
    found = {
        "machine": MACHINE,
        "rounds": 6,
        "text_megabytes": 4,
        "rows": [{"name": data.ONE_CORE, "seconds": [2.0] * 6, "megabytes_per_second": once}],
        "loader_share": {"value": 0.001, "low": 0.0009, "high": 0.0011},
        "memory": memory,
    }
    goals = data.goals_of(found)
    assert [row["outcome"] for row in goals] == ["met", "met", "met", "missed"]
    assert [row["value"] for row in goals[2:]] == pytest.approx([0, 0.5])
    assert "Memory against the size of the corpus" in render(data_page(found | {"goals": goals}, "command"))
