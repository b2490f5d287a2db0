"""Atomic writes: complete or absent."""

import hashlib
import os
import shutil
from pathlib import Path

import pytest

from gatelab.files import atomic_path, default_folder, remove_leftovers, require_free_space, sha256, write_atomically


def test_a_failed_write_leaves_what_was_there(tmp_path):
    file = tmp_path / "result.json"
    write_atomically(file, "old")
    with pytest.raises(RuntimeError), atomic_path(file) as temporary:
        temporary.write_text("half")
        raise RuntimeError
    assert file.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"]


def test_a_folder_appears_whole_or_not_at_all(tmp_path):
    target = tmp_path / "step_1"
    with pytest.raises(RuntimeError), atomic_path(target) as temporary:
        temporary.mkdir()
        (temporary / "a").write_text("x")
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []
    with atomic_path(target) as temporary:
        temporary.mkdir()
        (temporary / "a").write_text("x")
        assert not target.exists()
    assert (target / "a").read_text() == "x"


def test_what_stands_beside_is_left_alone(tmp_path, monkeypatch):
    """Writing a file flushes it and the folder that names it, not the folder's other files."""
    (tmp_path / "beside").mkdir()
    (tmp_path / "beside" / "file").write_text("mine")
    opened, system_open = [], os.open
    monkeypatch.setattr(os, "open", lambda path, flags: (opened.append(path), system_open(path, flags))[1])
    write_atomically(tmp_path / "new", "x")
    assert len(opened) == 2 and opened[0].parent == opened[1] == tmp_path


def test_leftovers_of_a_kill_are_removed_and_nothing_else(tmp_path):
    (tmp_path / ".step_1.abcdef01.tmp").mkdir()
    (tmp_path / ".file.abcdef02.tmp").write_text("half")
    mine = {"kept.tmp", ".note.tmp", ".my.work.tmp"}
    for name in mine:
        (tmp_path / name).write_text("mine")
    remove_leftovers(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == mine


def test_sha256(tmp_path):
    content = bytes(range(256)) * 9000
    write_atomically(tmp_path / "f", content)
    assert sha256(tmp_path / "f") == hashlib.sha256(content).hexdigest()


def test_too_little_space_is_said_before_any_work(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 5, 5_000_000))
    require_free_space(tmp_path / "new" / "folder", 4_000_000, "a checkpoint")
    with pytest.raises(OSError, match="a checkpoint needs about 6 MB but only 5 MB are free under"):
        require_free_space(tmp_path / "new" / "folder", 6_000_000, "a checkpoint")


@pytest.mark.parametrize(
    ("names", "folder"),
    [
        (["runs/demo/ungated"], "ungated"),
        (["owner/Name-1.5B"], "Name-1.5B"),
        (["a/one", "b/two"], "one-and-two"),
        ([".."], "model"),
        (["odd name?/x y"], "x_y"),
    ],
)
def test_the_default_folder_is_called_after_the_models(names, folder):
    assert default_folder("diagnosis", names) == Path("runs/diagnosis") / folder
