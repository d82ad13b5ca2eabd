"""posenc extend and posenc evaluate: what they write, and what they refuse without a trace."""

from __future__ import annotations

import errno
import hashlib
import json
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from posenc import storage
from posenc.lab.evaluation.checkpoint import as_llama
from posenc.models import Decoder, DecoderConfig
from posenc.transformers.checkpoints import Fields
from posenc.transformers.engines.vllm import PAST_COSINES
from posenc.transformers.live import LiveDecoder
from tests.support.commands import printed, printed_json, refusal, run_command
from tests.support.samples import next_token_model
from tests.support.tiny_models import word_tokenizer

LENGTH = 16
TEXT = b"the quick brown fox jumps over the lazy dog. " * 60


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


def extend(folder: Path, methods: str, text: Path | None = None) -> tuple[str | Path, ...]:
    given = ("extend", folder, "--method", methods, "--factor", "2")
    return given if text is None else (*given, "--text", text)


def test_a_checkpoint_with_a_report_and_the_input_untouched(
    base: Path, text: Path, tmp_path: Path
) -> None:
    before = digest(base)
    out = tmp_path / "out"
    told = printed(*extend(base, "yarn", text), "--out", out)
    assert "Written: yarn. It was the one asked for." in told
    assert "transformers runs it as stretched" in told
    assert digest(base) == before
    configs = {"config.json", "generation_config.json", "tokenizer_config.json"}
    assert {p.name for p in out.iterdir()} == {*configs, "model.safetensors", "report"}
    assert (out / "report/index.html").exists()
    fields = json.loads((out / "config.json").read_text())
    assert fields["rope_parameters"]["rope_type"] == "yarn"
    assert fields["max_position_embeddings"] == 2 * LENGTH
    assert [p.name for p in tmp_path.iterdir()] == ["out"], "nothing half-written beside it"


def test_the_best_of_several_after_fine_tuning(base: Path, text: Path, tmp_path: Path) -> None:
    tuned = ("--finetune-steps", "2", "--positions", "skipped", "--always")
    given = extend(base, "rerope,interpolate", text)
    found = printed_json(*given, *tuned, "--out", tmp_path / "out")
    assert found["chosen"] in {"rerope", "interpolate"}
    assert found["finetune"]["positions"] == "skipped"
    LiveDecoder.open(Fields.read(tmp_path / "out"), device="cpu")


def test_engines_that_serve_it_otherwise_are_named(base: Path, tmp_path: Path) -> None:
    told = printed_json(*extend(base, "dynamic_ntk"), "--no-report", "--out", tmp_path / "out")
    ignored, other = "ignores the scaling", "rotates by other frequencies"
    past = f"is not compared: {PAST_COSINES}"
    expected = {"vLLM": past, "SGLang": other, "llama.cpp": ignored, "mlx-lm": ""}
    assert {engine: told["engines"][engine] for engine in expected} == expected
    refused = "does not start: its converter knows no dynamic scaling of this model"
    assert told["engines"]["CTranslate2"] == refused


def test_a_model_of_posenc_compare_is_stretched(text: Path, tmp_path: Path) -> None:
    """Saved as the lab saves it, named by its run's folder or its own."""
    run = tmp_path / "runs/rope/seed-0"
    next_token_model(TEXT, length=LENGTH).save(run / "model")
    before = digest(run / "model")
    for folder, options in ((run, ("--no-report",)), (run / "model", ())):
        out = tmp_path / f"out-{len(options)}"
        told = printed(*extend(folder, "yarn", text), *options, "--out", out)
        assert "transformers runs it as stretched" in told
        fields = json.loads((out / "config.json").read_text())
        assert fields["model_type"] == "llama"
        assert fields["max_position_embeddings"] == 2 * LENGTH
        tokens = torch.arange(2 * LENGTH).unsqueeze(0)
        longer = LiveDecoder.open(Fields.read(out), device="cpu")
        assert longer(tokens).shape == (1, 2 * LENGTH, 256)
    assert digest(run / "model") == before
    alibi = tmp_path / "alibi"
    next_token_model(TEXT, length=LENGTH, encoding="alibi").save(alibi)
    said = refusal(*extend(alibi, "yarn", text), "--out", tmp_path / "no")
    assert "one trained with alibi" in said
    assert "posenc evaluate measures it as it is" in said
    seen = printed_json("evaluate", alibi, "--text", text, "--out", tmp_path / "seen")
    assert seen["length"] == LENGTH


