"""Everything that the documents name exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

from posenc.registry import ENCODINGS
from posenc.testing import IDENTITIES, LAWS
from posenc.transformers import restore
from tests.support.tiny_models import tiny_model

ROOT = Path(__file__).parent.parent
TESTS = ROOT / "tests"
README = (ROOT / "README.md").read_text()
INDEX = (ROOT / "docs" / "reference" / "names.md").read_text()
BUGS = (ROOT / "docs" / "about" / "bugs.md").read_text()


def rows(page: str) -> list[list[str]]:
    """The cells of every table, without heads."""
    lines = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| ")]
    return [cells for cells in lines if cells[0] not in ("report", "trap")]


def test_every_named_test_exists() -> None:
    entries = rows(BUGS)
    assert len(entries) > 60
    for *told, tests in entries:
        names = re.findall(r"(law )?`([^`]+)`", tests)
        assert names, told
        for law, name in names:
            if law:
                assert name in LAWS or name in IDENTITIES, name
            else:
                path, _, function = name.partition("::")
                assert f"def {function}(" in (TESTS / path).read_text(), name


def test_every_report_that_a_test_names_is_told_of() -> None:
    told = {number for cells in rows(BUGS) for number in re.findall(r"#\d+", cells[0])}
    named = {
        number: file.name
        for file in TESTS.rglob("test_*.py")
        for text in re.findall(r'"""([^"]*)"""', file.read_text())
        for number in re.findall(r"[a-z] (#\d+)", text)
    }
    assert len(named) > 30
    assert {number: where for number, where in named.items() if number not in told} == {}


def test_links_lead_somewhere() -> None:
    pages = [*ROOT.glob("*.md"), *ROOT.glob("benchmarks/results/*.md")]
    for page in pages:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_the_index_names_every_encoding() -> None:
    for name in ENCODINGS:
        assert f"`{name}`" in INDEX, name


def test_the_readme_is_short() -> None:
    assert len(README.splitlines()) <= 90


def test_the_first_release_is_told_shortly() -> None:
    assert len((ROOT / "CHANGELOG.md").read_text().splitlines()) <= 60


def test_the_readmes_examples_run(monkeypatch: pytest.MonkeyPatch) -> None:
    attention, models = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    exec(compile(attention, "README.md", "exec"), {"print": lambda *_: None})
    tiny, printed = tiny_model("qwen3"), list[str]()
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda _: tiny)
    exec(compile(models, "README.md", "exec"), {"print": lambda x: printed.append(str(x))})
    stretched, accelerated = printed
    assert "1 of 1 stretched (yarn)" in stretched
    assert "Qwen3Attention: posenc, causal" in accelerated
    report = restore(tiny)
    assert "restored" in str(report)


TEXT = [*(name for name, entry in ENCODINGS.items() if entry.claims.serves(1)), "rope+alibi"]


@pytest.mark.parametrize("name", TEXT)
def test_the_readmes_example_runs_with_every_encoding_of_text(name: str) -> None:
    example = re.findall(r"```python\n(.*?)```", README, re.DOTALL)[0]
    smaller = {'"rope"': f'"{name}"', "700, 324": "40, 24", "1024": "64"}
    for old, new in smaller.items():
        assert old in example
        example = example.replace(old, new)
    names: dict[str, object] = {"print": lambda *_: None}
    exec(compile(example, "README.md", "exec"), names)
    out = names["out"]
    assert isinstance(out, torch.Tensor)
    assert out.shape == (1, 8, 64, 64)
    assert out.isfinite().all()


def test_the_first_example_runs_with_every_name_in_its_comment() -> None:
    page = (ROOT / "docs" / "start" / "index.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    first, *others = re.findall(r'"(\w+)"', example)
    assert len(others) >= 3
    for name in others:
        names: dict[str, object] = {}
        exec(compile(example.replace(f'"{first}"', f'"{name}"', 1), "start", "exec"), names)
        out = names["out"]
        assert isinstance(out, torch.Tensor)
        assert out.isfinite().all(), name


def test_forms_of_issues_ask_for_something() -> None:
    forms = sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml"))
    assert len(forms) >= 4
    for path in forms:
        form = yaml.safe_load(path.read_text())
        if path.name != "config.yml":
            assert {"name", "description", "labels", "body"} == set(form), path.name
            asked = [field for field in form["body"] if field["type"] in ("input", "textarea")]
            assert asked == form["body"], path.name
            assert any(field.get("validations", {}).get("required") for field in asked)


def test_every_version_of_the_site_is_published_beside_the_others() -> None:
    flow = yaml.safe_load((ROOT / ".github/workflows/site.yml").read_text())
    script = flow["jobs"]["publish"]["steps"][-1]["run"]
    assert flow[True]["push"] == {"branches": ["main"], "tags": ["v*"]}  # YAML reads "on" so
    assert 'cp -r ../build/docs "$version"' in script
    assert "python ../scripts/versions.py ." in script
