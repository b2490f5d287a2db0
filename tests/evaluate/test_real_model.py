"""A real pretrained decoder with a strong attention sink, opened from a package and measured."""

from __future__ import annotations

from pathlib import Path

import pytest
from real_models import SMOLLM2, squad_text

from gatelab.diagnose.measure import measure
from gatelab.evaluate.models import OpenedModel, open_model
from gatelab.evaluate.texts import file_text, read_windows

pytestmark = [pytest.mark.network, pytest.mark.slow]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def smollm2(cache: Path) -> OpenedModel:
    for package in ("transformers", "gguf", "accelerate"):
        pytest.importorskip(package)
    try:
        return open_model(str(SMOLLM2.file(cache)))
    except OSError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def squad(cache: Path) -> Path:
    try:
        return squad_text(cache)
    except OSError as error:
        pytest.skip(str(error))


def test_its_shape(smollm2: OpenedModel) -> None:
    assert (smollm2.family, smollm2.max_context) == ("llama", 8192)
    assert smollm2.description["parameters"] == 134_515_008
    tokenizer = smollm2.tokenizer
    assert (tokenizer.bos_id, tokenizer.decode_one(1), tokenizer.num_bos_added) == (1, "<|im_start|>", 0)


@pytest.mark.parametrize(("bos", "attention", "largest"), [(False, 0.3529, 22_552), (True, 0.3388, 24_926)])
def test_its_sink_is_as_strong_as_known(
    smollm2: OpenedModel, squad: Path, bos: bool, attention: float, largest: float
) -> None:
    """320 tokens; queries from 64 on; the largest hidden value is the first token's."""
    windows = read_windows(file_text(squad), smollm2.tokenizer, squad.parent, length=320, bos=bos)
    rows = measure(smollm2.model, windows.tokens, smollm2.attach).rows("SmolLM2")
    figures = [row for row in rows if row["metric"] == "first_token_attention" and row["query_range"] == "from_64"]
    heads = [row["value"] for row in figures]
    assert len(heads) == 30 * 9
    assert sum(heads) / len(heads) == pytest.approx(attention, abs=0.002)
    assert sum(value > 0.3 for value in heads) / len(heads) == pytest.approx(0.51, abs=0.01)
    values = {row["layer"]: row["value"] for row in rows if row["metric"] == "largest_activation"}
    tokens = {row["layer"]: row["value"] for row in rows if row["metric"] == "largest_activation_token"}
    layer = max(values, key=values.__getitem__)
    assert values[layer] == pytest.approx(largest, rel=0.01) and tokens[layer] == 0
