"""Training a translator: batches, early stopping, going on, translating."""

from __future__ import annotations

import json
import math
import random
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from examples.translation.data import Data, epoch_batches, learnable
from examples.translation.settings import Settings
from examples.translation.training import Existing, load_settings, train_translator
from examples.translation.translator import Translator

from posenc import errors
from posenc.lab.experiments.sequences import Subwords, read_parallel
from posenc.lab.training import loop
from posenc.storage import load_tensors

NUMBERS = {"one": "eins", "two": "zwei", "six": "sechs", "red": "rot", "big": "gross", "old": "alt"}


def written(text: Path, count: int = 400, longest: int = 5) -> Path:
    """Sentences and their translations, word for word in the reverse order."""
    source = random.Random(3)
    rows = []
    for _ in range(count):
        words = source.choices(list(NUMBERS), k=source.randint(1, longest))
        rows.append(" ".join(words) + "\t" + " ".join(NUMBERS[word] for word in reversed(words)))
    text.write_text("\n".join([*rows, ""]))
    return text


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    model = {"encoding": "rope", "vocabulary": 40, "max_length": 24}
    sizes = {"width": 16, "layers": 1, "heads": 2, "threads": 1, "beams": 2}
    times = {"batch_tokens": 200, "steps": 12, "every": 4, "warmup": 4}
    return Settings(text=written(tmp_path / "pairs.tsv"), **model, **sizes, **times)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


def prepared(settings: Settings) -> Data:
    text = read_parallel(settings.text)
    return Data.of(text, Subwords.learn(learnable(text), size=settings.vocabulary), settings)


class Losses:
    """Losses of the steps of a training; asks to stop, or is killed, after one of them."""

    def __init__(self, stop: int = 0, kill: int = 0) -> None:
        self.of: list[tuple[int, float]] = []
        self.stop, self.kill = stop, kill

    def __call__(self, step: int, loss: float) -> None:
        self.of.append((step, loss))
        if step == self.kill:
            raise Killed
        if step == self.stop:
            signal.raise_signal(signal.SIGINT)


class Killed(BaseException):
    pass


def test_no_sentence_is_in_two_parts(settings: Settings) -> None:
    data = prepared(settings)
    parts = [{one.line for one in part} for part in (data.train, data.validation, data.test)]
    assert all(parts)
    assert sum(map(len, parts)) == len(set.union(*parts))


def test_an_epoch_has_every_pair_once(settings: Settings) -> None:
    data = prepared(settings).train
    batches = epoch_batches(data, tokens=200, seed=0, epoch=0)
    assert sorted(index for rows in batches for index in rows) == list(range(len(data)))
    for rows in batches:
        assert len(rows) * max(data[index].width for index in rows) <= 200
    assert batches == epoch_batches(data, tokens=200, seed=0, epoch=0)
    assert batches != epoch_batches(data, tokens=200, seed=0, epoch=1)
    assert batches != epoch_batches(data, tokens=200, seed=1, epoch=0)


def test_batches_hold_little_padding(settings: Settings) -> None:
    data = prepared(settings).train
    places = tokens = 0
    for rows in epoch_batches(data, tokens=200, seed=0, epoch=0):
        widths = [data[index].width for index in rows]
        places, tokens = places + len(rows) * max(widths), tokens + sum(widths)
    assert tokens > 0.8 * places


@pytest.mark.long
def test_it_learns_to_translate(settings: Settings, out: Path) -> None:
    written(settings.text, 1500, longest=3)
    sizes = {"width": 32, "heads": 4, "vocabulary": 60, "max_length": 30, "batch_tokens": 400}
    times = {"steps": 300, "every": 100, "warmup": 40, "learning_rate": 1e-2}
    longer = replace(settings, dropout=0.0, smoothing=0.0, **sizes, **times)
    report = train_translator(longer, out)
    assert report.validation < 0.05
    assert report.chrf > 95  # BLEU needs runs of four words
    assert "tok:13a" in report.signature
    translator = Translator.load(out / "model")
    found = translator.translate(["one", "", "old big", "one two six"])
    assert found == ["eins", "", "gross alt", "sechs zwei eins"]


def test_going_on_gives_the_same_bits(settings: Settings, out: Path) -> None:
    whole, stopped = Losses(), out.with_name("stopped")
    train_translator(settings, out, stepped=whole)
    for first in (3, 7):  # before the first look, and between two
        existing: Existing = "refuse" if first == 3 else "resume"
        with pytest.raises(errors.Interrupted, match=rf"a stop after step {first}\..*--resume"):
            train_translator(settings, stopped, existing=existing, stepped=Losses(stop=first))
    rest, lines = Losses(), list[str]()
    how: dict[str, Any] = {"existing": "resume", "stepped": rest, "tell": lines.append}
    report = train_translator(load_settings(stopped), stopped, **how)
    assert lines[1] == "goes on after step 7"
    assert rest.of == whole.of[7:]
    for file in ("checkpoint.safetensors", "model/model.safetensors"):
        one, other = (load_tensors(folder / file)[0] for folder in (out, stopped))
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    assert report.steps == 12


def test_a_killed_training_goes_on_from_its_last_save(
    settings: Settings, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "SAVE_SECONDS", 0.0)
    with pytest.raises(Killed):
        train_translator(settings, out, stepped=Losses(kill=8))
    rest, whole = Losses(), Losses()
    report = train_translator(load_settings(out), out, existing="resume", stepped=rest)
    other = train_translator(settings, out.with_name("b"), stepped=whole)
    assert rest.of == whole.of[7:]
    assert replace(report, seconds=0.0) == replace(other, seconds=0.0)


