"""Generated pages: every encoding, extension, command, option and public name has its place."""

from __future__ import annotations

import re
import typing
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from scripts.docs import measured, pages, pictures, reference, snippets, sources
from scripts.docs.markdown import paragraph, prose

import posenc
from posenc.extension import EXTENSIONS
from posenc.lab.cli.app import COMMANDS, arguments_of
from posenc.lab.experiments.settings import ComparisonSettings
from posenc.lab.reporting.palette import LIGHT
from posenc.lab.users import users
from posenc.lab.visualization.pictures import PARAMETERS, RISE
from posenc.models import Decoder, DecoderConfig, Sample
from posenc.registry import ENCODINGS
from posenc.testing import LAWS

DOCS = Path(__file__).parent.parent / "docs"


@pytest.fixture(scope="module")
def made() -> dict[str, str]:
    return pages.pages()


def test_committed_pages_are_current(made: dict[str, str]) -> None:
    for name in pages.committed():
        assert (DOCS / name).read_text() == made[name], "Remedy: make docs"


def test_every_name_has_its_page(made: dict[str, str]) -> None:
    for name, entry in ENCODINGS.items():
        page = made[f"methods/{name}.md"]
        assert entry.citation is not None
        assert f"@misc{{{re.sub('[^a-z]', '', entry.citation.authors.split()[0].lower())}" in page
        assert entry.citation.title in page
        assert "<math" in page
        assert f":file: pictures/{name}.html\n" in page
        for option in entry.options():
            assert re.search(rf"^\| `{option}` \| `.*` \| .+ \|$", page, re.MULTILINE), option
    for name, extension in EXTENSIONS.items():
        page = made[f"extensions/{name}.md"]
        assert extension.summary in page
        assert f"[`{name}`]({name}.md)" in made["extensions/index.md"]
        for option in extension.options():
            assert option in ("encoding", "model") or f"| `{option}` |" in page, (name, option)
    for law in LAWS:
        assert f"`{law}`" in made["reference/names.md"]


def test_every_public_name_is_described_once(made: dict[str, str]) -> None:
    directive = re.compile(r"^\.\. (?:auto\w+|py:data):: (\S+)$", re.MULTILINE)
    described = [name for page in made.values() for name in directive.findall(page)]
    assert len(described) == len(set(described))
    for name in posenc.__all__:
        assert f"posenc.{name}" in described
    for module in reference.MODULES:
        page = made[f"reference/api/{module}.md"]
        for name in reference.exported(module):
            assert f":: {module}.{name}\n" in page or f"- `{name}`: see [" in page, name


def test_modules_that_export_names_are_described() -> None:
    """All but those of engines, commands and kernels."""
    package = Path(posenc.__file__).parent
    inner = re.compile(r"attention/backends|cli|families")
    for file in package.rglob("__init__.py"):
        folder = file.parent.relative_to(package.parent)
        if "__all__" in file.read_text() and not inner.search(str(folder)):
            assert ".".join(folder.parts) in reference.MODULES, folder


def test_every_command_and_option_is_described(made: dict[str, str]) -> None:
    page = made["reference/commands.md"]
    for name in COMMANDS:
        section = page.partition(f"## posenc {name}\n")[2].partition("\n## ")[0]
        shown = [argument.name for argument in arguments_of(name) if not argument.children]
        assert shown
        for option in shown:
            assert f"`{option}`" in section, (name, option)


def test_options_in_sentences_are_code(made: dict[str, str]) -> None:
    """Typography makes a dash of two hyphens elsewhere."""
    page = re.sub(r"```.*?```", "", made["reference/commands.md"], flags=re.DOTALL)
    assert "`--launch`" in page
    assert re.findall(r"--[a-z]+", re.sub(r"`[^`]*`", "", page)) == []


