"""Code of pages and notebooks runs, and command lines name what exists."""

from __future__ import annotations

import doctest
import importlib.util
import json
import re
import runpy
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers

from posenc.lab.cli.app import arguments_of
from tests.support.tiny_models import tiny_model
from tests.website.pages import CHINESE, DOCS, ROOT, SOURCES, TRANSLATED, blocks, name

SAME = [CHINESE / path.relative_to(DOCS) for path in TRANSLATED]
"""Chinese pages with the code of English ones."""

RUN = [path for path in SOURCES if path not in SAME and blocks(path.read_text(), "python", "pycon")]
TYPED = [path for path in SOURCES if blocks(path.read_text(), "console", "bash")]
MADE = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)

MODELS = {"Qwen/Qwen3-0.6B": "qwen3", "microsoft/deberta-v3-base": "deberta-v2"}
"""Released models that pages load, and the types of those that the tests load instead."""


class Tokenizer:
    """Random ids in place of a released model's tokenizer."""

    def __call__(self, text: str, **options: Any) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.randint(100, (1, 12))}


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Tiny models in place of released ones, and a folder of one."""
    for kind in ("AutoModel", "AutoModelForCausalLM"):
        load = lambda model: tiny_model(MODELS[model])  # noqa: E731
        monkeypatch.setattr(getattr(transformers, kind), "from_pretrained", load)
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda _: Tokenizer())
    monkeypatch.chdir(tmp_path)
    tiny_model("llama").save_pretrained("folder")


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("path", RUN, ids=name)
def test_blocks_run_one_after_the_other(path: Path) -> None:
    torch.manual_seed(0)
    names: dict[str, Any] = {"__name__": "page"}
    try:
        for number, (kind, code) in enumerate(blocks(path.read_text(), "python", "pycon")):
            place = f"{name(path)}, block {number}"
            if kind == "python":
                exec(compile(code, place, "exec"), names)
                continue
            test = doctest.DocTestParser().get_doctest(code, names, place, str(path), 0)
            failures: list[str] = []
            runner = doctest.DocTestRunner(verbose=False, optionflags=doctest.ELLIPSIS)
            runner.run(test, out=failures.append, clear_globs=False)
            names.update(test.globs)
            assert "".join(failures) == ""
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def lines(text: str) -> list[list[str]]:
    """Words of the commands in a block, without prompts, comments and what they print."""
    joined = re.sub(r"\\\n\s*", "", text)
    typed = re.findall(r"^\$ (.*)$", joined, re.MULTILINE) or joined.splitlines()
    return [shlex.split(line, comments=True) for line in typed if line.strip()]


@pytest.mark.parametrize("path", TYPED, ids=name)
def test_commands_and_options_exist(path: Path) -> None:
    for _, text in blocks(path.read_text(), "console", "bash"):
        for program, *words in lines(text):
            options = {word.partition("=")[0] for word in words if word.startswith("--")}
            if program == "posenc" and words != ["--version"]:
                known = {name for one in arguments_of(words[0]) for name in one.names}
                assert options <= known, f"{words[0]}: {options - known}"
            elif program == "make":
                assert words[0] in MADE, words
            elif program == "python" and words[0] == "-m":
                assert importlib.util.find_spec(words[1]), words
            else:
                assert program in {"pip", "torchrun", "posenc", "unzip", "vllm"}, program


def test_a_wrong_option_is_noticed(tmp_path: Path) -> None:
    words = ["posenc", "doctor", "x", "--sec", "0"]
    assert lines("$ posenc doctor x --sec 0\nprinted\n") == [words]
    assert lines("posenc compare --out x \\\n    --nodes 8  # eight\n")[0][-2:] == ["--nodes", "8"]


NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def test_notebooks_are_current() -> None:
    made: dict[Path, str] = runpy.run_path(str(ROOT / "scripts/notebooks.py"))["notebooks"]()
    assert sorted(made) == NOTEBOOKS
    for path, text in made.items():
        assert path.read_text() == text, f"{path.name} is not current. Remedy: make docs"


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_cells_run(path: Path) -> None:
    cells = json.loads(path.read_text())["cells"]
    code = [cell["source"] for cell in cells if cell["cell_type"] == "code"]
    assert code[0].startswith("%pip install")
    torch.manual_seed(0)
    names: dict[str, Any] = {"__name__": "notebook"}
    for number, source in enumerate(code[1:]):
        exec(compile(source, f"{path.name}, cell {number}", "exec"), names)
