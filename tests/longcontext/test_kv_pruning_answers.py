"""Mini tasks asked of a pruned model: the prompts, and the answers against greedy decoding that knows no cut cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pruned_models import VOCABULARY, build_decoder, masked_logits, tokens_of

from gatelab.data.settings import CorpusSettings
from gatelab.evaluate.generation import generate
from gatelab.evaluate.model_tokenizer import ModelTokenizer
from gatelab.evaluate.models import OpenedModel
from gatelab.evaluate.ruler.sample import Sample
from gatelab.evaluate.ruler.tasks import MINI_TASKS, Task
from gatelab.longcontext.kv_pruning.answers import Question, ask, mini_questions
from gatelab.longcontext.kv_pruning.driver import pruned
from gatelab.longcontext.kv_pruning.presses import build_press
from gatelab.longcontext.kv_pruning.trial import ANSWERS, FOUND, Arm, Trial

GENERATED, PROMPT, BOS, NUM_RECENT = 5, 23, 1, 3
H2O, BY_HEADS = Arm("h2o", "uniform"), Arm("key_norm", "heads")


class Words:
    """A tokenizer of one token a word, without BOS."""

    eos_token_id: int | None = None

    def encode(self, text: str, **options: Any) -> list[int]:
        return [3 + len(word) % (VOCABULARY - 3) for word in text.split()]

    def get_vocab(self) -> dict[str, int]:
        return {}


def opened(source: Any, max_context: int = 300, bos_id: int | None = BOS) -> OpenedModel:
    tokenizer = ModelTokenizer(
        encode=Words().encode,
        decode=lambda ids: "".join(f"<{number}>" for number in ids),
        bos_id=bos_id,
        num_bos_added=0,
        vocab_size=VOCABULARY,
        source=source,
    )
    return OpenedModel("tiny", "gatelab", build_decoder(), tokenizer, max_context)


def make_trial(folder: Path, **changes: Any) -> Trial:
    arguments: dict[str, Any] = {
        "presses": ("h2o", "oracle", "key_norm@heads"), "budgets": (1.0, 0.25), "num_recent": NUM_RECENT,
        "ruler_samples": 2, "dtype": torch.float64,
    }  # fmt: skip
    return Trial(CorpusSettings(), folder, **arguments | changes)


def question(ids: torch.Tensor, answers: list[str]) -> Question:
    return Question(Task("any", GENERATED, lambda making: []), Sample(0, "", answers, PROMPT), ids)


def answer_by_masks(model: Any, ids: torch.Tensor, arm: Arm, num_keys: int) -> list[int]:
    """Greedy decoding, all tokens read anew for each; the prompt's last token and later ones see what was kept."""
    num_read = PROMPT - 1
    with pruned(model, build_press(arm.press), arm.allocation, NUM_RECENT) as reader:
        reader.read(ids[:, :num_read])
        reader.cut(num_keys)
        kept = {
            (layer, head): set(held.positions[0].tolist())
            for layer, keys in reader.layers.items()
            for head, held in enumerate(keys.heads)
        }
    assert any(len(places) < num_read for places in kept.values())

    def sees(layer: int, b: int, k: int, t: int, s: int) -> bool:
        return t < num_read or s >= num_read or s in kept[layer, k]

    written: list[int] = []
    while len(written) < GENERATED:
        logits = masked_logits(model, torch.cat((ids, torch.tensor([written], dtype=torch.long)), dim=1), sees)
        written.append(int(logits[0, -1].argmax()))
    return written


def test_answers_are_those_of_greedy_decoding(tmp_path: Path) -> None:
    one, trial = opened(Words()), make_trial(tmp_path)
    questions, wanted, first_tokens = [], [], []
    for ids in tokens_of(2, PROMPT).split(1):
        (whole,) = generate(one, ids.tolist(), GENERATED)
        cut = [answer_by_masks(one.model, ids, arm, trial.keys_at(0.25, PROMPT - 1)) for arm in (H2O, BY_HEADS)]
        assert whole not in cut and cut[0] != cut[1]
        first_tokens.append({written[0] for written in (whole, *cut)})
        answers = [one.tokenizer.decode(written) for written in (whole, *cut)]
        questions += [question(ids, [answer]) for answer in answers]
        wanted.append(answers)
    assert any(len(tokens) > 1 for tokens in first_tokens)
    said: list[str] = []
    found, scores = ask(one, trial, questions, said.append)
    assert found == [100.0, 0.0, 0.0] * 2
    assert len(said) == 6 and said[-1] == "question 6 of 6: 0 % of its answers found unpruned"
    assert {(score.use, score.metric) for score in scores} == {(ANSWERS, FOUND)}
    for arm, of_cut in ((H2O, [0.0, 100.0, 0.0]), (BY_HEADS, [0.0, 0.0, 100.0])):
        of_arm = [score for score in scores if score.arm == arm]
        assert [score.value for score in of_arm if score.budget == 1.0] == found
        assert [score.value for score in of_arm if score.budget == 0.25] == of_cut * 2
        assert [score.sample for score in of_arm if score.budget == 0.25] == list(range(6))
    assert {score.arm for score in scores} == {H2O, BY_HEADS}


def test_an_answer_ends_at_a_stop_token(tmp_path: Path) -> None:
    source, ids = Words(), tokens_of(1, PROMPT)
    one, trial = opened(source), make_trial(tmp_path, presses=("h2o",), budgets=(1.0,))
    (whole,) = generate(one, ids.tolist(), GENERATED)
    source.eos_token_id = whole[2]
    before = whole[: whole.index(whole[2])]
    answers = [one.tokenizer.decode(before), one.tokenizer.decode(whole)]
    found, scores = ask(one, trial, [question(ids, answers)])
    assert found == [50.0] and [score.value for score in scores] == [50.0]


def test_prompts_begin_with_one_bos_and_leave_room_for_the_answer(tmp_path: Path) -> None:
    length = 250
    questions = mini_questions(opened(Words()), make_trial(tmp_path), length)
    assert [one.task.name for one in questions] == [name for name in MINI_TASKS for _ in range(2)]
    for one in questions:
        assert one.ids[0].tolist() == [BOS, *Words().encode(one.sample.input)]
        assert one.ids.shape[1] + one.task.generated <= length + 1
        assert one.share(" ".join(one.sample.outputs)) == 100.0 and one.share("") == 0.0


@pytest.mark.parametrize(
    ("length", "changes", "wanted"),
    [
        (250, {"bos_id": None}, "the tokenizer of tiny has no BOS, with which the mini tasks begin"),
        (301, {}, "mini tasks of 301 tokens are beyond the 300 that tiny was made for; take a smaller ruler_length"),
        (100, {}, "mini_single at length=100 is too short; it is made from 128 on"),
    ],
)
def test_lengths_that_cannot_be_asked_are_refused(
    tmp_path: Path, length: int, changes: dict[str, Any], wanted: str
) -> None:
    with pytest.raises(ValueError, match=wanted):
        mini_questions(opened(Words(), **changes), make_trial(tmp_path), length)
