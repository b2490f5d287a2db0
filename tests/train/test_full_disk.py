"""A disk that runs full or is read-only: one clear sentence, the last good state intact, and the run can go on."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tiny_runs import Recording, assert_same_run, tiny_run

from gatelab.train.checkpoint import checkpoints
from gatelab.train.loop import train
from gatelab.train.metrics import read_metrics
from gatelab.train.run_folder import RunFolder

SETTINGS = tiny_run("train.checkpoint.every=2")


class Disk:
    """A small file system of its own."""

    def __init__(self, path: Path):
        self.path = path

    def mount(self, options: str) -> bool:
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(self.path)]
        return shutil.which("mount") is not None and subprocess.run(command, capture_output=True).returncode == 0


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    (tmp_path / "disk").mkdir()
    disk = Disk(tmp_path / "disk")
    if not disk.mount("size=16k"):
        pytest.skip("needs the right to mount a tmpfs")
    yield disk
    subprocess.run(["umount", str(disk.path)], check=True)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    train(SETTINGS, folder, cache)
    return folder


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_disk_that_runs_full_again_and_again(
    disk: Disk, undisturbed: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check beforehand is told that there is room; then each start finds a little more of it."""
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(1 << 40, 0, 1 << 40))
    whole = sum(path.stat().st_blocks * 512 for path in undisturbed.rglob("*") if path.is_file())
    run, size, completed = RunFolder(disk.path / "run"), 16 << 10, []
    while run.result is None:
        try:
            train(SETTINGS, run.path, cache)
        except OSError as error:
            assert "No space left on device" in str(error) or "could not be written; is the disk full?" in str(error)
            assert "\n" not in str(error).strip()
            completed.append(len(checkpoints(run.checkpoints)))
            assert not list(run.path.rglob("*.tmp"))
            size += whole // 7
            assert size < 4 * whole, "there is room enough by now"
            assert disk.mount(f"remount,size={size}")
    assert len(completed) > 2 and completed[0] == 0 and completed[-1] > 0
    assert_same_run(run.path, undisturbed)


def test_metrics_that_no_longer_fit(
    tmp_path: Path, undisturbed: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system refuses half a row in the middle of the run."""

    class Full(Recording):
        def update(self, step: int, *figures: float) -> None:
            if step == 7:
                raise OSError(28, "No space left on device")

    message = "or .* can't be written: No space left on device; the last good checkpoint is .*step_00000006. Free some"
    with pytest.raises(OSError, match=message):
        train(SETTINGS, tmp_path / "run", cache, Full())
    with (tmp_path / "run" / "metrics.jsonl").open("a") as stream:
        stream.write('{"kind": "step", "st')
    train(SETTINGS, tmp_path / "run", cache)
    assert_same_run(tmp_path / "run", undisturbed)


def test_a_folder_that_becomes_read_only(disk: Disk, undisturbed: Path, cache: Path) -> None:
    assert disk.mount("remount,size=64m")
    folder = disk.path / "run"
    with pytest.raises(KeyboardInterrupt):
        train(SETTINGS, folder, cache, Recording(7))
    before = files_of(folder)
    assert disk.mount("remount,ro")
    for place, kept in ((folder, "the last good checkpoint is .*step_00000006"), (disk.path / "new", "there is no")):
        with pytest.raises(OSError, match=f"can't be written: .*[Rr]ead-only.*; {kept}.*make the folder writable"):
            train(SETTINGS, place, cache)
    assert files_of(folder) == before and not (disk.path / "new").exists()
    assert len(read_metrics(folder / "metrics.jsonl", "step")) == 7
    assert disk.mount("remount,rw")
    train(SETTINGS, folder, cache)
    assert_same_run(folder, undisturbed)


def rights_refused(*arguments: object, **options: object) -> None:
    raise PermissionError(13, "Permission denied", "somewhere/run")


def test_a_folder_without_the_right_to_write(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused: Callable[..., None] = rights_refused
    monkeypatch.setattr(Path, "mkdir", refused)
    with pytest.raises(OSError, match="somewhere/run can't be written: Permission denied; there is no checkpoint yet"):
        train(SETTINGS, tmp_path / "run", cache)
