"""Run transformers' own tests of models with and without posenc under the models.

    python scripts/transformers_tests.py [KIND ...]                    the common tests of models
    python scripts/transformers_tests.py --checkout FOLDER [FAMILY ...]   all tests of families

The common tests are those of the installed version's source distribution, over tiny causal models;
families' tests are in a checkout of transformers alone, as near to that version as there is. What
they need is downloaded first; they run without network.

Prints how many tests pass with the models as they are, switched to sdpa, accelerated, and stretched
by ReRoPE, which moves positions; and those that pass only without posenc: then it ends with 1. The
same file is the pytest plugin that changes every model before its first forward pass.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch
import transformers

from posenc.errors import ArgumentError
from posenc.transformers import stretch
from posenc.transformers.acceleration import FAMILIES, accelerate

KINDS = ("llama", "qwen3", "gemma3_text", "gpt_oss", "gpt_neox", "phi3", "bloom", "mpt", "gpt2")
"""Model types whose common tests are run by default."""

WAY, KIND = "POSENC_TESTS_WAY", "POSENC_TESTS_KIND"
"""Variables of the plugin and of the common tests."""

WAYS = ("sdpa", "accelerated", "stretched")

UNMOVED = {"length": 4000, "window": 3000, "windows": True}
"""Options of ReRoPE with which short texts have the outputs that they had."""

PASSED = re.compile(r"^PASSED (tests/\S+)", re.MULTILINE)
COUNTED = re.compile(r"^changed modules: (\d+)", re.MULTILINE)

COMMON = f"""
import copy, os, unittest
import torch
from tests.test_modeling_common import ModelTesterMixin
from posenc_repository.tests.support.tiny_models import tiny_model

KIND = os.environ["{KIND}"]


class Tester:
    batch_size, seq_length, is_training = 2, 12, True

    def __init__(self):
        self.config = tiny_model(KIND).config
        for name in ("num_hidden_layers", "num_attention_heads", "hidden_size"):
            setattr(self, name, getattr(self.config, name))

    def get_config(self):
        config = copy.deepcopy(self.config)
        config._attn_implementation = None
        return config

    def prepare_config_and_inputs_for_common(self):
        ids = torch.randint(3, 100, (self.batch_size, self.seq_length))
        return self.get_config(), {{"input_ids": ids, "attention_mask": torch.ones_like(ids)}}


class Test(ModelTesterMixin, unittest.TestCase):
    all_model_classes = (type(tiny_model(KIND)),)

    def setUp(self):
        self.model_tester = Tester()