def test_types_of_parameters_have_no_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("sphinx")
    monkeypatch.syspath_prepend(str(DOCS / "_ext"))
    from sphinx.util.typing import stringify_annotation
    from type_hints import plain

    hints = typing.get_type_hints(Sample.__init__, include_extras=True)
    shown = {name: plain(stringify_annotation(hint)) for name, hint in hints.items()}
    assert (shown["temperature"], shown["top_k"], shown["top_p"]) == (
        "float",
        "int | None",
        "float",
    )
    for record in (DecoderConfig, ComparisonSettings):
        for hint in typing.get_type_hints(record, include_extras=True).values():
            text = plain(stringify_annotation(hint, "smart"))
            assert not re.search(r"Annotated|\(|\.~", text), hint


def test_rows_have_as_many_cells_as_their_heads(made: dict[str, str]) -> None:
    for name, page in made.items():
        for block in re.findall(r"(?:^\|.*\|\n)+", page, re.MULTILINE):
            counts = {len(re.findall(r"(?<!\\)\|", line)) for line in block.splitlines()}
            assert len(counts) == 1, name


def test_links_lead_somewhere(made: dict[str, str]) -> None:
    for name, page in made.items():
        for target in re.findall(r"\]\((?!https?:)([^)#\s]+)\)", page):
            path = (DOCS / name).parent.joinpath(target).resolve()
            assert str(path.relative_to(DOCS)) in made or path.is_file(), (name, target)


def test_pictures_follow_the_scheme_and_have_words() -> None:
    picture = pictures.of_encoding("t5")
    assert '<div class="picture" role="img" aria-label="t5: Added to the logits: ' in picture
    assert picture.count("<svg") == picture.count('<div class="panel">') == 3
    assert f">{PARAMETERS['initial']}<" in picture
    assert not re.search('<rect[^>]*fill="(white|#fff)', picture), "no ground of its own"
    colours = {*re.findall('(?:stroke|fill)="(#[0-9a-f]{6})"', picture)} - {RISE, "#000000"}
    assert colours <= set(LIGHT.values()), "each has a twin in the dark scheme"


def run(code: str) -> dict[str, Any]:
    """The names that code to paste leaves behind."""
    names: dict[str, Any] = {}
    torch.manual_seed(0)
    exec(compile(code, "page", "exec"), names)
    return names


@pytest.mark.parametrize("name", ENCODINGS)
def test_the_layer_and_the_tensors_run(name: str) -> None:
    out = run(snippets.layer(name))["out"]
    assert out.shape == (1, snippets.TOKENS, snippets.DIM)
    assert out.isfinite().all()
    own = run(snippets.tensors(name))
    q, k, v, grid, encoding = (own[x] for x in ("q", "k", "v", "grid", "encoding"))
    torch.testing.assert_close(own["out"], posenc.attend(q, k, v, grid, encoding))


@pytest.mark.parametrize("name", ENCODINGS)
def test_the_model_of_transformers_runs_with_it(name: str) -> None:
    """And without it gives something else, unless there is nothing to it."""
    found = run(snippets.transformers(name))
    model, encoding = found["model"].eval(), found["encoding"]
    trained = [p for p in encoding.parameters() if p.requires_grad]
    assert any(p.grad is not None for p in trained) or not trained
    if not encoding.parts():
        return
    if encoding.embedding is None:
        name = model.config._attn_implementation
        function = transformers.AttentionInterface()[name]
        assert function is found["attention"]
    for parameter in trained:
        torch.nn.init.normal_(parameter)
    if name in ("abacus",):
        return
    inputs = found["ids"] if "ids" in found else torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        positioned = model(inputs)[0]
        for module in model.modules():
            module._forward_hooks.clear()
            if encoding.embedding is not None:
                module._forward_pre_hooks.clear()
        if encoding.embedding is None:
            model.set_attn_implementation("sdpa")
        assert not torch.allclose(model(inputs)[0], positioned, atol=1e-6)


def test_users_are_of_encodings_there_are(made: dict[str, str]) -> None:
    known = users()
    assert set(known) <= set(ENCODINGS)
    for name, models in known.items():
        assert f"## Used by\n\n{', '.join(models)}.\n" in made[f"methods/{name}.md"]


