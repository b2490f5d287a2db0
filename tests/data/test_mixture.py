"""Windows from several corpora by weight, and orders that are computed instead of kept."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from gatelab.data import window_order as order_module
from gatelab.data.loader import MixedLoader, TrainLoader
from gatelab.data.prepare import prepare
from gatelab.data.settings import CorpusSettings, DataSettings, MixedCorpus, TokenizerSettings
from gatelab.data.shards import TokenShards
from gatelab.data.window_order import BLOCK, KeyedPermutation, Mixture, window_order

TEXTS = {"gates": ["the gate opens"] * 31, "sinks": ["nothing is worth reading"] * 47, "rest": ["a token asks"] * 11}
WEIGHTS = [1.0, 0.5, 0.05]


@pytest.fixture(scope="module")
def sources(make_shards: Callable[..., TokenShards]) -> dict[str, TrainLoader]:
    made = {}
    for name, texts in TEXTS.items():
        made[name] = TrainLoader(
            make_shards(texts, 10_000), context=17, sequences_per_step=12, seed=4, bos_id=0, document_masks=True
        )
    return made


@pytest.fixture(scope="module")
def mixed(sources: dict[str, TrainLoader]) -> MixedLoader:
    return MixedLoader(sources, WEIGHTS, seed=4)


def windows_by_loops(sources: dict[str, TrainLoader], num_windows: int) -> list[torch.Tensor]:
    """The mixture written out: each position takes the next window of its source."""
    mixture, taken, found = Mixture(list(sources), WEIGHTS, 4), Counter(), []
    for position in range(num_windows):
        number = mixture.at(position)[0]
        source = list(sources.values())[number]
        found.append(source.windows([taken[number]]).targets[0])
        taken[number] += 1
    return found


def test_each_position_is_the_next_window_of_its_source(
    mixed: MixedLoader, sources: dict[str, TrainLoader], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = windows_by_loops(sources, 12 * 9)
    for step in (8, 0, 3):  # in any order: nothing that came before matters
        assert torch.equal(mixed.batch(step).targets, torch.stack(expected[12 * step : 12 * step + 12]))
    assert mixed.batch(3).documents is not None


@pytest.mark.parametrize(("num_ranks", "pieces"), [(2, 1), (4, 1), (2, 3), (1, 4)])
def test_ranks_together_have_the_batch_of_one(mixed: MixedLoader, num_ranks: int, pieces: int) -> None:
    whole = mixed.batch(5)
    size = 12 // pieces // num_ranks
    for rank in range(num_ranks):
        part = mixed.batch(5, rank, num_ranks, pieces)
        rows = [p * size * num_ranks + rank * size + row for p in range(pieces) for row in range(size)]
        assert torch.equal(part.inputs, whole.inputs[rows]) and torch.equal(part.targets, whole.targets[rows])
        assert part.documents is not None and whole.documents is not None
        assert torch.equal(part.documents, whole.documents[rows])


def test_weights_hold_in_every_block_and_epochs_are_exact(mixed: MixedLoader, sources: dict[str, TrainLoader]) -> None:
    mixture = Mixture(list(TEXTS), WEIGHTS, seed=4)
    assert mixture.per_block == [2643, 1321, 132] and sum(mixture.per_block) == BLOCK
    drawn = [mixture.at(position) for position in range(2 * BLOCK + 100)]
    seen: Counter[int] = Counter()
    for source, earlier in drawn:
        assert earlier == seen[source]
        seen[source] += 1
    assert [seen[number] for number in range(3)] == mixture.counts(2 * BLOCK + 100)
    assert Counter(source for source, _ in drawn[BLOCK : 2 * BLOCK]) == {0: 2643, 1: 1321, 2: 132}
    counts = mixture.counts(12 * 700)
    epochs = [count / source.num_windows for count, source in zip(counts, sources.values(), strict=True)]
    assert list(mixed.epochs(700).values()) == epochs and epochs[0] > 100


def test_seed_and_block_decide_the_order() -> None:
    first, other = Mixture(["a", "b"], [1, 1], seed=0), Mixture(["a", "b"], [1, 1], seed=1)
    orders = [[m.at(start + i)[0] for i in range(64)] for m in (first, other) for start in (0, BLOCK)]
    assert len({tuple(order) for order in orders}) == 4
    again = Mixture(["a", "b"], [1, 1], seed=0)
    assert [again.at(i) for i in range(64)] == [first.at(i) for i in range(64)]


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan"), float("inf")])
def test_a_weight_is_above_zero(weight: float) -> None:
    with pytest.raises(ValueError, match=r"b has the weight .* in the mixture; a weight is a number above 0"):
        Mixture(["a", "b"], [1.0, weight], seed=0)
    with pytest.raises(ValueError, match=r"mixture\.0\.weight cannot be .*: input should be"):
        DataSettings.parse({"mixture": [{"corpus": {"name": "python_standard_library"}, "weight": weight}]})


def test_a_weight_too_small_to_be_drawn_is_refused() -> None:
    with pytest.raises(ValueError, match="b has so small a weight in the mixture that not one of 4096 windows"):
        Mixture(["a", "b"], [1.0, 1e-5], seed=0)


@pytest.mark.parametrize("size", [1, 2, 3, 17, 64, 1000, 4097])
def test_a_computed_order_is_a_permutation(size: int) -> None:
    order = KeyedPermutation(size, "4 0")
    assert sorted(order[index] for index in range(size)) == list(range(size))
    with pytest.raises(IndexError):
        order[size]


def test_a_computed_order_is_mixed_and_keyed() -> None:
    order, other = KeyedPermutation(5000, "4 0"), KeyedPermutation(5000, "4 1")
    entries = [order[index] for index in range(5000)]
    assert sum(a == b for a, b in zip(entries, (other[index] for index in range(5000)), strict=True)) < 20
    steps = torch.tensor(entries, dtype=torch.float64)
    correlation = torch.corrcoef(torch.stack((steps[:-1], steps[1:])))[0, 1]
    assert abs(correlation) < 0.05 and abs(steps[:1000].mean() - 2500) < 200


def test_only_long_orders_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not isinstance(window_order(1000, 4, 0), KeyedPermutation)
    monkeypatch.setattr(order_module, "MOST_DRAWN", 999)
    assert isinstance(window_order(1000, 4, 0), KeyedPermutation)


def corpus(folder: Path, name: str, **changes: object) -> CorpusSettings:
    path = folder / f"{name}.jsonl"
    path.write_text("".join(f'{{"text": "{text} {number}"}}\n' for number, text in enumerate(TEXTS[name])))
    return CorpusSettings(name="files", path=str(path), **{"heldout_fraction": 0.2, **changes})  # type: ignore[arg-type]


def test_a_mixture_is_prepared_and_its_weights_need_no_new_tokens(tmp_path: Path) -> None:
    train, other = corpus(tmp_path, "gates"), corpus(tmp_path, "sinks", heldout_fraction=0.3)
    common = {"train": train, "tokenizer": TokenizerSettings(vocab_size=290), "context": 8}
    first, second = (
        prepare(DataSettings(**common, mixture=(MixedCorpus(corpus=other, weight=weight),)), tmp_path / "cache")  # type: ignore[arg-type]
        for weight in (0.5, 2.0)
    )
    assert first.folder == second.folder and first.fingerprint == second.fingerprint
    assert list(first.mixture) == ["sinks.jsonl"] and list(first.heldout) == ["gates.jsonl", "sinks.jsonl"]
    text = first.tokenizer.decode(first.mixture["sinks.jsonl"][:].tolist())
    assert "worth reading" in text and "gate opens" not in text
    alone = prepare(DataSettings(**common), tmp_path / "cache")  # type: ignore[arg-type]
    assert alone.folder != first.folder and not alone.mixture


def test_a_corpus_is_mixed_in_once(tmp_path: Path) -> None:
    train = corpus(tmp_path, "gates")
    with pytest.raises(ValueError, match=r"two training corpora are called gates\.jsonl; mix in a corpus once"):
        DataSettings.parse({"train": train.to_mapping(), "mixture": [{"corpus": train.to_mapping(), "weight": 1}]})
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "alias.jsonl").symlink_to(tmp_path / "gates.jsonl")
    alias = train.model_copy(update={"path": str(tmp_path / "more")})
    settings = DataSettings(train=train, mixture=(MixedCorpus(corpus=alias, weight=1.0),))
    with pytest.raises(ValueError, match=r"gates\.jsonl and by the training corpus more; .* drop more from mixture"):
        prepare(settings, tmp_path / "cache")