"""
"""The common tests of one model type."""

LEFT_OUT = {
    "exporters/test_export.py": "ExportTesterMixin",
    "generation/test_utils.py": "GenerationTesterMixin",
}
"""Modules that the common tests import, and no source distribution has."""


class Changer:
    """Pytest plugin under which every model of transformers is changed when it is first called."""

    def __init__(self) -> None:
        self.seen: WeakSet[Any] = WeakSet()
        self.modules = 0

    def change(self, model: Any) -> None:
        self.seen.update(x for x in model.modules() if isinstance(x, transformers.PreTrainedModel))
        with suppress(ArgumentError, ValueError):  # models that are not served
            if os.environ[WAY] == "sdpa":
                model.set_attn_implementation("sdpa")
            elif os.environ[WAY] == "stretched":
                self.modules += stretch(model, "rerope", **UNMOVED).stretched
            else:
                self.modules += accelerate(model, check=False, shortest=0).accelerated

    def pytest_configure(self) -> None:
        call = transformers.PreTrainedModel.__call__

        def changed(model: Any, *arguments: Any, **options: Any) -> Any:
            if not torch.compiler.is_compiling() and model not in self.seen:
                self.change(model)
            return call(model, *arguments, **options)

        transformers.PreTrainedModel.__call__ = changed

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        terminalreporter.write_line(f"changed modules: {self.modules}")


def pytest_configure(config: Any) -> None:
    """Change models; called when this file is loaded as a plugin."""
    config.pluginmanager.register(Changer())


def pip(command: str, *arguments: str) -> None:
    """Run a command of pip."""
    subprocess.run([sys.executable, "-m", "pip", command, "--quiet", *arguments], check=True)


def common_tests(folder: Path) -> Path:
    """Download the source distribution of the installed transformers, and add the tests of a type.

    Returns:
        the folder of its ``tests``.
    """
    wanted = f"transformers=={transformers.__version__}"
    of_sources = ["--no-deps", "--no-build-isolation", "--no-binary", "transformers"]
    pip("download", *of_sources, "--dest", str(folder), wanted)
    (archive,) = folder.glob("transformers-*.tar.gz")
    with tarfile.open(archive) as opened:
        opened.extractall(folder, filter="data")
    source = folder / archive.name.removesuffix(".tar.gz")
    tests = source / "tests"
    for name, mixin in LEFT_OUT.items():
        (tests / name).parent.mkdir(exist_ok=True)
        (tests / name).write_text(f"class {mixin}:\n    pass\n")
        (tests / name).with_name("__init__.py").touch()
    (tests / "__init__.py").touch()
    (tests / "test_common.py").write_text(COMMON)
    (source / "posenc_repository").symlink_to(Path(__file__).resolve().parent.parent)
    return source


def passed(
    source: Path, libraries: Path, files: Sequence[str], kind: str, way: str
) -> tuple[set[str], int]:
    """The tests of some files that pass, and the number of modules that were changed.

    Args:
        source: folder that has ``tests``.
        libraries: folder of what they need beside transformers.
        way: one of ``WAYS``; "" for models as they are.
    """
    command = [sys.executable, "-m", "pytest", "-q", "-rp", "-p", "no:randomly", "-W", "ignore"]
    if way:
        command += ["-p", Path(__file__).stem]
    path = os.pathsep.join([str(Path(__file__).parent.resolve()), str(libraries)])
    variables = {"HF_HUB_OFFLINE": "1", "PYTHONPATH": path, WAY: way, KIND: kind}
    result = subprocess.run(
        [*command, *files],
        cwd=source,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
    )
    if result.returncode not in (0, 1):  # 1: some tests failed
        said = result.stdout + result.stderr
        sys.exit(f"{said}\npytest ended with return code {result.returncode}.")
    modules = sum(map(int, COUNTED.findall(result.stdout)))
    return {match[1] for match in PASSED.finditer(result.stdout)}, modules


def main() -> None:
    """Print the table and the tests that pass only without posenc."""
    parser = argparse.ArgumentParser(description="Run transformers' own tests with posenc.")
    parser.add_argument("--checkout", type=Path, help="of transformers, for tests of families")
    parser.add_argument("kinds", nargs="*", metavar="KIND", help="model types, or families")
    options = parser.parse_args()
    print("| models | passed as they are | sdpa | accelerated, modules | stretched, modules |")
    print("|---" * (2 + len(WAYS)) + "|")
    lost: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        source, libraries = options.checkout or common_tests(Path(folder)), Path(folder, "lib")
        pip("install", "--target", str(libraries), "parameterized", "httpx")
        for kind in options.kinds or (list(FAMILIES) if options.checkout else KINDS):
            files = ["tests/test_common.py"]
            if options.checkout:
                found = (source / "tests" / "models" / kind).glob("test_modeling_*.py")
                files = sorted(str(file.relative_to(source)) for file in found)
            if not files:
                sys.exit(f"{source} has no tests of {kind}.")
            ordinary, _ = passed(source, libraries, files, kind, "")
            cells = [str(len(ordinary))]
            for way in WAYS:
                after, modules = passed(source, libraries, files, kind, way)
                if way == "sdpa":
                    ordinary &= after
                    cells.append(str(len(after)))
                else:
                    lost += [f"{kind}, {way}: {test}" for test in sorted(ordinary - after)]
                    cells.append(f"{len(after)}, {modules}")
            print(f"| {kind} | {' | '.join(cells)} |", flush=True)
    for test in lost:
        print(f"only without posenc: {test}")
    if lost:
        sys.exit(1)


if __name__ == "__main__":
    main()
