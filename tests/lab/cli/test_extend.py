"""posenc extend and posenc evaluate: what they write, and what they refuse without a trace."""

from __future__ import annotations

import errno
import hashlib
import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from posenc import storage
from posenc.lab.evaluation.checkpoint import as_llama
from posenc.models import Decoder, DecoderConfig
from posenc.transformers.checkpoints import Fields
from posenc.transformers.live import LiveDecoder
from tests.support.samples import next_token_model

LENGTH = 16
TEXT = b"the quick brown fox jumps over the lazy dog. " * 60

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base") / "model"
    as_llama(next_token_model(TEXT, length=LENGTH)).save_pretrained(folder)
    (folder / "tokenizer_config.json").write_text("{}")
    (folder / "README.md").write_text("words")
    return folder


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_bytes(TEXT)
    return path


def digest(folder: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.iterdir()}


def test_a_checkpoint_with_a_report_and_the_input_untouched(
    posenc: Run, base: Path, text: Path, tmp_path: Path
) -> None:
    before = digest(base)
    out = tmp_path / "out"
    code, printed, _ = posenc(
        "extend", base, "--method", "yarn", "--factor", "2", "--text", text, "--out", out
    )
    assert code == 0
    assert "Written: yarn. It was the one asked for." in printed
    assert "transformers runs it as stretched" in printed
    assert digest(base) == before
    assert {p.name for p in out.iterdir()} == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "report",
        "tokenizer_config.json",
    }
    assert (out / "report/index.html").exists()
    fields = json.loads((out / "config.json").read_text())
    assert fields["rope_parameters"]["rope_type"] == "yarn"
    assert fields["max_position_embeddings"] == 2 * LENGTH
    assert [p.name for p in tmp_path.iterdir()] == ["out"], "nothing half-written beside it"


def test_the_best_of_several_after_fine_tuning(
    posenc: Run, base: Path, text: Path, tmp_path: Path
) -> None:
    code, printed, _ = posenc(
        *("extend", base, "--method", "rerope,interpolate", "--factor", "2", "--text", text),
        *("--finetune-steps", "2", "--positions", "skipped", "--out", tmp_path / "out", "--json"),
        "--always",
    )
    assert code == 0
    found = json.loads(printed)
    assert found["chosen"] in {"rerope", "interpolate"}
    assert found["finetune"]["positions"] == "skipped"
    LiveDecoder.open(Fields.read(tmp_path / "out"), device="cpu")


def test_engines_that_serve_it_otherwise_are_named(posenc: Run, base: Path, tmp_path: Path) -> None:
    given = ("extend", base, "--method", "dynamic_ntk", "--factor", "2", "--no-report", "--json")
    code, printed, said = posenc(*given, "--out", tmp_path / "out")
    assert code == 0, said
    ignored = "ignores the scaling"
    assert json.loads(printed)["engines"] == {
        "vLLM": ignored,
        "SGLang": "rotates by other frequencies",
        "llama.cpp": ignored,
        "mlx-lm": "",
    }


def test_a_model_of_posenc_compare_is_stretched(posenc: Run, text: Path, tmp_path: Path) -> None:
    """Saved as the lab saves it, named by its run's folder or its own."""
    run = tmp_path / "runs/rope/seed-0"
    next_token_model(TEXT, length=LENGTH).save(run / "model")
    before = digest(run / "model")
    given = ("--method", "yarn", "--factor", "2", "--text", text)
    for folder, options in ((run, ("--no-report",)), (run / "model", ())):
        out = tmp_path / f"out-{len(options)}"
        code, printed, said = posenc("extend", folder, *given, *options, "--out", out)
        assert code == 0, said
        assert "transformers runs it as stretched" in printed
        fields = json.loads((out / "config.json").read_text())
        assert fields["model_type"] == "llama"
        assert fields["max_position_embeddings"] == 2 * LENGTH
        tokens = torch.arange(2 * LENGTH).unsqueeze(0)
        longer = LiveDecoder.open(Fields.read(out), device="cpu")
        assert longer(tokens).shape == (1, 2 * LENGTH, 256)
    assert digest(run / "model") == before
    next_token_model(TEXT, length=LENGTH, encoding="alibi").save(tmp_path / "alibi")
    code, _, said = posenc("extend", tmp_path / "alibi", *given, "--out", tmp_path / "no")
    assert code == 2
    assert "one trained with alibi" in said
    assert "posenc evaluate measures it as it is" in said
    code, printed, said = posenc(
        *("evaluate", tmp_path / "alibi", "--text", text, "--out", tmp_path / "seen", "--json")
    )
    assert code == 0, said
    assert json.loads(printed)["length"] == LENGTH


