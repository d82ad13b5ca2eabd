"""``evaluate``: questions to a model, limits, going on after a stop, and what is printed."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from posenc.errors import ArgumentError, Interrupted
from posenc.lab.evaluation.checkpoint import Checkpoint
from posenc.lab.evaluation.evaluate import evaluate
from posenc.lab.evaluation.lengths import Series, affordable
from posenc.lab.evaluation.report import study_page, write_study
from posenc.lab.evaluation.results import Study
from posenc.lab.evaluation.scoring import Examination
from posenc.lab.evaluation.suites.next_token import NextTokenSuite
from posenc.lab.evaluation.summary import answer
from posenc.lab.evaluation.texts import Text, read_ids
from posenc.models import Decoder
from tests.support.known_lengths import unlearned
from tests.support.samples import next_token_model
from tests.support.tiny_models import tiny_model

LENGTH = 128
SENTENCE = b"the quick brown fox jumps over the lazy dog of another neighbour. "


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Text:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_bytes(SENTENCE * 40)
    return read_ids(path, encode=None, training=False)


@pytest.fixture
def model() -> Decoder:
    return next_token_model(SENTENCE, length=LENGTH)


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[str, int], float]:
    """Shares of right answers, by task and length, instead of those of a model."""
    shares = {("vt", 128): 1.0, ("vt", 256): 0.5, ("cwe", 128): 0.0, ("fwe", 128): 1.0}
    shares[("fwe", 256)] = 1.0

    def ask(self: Examination, model: nn.Module, name: str, length: int) -> tuple[float, ...]:
        return (shares[name, length],) * 40

    monkeypatch.setattr(Examination, "ask", ask)
    return shares


def measured(model: nn.Module, text: Text, **fields: Any) -> Study:
    options = {"tasks": "vt,cwe,fwe", "lengths": (64, 128, 256)} | fields
    return evaluate(Checkpoint("tiny", "decoder", model, LENGTH), text, **options)


def test_nothing_learned_leaves_no_effective_length(
    model: Decoder, text: Text, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Series, "learned", lambda *_: False)
    study = measured(model, text, lengths=[LENGTH])
    assert study.effective is None
    assert all(word not in " ".join(answer(study)) for word in ("ffective", "guessing"))


def test_questions_enter_the_effective_length(
    model: Decoder, text: Text, answers: dict[tuple[str, int], float], tmp_path: Path
) -> None:
    study = measured(model, text)
    assert study.effective.limited_by == "answers"
    assert (study.effective.length, study.effective.end) == (128, 256)
    assert study.effective.abilities == ("loss", "vt", "fwe")
    assert study.effective.unlearned == ("recall", "cwe")
    assert study.answers == {"vt": {128: 1, 256: 0.5}, "cwe": {128: 0}, "fwe": {128: 1, 256: 1}}
    said = " ".join(answer(study))
    assert "its own loss and answers in 2 tasks at 128" in said
    assert "answers left that margin first." in said
    assert "guessing: recall and cwe." in said
    (table,) = (s for s in study_page(study).sections if s.key == "answers")
    assert [[cell.text for cell in row] for row in table.rows] == [
        ["vt", "100%", "50%"],
        ["cwe", "0%", "—"],
        ["fwe", "100%", "100%"],
    ]
    write_study(study, tmp_path / "report")
    stored = json.loads((tmp_path / "report/study.json").read_text())
    assert stored["effective"]["end"] == 256
    rows = csv.DictReader((tmp_path / "report/measurements.csv").read_text().splitlines())
    (asked,) = [row for row in rows if (row["metric"], row["length"]) == ("vt", "256")]
    assert float(asked["value"]) == 0.5
    assert int(asked["count"]) == len(study.findings[0].untuned.tasks["vt"][256])


def test_questions_are_made_of_the_text_and_asked(model: Decoder, text: Text) -> None:
    study = measured(
        model, text, tasks="niah_multikey_2,json_lookup,cwe", lengths=(512,), questions=2
    )
    assert set(study.answers) == {"niah_multikey_2", "json_lookup"}
    assert study.left_out == {"cwe": "no question fits 512 tokens"}
    assert study.style == "base"
    assert "Not measured: cwe; no question fits 512 tokens." in answer(study)
    assert measured(model, text, tasks="none").answers == {}


def test_a_longer_margin_reads_farther(
    model: Decoder, text: Text, answers: dict[tuple[str, int], float]
) -> None:
    wide = measured(model, text, margin=0.9)
    assert (wide.effective.length, wide.effective.end) == (256, None)


def test_after_a_stop_nothing_is_measured_again(
    model: Decoder,
    text: Text,
    answers: dict[tuple[str, int], float],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done: list[str] = []
    state = tmp_path / "state.json"
    kept: dict[str, Any] = {"state": state, "progress": lambda stage, *_: done.append(stage)}
    with pytest.raises(Interrupted, match="a stop before questions fwe at 128"):
        measured(model, text, stop=lambda: len(done) == 4, **kept)
    asked = [f"questions, step {name}" for name in ("vt at 128", "vt at 256", "cwe at 128")]
    assert done == ["loss and needles", *asked]

    def again(*_: object, **__: object) -> None:
        raise AssertionError("measured again")

    monkeypatch.setattr(NextTokenSuite, "measure", again)
    done.clear()
    resumed = measured(model, text, **kept)
    assert done == [*(f"questions, step fwe at {n}" for n in (128, 256)), "measured"]
    with pytest.raises(AssertionError, match="measured again"):
        measured(model, text, state=state, margin=0.1)
    assert resumed.effective is not None


class Passing(nn.Linear):
    """Keeps the shapes of what passes through it."""

    def __init__(self) -> None:
        super().__init__(1, 1)
        self.shapes: list[tuple[int, ...]] = []

    def forward(self, tokens: Tensor) -> Tensor:
        self.shapes.append(tuple(tokens.shape))
        return tokens


class Memory:
    """A pass takes the square of its length in MiB."""

    used_by: Iterator[int]

    def __init__(self, device: torch.device) -> None:
        del device

    def used(self) -> int:
        return next(Memory.used_by)


def test_lengths_beyond_a_limit_are_left_out(text: Text, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("posenc.lab.evaluation.lengths.PeakMemory", Memory)
    monkeypatch.setattr("posenc.lab.evaluation.lengths.rows_a_call", lambda length: 1)
    model, lengths = Passing(), (16, 32, 64, 128)

    def within(memory: float | None, minutes: float | None, used: Iterable[int]) -> Any:
        Memory.used_by = iter(used)
        limits = {"memory": memory, "minutes": minutes, "needed": 32, "passes": 1}
        return affordable(model, text.measured, lengths, **limits)

    kept, left = within(2.0, None, (n * n * 2**20 for n in (16, 32, 64)))
    assert kept == (16, 32)
    assert [length for _, length in model.shapes] == [16, 32], "4 GiB at 64 are foreseen"
    assert left == dict.fromkeys(("64", "128"), "memory: a pass would take more than 2 GiB")
    with pytest.raises(ArgumentError, match="memory: expected enough for contexts of 32") as caught:
        within(2.0, None, [2**40])
    assert caught.value.remedy.startswith("A pass takes more than 2 GiB; raise the limit")
    with pytest.raises(ArgumentError, match="minutes: expected enough for contexts of 32"):
        within(None, 1e-9, [0] * 4)
    assert within(9.0, 9.0, [0] * 4) == (lengths, {})


def test_the_time_of_all_passes_is_foreseen(text: Text, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two texts a pass, six at each length, ten seconds a pass: half a minute a length."""
    model, clock = Passing(), iter(range(0, 1000, 10))
    monkeypatch.setattr("posenc.lab.evaluation.lengths.time.perf_counter", lambda: next(clock))
    monkeypatch.setattr("posenc.lab.evaluation.lengths.rows_a_call", lambda length: 2)
    lengths, few = (16, 32, 64, 128), {"needed": 32, "passes": 6}
    kept, left = affordable(model, text.measured, lengths, memory=None, minutes=1.2, **few)
    assert kept == (16, 32)
    assert left == dict.fromkeys(("64", "128"), "minutes: measuring would take more than 1.2")
    assert model.shapes == [(2, 16), (2, 32), (2, 64)]
    with pytest.raises(ArgumentError, match=r"minutes: expected .* 32, the trained length"):
        affordable(model, text.measured, lengths, memory=None, minutes=0.75, **few)


