"""Print the size of the code and what a call of attend enters: python scripts/figures.py."""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FrameType

import torch

import posenc
from posenc import Grid, Layout, attend, create

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "posenc"
OTHER_HOUSES = ("transformers", "lab")
"""Folders of ``src/posenc`` that are not the core."""

LAYOUT = {tokenize.NEWLINE, tokenize.NL, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def python_lines(source: str) -> int:
    """Lines that hold code: neither blank, nor comment, nor docstring."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    texts = set()
    for node in ast.walk(ast.parse(source)):
        body = node.body if isinstance(node, documented) else []
        # strings after an assignment document it
        for statement in body:
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                texts |= set(range(statement.lineno, (statement.end_lineno or 0) + 1))
    lines = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in LAYOUT | {tokenize.COMMENT}:
            lines |= set(range(token.start[0], token.end[0] + 1))
    return len(lines - texts)


def cpp_lines(source: str) -> int:
    """Lines that hold code: neither blank nor comment."""
    bare = re.sub(r"/\*.*?\*/", "", source, flags=re.DOTALL)
    return sum(bool(re.sub(r"//.*", "", line).strip()) for line in bare.splitlines())


def code_lines(files: Iterable[Path]) -> int:
    """Of Python and C++ files."""
    return sum(
        (python_lines if file.suffix == ".py" else cpp_lines)(file.read_text()) for file in files
    )


def sources(folder: Path) -> list[Path]:
    """Python and C++ files below a folder."""
    return sorted(f for f in folder.rglob("*") if f.suffix in {".py", ".h", ".cpp"})


def repeated_classes(folder: Path) -> dict[str, list[str]]:
    """Files by the names of classes that several of them define."""
    found = defaultdict(list)
    for file in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ClassDef):
                found[node.name].append(str(file.relative_to(folder)))
    return {name: files for name, files in sorted(found.items()) if len(set(files)) > 1}


MEMORIES = ("WeakKeyDictionary", "WeakTensorKeyDictionary", "WeakValueDictionary")
CACHES = ("cache", "lru_cache")


def memories(files: Iterable[Path]) -> dict[str, list[str]]:
    """Weak dictionaries and cached functions, by file."""
    found = defaultdict(list)
    for file in files:
        tree = ast.parse(file.read_text()) if file.suffix == ".py" else ast.Module([], [])
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                named = {ast.unparse(x).partition("(")[0] for x in node.decorator_list}
                if named & {*CACHES, *(f"functools.{name}" for name in CACHES)}:
                    found[str(file.relative_to(PACKAGE))].append(node.name)
            elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(MEMORIES):
                found[str(file.relative_to(PACKAGE))].append(ast.unparse(node.func))
    return dict(found)


def entered(call: Callable[[], object]) -> tuple[int, int]:
    """Files of posenc that a call enters, and its calls of their functions."""
    files, calls = set(), 0

    def count(frame: FrameType, event: str, _: object) -> None:
        nonlocal calls
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(str(PACKAGE)):
            files.add(name)
            calls += 1

    sys.setprofile(count)
    try:
        call()
    finally:
        sys.setprofile(None)
    return len(files), calls


def main() -> None:
    assert Path(posenc.__file__).parent == PACKAGE, posenc.__file__
    everything = sources(PACKAGE)
    core = [f for f in everything if f.relative_to(PACKAGE).parts[0] not in OTHER_HOUSES]
    print(f"code lines of the core      {code_lines(core):,}")
    print(f"code lines of src           {code_lines(everything):,}")
    print(f"code lines of tests         {code_lines(sources(ROOT / 'tests')):,}")
    print(f"files in src                {len(everything)}")
    encoding = create("t5", heads=8, causal=True).eval()
    q, k, v = torch.randn(3, 1, 8, 512, 64).unbind()
    layout = Layout.sequence(512)

    def call() -> object:
        return attend(q, k, v, Grid.of(layout, causal=True), encoding)

    with torch.no_grad():
        call()  # kernels are loaded, backends imported
        encoding = create("t5", heads=8, causal=True).eval()
        print("a first attend              {} files, {} calls".format(*entered(call)))
        call()  # the encoding prepares what later calls reuse
        print("a prepared one              {} files, {} calls".format(*entered(call)))
    remembering = memories(core)
    print(
        f"weak dictionaries and cached functions of the core {sum(map(len, remembering.values()))}"
    )
    for name, items in remembering.items():
        print(f"  {name}: {', '.join(items)}")
    repeated = repeated_classes(PACKAGE)
    print(f"class names in several files {len(repeated)}")
    for name, files in repeated.items():
        print(f"  {name}: {', '.join(files)}")


if __name__ == "__main__":
    main()