def test_nothing_is_written_of_several_that_gain_nothing(
    posenc: Run, base: Path, text: Path, tmp_path: Path
) -> None:
    """A model that looks at nothing but the last byte: all methods are level."""
    out = tmp_path / "out"
    code, printed, said = posenc(
        *("extend", base, "--method", "self_extend,rerope", "--factor", "2", "--text", text),
        *("--out", out),
    )
    assert code == 0, said
    assert printed.strip().startswith("Without any training, do not stretch: at 32 bytes ")
    assert "use self_extend" not in printed
    assert "use rerope" not in printed
    assert "needles do not count" in printed
    assert "No checkpoint was written" in printed
    assert [path.name for path in out.iterdir()] == ["report"]


@pytest.fixture(scope="module")
def untrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    config = DecoderConfig(vocabulary=256, dim=16, layers=1, heads=2, max_length=LENGTH)
    folder = tmp_path_factory.mktemp("untrained") / "model"
    as_llama(Decoder(config)).save_pretrained(folder)
    return folder


def test_figures_of_random_weights_are_no_headline(
    posenc: Run, untrained: Path, text: Path, tmp_path: Path
) -> None:
    """A model that does not beat the frequencies of bytes fails, report and all."""
    given = ("evaluate", untrained, "--text", text)
    code, printed, said = posenc(*given, "--out", tmp_path / "out")
    assert code == 2
    assert printed.strip().startswith("Nothing can be said of model: at best its loss is ")
    assert "(byte frequencies alone: 4.396)" in printed
    assert "expected a better loss than 4.396 (byte frequencies alone), got " in said
    page = (tmp_path / "out/index.html").read_text()
    assert "<h1>Nothing can be said of model" in page
    code, printed, said = posenc(*given, "--out", tmp_path / "json", "--json")
    assert code == 2
    assert json.loads(printed)["gate"].startswith("Nothing can be said of model")


def test_random_weights_are_not_stretched(
    posenc: Run, untrained: Path, text: Path, tmp_path: Path
) -> None:
    given = ("extend", untrained, "--method", "yarn", "--factor", "2", "--text", text)
    code, printed, said = posenc(*given, "--out", tmp_path / "out")
    assert code == 2
    assert "use yarn" not in printed
    assert "expected a better loss than" in said
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["report"]
    code, printed, said = posenc(*given, "--out", tmp_path / "always", "--always")
    assert code == 0, said
    assert "Written: yarn" in printed
    assert printed.strip().startswith("Nothing can be said of model")


def test_longrope_is_searched_on_the_text(
    posenc: Run, base: Path, text: Path, tmp_path: Path
) -> None:
    arguments = ("extend", base, "--method", "longrope", "--factor", "2", "--text", text)
    code, printed, said = posenc(*arguments, "--search", "4", "--out", tmp_path / "out")
    assert code == 0, said
    assert "Its factors are the best of 4" in printed
    assert "searching factors" in said
    assert {path.name for path in tmp_path.iterdir()} == {"out", "out-search.json"}
    state = json.loads((tmp_path / "out-search.json").read_text())
    best = state["factors"][state["losses"].index(min(state["losses"]))]
    written = json.loads((tmp_path / "out/config.json").read_text())["rope_parameters"]
    assert written["rope_type"] == "longrope"
    assert written["long_factor"] == pytest.approx(best)
    code, _, said = posenc(*arguments, "--search", "-1", "--out", tmp_path / "again")
    assert code == 2
    assert "--search: expected a whole number, 0 or more" in said


def test_evaluate_reads_what_only_posenc_knows(
    posenc: Run, base: Path, text: Path, tmp_path: Path
) -> None:
    longer = tmp_path / "longer"
    code, printed, _ = posenc(
        *("extend", base, "--method", "rerope", "--factor", "2", "--text", text, "--out", longer)
    )
    assert code == 0
    assert "transformers does not know this method" in printed
    stretched = json.loads((longer / "report/study.json").read_text())
    code, printed, _ = posenc(
        *("evaluate", longer, "--text", text, "--lengths", "8,16,32", "--json"),
        *("--out", tmp_path / "seen"),
    )
    assert code == 0
    measured = json.loads(printed)["findings"][0]["untuned"]
    rerope = next(each for each in stretched["findings"] if each["key"] == "rerope")
    assert measured["loss"] == pytest.approx(rerope["untuned"]["loss"])
    assert measured["needles"] == rerope["untuned"]["needles"]
    code, _, said = posenc("extend", longer, "--text", text, "--out", tmp_path / "again")
    assert code == 2
    assert "has not stretched yet" in said


TOKENIZER = """{"version": "1.0", "truncation": null, "padding": null, "added_tokens": [],
"normalizer": null, "pre_tokenizer": {"type": "Whitespace"}, "post_processor": null,
"decoder": null, "model": {"type": "WordLevel", "vocab": {VOCABULARY}, "unk_token": "[UNK]"}}"""
WORDS = ["[UNK]", ".", *(str(n) for n in range(10)), "the", "quick", "brown", "fox", "jumps"]
WORDS += ["over", "lazy", "dog", "The", "pass", "key", "is", "Remember", "it"]
TOKENIZER = TOKENIZER.replace(
    "{VOCABULARY}", json.dumps({word: number for number, word in enumerate(WORDS)})
)


