"""The words of the command line: names as they are, and its own."""

from __future__ import annotations

import ast
import io
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.table import Table
from transformers import BertConfig, BertModel

import posenc
from posenc.errors import CheckpointError, Interrupted, OutputError
from posenc.lab.cli import main
from posenc.lab.cli.console import Terminal, command_line, print_error
from posenc.lab.cli.options import (
    complete_encoding,
    complete_encodings,
    complete_methods,
    complete_task,
)
from posenc.lab.evaluation.checkpoint import as_llama
from posenc.lab.evaluation.progress import kept
from posenc.models import Decoder, EncoderConfig, MaskedLM
from tests.support.samples import next_token_model

Command = Callable[..., tuple[int, str, str]]

SOURCE = Path(posenc.__file__).parent
NAMES = [
    "x[/]",
    "tr[bold]",
    "[red]a",
    ":smile:",
    "a\x1b[31mb",
    "a\x1b]0;title\x07b",
    "a\u202eb",
    "a\udcffb",
]


def shown(name: str) -> str:
    """A name without controls; rich leaves out the bell."""
    return re.sub(r"[\x1b\u202e\udcff]", "\ufffd", name.replace("\x07", ""))


@pytest.mark.parametrize("name", NAMES)
def test_names_are_printed_as_they_are(name: str) -> None:
    file = io.StringIO()
    terminal = Terminal()
    terminal.file = file
    terminal.print(f"Written: {name}", soft_wrap=True)
    table = Table()
    table.add_row(name)
    terminal.print(table)
    printed = file.getvalue()
    assert shown(name) in printed
    assert not re.search(r"[\x00-\x09\x0b-\x1f\u202e\udcff]", printed)


@pytest.mark.parametrize("name", NAMES)
def test_errors_name_folders_as_they_are(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    print_error(OutputError("out", expected=f"to write {name}", got=name, remedy=f"Not {name}."))
    printed = capsys.readouterr().err.replace("\n", " ")
    assert printed.count(shown(name)) == 3


def test_all_that_prints_does_so_by_the_one_console() -> None:
    paths = list((SOURCE / "lab" / "cli").glob("*.py"))
    assert paths
    for path in paths:
        made = re.findall(r"\b(Console|TextColumn)\(", path.read_text())
        assert path.name == "console.py" or not made, path.name


@pytest.mark.parametrize("folder", ["lab", "transformers/doctor", "transformers/engines"])
def test_remedies_of_commands_are_no_python(folder: str) -> None:
    paths = list((SOURCE / folder).rglob("*.py"))
    assert paths
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.keyword) and node.arg == "remedy":
                words = [c.value for c in ast.walk(node.value) if isinstance(c, ast.Constant)]
                assert not re.search(r"\bposenc\.[a-z]|in Python\b", " ".join(map(str, words)))


@pytest.mark.parametrize(
    "file",
    [
        *("storage.py", "models", "encodings", "transformers/acceleration"),
        *("transformers/stretching", "transformers/checkpoints"),
    ],
)
def test_remedies_of_the_library_name_no_option(file: str) -> None:
    path = SOURCE / file
    modules = list(path.rglob("*.py")) if path.is_dir() else [path]
    assert modules
    for module in modules:
        for node in ast.walk(ast.parse(module.read_text())):
            if isinstance(node, ast.keyword) and node.arg == "remedy":
                words = [c.value for c in ast.walk(node.value) if isinstance(c, ast.Constant)]
                assert "--" not in " ".join(map(str, words)), module


def test_a_setting_is_called_as_its_option(posenc: Command, tmp_path: Path) -> None:
    code, _, told = posenc("compare", "--heads", "3", "--width", "64", "--out", tmp_path / "out")
    assert code == 2
    assert "--width: expected a multiple of heads (3)" in told


def test_lengths_that_no_memory_holds(posenc: Command, tmp_path: Path) -> None:
    code, _, told = posenc("bench", "--lengths", "99999999999", "--out", tmp_path / "out")
    assert code == 2
    assert "--lengths: expected at most" in told


