"""Other seeds, lengths and tokenizers than the golden ones, and the scores, against NVIDIA's package itself."""

from __future__ import annotations

from pathlib import Path

import pytest
from reference_generators import ReferenceGenerators

from gatelab.evaluate.ruler.sample import Sample, to_lines
from gatelab.evaluate.ruler.scoring import clean, score
from gatelab.evaluate.ruler.tasks import RULER_TASKS, make_samples
from gatelab.evaluate.ruler.texts import Texts
from gatelab.evaluate.ruler.tokens import open_tokenizer

pytestmark = [pytest.mark.peer, pytest.mark.network, pytest.mark.slow]

CACHE = Path("~/.cache/gatelab").expanduser()
GPT2 = Path(__file__).parents[2] / "golden" / "ruler" / "tokenizer_gpt2"
SMOLLM2 = CACHE / "models" / "SmolLM2-135M-Instruct" / "SmolLM2-135M-Instruct.gguf"


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> ReferenceGenerators:
    return ReferenceGenerators(tmp_path_factory.mktemp("reference"), CACHE)


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not SMOLLM2.exists():
        pytest.skip("SmolLM2's tokenizer was never fetched here")
    folder = tmp_path_factory.mktemp("smollm2")
    open_tokenizer(str(SMOLLM2)).source.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(("seed", "length"), [(42, 1024), (7, 4096), (123, 2048), (42, 8192)])
@pytest.mark.parametrize("name", RULER_TASKS)
def test_samples_for_gpt2(name: str, length: int, seed: int, reference: ReferenceGenerators):
    _compare(name, GPT2, length, seed, reference)


@pytest.mark.parametrize(("seed", "length"), [(7, 1024), (42, 4096), (7, 8192)])
@pytest.mark.parametrize("name", RULER_TASKS)
def test_samples_for_smollm2(name: str, length: int, seed: int, smollm2: Path, reference: ReferenceGenerators):
    _compare(name, smollm2, length, seed, reference)


def test_scores(reference: ReferenceGenerators):
    references = [["France", "in France"], ["1234567", "7654321"], ["a"], ["B"], ["x"]]
    predictions = ["FRANCE\x07", " It is 7654321\t", None, "\x01", "Y\n"]
    theirs = reference.scores(predictions, references)
    assert theirs["cleaned"] == [clean(prediction) for prediction in predictions]
    samples = [Sample(number, "", outputs, 0) for number, outputs in enumerate(references)]
    for name, kind in (("vt", "all"), ("qa_1", "part")):
        ours = score(RULER_TASKS[name], predictions, samples)
        assert ours.per_sample == theirs[f"{kind}_per_sample"]
        assert round(ours.mean, 2) == theirs[kind]
        assert ours.empty == theirs["cleaned"].count("")


def _compare(name: str, tokenizer: Path, length: int, seed: int, reference: ReferenceGenerators) -> None:
    try:
        ours = make_samples(RULER_TASKS[name], open_tokenizer(str(tokenizer)), length, seed, 4, Texts(CACHE))
    except ValueError as error:
        assert "does not fit" in str(error)
        pytest.skip(f"the reference would never end: {error}")
    assert to_lines(ours) == reference.generate(RULER_TASKS[name], tokenizer, length, seed, 4)