def test_nothing_is_written_of_several_that_gain_nothing(
    base: Path, text: Path, tmp_path: Path
) -> None:
    """A model that looks at nothing but the last byte: all methods are level."""
    out = tmp_path / "out"
    told = printed(*extend(base, "self_extend,rerope", text), "--out", out)
    assert "Do not stretch: even " in told
    assert "Nothing is gained by stretching: at 32 bytes " in told
    assert "No checkpoint was written" in told
    assert [path.name for path in out.iterdir()] == ["report"]


@pytest.fixture(scope="module")
def untrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    config = DecoderConfig(vocabulary=256, dim=16, layers=1, heads=2, max_length=LENGTH)
    folder = tmp_path_factory.mktemp("untrained") / "model"
    as_llama(Decoder(config)).save_pretrained(folder)
    return folder


def test_figures_of_random_weights_are_no_headline(
    untrained: Path, text: Path, tmp_path: Path
) -> None:
    """A model that does not beat the frequencies of bytes fails, report and all."""
    given = ("evaluate", untrained, "--text", text)
    done = run_command(*given, "--out", tmp_path / "out")
    assert done.returncode == 2
    assert "Nothing can be said of model: its best loss is " in done.stdout
    assert "(byte frequencies alone: 4.396)" in " ".join(done.stdout.split())
    said = " ".join(done.stderr.split())
    assert "expected a better loss than 4.396 (byte frequencies alone), got " in said
    assert "<h1>Nothing can be said of model" in (tmp_path / "out/index.html").read_text()
    done = run_command(*given, "--out", tmp_path / "json", "--json")
    assert done.returncode == 2
    assert json.loads(done.stdout)["gate"].startswith("Nothing can be said of model")


def test_random_weights_are_not_stretched(untrained: Path, text: Path, tmp_path: Path) -> None:
    given = extend(untrained, "yarn", text)
    done = run_command(*given, "--out", tmp_path / "out")
    assert done.returncode == 2
    assert "Use yarn" not in done.stdout
    assert "expected a better loss than" in " ".join(done.stderr.split())
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["report"]
    told = printed(*given, "--out", tmp_path / "always", "--always")
    assert "Written: yarn" in told
    assert "Nothing can be said of model" in told


def test_longrope_is_searched_on_the_text(base: Path, text: Path, tmp_path: Path) -> None:
    given = extend(base, "longrope", text)
    done = run_command(*given, "--search", "4", "--out", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert "Its factors are the best of 4" in " ".join(done.stdout.split())
    assert "searching factors" in done.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"out", "out-search.json"}
    state = json.loads((tmp_path / "out-search.json").read_text())
    best = state["factors"][state["losses"].index(min(state["losses"]))]
    written = json.loads((tmp_path / "out/config.json").read_text())["rope_parameters"]
    assert written["rope_type"] == "longrope"
    assert written["long_factor"] == pytest.approx(best)
    said = refusal(*given, "--search", "-1", "--out", tmp_path / "again")
    assert "--search: expected a whole number, 0 or more" in said


def test_evaluate_reads_what_only_posenc_knows(base: Path, text: Path, tmp_path: Path) -> None:
    longer = tmp_path / "longer"
    told = printed(*extend(base, "rerope", text), "--out", longer)
    assert "transformers does not know this method" in told
    stretched = json.loads((longer / "report/study.json").read_text())
    given = ("evaluate", longer, "--text", text, "--lengths", "8,16,32")
    measured = printed_json(*given, "--out", tmp_path / "seen")["findings"][0]["untuned"]
    rerope = next(each for each in stretched["findings"] if each["key"] == "rerope")
    assert measured["loss"] == pytest.approx(rerope["untuned"]["loss"])
    assert measured["needles"] == rerope["untuned"]["needles"]
    said = refusal("extend", longer, "--text", text, "--out", tmp_path / "again")
    assert "has not stretched yet" in said


WORDS = ["[UNK]", ".", *(str(n) for n in range(10)), "the", "quick", "brown", "fox", "jumps"]
WORDS += ["over", "lazy", "dog", "The", "pass", "key", "is", "Remember", "it"]
TOKENIZER = word_tokenizer(WORDS).to_str()