def test_a_folder_of_another_kind_is_not_to_be_deleted(posenc: Command, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    code, _, told = posenc("generate", tmp_path)
    assert code == 2
    assert "elete" not in told
    assert "--resume" not in told


@pytest.mark.parametrize("command", ["generate", "evaluate", "extend", "doctor"])
@pytest.mark.parametrize(
    ("path", "got", "remedy"),
    [
        ("runs/rpe/model", "no folder runs/rpe/model", "Did you mean runs/rope?"),
        ("runs", "no config.json in runs", "Did you mean runs/rope/model?"),
        ("runs/rope/model/config.json", "which is a file", "Name the folder that it lies in"),
        ("meta-llama/Llama-3", "no such folder", "hf download meta-llama/Llama-3"),
        ("gpt2", "no folder gpt2", "this folder has no gpt2. A name on the Hugging Face Hub"),
        ("/no/such/folder", "no folder", "Check the path: / has no no."),
        ("cut", "invalid JSON", "Download or write it again"),
        ("linked", "a link to a file that is gone", "Download or write the folder again"),
        ("bare", "model.safetensors", "Download or save the weights"),
        ("strange", "none", "save_pretrained"),
    ],
)
def test_the_remedy_fits_the_cause(
    posenc: Command,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: str,
    path: str,
    got: str,
    remedy: str,
) -> None:
    """A typing error is not a damaged file, and a name on the Hub is no folder."""
    monkeypatch.chdir(tmp_path)
    for name, text in {
        "runs/rope/model": '{"model_type": "llama"}',
        "cut": '{"model_type": "lla',
        "bare": '{"model_type": "llama", "hidden_size": 8}',
        "strange": "{}",
    }.items():
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "config.json").write_text(text)
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked/config.json").symlink_to(tmp_path / "gone")
    if command == "doctor" and path in ("bare", "strange"):
        return  # it reads no weights, and any config
    code, _, told = posenc(command, path)
    assert code == 2
    assert got in told
    assert remedy in told
    assert "from a copy" not in told


def test_generate_reads_what_predicts_tokens(posenc: Command, tmp_path: Path) -> None:
    """A run of compare and any folder of transformers; other models are told from them."""
    model = next_token_model(b"abcab", length=16)
    model.save(tmp_path / "saved")
    as_llama(model).save_pretrained(tmp_path / "live")
    options = ("--prompt", "ab", "--max-new", "4", "--temperature", "0")
    for folder in ("saved", "live"):
        code, printed, _ = posenc("generate", tmp_path / folder, *options)
        assert (code, printed.strip()) == (0, "abcabc")
    sampled = ("generate", tmp_path / "live", "--max-new", "5", "--top-k", "3")
    one, two = (posenc(*sampled, "--seed", "1")[1] for _ in range(2))
    assert one == two
    larger = next_token_model([0, 1], length=16, vocabulary=300)
    as_llama(larger).save_pretrained(tmp_path / "tokens")
    code, _, told = posenc("generate", tmp_path / "tokens", *options)
    assert code == 2
    assert "a tokenizer for a vocabulary of 300" in told
    config = EncoderConfig(vocabulary=256, dim=16, layers=1, heads=2, max_length=8)
    MaskedLM(config).save(tmp_path / "masked")
    code, _, told = posenc("generate", tmp_path / "masked", *options)
    assert code == 2
    assert "a decoder, which predicts the next token" in told
    BertModel(BertConfig(hidden_size=12, num_hidden_layers=1)).save_pretrained(tmp_path / "bert")
    code, _, told = posenc("generate", tmp_path / "bert", *options)
    assert code == 2
    assert "a model of the next token, got a bert" in told
    with pytest.raises(CheckpointError, match=r"a checkpoint of transformers \(llama\).*reads it"):
        Decoder.load(tmp_path / "live")
    with pytest.raises(CheckpointError, match=r"that of a masked_lm\. posenc\.models\.load"):
        Decoder.load(tmp_path / "masked")


def test_a_package_that_is_not_installed_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in list(sys.modules):
        if name == "posenc.lab.cli.app" or name.partition(".")[0] == "typer":
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "typer", None)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert "pip install 'posenc[cli]'" in capsys.readouterr().err


def test_lists_are_filtered(posenc: Command) -> None:
    _, printed, _ = posenc("list", "--axes", "2", "--bidirectional")
    assert "rope2d" in printed
    assert "alibi" not in printed.split()
    _, printed, _ = posenc("list", "--site", "value", "--extrapolates", "no such words")
    assert "No encoding matches" in printed


def test_shells_complete_names() -> None:
    assert "kerple" in complete_encoding("ker")
    assert complete_encodings("rope,ker") == ["rope,kerple"]
    assert "rope+alibi" in complete_encodings("rope+al")
    assert "yarn,rerope" in complete_methods("yarn,rer")
    assert "all" in complete_methods("al")
    assert complete_task("cop") == ["copy"]


def test_an_interrupted_extension_says_how_to_go_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "argv", ["posenc", "extend", "--out", "a b"])
    with (
        pytest.raises(Interrupted, match="stop") as raised,
        kept(tmp_path / "state", command_line()),
    ):
        raise Interrupted("search", expected="nine", got="a stop", remedy="")
    assert raised.value.remedy.endswith("To go on: posenc extend --out 'a b'")
    assert str(tmp_path / "state") in raised.value.remedy
