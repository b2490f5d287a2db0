"""Equal conditions are checked on weights and batches, not believed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_studies import synthetic_study, text_study

from gatelab.model.decoder import Decoder
from gatelab.model.initialization import initialize
from gatelab.study import conditions
from gatelab.study import study as study_module
from gatelab.study.conditions import Conditions, check_conditions, conditions_table
from gatelab.train.settings import RunSettings

MIXTURE = "model.mixture={num_experts: 3, experts_per_token: 2, expert_width: 24}"


def arms(*words: str) -> list[dict[str, Any]]:
    return [{"name": "ungated"}, {"name": "other", "assignments": list(words)}]


def common_by_loops(one: RunSettings, two: RunSettings, seed: int) -> int:
    """Elements at equal places of equally named tensors that have equal bits."""
    decoders = [Decoder(run.model) for run in (one, two)]
    for decoder in decoders:
        initialize(decoder, seed)
    left, right = (decoder.state_dict() for decoder in decoders)
    total = 0
    for name in left.keys() & right.keys():
        if name.endswith("gate_up_proj"):
            pairs = [(left[name].unflatten(1, (2, -1)), right[name].unflatten(1, (2, -1)))]
        else:
            pairs = [(left[name], right[name])]
        for a, b in pairs:
            places = tuple(slice(min(sizes)) for sizes in zip(a.shape, b.shape, strict=True))
            assert torch.equal(a[places], b[places])
            total += a[places].numel()
    return total


@pytest.mark.parametrize("mixture", [(), (MIXTURE,)])
def test_matched_arms_share_all_but_gates(tmp_path: Path, mixture: tuple[str, ...]) -> None:
    study = synthetic_study(
        "model.feedforward_width=48", "model.matching_multiple=1", *mixture,
        arms=arms("gate=sdpa_elementwise", "match=parameters"), seeds=[3, 5],
    )  # fmt: skip
    base, other = check_conditions(study, tmp_path)
    assert base.weights == other.weights and set(base.weights) == {3, 5} and base.weights[3] != base.weights[5]
    assert base.batches == other.batches and base.batches[3] != base.batches[5]
    assert base.common_parameters == other.common_parameters
    assert base.common_parameters == common_by_loops(*(study.settings_of(arm) for arm in study.arms), 3)
    assert not base.differences and other.differences
    narrowed = "model.mixture.expert_width" if mixture else "model.feedforward_width"
    assert narrowed in other.differences


def test_gates_and_sinks_are_an_arms_own(tmp_path: Path) -> None:
    """Two arms with gates of one name and other start values have their other weights in common."""
    study = synthetic_study(arms=[
        {"name": "ungated", "assignments": ["gate=sdpa_elementwise"]},
        {"name": "other", "assignments": ["gate=sdpa_elementwise", "model.gates.0.initialization=zeros"]},
    ])  # fmt: skip
    base, other = check_conditions(study, tmp_path)
    assert base.weights == other.weights
    assert other.differences == {"model.gates.0.initialization": ["normal", "zeros"]}


@pytest.mark.parametrize(
    ("words", "weights", "batches", "schedule"),
    [
        (["train.optimizer.weight_decay=0"], "equal", "equal", "other, as declared"),
        (["model.init_std=0.1"], "other, as declared", "equal", "equal"),
        (["data.context=12"], "equal", "other, as declared", "equal"),
        (["train.steps=5"], "equal", "other, as declared", "other, as declared"),
        (["model.num_layers=2", "model.qk_norm=true"], "equal", "equal", "equal"),
    ],
)
def test_what_an_arm_declares_may_differ(
    tmp_path: Path, words: list[str], weights: str, batches: str, schedule: str
) -> None:
    study = synthetic_study(arms=arms(*words))
    table = conditions_table(study, check_conditions(study, tmp_path))
    assert list(table.rows[0].values()) == ["ungated", "equal", "equal", "equal", None]
    paths = ", ".join(word.partition("=")[0] for word in words)
    assert list(table.rows[1].values()) == ["other", weights, batches, schedule, paths]
    assert "initial weights are common to all arms" in table.caption


def test_text_is_prepared_and_digested_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = []
    real = conditions.open_source
    monkeypatch.setattr(conditions, "open_source", lambda *a: opened.append(a) or real(*a))
    base, other = check_conditions(text_study(tmp_path, seeds=[0, 1]), tmp_path / "cache")
    assert len(opened) == 2 and base.batches == other.batches and base.batches[0] != base.batches[1]
    assert base.fingerprint == other.fingerprint and len(base.fingerprint) == 64


def test_every_sampled_batch_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from gatelab.data.synthetic import BigramBackcopy

    study, steps = synthetic_study("train.steps=100"), []
    before = check_conditions(study, tmp_path)[0].batches
    real = BigramBackcopy.batch

    def spoiled(self: BigramBackcopy, step: int) -> Any:
        steps.append(step)
        batch = real(self, step)
        if step == 99:
            batch.targets[-1, -1] += 1
        return batch

    monkeypatch.setattr(BigramBackcopy, "batch", spoiled)
    assert check_conditions(study, tmp_path)[0].batches != before
    assert len(steps) == 32 and (steps[0], steps[-1]) == (0, 99)


class TestRefusals:
    def test_weights_that_depend_on_the_arm(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def careless(decoder: Decoder, seed: int) -> None:
            torch.manual_seed(seed)
            for parameter in decoder.parameters():
                torch.nn.init.normal_(parameter)

        monkeypatch.setattr(conditions, "initialize", careless)
        with pytest.raises(ValueError, match="arm gated has other initial weights than ungated, which it does not"):
            check_conditions(synthetic_study("model.num_layers=2"), tmp_path)

    def test_batches_that_depend_on_the_arm(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(
            conditions._Reader, "read", lambda self, run: conditions._Read(str(len(run.model.gates)), "fingerprint")
        )
        with pytest.raises(ValueError, match="arm gated has other training batches than ungated, which it does not"):
            check_conditions(synthetic_study(), tmp_path)

    def test_settings_that_no_word_declares(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        study, real = synthetic_study(), study_module.resolve

        def careless(recipe: str, words: tuple[str, ...]) -> RunSettings:
            gated = any(word.startswith("gate=") for word in words)
            return real(recipe, (*words, "train.optimizer.clip_norm=2") if gated else words)

        monkeypatch.setattr(study_module, "resolve", careless)
        with pytest.raises(
            ValueError,
            match=r"arm gated differs from ungated in train\.optimizer\.clip_norm \(2\.0, not 1\.0\), ",
        ):
            check_conditions(study, tmp_path)


def test_conditions_survive_their_file(tmp_path: Path) -> None:
    found = check_conditions(synthetic_study(seeds=[0, 11]), tmp_path)
    assert [Conditions.from_mapping(json.loads(json.dumps(one._asdict()))) for one in found] == found
