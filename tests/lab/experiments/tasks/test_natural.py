"""The tasks on natural data, and on sentences of a grammar."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from posenc.errors import ArgumentError, DataError, Interrupted
from posenc.lab.experiments.results import Measurement, RefusedMeasurement
from posenc.lab.experiments.sequences import SYMBOLS, Split, Subwords, drawn
from posenc.lab.experiments.settings import ComparisonSettings
from posenc.lab.experiments.tasks import TASKS, Task, word_order
from posenc.lab.experiments.tasks.pairs import HELD_OUT, Pair, PairTask, _dictionary, distance
from posenc.lab.experiments.tasks.temperature import Interpolator, Timed
from posenc.lab.training.checkpoint import TrainingPlan
from posenc.lab.training.loop import Watch, seeded_model, train
from posenc.layout import Layout
from posenc.models import MaskedLM, TextClassifier, Transformer

SMALL = {"train_length": 8, "width": 16, "layers": 1, "heads": 2, "batch": 8}


def parallel(folder: Path, count: int = 300) -> Path:
    """Letters, and the same in capitals from the end."""
    source = Random(4)
    lines = []
    for _ in range(count):
        words = ["".join(source.choices("abc", k=2)) for _ in range(source.randint(1, 6))]
        lines.append(" ".join(words) + "\t" + " ".join(reversed(words)).upper() + "\n")
    path = folder / "pairs.tsv"
    path.write_text("".join(lines))
    return path


def made(name: str, folder: Path, **changes: Any) -> tuple[Task, ComparisonSettings]:
    given = dict(SMALL)
    if name in ("masked", "translation"):
        given["text"] = parallel(folder)  # type: ignore[assignment]
    if name == "translation":
        given["options"] = {"vocabulary": 30}  # type: ignore[assignment]
    settings = ComparisonSettings(out=folder / "out", task=name, **{**given, **changes})  # type: ignore[arg-type]
    return settings.entry.make(settings), settings


def measured(task: Task, encoding: str, model: torch.nn.Module) -> dict[tuple[str, float], Any]:
    found: dict[tuple[str, float], Any] = {}
    for piece in task.measure(model, encoding, 0, available=None):
        for item in piece:
            value = item.value if isinstance(item, Measurement) else item
            found[item.metric, item.x] = value
    return found


def trained(
    task: Task, settings: ComparisonSettings, encoding: str, folder: Path, rate: float | None = None
) -> dict[tuple[str, float], Any]:
    folder = folder / hashlib.sha256(encoding.encode()).hexdigest()[:8]
    folder.mkdir(parents=True)
    rate = settings.rate if rate is None else rate
    plan = TrainingPlan(
        encoding=encoding, seed=0, steps=settings.planned_steps, rate=rate, folder=folder
    )
    return measured(task, encoding, train(task, plan).model)


NAMES = ("masked", "phonemes", "temperature", "translation", "word_order")


@pytest.mark.parametrize("name", NAMES)
def test_every_task_keeps_the_rules(name: str, tmp_path: Path) -> None:
    """Pure batches, one start for all, as many measurements as promised, a loss, a saved model."""
    task, settings = made(name, tmp_path)
    again, _ = made(name, tmp_path)
    assert task.fingerprint == again.fingerprint
    assert sum(metric.headline for metric in task.metrics) == 1
    first = task.batch(0, 3)
    task.batch(1, 1)
    for key, tensor in again.batch(0, 3).items():
        assert torch.equal(first[key], tensor)
    assert any(not torch.equal(first[key], x) for key, x in task.batch(0, 4).items())
    control = dict(seeded_model(task, "nope", 3).named_parameters())
    for encoding in settings.trained:
        model = seeded_model(task, encoding, 3)
        own = dict(model.named_parameters())
        assert all(torch.equal(own[key], x) for key, x in control.items())
        loss = task.loss(model, first)
        assert loss.shape == ()
        assert torch.isfinite(loss)
    model.eval().requires_grad_(requires_grad=False)
    pieces = list(task.measure(model, encoding, 0, available=None))
    assert len(pieces) == task.count(encoding)
    keys = {item.metric for piece in pieces for item in piece}
    assert keys == {metric.key for metric in task.metrics} - {"training_loss"}
    assert {item.x for piece in pieces for item in piece} == set(task.lengths)
    with pytest.raises(ArgumentError, match="that fits into"):
        task.require_memory(model, 10)
    task.require_memory(model, 10**11)
    task.save(model, tmp_path / "model")
    kinds = {
        "masked": MaskedLM,
        "phonemes": Transformer,
        "temperature": Interpolator,
        "translation": Transformer,
        "word_order": TextClassifier,
    }
    loaded = kinds[name].load(tmp_path / "model")
    inner = model.model if isinstance(model, Timed) else model
    for key, tensor in inner.state_dict().items():
        assert torch.equal(loaded.state_dict()[key], tensor)


@pytest.mark.parametrize("name", NAMES)
def test_training_that_was_stopped_goes_on_to_the_same_bits(name: str, tmp_path: Path) -> None:
    task, settings = made(name, tmp_path)
    losses = []
    for folder in ("whole", "parts"):
        (tmp_path / folder).mkdir()
        plan = TrainingPlan(
            encoding="rope", seed=1, steps=4, rate=settings.rate, folder=tmp_path / folder
        )
        if folder == "parts":
            asked = iter((False, True))
            with pytest.raises(Interrupted):
                train(task, plan, Watch(stop=lambda asked=asked: next(asked)))  # type: ignore[misc]
        losses.append(train(task, plan).losses)
    assert torch.equal(losses[0], losses[1])


@pytest.mark.parametrize("name", ["masked", "phonemes", "translation", "word_order"])
def test_drawn_positions_are_refused(name: str, tmp_path: Path) -> None:
    task, _ = made(name, tmp_path)
    with pytest.raises(ArgumentError, match="plain positions"):
        task.build("sinusoidal@randomized")


@pytest.mark.parametrize("name", NAMES)
def test_encoding_that_needs_a_causal_mask_is_refused(name: str, tmp_path: Path) -> None:
    task, _ = made(name, tmp_path)
    with pytest.raises(ArgumentError, match="requires a causal mask"):
        task.build("forgetting")


def test_learned_table_ends_where_training_ends(tmp_path: Path) -> None:
    for name in ("masked", "phonemes", "word_order"):
        task, _ = made(name, tmp_path)
        model = task.build("learned").eval().requires_grad_(requires_grad=False)
        found = measured(task, "learned", model)
        key = next(metric.key for metric in task.metrics if metric.headline)
        assert isinstance(found[key, 8], float)
        refusal = found[key, task.lengths[-1]]
        assert isinstance(refusal, RefusedMeasurement)
        assert "learned table" in refusal.reason


# Pairs


def test_split_by_name_and_length() -> None:
    pairs = [
        Pair(name=str(n), source=[2] * (n % 12 + 1), target=[2] * (n % 3 + 1)) for n in range(2000)
    ]
    split = Split.of(pairs, (6, 9, 12), held_out=0.1)
    assert all(pair.length <= 6 for pair in split.train)
    assert {pair.length for pair in split.tests[6]} == {1, 2, 3, 4, 5, 6}
    assert {pair.length for pair in split.tests[9]} == {7, 8, 9}
    names = {pair.name for pair in split.train}
    assert not any(pair.name in names for tests in split.tests.values() for pair in tests)
    assert 60 < len(split.tests[6]) < 140
    with pytest.raises(DataError, match="at least 16 examples"):
        Split.of(pairs[:20], (6,), held_out=0.1)


def test_lengths_without_enough_examples_are_refused(tmp_path: Path) -> None:
    task, _ = made("translation", tmp_path, train_length=12, test_lengths=(12, 200))
    model = task.build("rope").eval().requires_grad_(requires_grad=False)
    found = measured(task, "rope", model)
    assert isinstance(found["bleu", 12], float)
    assert "only" in found["bleu", 200].reason


def test_distance_counts_edits() -> None:
    assert distance("kitten", "sitting") == 3
    assert distance("", "abc") == distance("abc", "") == 3
    assert distance(["AH", "B"], ["AH", "B"]) == 0


def test_phonemes_score_against_the_closest_pronunciation(tmp_path: Path) -> None:
    task, _ = made("phonemes", tmp_path)
    assert isinstance(task, PairTask)
    pairs = [pair for pair in task.split.tests[8] if len(pair.answers) > 1]
    right = [list(pair.target) for pair in pairs]
    assert task.score(right, pairs) == (0.0, 0.0)
    assert task.score([[] for _ in pairs], pairs) == (1.0, 1.0)


def test_words_are_learned_by_their_first_pronunciation() -> None:
    sounds, pairs, _ = _dictionary(stress=False)
    (pair,) = (pair for pair in pairs if pair.name == "either")
    assert list(pair.answers) == ["IY DH ER", "AY DH ER"]
    assert [sounds[symbol - SYMBOLS] for symbol in pair.target] == ["IY", "DH", "ER"]


def test_translation_needs_a_text(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="expected a parallel text, got none"):
        made("translation", tmp_path, text=None)


def test_translation_reads_two_files(tmp_path: Path) -> None:
    lines = [line.split("\t") for line in parallel(tmp_path).read_text().splitlines()]
    for index, name in enumerate(("a", "b")):
        (tmp_path / name).write_text("".join(f"{cells[index]}\n" for cells in lines))
    two, _ = made(
        "translation",
        tmp_path,
        text=tmp_path / "a",
        options={"vocabulary": 30, "target": str(tmp_path / "b")},
    )
    one, _ = made("translation", tmp_path)
    assert two.corpus.sha256 == one.corpus.sha256


def test_right_translations_score_full_marks(tmp_path: Path) -> None:
    task, _ = made("translation", tmp_path, train_length=16)
    assert isinstance(task, PairTask)
    pairs = [pair for pair in task.split.tests[16] if len(pair.answers[0].split()) > 3]
    bleu, chrf = task.score([list(pair.target) for pair in pairs], pairs)
    assert bleu == pytest.approx(100)
    assert chrf == pytest.approx(100)


def test_subwords_are_learned_from_training_pairs_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learned: list[str] = []
    learn = Subwords.learn

    def kept(lines: list[str], *, size: int) -> Subwords:
        learned.extend(lines)
        return learn(lines, size=size)

    monkeypatch.setattr(Subwords, "learn", kept)
    made("translation", tmp_path)
    pairs = [line.split("\t") for line in parallel(tmp_path).read_text().splitlines()]
    seen = [pair for pair in pairs if drawn(pair[0]) >= HELD_OUT]
    assert learned == [line for pair in seen for line in pair]
    assert len(seen) < len(pairs)


# Word order


@pytest.mark.parametrize("length", [5, 6, 7, 12, 40])
def test_minimal_pairs_have_the_same_words(length: int) -> None:
    source = Random(length)
    for _ in range(50):
        scene = word_order.draw_scene(length, source)
        words, turned = scene.words(), scene.turned()
        assert len(words) == length
        assert sorted(words) == sorted(turned.words())
        assert words != turned.words()
        assert scene.person_acts != turned.person_acts


def test_who_acts_follows_from_the_sentence() -> None:
    one = word_order.Scene(word_order.Phrase("dog"), word_order.Phrase("man"), "chased", "active")
    assert one.words() == ["the", "dog", "chased", "the", "man"]
    assert not one.person_acts
    other = replace(one, kind="passive")
    assert other.words() == ["the", "dog", "was", "chased", "by", "the", "man"]
    assert other.person_acts


def test_who_sees_no_order_tells_no_pair_apart(tmp_path: Path) -> None:
    """The control that must fail does, exactly; an encoding succeeds in the same few steps."""
    task, settings = made("word_order", tmp_path, width=32, heads=4, batch=16, steps=120)
    failing = trained(task, settings, "nope", tmp_path)
    assert {failing["accuracy", x] for x in task.lengths} == {0.5}
    assert {failing["pairs", x] for x in task.lengths} == {0.0}
    assert trained(task, settings, "sinusoidal", tmp_path)["accuracy", 8] > 0.75


def labelled(folder: Path, lines: list[str]) -> Path:
    path = folder / "labelled.tsv"
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def test_labelled_sentences_of_the_user(tmp_path: Path) -> None:
    source = Random(1)
    lines = []
    for index in range(300):
        words = source.choices(["film", "plot", "it", "was"], k=source.randint(2, 14))
        lines.append(f"{'good' if index % 3 else 'bad'}\t{' '.join(words)}!")
    task, _ = made("word_order", tmp_path, text=labelled(tmp_path, lines), test_lengths=(8, 16, 99))
    headline = next(metric for metric in task.metrics if metric.headline)
    assert headline.trivial is not None
    assert 0.5 < headline.trivial < 0.8
    assert "pairs" not in {metric.key for metric in task.metrics}
    model = task.build("t5").eval().requires_grad_(requires_grad=False)
    found = measured(task, "t5", model)
    assert isinstance(found["accuracy", 8], float)
    assert isinstance(found["accuracy", 16], float)
    assert "only 0 sentences" in found["accuracy", 99].reason


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["good\ta film"] * 50, "two labels or more"),
        (["good\ta film", "bad film"], "got 0 in line 2"),
        (["good\ta film", "bad\ta plot"], "16 examples of at most 8 words"),
    ],
)
def test_bad_labelled_sentences(tmp_path: Path, lines: list[str], message: str) -> None:
    with pytest.raises(DataError, match=message):
        made("word_order", tmp_path, text=labelled(tmp_path, lines))


# Masked bytes


def test_the_same_bytes_are_masked_and_scored_at_every_length(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes(bytes(torch.randint(256, (4000,)).tolist()))
    task, _ = made("masked", tmp_path, text=path, test_lengths=(8, 16, 24, 64))
    seen = []
    for length in task.lengths:
        begin = (64 - length) // 2
        first, scored = task._middle(length)  # type: ignore[attr-defined]
        part = slice(begin + first, begin + first + scored)
        assert 0 <= first <= first + scored <= length
        seen.append((task._windows[:, part], task._masked[:, part]))  # type: ignore[attr-defined]
    for windows, masked in seen[1:]:
        assert torch.equal(windows, seen[0][0])
        assert torch.equal(masked, seen[0][1])


def test_masked_bytes_are_hidden_from_the_model(tmp_path: Path) -> None:
    task, _ = made("masked", tmp_path)
    batch = task.batch(0, 0)
    hidden = batch["inputs"] != batch["targets"]
    assert (hidden & ~batch["chosen"]).sum() == 0
    assert hidden.any()


def test_text_that_is_too_short_to_mask(tmp_path: Path) -> None:
    path = tmp_path / "short"
    path.write_text("x" * 200)
    with pytest.raises(DataError, match="held out, to test at length 64"):
        made("masked", tmp_path, text=path)


# Temperatures


def test_times_are_hours_in_order_and_values_those_of_the_year(tmp_path: Path) -> None:
    task, _ = made("temperature", tmp_path)
    batch = task.batch(0, 0)
    assert batch["values"].shape == batch["times"].shape == batch["hidden"].shape == (8, 8)
    assert (batch["times"].diff(dim=1) >= 1).all()
    assert batch["times"].min() >= 0
    assert batch["times"].max() < 24
    assert (batch["hidden"].sum(1) == 2).all()


def test_hidden_readings_do_not_reach_the_model(tmp_path: Path) -> None:
    task, _ = made("temperature", tmp_path)
    model = seeded_model(task, "rope", 0).eval()
    batch = task.batch(0, 0)
    told = model(batch["values"], batch["times"], batch["hidden"])
    other = batch["values"] + 100 * batch["hidden"]
    assert torch.equal(model(other, batch["times"], batch["hidden"]), told)
    seen = batch["values"] + 100 * ~batch["hidden"]
    assert not torch.equal(model(seen, batch["times"], batch["hidden"]), told)


def test_index_positions_do_not_see_the_times(tmp_path: Path) -> None:
    task, _ = made("temperature", tmp_path)
    batch = task.batch(0, 0)
    given = batch["values"], batch["hidden"]
    later = batch["times"] * 1.5 + 3
    for encoding, same in (("sinusoidal@index", True), ("sinusoidal", False)):
        model = seeded_model(task, encoding, 0).eval()
        one, other = (model(given[0], times, given[1]) for times in (batch["times"], later))
        assert torch.equal(one, other) == same
    by_index = seeded_model(task, "rope@index", 0).eval()
    assert isinstance(by_index, Timed)
    plain = by_index.model(*given, Layout.sequence(8))
    assert torch.equal(by_index(given[0], batch["times"], given[1]), plain)


@pytest.mark.long
def test_times_tell_more_than_indices(tmp_path: Path) -> None:
    """The control that must fail does."""
    task, settings = made(
        "temperature", tmp_path, train_length=32, width=32, heads=4, batch=32, steps=300
    )
    by_time, by_index = (
        trained(task, settings, encoding, tmp_path, rate=0.01)["error", 32]
        for encoding in ("sinusoidal", "sinusoidal@index")
    )
    assert by_time < 0.5 * by_index


def test_unknown_place_and_spans_beyond_a_stretch(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="Seattle or San Francisco"):
        made("temperature", tmp_path, options={"place": "Atlantis"})
    with pytest.raises(DataError, match="at most 160 readings"):
        made("temperature", tmp_path, test_lengths=(200,))
    assert (
        "San Francisco" in made("temperature", tmp_path, options={"place": "San Francisco"})[0].data
    )


def test_randomized_positions_are_no_times(tmp_path: Path) -> None:
    task, _ = made("temperature", tmp_path)
    with pytest.raises(ArgumentError, match="plain or index positions"):
        task.build("rope@randomized")


def test_all_are_listed() -> None:
    for name in NAMES:
        entry = TASKS[name]
        assert entry.expectation.endswith((".", ")."))
        assert "nope" in entry.defaults.references
