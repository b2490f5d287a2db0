"""What asks for the next token refuses a model that sees it; what looks inside takes it."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_models import VOCABULARY, tiny_run, write_corpus, write_text

from gatelab.data.settings import DataSettings, ImageSettings
from gatelab.evaluate.diagnosis import Examination, diagnose
from gatelab.evaluate.models import open_model
from gatelab.evaluate.quantisation.trial import QuantisationTrial, quantise_models
from gatelab.evaluate.ruler.running import RulerSettings, evaluate_ruler
from gatelab.evaluate.ruler.texts import Texts
from gatelab.evaluate.texts import file_text
from gatelab.longcontext.extend import open_base_run
from gatelab.model.settings import ModelSettings, PatchSettings
from gatelab.study.probes import require_probeable
from gatelab.study.study import Study
from gatelab.train import throughput
from gatelab.train.loop import train
from gatelab.train.settings import RunSettings


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("encoder")
    plain = tiny_run(write_corpus(folder / "corpus.jsonl"))
    words = ("model.causal=false", "data.masking={}", f"model.vocab_size={VOCABULARY + 2}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(throughput, "measure_peak", lambda dtype, **_: 1e12)
        train(plain.with_overrides(words), folder / "run", folder / "cache")
    return folder / "run"


def test_an_encoder_is_diagnosed_as_it_is(encoder: Path, tmp_path: Path) -> None:
    (found,) = diagnose([str(encoder)], Examination(file_text(write_text(tmp_path / "text.txt")), tmp_path, length=65))
    assert found.mapping["floor"] == pytest.approx(1 / 65)


def test_what_needs_the_next_token_refuses_it(encoder: Path, tmp_path: Path) -> None:
    text = file_text(write_text(tmp_path / "text.txt"))
    message = rf"^{encoder} sees later tokens \(causal=False\), so it can't "
    for options in ({"clamp": True}, {"precision": True}):
        with pytest.raises(
            ValueError, match=f"{message}be probed with the loss of the next token; open a causal model"
        ):
            diagnose([str(encoder)], Examination(text, tmp_path, **options))
    with pytest.raises(ValueError, match=f"{message}be scored on the next token"):
        quantise_models([str(encoder)], QuantisationTrial(text, tmp_path, ("w8a8",)))
    with pytest.raises(ValueError, match=f"{message}generate"):
        evaluate_ruler(
            str(encoder), RulerSettings(lengths=(64,)), Texts(tmp_path, allow_download=False), tmp_path / "r"
        )
    with pytest.raises(
        ValueError, match=r"is an encoder, whose later tokens are seen; a decoder's context is extended"
    ):
        open_base_run(str(encoder))


def test_a_study_of_encoders_has_no_probes(tmp_path: Path) -> None:
    words = ("model.causal=false", "data.masking={}", "model.vocab_size=2050")
    arms = [{"name": "ungated"}, {"name": "gated", "assignments": ["gate=sdpa_headwise"]}]
    study = Study.parse(
        {"name": "rounded", "question": "?", "recipe": "dense_tiny", "assignments": words, "arms": arms}
        | {"baseline": "ungated", "metric": "quantisation_cost[w8a8]"}
    )
    with pytest.raises(
        ValueError, match=r"^metric quantisation_cost\[w8a8\] is measured with the loss of the next token"
    ):
        require_probeable(study, tmp_path)


def test_a_run_on_images_has_no_tokenizer(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    plain = tiny_run(tmp_path / "nothing.jsonl")
    changes = {"vocab_size": 10, "causal": False, "tied_head": False, "patches": PatchSettings().to_mapping()}
    model = ModelSettings.parse(plain.model.to_mapping() | changes)
    settings = RunSettings(model=model, data=DataSettings(images=ImageSettings(), context=65), train=plain.train)
    train(settings, tmp_path / "run", tmp_path / "cache")
    with pytest.raises(ValueError, match=r"was trained on images and has no tokenizer for a text$"):
        open_model(str(tmp_path / "run"))
