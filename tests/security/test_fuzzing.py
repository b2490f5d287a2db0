"""A short run of the fuzzer, and that it would notice what it looks for."""

from __future__ import annotations

import json
from pathlib import Path

import fuzz
import pytest


def test_a_few_thousand_inputs_do_no_harm(tmp_path: Path) -> None:
    found = json.loads(json.dumps(fuzz.fuzz(3000, seed=7, folder=tmp_path)))
    assert found["failed"] == 0, [row["failures"] for row in found["targets"].values() if row["failures"]]
    assert found["memory_is_bounded"]
    assert sum(row["inputs"] for row in found["targets"].values()) == 3000
    for name, row in found["targets"].items():
        assert row["inputs"] > 40 and row["refused"] > 20 and row["messages"] >= 1, name


def test_an_input_is_made_again_by_its_number(tmp_path: Path) -> None:
    targets = fuzz.make_targets(tmp_path)
    inputs = [fuzz.input_of(number, 7, targets) for number in range(200)]
    assert inputs == [fuzz.input_of(number, 7, targets) for number in range(200)]
    assert inputs != [fuzz.input_of(number, 8, targets) for number in range(200)]


@pytest.mark.parametrize(
    ("error", "is_failure"),
    [
        (ValueError("said"), False), (OSError("said"), False), (ValueError(), True), (KeyError("key"), True),
        (RecursionError("deep"), True), (MemoryError(), True), (AssertionError("ours"), True), (SystemExit(0), True),
    ],
)  # fmt: skip
def test_only_errors_that_say_something_are_refusals(error: BaseException, is_failure: bool) -> None:
    def read(content: bytes) -> None:
        raise error

    outcome = fuzz.Outcome()
    fuzz._try(5, fuzz.Target(read, [b""], 1), b"", outcome)
    assert [one["input"] for one in outcome.failures] == ([5] if is_failure else [])


def test_an_input_that_takes_too_long_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(content: bytes) -> None:
        while True:
            pass

    monkeypatch.setattr(fuzz, "LIMIT_SECONDS", 0.05)
    fuzz.signal.signal(fuzz.signal.SIGPROF, fuzz._too_slow)
    outcome = fuzz.Outcome()
    fuzz._try(0, fuzz.Target(read, [b""], 1), b"", outcome)
    assert [one["error"] for one in outcome.failures] == ["TooSlowError"]