def test_tasks_that_time_does_not_reach_are_named(
    model: Decoder,
    text: Text,
    answers: dict[tuple[str, int], float],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("posenc.lab.evaluation.evaluate.Deadline.left", -1.0)
    study = measured(model, text, minutes=100)
    assert study.answers == {}
    assert set(study.left_out) == {"vt", "cwe", "fwe"}
    assert "Not measured: vt, cwe and fwe; minutes: there was no time left." in answer(study)


def test_a_sliding_window_is_measured_beside_it(tmp_path: Path, text: Text) -> None:
    tiny_model("qwen3", vocab_size=256, max_position_embeddings=32).save_pretrained(tmp_path)
    opened = Checkpoint.open(tmp_path, dtype="bfloat16")
    assert next(opened.model.parameters()).dtype == torch.bfloat16
    study = evaluate(opened, text, tasks="none")
    keys = [finding.key for finding in study.findings]
    assert keys == ["direct", "window"]
    direct, window = (finding.untuned for finding in study.findings)
    assert window.loss[32] == pytest.approx(direct.loss[32], rel=0.02), "the same within it"
    assert window.loss[64] != direct.loss[64]
    short = evaluate(opened, text, tasks="none", lengths=(16, 32))
    assert [finding.key for finding in short.findings] == ["direct"], "nothing is beyond it"


def test_logits_that_are_not_asked_for_are_not_computed(tmp_path: Path) -> None:
    tiny_model("qwen3", vocab_size=256, max_position_embeddings=32).save_pretrained(tmp_path)
    model = Checkpoint.open(tmp_path).model
    tokens = torch.arange(20).unsqueeze(0)
    with torch.no_grad():
        whole, last = model(tokens), model(tokens, last=3)
    assert last.shape == (1, 3, 256)
    torch.testing.assert_close(last, whole[:, -3:])


def test_a_model_that_knows_nothing_is_asked_nothing_about(text: Text) -> None:
    study = measured(unlearned(0), text, tasks="none")
    assert study.effective is None
    assert study.gate


def folder_of_bytes(folder: Path, length: int = 512) -> Path:
    """A random model with a tokenizer, of which each byte is a token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    tiny_model("qwen3", vocab_size=256, max_position_embeddings=length).save_pretrained(folder)
    alphabet = {byte: n for n, byte in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def test_a_model_of_tokens_reads_contexts_once(tmp_path: Path) -> None:
    opened = Checkpoint.open(folder_of_bytes(tmp_path / "model"))
    (tmp_path / "text.txt").write_bytes(SENTENCE * 120)
    shares: list[float] = []
    study = evaluate(
        opened,
        opened.data(text=tmp_path / "text.txt"),
        lengths=(800, 900),
        progress=lambda stage, share, _: shares.append(share),
    )
    assert [finding.key for finding in study.findings] == ["direct", "window"]
    assert 3 < study.asked <= len(SENTENCE) * 120 // 901, "until it is settled that both hold"
    for finding in study.findings:
        assert list(finding.untuned.loss) == list(finding.untuned.needles) == [800, 900]
        assert len(finding.untuned.windows) == 4 * study.asked
    assert study.gate, "nothing was learned"
    hasty = evaluate(
        opened, opened.data(text=tmp_path / "text.txt"), lengths=(800, 900), minutes=1e-6
    )
    assert 1 <= hasty.asked <= study.asked
    assert all(0 <= share <= 1 for share in shares)
    assert study_page(study).sections


def test_a_chat_model_is_asked_by_its_template(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = folder_of_bytes(tmp_path / "chat")
    (folder / "chat_template.jinja").write_text("<{{ messages[0].content }}>")
    path = tmp_path / "text.txt"
    path.write_bytes(SENTENCE * 60)
    opened = Checkpoint.open(folder)
    read = opened.data(text=path)
    fields = {"tasks": "json_lookup", "questions": 2, "lengths": (512,)}
    assert evaluate(opened, read, **fields).style == "chat"
    study = evaluate(opened, read, style="base", **fields)
    assert study.style == "base"
    assert set(study.answers) == {"json_lookup"}
