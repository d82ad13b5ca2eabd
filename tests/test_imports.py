"""Imports go one way, and ``import posenc`` loads nothing optional."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import posenc

PACKAGE = Path(posenc.__file__).parent

FOUNDATION = {"errors", "arguments", "runtime", "layout", "grid", "encoding", "registration"}
CORE = FOUNDATION | {"registry", "attention", "encodings", "extension", "models", "storage"}
RESULTS = {
    "lab.codec",
    "lab.declared",
    "lab.folders",
    "lab.reporting",
    "lab.stores",
    "lab.training",
}
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "runtime": set(),
    "storage": {"errors"},
    "arguments": {"errors"},
    "registration": {"errors", "arguments"},
    "layout": {"errors", "arguments", "runtime"},
    "grid": {"errors", "arguments", "layout"},
    "encoding": {"errors", "arguments", "runtime", "layout", "grid"},
    "encodings": FOUNDATION,
    "attention": FOUNDATION,
    "registry": FOUNDATION,
    "extension": CORE - {"models", "extension"},
    "models": CORE - {"models"},
    "testing": CORE,
    "distributed": CORE,
    # the second house: models of transformers
    "transformers": CORE,
    # the third: the lab
    "lab": set(),
    "lab.codec": {"errors"},
    "lab.declared": set(),
    "lab.folders": {"errors", "storage"},
    "lab.stores": {"errors"},
    "lab.users": set(),
    "lab.training": CORE | {"distributed"},
    "lab.reporting": {"attention", "storage"},
    "lab.visualization": CORE | {"lab.reporting"},
    "lab.experiments": CORE | RESULTS,
    "lab.evaluation": CORE | RESULTS | {"transformers", "lab.experiments"},
    "lab.doctor": {"errors", "transformers", "lab.evaluation", "lab.reporting"},
    "lab.bench": CORE | RESULTS | {"lab.experiments"},
    "lab.lm_eval": CORE | {"transformers"},
    "lab.cli": CORE
    | RESULTS
    | {"transformers", "lab.experiments", "lab.evaluation", "lab.doctor", "lab.bench"}
    | {"lab.visualization", "lab.users"},
    "__main__": {"lab.cli"},
}
"""What each room imports of others: files and folders of the top floor, and those of the lab."""


def room(module: str) -> str:
    """The room of a module, by its name without ``posenc.``."""
    parts = module.split(".")
    return ".".join(parts[:2]) if parts[0] == "lab" else parts[0]


def imported_modules(source: str) -> set[str]:
    """Every module of posenc that a source imports, at any depth of its code."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide where they go"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name for name in found if name.split(".")[0] == "posenc"}


FILES = sorted(
    file for file in PACKAGE.rglob("*.py") if file.parent != PACKAGE or file.stem != "__init__"
)


def check_direction(own: str, source: str) -> None:
    """Hold what one part of the package imports to ``MAY_IMPORT``.

    Names that the package itself offers, such as ``posenc.create``, are refused: they come from
    everywhere at once. Say ``from posenc.registry import create``. The version alone is defined
    before anything is imported.
    """
    assert own in MAY_IMPORT, f"{own} is new: say in MAY_IMPORT what it may import"
    for name in imported_modules(source) - {"posenc.__version__"}:
        target = room(name.partition(".")[2])
        assert target == own or target in MAY_IMPORT[own], f"{own} must not import {name}"


def test_imports_go_one_way() -> None:
    for file in FILES:
        name = ".".join(file.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")
        check_direction(room(name), file.read_text())


@pytest.mark.parametrize(
    ("own", "source"),
    [
        ("attention", "from posenc.encodings.score.alibi import Alibi"),
        ("attention", "from posenc import encodings"),
        ("attention", "def late():\n    import posenc.encodings.score.t5"),
        ("layout", "from posenc.encoding import Encoding"),
        ("encodings", "from posenc.attention.api import attend"),
        ("models", "from posenc.lab.training.loop import train"),
        ("models", "from posenc import create"),
        ("lab.experiments", "import posenc"),
        ("lab.evaluation", "from posenc.lab.cli.app import main"),
        ("lab.training", "from posenc.lab.experiments.compare import compare"),
        ("lab.visualization", "from posenc.lab.bench.run import bench"),
        ("lab.reporting", "from posenc.lab.experiments.results import Comparison"),
        ("attention", "from posenc.transformers.live import LiveModel"),
        ("distributed", "from posenc.lab.codec import from_json"),
        ("transformers", "from posenc.lab.reporting.numbers import counted"),
        ("transformers", "from posenc import lab"),
        ("lab.reporting", "from posenc.transformers import stretch"),
        ("somewhere_new", "import torch"),
    ],
)
def test_wrong_imports_are_caught(own: str, source: str) -> None:
    with pytest.raises(AssertionError, match=r"must not import|is new"):
        check_direction(own, source)


def test_backends_never_import_one_another() -> None:
    folder = PACKAGE / "attention" / "backends"
    for file in folder.rglob("*.py"):
        own = file.relative_to(folder).parts[0].removesuffix(".py")
        for name in imported_modules(file.read_text()):
            parts = name.split(".")
            if parts[1:3] == ["attention", "backends"] and len(parts) > 3:
                assert parts[3] in {own, "common"}, f"{file.name} imports {name}"


def circles(imports: dict[str, set[str]]) -> set[str]:
    """Modules that import themselves through others."""
    reached = {name: set(others) for name, others in imports.items()}
    for middle in imports:
        for others in reached.values():
            if middle in others:
                others |= reached[middle]
    return {name for name, others in reached.items() if name in others}


def test_no_modules_import_in_a_circle() -> None:
    """Imports for types alone count too."""
    sources = {
        ".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(
            ".__init__"
        ): file.read_text()
        for file in FILES
    }
    imports = {
        own: {
            name if name in sources else name.rpartition(".")[0]
            for name in imported_modules(source)
        }
        & sources.keys() - {own}
        for own, source in sources.items()
    }
    assert circles(imports) == set()
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == {"b", "c"}


OPTIONAL = [
    "transformers",
    "lightning_fabric",
    "altair",
    "pandas",
    "cyclopts",
    "rich",
    "jinja2",
    "torchdiffeq",
    "scipy",
    "vl_convert",
    "hypothesis",
    "triton",
    "cattrs",
    "posenc.lab.training",
    "posenc.lab.experiments",
    "posenc.lab.visualization",
    "posenc.lab.cli",
    "posenc.models",
    "posenc.testing",
]


OF_TRAINING = ["lightning_fabric", "torch._dynamo", "torch.distributed.fsdp"]


def test_import_loads_nothing_optional_but_subpackages_that_are_used() -> None:
    """Subpackages are there without an import of their own.

    Laws trace nothing yet, and programs that measure models load nothing that only training needs.
    """
    program = (
        "import sys, torch; before = set(sys.modules); import posenc;"
        f"print([m for m in {OPTIONAL!r} if m in set(sys.modules) - before]);"
        "assert 'models' in dir(posenc);"
        "posenc.models.Decoder, posenc.extension.extend, posenc.testing.LAWS;"
        "import posenc.lab.evaluation.checkpoint, posenc.lab.evaluation.extend;"
        f"print([m for m in {OF_TRAINING!r} if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == ["[]", "[]"]


def test_unknown_subpackages_are_no_attributes() -> None:
    with pytest.raises(AttributeError, match="no attribute 'modles'"):
        posenc.modles  # type: ignore[attr-defined]  # noqa: B018
