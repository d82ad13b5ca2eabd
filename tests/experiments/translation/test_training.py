"""Training a translator: batches, early stopping, going on, translating."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from posenc.errors import (
    ArgumentError,
    CheckpointError,
    DataError,
    Interrupted,
    OutputError,
    UnknownNameError,
)
from posenc.experiments.translation import (
    Translator,
    TranslatorSettings,
    train_translator,
    training,
)
from posenc.experiments.translation.data import Data, epoch_batches, learnable
from posenc.experiments.translation.folder import load_settings
from posenc.experiments.translation.parallel import read_parallel
from posenc.experiments.translation.subwords import Subwords
from posenc.experiments.translation.training import Event, Prepared, Stepped
from posenc.storage import load_tensors

NUMBERS = {"one": "eins", "two": "zwei", "six": "sechs", "red": "rot", "big": "gross", "old": "alt"}


def sentences(count: int, longest: int = 5) -> list[tuple[str, str]]:
    """Word for word, in the reverse order."""
    source = random.Random(3)
    found = []
    for _ in range(count):
        words = source.choices(list(NUMBERS), k=source.randint(1, longest))
        found.append((" ".join(words), " ".join(NUMBERS[word] for word in reversed(words))))
    return found


@pytest.fixture
def settings(tmp_path: Path) -> TranslatorSettings:
    text = tmp_path / "pairs.tsv"
    text.write_text("".join(f"{a}\t{b}\n" for a, b in sentences(400)))
    return TranslatorSettings(
        out=tmp_path / "out",
        text=text,
        encoding="rope",
        vocabulary=40,
        max_length=24,
        width=16,
        layers=1,
        heads=2,
        batch_tokens=200,
        steps=12,
        every=4,
        warmup=4,
        threads=1,
        beams=2,
    )


def prepared(settings: TranslatorSettings) -> Data:
    text = read_parallel(settings.text)
    return Data.of(text, Subwords.learn(learnable(text), size=settings.vocabulary), settings)


def losses(events: list[Event]) -> list[float]:
    return [event.loss for event in events if isinstance(event, Stepped)]


def test_no_sentence_is_in_two_parts(settings: TranslatorSettings) -> None:
    data = prepared(settings)
    parts = [{one.line for one in part} for part in (data.train, data.validation, data.test)]
    assert all(parts)
    assert sum(map(len, parts)) == len(set.union(*parts))


def test_an_epoch_has_every_pair_once(settings: TranslatorSettings) -> None:
    data = prepared(settings).train
    batches = epoch_batches(data, tokens=200, seed=0, epoch=0)
    assert sorted(index for rows in batches for index in rows) == list(range(len(data)))
    for rows in batches:
        assert len(rows) * max(data[index].width for index in rows) <= 200
    assert batches == epoch_batches(data, tokens=200, seed=0, epoch=0)
    assert batches != epoch_batches(data, tokens=200, seed=0, epoch=1)
    assert batches != epoch_batches(data, tokens=200, seed=1, epoch=0)


def test_batches_hold_little_padding(settings: TranslatorSettings) -> None:
    data = prepared(settings).train
    places = tokens = 0
    for rows in epoch_batches(data, tokens=200, seed=0, epoch=0):
        widths = [data[index].width for index in rows]
        places, tokens = places + len(rows) * max(widths), tokens + sum(widths)
    assert tokens > 0.8 * places


def test_it_learns_to_translate(settings: TranslatorSettings) -> None:
    settings.text.write_text("".join(f"{a}\t{b}\n" for a, b in sentences(1500, longest=3)))
    longer = replace(
        settings,
        width=32,
        heads=4,
        vocabulary=60,
        max_length=30,
        batch_tokens=400,
        steps=300,
        every=100,
        warmup=40,
        dropout=0.0,
        smoothing=0.0,
        learning_rate=1e-2,
    )
    report = train_translator(longer)
    assert report.validation < 0.05
    assert report.chrf > 95  # BLEU needs runs of four words
    assert "tok:13a" in report.signature
    translator = Translator.load(longer.out / "model")
    assert translator.translate(["one", "", "old big", "one two six"]) == [
        "eins",
        "",
        "gross alt",
        "sechs zwei eins",
    ]


def test_going_on_gives_the_same_bits(
    settings: TranslatorSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole: list[Event] = []
    train_translator(settings, progress=whole.append)
    stopped = replace(settings, out=settings.out.with_name("stopped"))
    for first in (3, 7):  # before the first look, and between two
        stopping = _Stopping(first)
        monkeypatch.setattr(training, "interruptible", lambda stopping=stopping: stopping)
        with pytest.raises(Interrupted, match=rf"a stop after {first}\."):
            train_translator(stopped, progress=stopping.seen.append)
        stopped = load_settings(stopped.out)
    monkeypatch.undo()
    rest: list[Event] = []
    report = train_translator(stopped, progress=rest.append)
    assert isinstance(rest[0], Prepared)
    assert rest[0].step == 7
    assert losses(rest) == losses(whole)[7:]
    one, other = (load_tensors(out / "state.safetensors") for out in (settings.out, stopped.out))
    assert one[0].keys() == other[0].keys()
    for name, tensor in one[0].items():
        assert torch.equal(tensor, other[0][name]), name
    assert report.steps == 12
    one, other = (
        load_tensors(out / "model" / "model.safetensors") for out in (settings.out, stopped.out)
    )
    assert all(torch.equal(tensor, other[0][name]) for name, tensor in one[0].items())


class _Stopping:
    """Stops when so many steps are done."""

    def __init__(self, step: int) -> None:
        self.seen: list[Event] = []
        self.step = step

    def __enter__(self) -> Any:
        return lambda: isinstance(self.seen[-1], Stepped) and self.seen[-1].step >= self.step

    def __exit__(self, *exception: object) -> None:
        return None


def test_a_killed_training_goes_on_from_its_last_look(settings: TranslatorSettings) -> None:
    class Killed(BaseException):
        pass

    def kill(event: Event) -> None:
        if isinstance(event, Stepped) and event.step == 7:
            raise Killed

    with pytest.raises(Killed):
        train_translator(settings, progress=kill)
    rest: list[Event] = []
    train_translator(load_settings(settings.out), progress=rest.append)
    whole: list[Event] = []
    train_translator(replace(settings, out=settings.out.with_name("b")), progress=whole.append)
    assert isinstance(rest[0], Prepared)
    assert rest[0].step == 4
    assert losses(rest) == losses(whole)[4:]


def test_early_stopping_keeps_the_best(settings: TranslatorSettings) -> None:
    hot = replace(settings, steps=400, every=2, patience=3, learning_rate=0.3, warmup=1)
    events: list[Event] = []
    report = train_translator(hot, progress=events.append)
    assert report.stopped_early
    assert report.steps == report.best_step + 2 * 3 < 400
    looks = [e.validation for e in events if isinstance(e, Stepped) and e.validation is not None]
    assert report.validation == min(looks)
    tensors = load_tensors(hot.out / "state.safetensors")[0]
    kept = load_tensors(hot.out / "model" / "model.safetensors")[0]
    name = "source_embedding.weight"
    assert torch.equal(kept[name], tensors[f"best.{name}"])
    assert not torch.equal(kept[name], tensors[f"model.{name}"])
    assert json.loads((hot.out / "report.json").read_text())["bleu"] == report.bleu


def test_over_long_sentences(settings: TranslatorSettings) -> None:
    with settings.text.open("a") as file:
        file.write(f"{'one ' * 30}\t{'eins ' * 30}\n")
    with pytest.raises(DataError, match=r"at most 24 subwords .* in line 401"):
        train_translator(settings)
    assert not settings.out.exists()
    assert prepared(replace(settings, skip_bad=True)).skipped == 1


def test_too_few_pairs(settings: TranslatorSettings) -> None:
    settings.text.write_text("one\teins\ntwo\tzwei\n")
    with pytest.raises(DataError, match="pairs to"):
        train_translator(settings)


def test_translating_refuses_what_it_cannot_read(settings: TranslatorSettings) -> None:
    train_translator(settings)
    translator = Translator.load(settings.out / "model")
    with pytest.raises(DataError, match=r"lines of book of at most 24 subwords, got \d+ in line 2"):
        translator.translate(["one", "one " * 40], where="book")
    with pytest.raises(DataError, match=r"'ß' \(U\+00DF\) in line 1"):
        translator.translate(["ß"], where="book")
    assert translator.translate(["ß"], drop_unknown=True) == [""]
    (settings.out / "model" / "vocabulary.json").unlink()
    with pytest.raises(CheckpointError, match="vocabulary of a translator"):
        Translator.load(settings.out / "model")


def test_vocabulary_of_another_model_is_refused(settings: TranslatorSettings) -> None:
    train_translator(settings)
    path = settings.out / "model" / "vocabulary.json"
    path.write_text(Subwords.learn(["something else"], size=30).to_json())
    with pytest.raises(CheckpointError, match="do not belong together"):
        Translator.load(settings.out / "model")


def test_output_folder(settings: TranslatorSettings) -> None:
    train_translator(settings)
    with pytest.raises(OutputError, match="which exists"):
        train_translator(settings)
    with pytest.raises(ArgumentError, match="seed: expected 0"):
        train_translator(replace(settings, existing="resume", seed=1))
    train_translator(replace(settings, existing="replace", seed=1))
    assert load_settings(settings.out).seed == 1
    settings.text.write_text("".join(f"{a}\t{b}\n" for a, b in sentences(399)))
    with pytest.raises(DataError, match="text that training began with"):
        train_translator(load_settings(settings.out))
    with pytest.raises(OutputError, match=r"which has no settings\.json"):
        load_settings(settings.text.parent)
    (settings.text.parent / "other").mkdir()
    (settings.text.parent / "other" / "file").touch()
    with pytest.raises(OutputError, match=r"which has no settings\.json"):
        train_translator(replace(settings, out=settings.text.parent / "other", existing="replace"))


@pytest.mark.parametrize(
    "wrong",
    [
        {"width": 15},
        {"steps": 0},
        {"dropout": 1.0},
        {"smoothing": -0.1},
        {"learning_rate": 0.0},
        {"batch_tokens": 24},
        {"device": "toaster"},
        {"existing": "maybe"},
    ],
)
def test_settings_out_of_their_domain(settings: TranslatorSettings, wrong: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match=next(iter(wrong))):
        replace(settings, **wrong)


def test_unknown_encoding(settings: TranslatorSettings) -> None:
    with pytest.raises(UnknownNameError, match="Did you mean"):
        replace(settings, encoding="ropee")


def test_encoding_that_needs_a_causal_mask_is_refused(settings: TranslatorSettings) -> None:
    with pytest.raises(ArgumentError, match="encoder_encoding: expected"):
        train_translator(replace(settings, encoding="forgetting"))
    assert not settings.out.exists()


def test_diverging_training_says_so(settings: TranslatorSettings) -> None:
    with pytest.raises(ArgumentError, match=r"learning_rate: .* converges"):
        train_translator(replace(settings, learning_rate=1e30, warmup=1, steps=60))
