"""The words of the command line: names as they are, and its own."""

from __future__ import annotations

import ast
import io
import re
import sys
from pathlib import Path

import pytest
from cyclopts.completion.detect import ShellDetectionError
from rich.table import Table
from transformers import BertConfig, BertModel

import posenc
from posenc.errors import CheckpointError, Interrupted, OutputError
from posenc.lab.cli import main
from posenc.lab.cli.console import Terminal, command_line, print_error
from posenc.lab.evaluation.checkpoint import as_llama
from posenc.lab.evaluation.progress import kept
from posenc.models import Decoder, EncoderConfig, MaskedLM
from tests.support.commands import printed, refusal, run_command
from tests.support.samples import next_token_model

SOURCE = Path(posenc.__file__).parent
NAMES = ["x[/]", "tr[bold]", "[red]a", ":smile:"]
NAMES += ["a\x1b[31mb", "a\x1b]0;title\x07b", "a\u202eb", "a\udcffb"]


def shown(name: str) -> str:
    """A name without controls; rich leaves out the bell."""
    return re.sub(r"[\x1b\u202e\udcff]", "\ufffd", name.replace("\x07", ""))


@pytest.mark.parametrize("name", NAMES)
def test_names_are_printed_as_they_are(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    terminal, table = Terminal(), Table()
    terminal.file = io.StringIO()
    terminal.print(f"Written: {name}", soft_wrap=True)
    table.add_row(name)
    terminal.print(table)
    told = terminal.file.getvalue()
    assert shown(name) in told
    assert not re.search(r"[\x00-\x09\x0b-\x1f\u202e\udcff]", told)
    print_error(OutputError("out", expected=f"to write {name}", got=name, remedy=f"Not {name}."))
    assert capsys.readouterr().err.replace("\n", " ").count(shown(name)) == 3


def test_all_that_prints_does_so_by_the_one_console() -> None:
    paths = list((SOURCE / "lab" / "cli").glob("*.py"))
    assert paths
    for path in paths:
        made = re.findall(r"\b(Console|TextColumn)\(", path.read_text())
        assert path.name == "console.py" or not made, path.name


PYTHON, OPTION = r"\bposenc\.[a-z]|in Python\b", "--"
LIBRARY = ("storage.py", "models", "encodings", "transformers/acceleration")
LIBRARY += ("transformers/stretching", "transformers/checkpoints.py")


@pytest.mark.parametrize(
    ("place", "excluded"),
    [
        *((name, PYTHON) for name in ("lab", "transformers/doctor", "transformers/engines")),
        *((name, OPTION) for name in LIBRARY),
    ],
)
def test_remedies_are_in_the_language_of_who_reads_them(place: str, excluded: str) -> None:
    """Those of commands are no Python, and those of the library name no option."""
    path = SOURCE / place
    modules = list(path.rglob("*.py")) if path.is_dir() else [path]
    assert modules
    for module in modules:
        for node in ast.walk(ast.parse(module.read_text())):
            if isinstance(node, ast.keyword) and node.arg == "remedy":
                words = [c.value for c in ast.walk(node.value) if isinstance(c, ast.Constant)]
                assert not re.search(excluded, " ".join(map(str, words))), module


def test_a_setting_is_called_as_its_option(tmp_path: Path) -> None:
    told = refusal("compare", "--heads", "3", "--width", "64", "--out", tmp_path / "out")
    assert "--width: expected a multiple of heads (3)" in told
    told = refusal("bench", "--lengths", "99999999999", "--out", tmp_path / "out")
    assert "--lengths: expected at most" in told, "lengths that no memory holds"


def test_a_folder_of_another_kind_is_not_to_be_deleted(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    told = refusal("generate", tmp_path)
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
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, path: str, got: str, remedy: str
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
    told = refusal(command, path)
    assert got in told
    assert remedy in told
    assert "from a copy" not in told


def test_generate_reads_what_predicts_tokens(tmp_path: Path) -> None:
    """A run of compare and any folder of transformers; other models are told from them."""
    model = next_token_model(b"abcab", length=16)
    model.save(tmp_path / "saved")
    as_llama(model).save_pretrained(tmp_path / "live")
    options = ("--prompt", "ab", "--max-new", "4", "--temperature", "0")
    for folder in ("saved", "live"):
        assert printed("generate", tmp_path / folder, *options) == "abcabc"
    sampled = ("generate", tmp_path / "live", "--max-new", "5", "--top-k", "3", "--seed", "1")
    assert printed(*sampled) == printed(*sampled)
    larger = next_token_model([0, 1], length=16, vocabulary=300)
    as_llama(larger).save_pretrained(tmp_path / "tokens")
    config = EncoderConfig(vocabulary=256, dim=16, layers=1, heads=2, max_length=8)
    MaskedLM(config).save(tmp_path / "masked")
    BertModel(BertConfig(hidden_size=12, num_hidden_layers=1)).save_pretrained(tmp_path / "bert")
    for folder, message in {
        "tokens": "a tokenizer for a vocabulary of 300",
        "masked": "a decoder, which predicts the next token",
        "bert": "a model of the next token, got a bert",
    }.items():
        assert message in refusal("generate", tmp_path / folder, *options)
    with pytest.raises(CheckpointError, match=r"a checkpoint of transformers \(llama\).*reads it"):
        Decoder.load(tmp_path / "live")
    with pytest.raises(CheckpointError, match=r"that of a masked_lm\. posenc\.models\.load"):
        Decoder.load(tmp_path / "masked")


def test_a_package_that_is_not_installed_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in list(sys.modules):
        if name == "posenc.lab.cli.app" or name.partition(".")[0] == "cyclopts":
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "cyclopts", None)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert "pip install 'posenc[cli]'" in capsys.readouterr().err


def test_lists_are_filtered() -> None:
    names = printed("list", "--axes", "2", "--bidirectional").split()
    assert "rope2d" in names
    assert "alibi" not in names
    none = printed("list", "--site", "value", "--extrapolates", "no such words")
    assert "No encoding matches" in none


def test_shells_complete_names() -> None:
    def completed(*words: str) -> list[str]:
        return run_command("__complete", *words).stdout.split()[1:]

    assert "kerple" in completed("show", "ker")
    assert completed("compare", "--encodings", "rope,ker") == ["rope,kerple"]
    assert completed("gallery", "--encodings", "rope,ker") == ["rope,kerple"]
    assert "rope+alibi" in completed("bench", "--encodings", "rope+al")
    assert "yarn,rerope" in completed("extend", "--method", "yarn,rer")
    assert completed("extend", "--method", "al") == ["all"]
    assert completed("extend", "--method", "yarn,al") == []
    assert completed("compare", "--task", "cop") == ["copy"]
    for shell in ("bash", "zsh", "fish"):
        script = run_command("--show-completion", shell).stdout
        assert all(word in script for word in ("posenc", "encodings", "no-report"))


def test_a_shell_that_is_not_told_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown() -> None:
        raise ShellDetectionError

    monkeypatch.setattr("cyclopts.completion.detect.detect_shell", unknown)
    for option in ("--show-completion", "--install-completion"):
        assert "bash or fish" in refusal(option)


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
