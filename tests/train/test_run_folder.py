"""Folders in which no run can begin or go on are refused in one sentence, before any work, and stay as they are."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from tiny_runs import Recording, tiny_run, tiny_text_run, write_corpus

from gatelab.model.accounting import count_parameters
from gatelab.train.loop import train
from gatelab.train.run_folder import RunFolder


def contents(folder: Path) -> dict[str, bytes | None]:
    return {str(path): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Path:
    folder = tmp_path_factory.mktemp("finished") / "run"
    train(tiny_run("train.steps=4", "train.checkpoint.every=2"), folder, cache)
    return folder


@pytest.fixture
def copied(finished: Path, tmp_path: Path) -> Path:
    return shutil.copytree(finished, tmp_path / "run")


@pytest.fixture
def refuses(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Path, str], None]:
    """Says that ``train`` refuses a folder with a message of one line, before any work, and changes nothing there."""

    def check(folder: Path, message: str) -> None:
        monkeypatch.setattr("gatelab.train.loop.open_source", lambda *_: pytest.fail("work was begun"))
        before = contents(folder)
        with pytest.raises(ValueError, match=message) as error:
            train(tiny_run("train.steps=4", "train.checkpoint.every=2"), folder, cache)
        assert "\n" not in str(error.value)
        assert contents(folder) == before

    return check


@pytest.mark.parametrize("name", ["checkpoints", "metrics.jsonl", "result.json"])
def test_what_a_run_left_without_its_settings(copied: Path, refuses: Callable[[Path, str], None], name: str) -> None:
    for path in copied.iterdir():
        if path.name != name:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    message = f"run has {name} of a run but no settings.yaml to go on with; restore it or choose another folder"
    refuses(copied, message)


@pytest.mark.parametrize(
    ("name", "content", "fault"),
    [
        ("data.json", [], "it holds no mapping"),
        ("data.json", {}, "its 'fingerprint' is no str"),
        ("data.json", {"fingerprint": "", "heldout": []}, "its 'attributions' is no list"),
        ("environment.json", "torch", "it holds no mapping"),
        ("result.json", 3, "it holds no mapping"),
        ("result.json", {"heldout": []}, "its 'heldout' is no dict"),
    ],
)
def test_records_of_the_wrong_shape(
    copied: Path, refuses: Callable[[Path, str], None], name: str, content: object, fault: str
) -> None:
    (copied / name).write_text(json.dumps(content))
    refuses(copied, f"{name} is unreadable: {fault}; restore it or choose another folder")


@pytest.mark.parametrize("name", ["data.json", "environment.json"])
def test_a_missing_record(copied: Path, refuses: Callable[[Path, str], None], name: str) -> None:
    (copied / name).unlink()
    refuses(copied, f"{name} of the run is missing; restore it or choose another folder")


def test_missing_metrics(copied: Path, refuses: Callable[[Path, str], None]) -> None:
    (copied / "metrics.jsonl").unlink()
    refuses(copied, r"metrics.jsonl is missing and the checkpoints beside it can't go on without; restore it or choose")


def test_a_file_in_place_of_the_checkpoints(tmp_path: Path, refuses: Callable[[Path, str], None]) -> None:
    (tmp_path / "checkpoints").write_text("")
    refuses(tmp_path, "checkpoints is a file where a run keeps its checkpoints; choose another folder")


def test_a_file_in_place_of_the_folder(tmp_path: Path, refuses: Callable[[Path, str], None]) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "run"):
        refuses(folder, "/file is a file where a folder is needed; choose another path")


def test_a_file_in_place_of_the_cache(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("")
    with pytest.raises(ValueError, match="/cache is a file where a folder is needed"):
        train(tiny_run(), tmp_path / "run", tmp_path / "cache")
    assert not (tmp_path / "run").exists()


def test_a_study(tmp_path: Path, refuses: Callable[[Path, str], None]) -> None:
    (tmp_path / "study.yaml").write_text("")
    refuses(tmp_path, "holds a study, whose runs are in folders of their own; choose another folder")


def test_a_run_stopped_before_its_first_row_goes_on(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch):
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("gatelab.train.loop.build", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        train(tiny_run("train.steps=4"), tmp_path / "run", cache)
    assert RunFolder(tmp_path / "run").is_started and not RunFolder(tmp_path / "run").metrics.exists()
    watch = Recording()
    train(tiny_run("train.steps=4"), tmp_path / "run", cache, watch)
    assert watch.starts == [0]


def test_refusals_leave_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty split, a text shorter than a window, a full disk: neither run folder nor cache."""
    new = tmp_path / "new"
    corpus = write_corpus(tmp_path / "text.jsonl", num_documents=3)
    with pytest.raises(ValueError, match=r"the heldout split of text\.jsonl is empty"):
        train(tiny_text_run(corpus, "data.train.heldout_fraction=0.0001"), new / "run", new / "cache")
    assert not new.exists()
    with pytest.raises(ValueError, match=r"no \.txt, \.jsonl, \.parquet file at"):
        train(tiny_text_run(tmp_path / "nowhere"), new / "run", new / "cache")
    assert not new.exists()
    with monkeypatch.context() as patch, pytest.raises(OSError, match="keeping the checkpoints of this run needs"):
        patch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(1, 1, 100))
        train(tiny_run(), new / "run", new / "cache")
    assert not new.exists()


def test_checkpoints_in_float64_need_twice_the_room(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = 3 * 24 * count_parameters(tiny_run().model).total
    settings = tiny_run("train.steps=4", "train.precision=float64")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(1, 1, needed - 1))
    with pytest.raises(OSError, match="keeping the checkpoints of this run needs"):
        train(settings, tmp_path / "run", cache)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(1, 1, needed))
    train(settings, tmp_path / "run", cache)
