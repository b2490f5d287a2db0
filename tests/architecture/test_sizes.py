"""Warning signs: a file or a function that has grown too long to be read at once."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src"
FILES = sorted(SOURCE.rglob("*.py"))
LONGEST_FILE, LONGEST_FUNCTION, MOST_ARGUMENTS = 400, 80, 8
FORBIDDEN_NAMES = {"utils", "util", "common", "helpers", "base", "misc"}


def functions_of(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def test_there_is_something_to_measure() -> None:
    assert len(FILES) > 20 and any(list(functions_of(path)) for path in FILES)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(SOURCE).as_posix())
def test_sizes_and_names(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").count("\n")
    assert lines <= LONGEST_FILE, f"{path.name} has {lines} lines"
    assert path.stem not in FORBIDDEN_NAMES and path.parent.name not in FORBIDDEN_NAMES, "name the concept"
    for function in functions_of(path):
        assert function.end_lineno is not None
        length = function.end_lineno - function.lineno + 1
        assert length <= LONGEST_FUNCTION, f"{path.name}: {function.name} has {length} lines"
        if function.name == "__init__":
            arguments = len(function.args.args) + len(function.args.kwonlyargs) - 1
            assert arguments <= MOST_ARGUMENTS, f"{path.name}:{function.lineno} takes {arguments} arguments"
