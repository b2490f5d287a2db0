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


def solved(question: str) -> list[str]:
    """The answers, read off the text by rules."""
    codes = re.findall(r"The code of ([a-z ]+) is (\d+)\.", question)
    if match := re.search(r"What is the code of ([a-z ]+)\?", question):
        return [value for key, value in codes if key == match[1]]
    if match := re.search(r"What are the codes of ([a-z, ]+)\?", question):
        keys = re.split(r", and |, ", match[1])
        return [value for wanted in keys for key, value in codes if key == wanted]
    if match := re.search(r"Which names have the value (\d+)\?", question):
        found = [match[1]]
        for name, given in re.findall(r"Let (\w+) be (\w+)\.", question):
            if given == found[-1]:
                found.append(name)
        return found[1:]
    listed = re.findall(r"\w+", question.removeprefix("Words: ").partition(".")[0])
    common = [word for word, _ in Counter(listed).most_common(3)]
    return sorted(common, key=listed.index)


@pytest.mark.parametrize("kind", KINDS)
def test_a_task_has_the_answer_that_its_text_gives(kind: RetrievalKind):
    for index in range(40):
        task = retrieval_task(kind, 5, index, 24 + index)
        assert task is not None
        assert solved(task.question) == task.answers
        assert task.document == f"{task.question}{task.answer_prefix} {', '.join(task.answers)}.{task.further}"
        asked = re.findall(r" What is the code of ([a-z ]+)\? The code of \1 is (\d+)\.", task.further)
        told = [f" What is the code of {key}? The code of {key} is {code}." for key, code in asked]
        assert "".join(told) == task.further
        assert all(task.question.count(f"The code of {key} is {code}.") == 1 for key, code in asked)
        assert len({key for key, _ in asked}) == len(asked) == (16 if kind == "multi_key" else 0)


def test_tasks_are_a_function_of_seed_index_and_split():
    def make(**changes: int | str):
        return retrieval_task("multi_key", **{"seed": 3, "index": 4, "size": 9, **changes})  # type: ignore[arg-type]

    assert make() == make()
    assert (
        len({make().question, *(make(**change).question for change in [{"seed": 4}, {"index": 5}, {"split": "train"}])})
        == 4
    )
    assert make(size=0) is None and make(size=64 * 32) is None


def test_training_documents_have_every_kind_and_the_asked_for_lengths():
    documents = list(islice(retrieval_documents(2, 2000), 120))
    assert documents == list(islice(retrieval_documents(2, 2000), 120))
    lengths = [len(document.text) for document in documents]
    assert max(lengths) <= 2000 and sum(length > 1500 for length in lengths) > 8 and min(lengths) < 450
    assert len({document.title for document in documents}) == 120
    assert all(sum(text in document.text for document in documents) > 10 for text in ("Words:", "Let ", NOISE[0]))


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