def test_a_tokenizer_is_used_and_goes_along(posenc: Run, tmp_path: Path) -> None:
    sentence = "the quick brown fox jumps over the lazy dog ."
    ids = [WORDS.index(word) for word in sentence.split()]
    model = next_token_model(ids * 2, length=64, vocabulary=40)
    as_llama(model).save_pretrained(tmp_path / "words")
    text = tmp_path / "text.txt"
    text.write_text(f"{sentence} " * 300)
    arguments = ("--method", "ntk", "--factor", "2", "--text", text, "--out", tmp_path / "out")
    code, _, said = posenc("extend", tmp_path / "words", *arguments)
    assert code == 2
    assert "a tokenizer for a vocabulary of 40" in said
    (tmp_path / "words/tokenizer.json").write_text(TOKENIZER)
    code, printed, said = posenc("extend", tmp_path / "words", *arguments)
    assert code == 0, said
    assert "bits per token" in printed
    assert (tmp_path / "out/tokenizer.json").read_text() == TOKENIZER


def _config(folder: Path, **fields: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def _unknown_family(folder: Path) -> None:
    _config(folder, model_type="t5", architectures=["T5ForConditionalGeneration"])


def _no_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def _no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def _missing_shard(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.rename(folder / "model-00001-of-00002.safetensors")
    index = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))


@pytest.mark.parametrize(
    ("spoil", "arguments", "message"),
    [
        (_unknown_family, (), "a model that can be measured: a causal or masked language model"),
        (_no_config, (), "config.json"),
        (_no_weights, (), "safetensors"),
        (_missing_shard, (), "model-00002-of-00002.safetensors"),
        (None, ("--factor", "0.5"), "factor: expected a finite number, 1 or more"),
        (None, ("--method", "hierarchical"), "a learned table, which hierarchical stretches"),
        (None, ("--method", "yarm"), "Did you mean 'yarn'"),
        (None, ("--method", ","), "--method: expected a method"),
        (None, ("--method", "segments"), "a method that a checkpoint can hold"),
        (None, ("--search", "9"), "longrope among the methods"),
        (None, ("--finetune-steps", "-1"), "--finetune-steps: expected a whole number, 0 or more"),
        (None, ("--positions", "odd"), "--positions"),
        (None, ("--factor", "4000"), "text: expected at least"),
        (None, ("--text", "/no/such/file"), "nothing there"),
    ],
)
def test_bad_input_is_told_and_nothing_is_written(
    posenc: Run,
    base: Path,
    text: Path,
    tmp_path: Path,
    spoil: Callable[[Path], None] | None,
    arguments: tuple[str, ...],
    message: str,
) -> None:
    folder = tmp_path / "input"
    folder.mkdir()
    for path in base.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    if spoil is not None:
        spoil(folder)
    before = digest(folder)
    given = ["--factor", "2", "--text", text, "--out", tmp_path / "out", *arguments]
    code, _, said = posenc("extend", folder, *given)
    assert code == 2
    assert message in said
    assert "Traceback" not in said
    assert digest(folder) == before
    assert [p.name for p in tmp_path.iterdir()] == ["input"]


def test_a_folder_in_use_is_refused_before_any_work(
    posenc: Run, base: Path, text: Path, tmp_path: Path
) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    for command in ("extend", "evaluate"):
        code, _, said = posenc(command, base, "--text", text, "--out", tmp_path)
        assert code == 2
        assert "in use" in said
    code, _, said = posenc("extend", base, "--text", text, "--out", base)
    assert code == 2
    assert [p.name for p in tmp_path.iterdir()] == ["mine.txt"]


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer_config.json", "study.json"])
def test_a_full_disk_leaves_nothing(
    posenc: Run, base: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    plain = storage._sync_folder

    def full(folder: Path) -> None:
        if (folder / name).exists():
            raise OSError(errno.ENOSPC, "No space left on device")
        plain(folder)

    monkeypatch.setattr(storage, "_sync_folder", full)
    code, _, said = posenc(
        "extend", base, "--factor", "2", "--text", text, "--out", tmp_path / "out"
    )
    assert code == 2
    assert "No space left" in said
    assert list(tmp_path.iterdir()) == []


def test_stopped_it_goes_on(
    posenc: Run, base: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ("extend", base, "--factor", "2", "--text", text, "--out", tmp_path / "out")
    with monkeypatch.context() as patched:
        patched.setattr(
            "posenc.lab.training.stopping.interruptible", lambda: nullcontext(lambda: True)
        )
        code, _, said = posenc(*arguments)
    assert code == 130
    assert "a stop after 1" in said
    assert f"To go on: posenc extend {base} --factor 2" in said
    assert [path.name for path in tmp_path.iterdir()] == ["out-measured.json"]
    code, _, said = posenc(*arguments)
    assert code == 0, said
    assert "direct: measuring" not in said, "it was measured before"
    assert "yarn: measuring" in said
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
