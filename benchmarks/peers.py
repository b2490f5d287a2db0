"""The environments of the peers that benchmarks run beside GateLab: one each, on the torch that runs this.

python benchmarks/peers.py FOLDER [--only NAME ...]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import venv
from pathlib import Path
from typing import NamedTuple

import torch


class Peer(NamedTuple):
    """A package to compare with: what is installed, the module of ``contenders`` that runs it, whether it has gates."""

    name: str
    requirement: str
    module: str
    gated: bool


PEERS = (
    Peer("litgpt", "litgpt==0.5.13", "litgpt_model", gated=False),
    Peer("x-transformers, gated", "x-transformers==2.31.10", "x_transformers_model", gated=True),
    Peer("OLMo-core, gated", "ai2-olmo-core==3.0.0", "olmo_model", gated=True),
)


def python_of(folder: Path, peer: Peer) -> str:
    """The interpreter of a peer's environment; ``SystemExit`` with the way out where there is none."""
    python = folder / peer.module / "bin" / "python"
    if not python.exists():
        raise SystemExit(f"{python} is missing; make it with: python benchmarks/peers.py {folder}")
    return str(python)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", nargs="+", choices=[peer.module for peer in PEERS])
    given = parser.parse_args()
    for peer in PEERS:
        if given.only and peer.module not in given.only:
            continue
        venv.create(given.folder / peer.module, with_pip=True)
        version = torch.__version__.split("+")[0]
        requirements = [f"torch=={version}", "setuptools", peer.requirement]
        subprocess.run([python_of(given.folder, peer), "-m", "pip", "install", "-q", *requirements], check=True)
        print(f"{peer.name}: {given.folder / peer.module}", file=sys.stderr)


if __name__ == "__main__":
    main()