def test_looks_after_the_checkpoint_come_again(
    settings: Settings, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A training that was killed before its checkpoint was written begins anew."""
    monkeypatch.setattr(loop, "SAVE_SECONDS", math.inf)  # however slow the machine
    with pytest.raises(Killed):
        train_translator(settings, out, stepped=Losses(kill=9))
    assert len(json.loads((out / "looks.json").read_text())) == 2
    again = Losses()
    report = train_translator(settings, out, existing="resume", stepped=again)
    assert [step for step, _ in again.of] == list(range(1, 13))
    kept = json.loads((out / "report.json").read_text())["losses"]
    assert [step for step, _ in kept] == [4, 8, 12]
    assert report.validation == min(loss for _, loss in kept)


def test_early_stopping_keeps_the_best(settings: Settings, out: Path) -> None:
    hot = replace(settings, steps=400, every=2, patience=3, learning_rate=0.3, warmup=1)
    report = train_translator(hot, out)
    assert report.stopped_early
    assert report.steps == report.best_step + 2 * 3 < 400
    plain = json.loads((out / "report.json").read_text())
    assert plain["bleu"] == report.bleu
    assert report.validation == min(loss for _, loss in plain["losses"])
    last = load_tensors(out / "checkpoint.safetensors")[0]
    best = load_tensors(out / "model" / "model.safetensors")[0]
    name = "source_embedding.weight"
    assert not torch.equal(best[name], last[f"model.{name}"])
    again = Losses()
    assert train_translator(hot, out, existing="resume", stepped=again) == report
    assert again.of == []


def test_over_long_sentences_and_too_few_pairs(settings: Settings, out: Path) -> None:
    with settings.text.open("a") as file:
        file.write(f"{'one ' * 30}\t{'eins ' * 30}\n")
    with pytest.raises(errors.DataError, match=r"at most 24 subwords .* in line 401"):
        train_translator(settings, out)
    assert not out.exists()
    assert prepared(replace(settings, skip_bad=True)).skipped == 1
    settings.text.write_text("one\teins\ntwo\tzwei\n")
    with pytest.raises(errors.DataError, match="pairs to"):
        train_translator(settings, out)


def test_translating_refuses_what_it_cannot_read(settings: Settings, out: Path) -> None:
    train_translator(settings, out)
    translator = Translator.load(out / "model")
    with pytest.raises(
        errors.DataError, match=r"lines of book of at most 24 subwords, got \d+ in line 2"
    ):
        translator.translate(["one", "one " * 40], where="book")
    with pytest.raises(errors.DataError, match=r"'ß' \(U\+00DF\) in line 1"):
        translator.translate(["ß"], where="book")
    assert translator.translate(["ß"], drop_unknown=True) == [""]
    vocabulary = out / "model" / "vocabulary.json"
    vocabulary.write_text(Subwords.learn(["something else"], size=30).to_json())
    with pytest.raises(errors.CheckpointError, match="do not belong together"):
        Translator.load(out / "model")
    vocabulary.unlink()
    with pytest.raises(errors.CheckpointError, match="vocabulary of a translator"):
        Translator.load(out / "model")


def test_output_folder(settings: Settings, out: Path) -> None:
    train_translator(settings, out)
    with pytest.raises(errors.OutputError, match="which exists"):
        train_translator(settings, out)
    with pytest.raises(errors.ArgumentError, match="seed: expected 0"):
        train_translator(replace(settings, seed=1), out, existing="resume")
    train_translator(replace(settings, seed=1), out, existing="replace")
    assert load_settings(out).seed == 1
    written(settings.text, 399)
    with pytest.raises(errors.DataError, match="text that training began with"):
        train_translator(load_settings(out), out, existing="resume")
    with pytest.raises(errors.OutputError, match=r"which has no settings\.json"):
        load_settings(out.parent)
    other = out.with_name("other")
    other.mkdir()
    (other / "file").touch()
    with pytest.raises(errors.OutputError, match=r"which has no settings\.json"):
        train_translator(settings, other, existing="replace")
    with pytest.raises(errors.UnknownNameError, match="existing: expected"):
        train_translator(settings, out, existing="maybe")


WRONG: dict[str, Any] = {"width": 15, "steps": 0, "dropout": 1.0, "smoothing": -0.1, "seed": -1}
WRONG |= {"learning_rate": 0.0, "batch_tokens": 24, "device": "toaster"}


@pytest.mark.parametrize(("name", "value"), WRONG.items())
def test_settings_out_of_their_domain(settings: Settings, name: str, value: object) -> None:
    with pytest.raises(errors.ArgumentError, match=name):
        replace(settings, **{name: value})


def test_unknown_encoding(settings: Settings) -> None:
    with pytest.raises(errors.UnknownNameError, match="Did you mean"):
        replace(settings, encoding="ropee")


def test_encoding_that_needs_a_causal_mask_is_refused(settings: Settings, out: Path) -> None:
    with pytest.raises(errors.ArgumentError, match="encoder_encoding: expected"):
        train_translator(replace(settings, encoding="forgetting"), out)
    assert not out.exists()


def test_diverging_training_says_so(settings: Settings, out: Path) -> None:
    with pytest.raises(errors.ArgumentError, match=r"learning_rate: .* converges"):
        train_translator(replace(settings, learning_rate=1e30, warmup=1, steps=60), out)