def test_a_tokenizer_is_used_and_goes_along(tmp_path: Path) -> None:
    sentence = "the quick brown fox jumps over the lazy dog ."
    ids = [WORDS.index(word) for word in sentence.split()]
    model = next_token_model(ids * 2, length=64, vocabulary=40)
    as_llama(model).save_pretrained(tmp_path / "words")
    text = tmp_path / "text.txt"
    text.write_text(f"{sentence} " * 300)
    given = (*extend(tmp_path / "words", "ntk", text), "--out", tmp_path / "out")
    assert "a tokenizer for a vocabulary of 40" in refusal(*given)
    (tmp_path / "words/tokenizer.json").write_text(TOKENIZER)
    assert "bits per token" in printed(*given)
    assert (tmp_path / "out/tokenizer.json").read_text() == TOKENIZER


def changed(folder: Path, **fields: object) -> Path:
    """The folder, with other fields in its config."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    return folder


def _missing_shard(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.rename(folder / "model-00001-of-00002.safetensors")
    index = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))


T5 = {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]}


@pytest.mark.parametrize(
    ("spoil", "arguments", "message"),
    [
        (lambda folder: changed(folder, **T5), (), "a model that can be measured: a causal or mas"),
        (lambda folder: (folder / "config.json").unlink(), (), "config.json"),
        (lambda folder: (folder / "model.safetensors").unlink(), (), "safetensors"),
        (_missing_shard, (), "model-00002-of-00002.safetensors"),
        (None, ("--method", "hierarchical"), "a learned table, which hierarchical stretches"),
        (None, ("--method", ","), "--method: expected a method"),
        (None, ("--method", "segments"), "a method that a checkpoint can hold"),
        (None, ("--search", "9"), "longrope among the methods"),
        (None, ("--positions", "odd"), "--positions"),
        (None, ("--factor", "4000"), "text: expected at least"),
    ],
)
def test_bad_input_is_told_and_nothing_is_written(
    base: Path,
    text: Path,
    tmp_path: Path,
    spoil: Callable[[Path], None] | None,
    arguments: tuple[str, ...],
    message: str,
) -> None:
    folder = Path(shutil.copytree(base, tmp_path / "input"))
    if spoil is not None:
        spoil(folder)
    before = digest(folder)
    given = ["--factor", "2", "--text", text, "--out", tmp_path / "out", *arguments]
    assert message in refusal("extend", folder, *given)
    assert digest(folder) == before
    assert [p.name for p in tmp_path.iterdir()] == ["input"]


def test_a_folder_in_use_is_refused_before_any_work(base: Path, text: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    for command in ("extend", "evaluate"):
        assert "in use" in refusal(command, base, "--text", text, "--out", tmp_path)
    refusal("extend", base, "--text", text, "--out", base)
    assert [p.name for p in tmp_path.iterdir()] == ["mine.txt"]


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer_config.json", "study.json"])
def test_a_full_disk_leaves_nothing(
    base: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    plain = storage._sync_folder

    def full(folder: Path) -> None:
        if (folder / name).exists():
            raise OSError(errno.ENOSPC, "No space left on device")
        plain(folder)

    monkeypatch.setattr(storage, "_sync_folder", full)
    given = ("extend", base, "--factor", "2", "--text", text, "--out", tmp_path / "out")
    assert "No space left" in refusal(*given)
    assert list(tmp_path.iterdir()) == []


def test_stopped_it_goes_on(
    base: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ("extend", base, "--factor", "2", "--text", text, "--out", tmp_path / "out")
    with monkeypatch.context() as patched:
        stopping = "posenc.lab.training.stopping.interruptible"
        patched.setattr(stopping, lambda: nullcontext(lambda: True))
        done = run_command(*arguments)
    said = " ".join(done.stderr.split())
    assert done.returncode == 130
    assert "a stop after 1" in said
    assert f"To go on: posenc extend {base} --factor 2" in said
    assert [path.name for path in tmp_path.iterdir()] == ["out-measured.json"]
    done = run_command(*arguments)
    assert done.returncode == 0, done.stderr
    assert "direct: measuring" not in done.stderr, "it was measured before"
    assert "yarn: measuring" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