def test_results_are_those_of_the_files() -> None:
    speed = "\n".join(measured.speed("t5"))
    assert "| `t5`, posenc | 0.59 / 0.51 |" in speed
    in_the_readme = ("| `nope`, posenc | 1.09 / 1.08 |", "| `t5`, posenc | 1.00 / 1.03 |")
    assert all(row in speed.partition("Intel")[2] for row in in_the_readme)
    assert (
        "| [copy](../results/copy.md) | `shaw` | Tokens of the answers right | 16: 99.7% ("
        in "\n".join(measured.learned("shaw"))
    )
    assert measured.speed("lierope") == measured.learned("lierope") == []


def test_reports_are_told_of_the_method_they_concern() -> None:
    assert any("flash-attention #845" in line for line in sources.of_encoding("alibi"))
    assert any("one cell off" in line for line in sources.of_extension("interpolate")) is False
    assert any("LongRoPE switches" in line for line in sources.of_extension("longrope"))
    assert all(sources.of_encoding(name) for name in ("rope", "t5", "deberta", "swin", "xpos"))


def test_commands_on_pages_of_extensions_exist(made: dict[str, str]) -> None:
    known = {option for argument in arguments_of("extend") for option in argument.names}
    for name in EXTENSIONS:
        (line,) = re.findall(r"^posenc extend (.*)$", made[f"extensions/{name}.md"], re.MULTILINE)
        assert f"--method '{name}" in line
        assert set(re.findall(r"--\w+", line)) <= known


def test_bibtex() -> None:
    citation = ENCODINGS["rope"].citation
    assert citation is not None
    entry = sources.bibtex(citation)
    assert entry.startswith("@misc{su2021roformer,\n  author = {Su and others},\n")
    assert "  eprint = {2104.09864},\n  archivePrefix = {arXiv},\n" in entry
    assert entry.endswith("  url = {https://arxiv.org/abs/2104.09864},\n}")
    citation = ENCODINGS["relative_logits"].citation
    assert citation is not None
    assert "author = {{Thinking Machines Lab}}" in sources.bibtex(citation)
    keys = [sources.bibtex(e.citation) for e in ENCODINGS.values() if e.citation is not None]
    assert all(key.count("{") == key.count("}") for key in keys)


def test_a_citation_has_the_year_of_its_first_version() -> None:
    entries = [*ENCODINGS.items(), *EXTENSIONS.items()]
    cited = {name: entry.citation for name, entry in entries if entry.citation is not None}
    years = {
        name: (citation.year, 2000 + int(number[1][:2]))
        for name, citation in cited.items()
        if (number := sources.ARXIV.search(citation.url))
    }
    assert len(years) > 50
    assert {name for name, (said, first) in years.items() if said != first} == set()


def test_formulas_a_paragraph_begins_with_are_displayed() -> None:
    first, rest = paragraph("``s_ij += b[h, n]``, ``n = Δ``, for b ``[H, N]``.")
    assert first.count('display="block"') == 2
    assert rest == "for b `[H, N]`."
    (whole,) = paragraph("Pair t is rotated by ``y · θ_t``.")
    assert whole.startswith("Pair t is rotated by <math>")
    assert prose("p_rope * W_K ``max_length``") == ("p&#95;rope &#42; W<sub>K</sub> `max_length`")


def test_files_are_as_described(tmp_path: Path) -> None:
    page = (DOCS / "reference" / "files.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    exec(compile(code.replace('"saved"', f'"{tmp_path}/saved"'), "files.md", "exec"), {})
    assert sorted(path.name for path in (tmp_path / "saved").iterdir()) == [
        "config.json",
        "model.safetensors",
    ]
    source = Path(posenc.__file__).parent
    written = "".join(file.read_text() for file in source.rglob("*.py"))
    for name in re.findall(r"`(?:report/)?(\w+\.(?:json|csv|html|safetensors))`", page):
        assert f'"{name}"' in written, name
    assert Decoder.made_from is DecoderConfig
