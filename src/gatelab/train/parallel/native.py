"""Building of the project's own C++ kernels against the installed PyTorch, once for each of their versions."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import torch

from gatelab.files import atomic_path

# Without -ffast-math: its start-up code would turn off denormal numbers in the whole process.
_FLAGS = ("-std=c++20", "-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-fopenmp", "-shared", "-fPIC")


def build_library(source: Path) -> Path:
    """The shared library of one C++ file, from PyTorch's folder of built extensions or built there now (seconds).

    Its name has a checksum of source, flags, compiler, processor and PyTorch. Raises ``RuntimeError`` with the
    compiler's words when it can't be built.
    """
    from torch.utils.cpp_extension import get_default_build_root  # slow to import, and for this alone

    compiler, torch_folder = cpp_compiler(), Path(torch.__file__).parent
    target = _run(compiler, "-march=native", "-dM", "-E", "-x", "c++", os.devnull)
    recipe = "\n".join((source.read_text(encoding="utf-8"), *_FLAGS, compiler, target, torch.__version__))
    folder = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root()) / "gatelab"
    library = folder / f"{source.stem}-{hashlib.sha256(recipe.encode()).hexdigest()[:16]}.so"
    if not library.exists():
        with atomic_path(library) as temporary:
            link = (f"-L{torch_folder / 'lib'}", "-ltorch_cpu", "-lc10")
            paths = (f"-isystem{torch_folder / 'include'}", str(source), "-o", str(temporary))
            _run(compiler, *_FLAGS, "-DAT_PARALLEL_OPENMP=1", *paths, *link)
    return library


def cpp_compiler() -> str:
    """The command of torch.compile's C++ compiler."""
    return os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")


def _run(*command: str) -> str:
    finished = subprocess.run(command, capture_output=True, text=True)
    if finished.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with status {finished.returncode}:\n{finished.stderr[-2000:]}")
    return finished.stdout
