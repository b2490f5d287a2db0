from __future__ import annotations

import re
from collections import Counter
from itertools import islice

import pytest

from gatelab.data.retrieval import KINDS, NOISE, RetrievalKind, retrieval_documents, retrieval_task
from gatelab.data.tokenizer import train_tokenizer
from gatelab.evaluate.model_tokenizer import ModelTokenizer, from_gatelab
from gatelab.evaluate.ruler.scoring import score
from gatelab.evaluate.ruler.tasks import MINI_TASKS, make_samples
from gatelab.evaluate.ruler.texts import Texts


@pytest.fixture(scope="module")
def tokenizer() -> ModelTokenizer:
    texts = (document.text for document in islice(retrieval_documents(1, 900), 60))
    return from_gatelab(train_tokenizer(texts, 600))


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Texts:
    return Texts(tmp_path_factory.mktemp("cache"), allow_download=False)


def solved(text: str) -> list[str]:
    """The answers, read off a text that ends with the beginning of its answer."""
    codes = re.findall(r"(\w+) (\d+)\.", text)
    if match := re.search(r"\. (\w+)$", text):
        return [value for key, value in codes if key == match[1]]
    if match := re.search(r"Codes ([a-z ]+)\? Codes:$", text):
        return [value for wanted in match[1].split() for key, value in codes if key == wanted]
    if match := re.search(r"Which names have the value (\d+)\?", text):
        found = [match[1]]
        for name, given in re.findall(r"Let (\w+) be (\w+)\.", text):
            if given == found[-1]:
                found.append(name)
        return found[1:]
    listed = re.findall(r"\w+", text.removeprefix("Words: ").partition(".")[0])
    common = [word for word, _ in Counter(listed).most_common(3)]
    return sorted(common, key=listed.index)


@pytest.mark.parametrize("kind", KINDS)
def test_a_task_has_the_answer_that_its_text_gives(kind: RetrievalKind):
    for index in range(40):
        task = retrieval_task(kind, 5, index, 24 + index)
        assert task is not None
        assert solved(task.question + task.answer_prefix) == task.answers
        assert task.document == f"{task.question}{task.answer_prefix} {', '.join(task.answers)}.{task.further}"
        told = re.findall(r"\w+ \d+\.", task.question)
        again = re.findall(r"\w+ \d+\.", task.document.removeprefix(task.question))
        if kind in ("single", "multi_key"):
            assert Counter(again) == Counter(told * (3 if kind == "single" else 2))
            assert len(told) == len({sentence.split()[0] for sentence in told}) == (1 if kind == "single" else 8)
        else:
            assert not task.further


def test_tasks_are_a_function_of_seed_index_and_split():
    def make(**changes: int | str):
        return retrieval_task("multi_key", **{"seed": 3, "index": 4, "size": 9, **changes})  # type: ignore[arg-type]

    assert make() == make()
    assert (
        len({make().question, *(make(**change).question for change in [{"seed": 4}, {"index": 5}, {"split": "train"}])})
        == 4
    )
    assert make(size=0) is None


def test_training_documents_have_every_kind_and_the_asked_for_lengths():
    documents = list(islice(retrieval_documents(2, 2000), 480))
    assert documents == list(islice(retrieval_documents(2, 2000), 480))
    lengths = [
        len(document.text)
        for document in documents
        if document.text.startswith(NOISE) or re.match(r"\w+ \d", document.text)
    ]
    assert max(lengths) <= 2000 and min(lengths) < 80
    of_size = [sum(length for length in lengths if low < length <= 5 * low) for low in (80, 400)]
    assert 0.5 < of_size[0] / of_size[1] < 2
    assert len({document.title for document in documents}) == 480
    texts = [document.text for document in documents[7::8]]
    assert all(sum(part in text for text in texts) >= 10 for part in ("Words:", "Let ", "Codes", NOISE[0]))


def test_five_of_eight_documents_repeat_all_parts_of_a_list_twice():
    documents = list(islice(retrieval_documents(2, 2000), 80))
    for document in (document for place, document in enumerate(documents) if place % 8 < 5):
        first, *again = re.findall(r"([a-z][a-z ]*)\.", document.text)
        words = first.split()
        assert len(set(words)) == len(words) <= 32
        assert all(part in first and 1 <= len(part.split()) <= 8 for part in again)
        assert sorted(" ".join(again).split()) == sorted(2 * words)


@pytest.mark.parametrize("name", MINI_TASKS)
@pytest.mark.parametrize("length", [512, 2048])
def test_samples_fill_the_length_and_a_perfect_reader_scores_100(
    name: str, length: int, tokenizer: ModelTokenizer, texts: Texts
):
    samples = make_samples(MINI_TASKS[name], tokenizer, length, 0, 7, texts)
    for sample in samples:
        assert len(tokenizer.encode(sample.input)) + MINI_TASKS[name].generated == sample.length <= length
        assert sample.length > length - 100
    answers = [", ".join(solved(sample.input)) for sample in samples]
    assert score(MINI_TASKS[name], answers, samples).mean == 100
    assert max(len(tokenizer.encode(f" {answer}")) for answer in answers) <= MINI_TASKS[name].generated


def test_below_its_least_length_a_task_is_refused(tokenizer: ModelTokenizer, texts: Texts):
    for task in MINI_TASKS.values():
        with pytest.raises(ValueError, match=f"{task.name} at length={task.minimum_length - 1} is too short"):
            make_samples(task, tokenizer, task.minimum_length - 1, 0, 1, texts)
        assert len(make_samples(task, tokenizer, 256, 0, 3, texts)) == 3
