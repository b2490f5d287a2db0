"""The tests of gates can fail: each of these deliberate mistakes in the gate code turns one of them red."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

import gatelab

PACKAGE = Path(gatelab.__file__).parent
TEST_FILE = Path(__file__).with_name("test_gate.py")
TESTS = [
    "test_float32_scores_round_once_and_bfloat16_scores_twice",
    "test_block_equals_oracle[sdpa_elementwise-True-1.0]",
    "test_block_equals_oracle[sdpa_head_shared-True-1.0]",
    "test_block_equals_oracle[query_after_rope-True-1.0]",
    "test_block_equals_oracle[low_rank_with_bias_shared-True-1.0]",
    "test_block_equals_oracle[gate_from_value_beside_value_gate-True-1.0]",
    "test_block_equals_oracle[dense_gate_from_output_beside_sdpa_gate-True-1.0]",
    "test_block_equals_oracle[control_before_additive_gate-True-1.0]",
]
ONE_WIDTH_TESTS = [
    "test_source_is_right_where_all_sources_have_one_width[hidden]",
    "test_source_is_right_where_all_sources_have_one_width[value]",
]


class Mutation(NamedTuple):
    """One textual change of one file; ``old`` occurs in it exactly once."""

    file: str
    old: str
    new: str
    tests: list[str] = TESTS


GATE, ATTENTION = "gates/gate.py", "model/attention.py"
PRODUCT = 'y * scores if self.spec.operation == "multiply" else y + scores'
HEADS = "self.projection(x).unflatten(-1, (-1, self.channels))"
SHARED = "return activation(logits).mean(dim=2, keepdim=True)"
ATTEND = """\
        output = self.kernel(query, key, value, mask, self.causal, self.sink)
        gating.sources["attention_output"] = output.flatten(2)
        gated = gating.apply("sdpa_output", self.control(output))
"""
GATED_QUERY = """\
        query = gating.apply("sdpa_output", query)
        output = self.kernel(query, key, value, mask, self.causal, self.sink)
        gating.sources["attention_output"] = output.flatten(2)
        gated = self.control(output)
"""
MADE = "gating = Gating(self.gates, x, value)"
VALUE = f"""\
        {MADE}
        value = gating.apply("value", value)
"""
GATED_VALUE_AS_SOURCE = (
    VALUE
    + """\
        gating.sources["value"] = value.flatten(2)
"""
)

MUTATIONS = {
    "gate dropped": Mutation(GATE, PRODUCT, "y"),
    "silu for sigmoid": Mutation(GATE, '"sigmoid": torch.sigmoid', '"sigmoid": F.silu'),
    "1 - sigmoid": Mutation(GATE, '"sigmoid": torch.sigmoid', '"sigmoid": lambda x: 1 - torch.sigmoid(x)'),
    "added for multiplied": Mutation(GATE, PRODUCT, "y + scores"),
    "multiplied for added": Mutation(GATE, PRODUCT, "y * scores"),
    "shared average over channels": Mutation(GATE, SHARED, SHARED.replace("dim=2", "dim=3")),
    "shared average of logits": Mutation(GATE, SHARED, "return activation(logits.mean(dim=2, keepdim=True))"),
    "heads and channels interleaved": Mutation(
        GATE, HEADS, "self.projection(x).unflatten(-1, (self.channels, -1)).transpose(2, 3)"
    ),
    "scores not widened": Mutation(GATE, 'self.spec.score_dtype == "float32"', "False"),
    "gate from the value": Mutation(ATTENTION, MADE, MADE.replace("x", "value.flatten(2)"), ONE_WIDTH_TESTS),
    "gate from the key for the value": Mutation(ATTENTION, MADE, MADE.replace("value", "key")),
    "gate from the query for the output": Mutation(
        ATTENTION, '["attention_output"] = output.flatten(2)', '["attention_output"] = query.flatten(2)'
    ),
    "gate from the previous token": Mutation(ATTENTION, MADE, MADE.replace("x", "x.roll(1, dims=1)")),
    "gate from a rescaled hidden state": Mutation(ATTENTION, MADE, MADE.replace("x", "F.rms_norm(x, x.shape[-1:])")),
    "gate from the gated value": Mutation(ATTENTION, VALUE, GATED_VALUE_AS_SOURCE),
    "gate before softmax": Mutation(ATTENTION, ATTEND, GATED_QUERY),
    "gate before the control": Mutation(
        ATTENTION,
        'gating.apply("sdpa_output", self.control(output))',
        'self.control(gating.apply("sdpa_output", output))',
    ),
    "query gate on the other side of the rotation": Mutation(
        ATTENTION,
        'return gating.apply(position, y, "after_rope")',
        "return y",
    ),
}


def run_tests(folder: Path, tests: list[str]) -> subprocess.CompletedProcess[str]:
    """The given tests of test_gate.py against the copy of the package in ``folder``, up to the first failure."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--tb=short"]
    speed = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "OMP_NUM_THREADS": "1"}
    environment = {**os.environ, "PYTHONPATH": str(folder), **speed}
    selection = [f"{TEST_FILE}::{test}" for test in tests]
    return subprocess.run([*command, *selection], cwd=folder, env=environment, capture_output=True, text=True)


def copy_package(folder: Path) -> Path:
    """A copy of the package under ``folder``."""
    return Path(shutil.copytree(PACKAGE, folder / "gatelab", ignore=shutil.ignore_patterns("__pycache__")))


@pytest.mark.slow
def test_unmutated_copy_passes(tmp_path: Path) -> None:
    copy_package(tmp_path)
    result = run_tests(tmp_path, [*TESTS, *ONE_WIDTH_TESTS])
    assert result.returncode == 0, result.stdout


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTATIONS)
def test_mutation_is_caught(name: str, tmp_path: Path) -> None:
    mutation = MUTATIONS[name]
    file = copy_package(tmp_path) / mutation.file
    text = file.read_text(encoding="utf-8")
    assert text.count(mutation.old) == 1, f"{mutation.file} has changed: write the mutation {name!r} anew"
    file.write_text(text.replace(mutation.old, mutation.new), encoding="utf-8")
    result = run_tests(tmp_path, mutation.tests)
    failed = re.findall(r"^FAILED \S*::(\S+)", result.stdout, re.MULTILINE)
    assert result.returncode == 1 and len(failed) == 1, f"not caught:\n{result.stdout}"
    assert re.search(r"^E +(AssertionError|assert )", result.stdout, re.MULTILINE), f"no assertion:\n{result.stdout}"
    print(f"{name}: caught by {failed[0]}")
