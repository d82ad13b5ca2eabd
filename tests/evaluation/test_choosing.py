"""The advice of a study and its stated certainty."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from posenc.errors import CheckpointError
from posenc.evaluation.candidates import Method
from posenc.evaluation.choosing import choose, gap, gate, require_learned
from posenc.evaluation.results import Findings, Study, StudyReading
from posenc.evaluation.suites import next_token as measuring
from posenc.evaluation.suites.needles import ByteNeedles, letters
from posenc.evaluation.suites.next_token import NextTokenSuite
from posenc.evaluation.verdict import answer, expectation, findings
from posenc.experiments.pieces import Pieces
from posenc.extension import EXTENSIONS

STRETCHES = 64
RULER = NextTokenSuite(
    torch.zeros(64), Pieces((64,)), (16, 32), ByteNeedles(), letters(), seed=0, windows=1
)
NOISE = [0.01 * ((7 * n) % 5 - 2) for n in range(STRETCHES)]


def reading(loss: float, found: float = 0.5, spread: float = 0.0) -> StudyReading:
    """Each stretch costs ``loss``, more or less, as all others do; ``spread`` is its own."""
    own = [spread * (1 if n % 2 else -1) for n in range(STRETCHES)]
    return StudyReading(
        loss={16: 2.0, 32: loss},
        by_position=((4.0, 2.0),),
        needles={16: (0.9,), 32: (found,)},
        copied={16: 0.9, 32: 0.9},
        per_second=1.0,
        peak_memory_bytes=1,
        pieces={
            "loss": {32: tuple(loss + noise + mine for noise, mine in zip(NOISE, own, strict=True))}
        },
    )


def study(**readings: StudyReading) -> Study:
    baselines = ("direct", "window")
    findings = tuple(
        Findings(
            key=key,
            role="baseline" if key in baselines else "method",
            writable=key not in (*baselines, "segments"),
            advice=(f"{key} has a ramp.",) if key == "yarn" else (),
            untuned=each,
        )
        for key, each in readings.items()
    )
    return Study(
        checkpoint="tiny",
        family="llama",
        parameters=1,
        length=16,
        factor=2.0,
        lengths=(16, 32),
        metrics=RULER.facts("byte")["metrics"],
        guide="",
        depths=(0.5,),
        unit="byte",
        needles="needles",
        chance=0.06,
        copy_chance=0.04,
        text="a text",
        sha256="",
        targets=STRETCHES,
        asked=64,
        findings=findings,
    )


BASE = {"direct": reading(4.0, 0.1), "window": reading(2.4, 0.05)}


def test_needles_come_before_loss() -> None:
    found = study(**BASE, ntk=reading(2.3, 0.2), yarn=reading(2.5, 0.57), rerope=reading(2.6, 0.6))
    assert choose(found, tuned=False)[0] == "yarn", "as many as rerope's, and less loss"


def test_stretching_must_gain() -> None:
    def chosen(**readings: StudyReading) -> str | None:
        return choose(study(**(BASE | {"ntk": reading(2.9, 0.05)} | readings)), tuned=False)[0]

    assert chosen(yarn=reading(2.3)) == "yarn"
    assert chosen(yarn=reading(2.5)) == "yarn", "needles beat the window"
    assert chosen(yarn=reading(2.34, 0.05)) == "yarn"
    assert chosen(yarn=reading(2.34, 0.05, spread=0.3)) is None, "not significant"
    assert chosen(yarn=reading(2.39, 0.05)) is None, "by less than 1%"
    assert chosen(direct=reading(2.5, 0.9), yarn=reading(2.3, 0.3)) is None, "needles are lost"
    assert chosen(segments=reading(2.0, 0.9), yarn=reading(2.3)) == "yarn"


def test_a_tie_or_no_gain_means_not_to_stretch() -> None:
    """All at chance: level with the model as it is."""
    noisy = {
        key: reading(4.95, 0.06, spread=spread)
        for key, spread in (("direct", 0.1), ("window", 0.2), ("self_extend", 0.3), ("ntk", 0.05))
    }
    blind = {key: replace(each, needles={16: (0.06,), 32: (0.06,)}) for key, each in noisy.items()}
    found = study(**blind)
    key, why = choose(found, tuned=False)
    assert key is None
    assert why.startswith("Nothing is gained by stretching: at 32 bytes ")
    assert "cannot be told from not stretched (4.950) and a plain sliding window (4.950)" in why
    first = answer(found)[0]
    assert first.startswith("Without any training, do not stretch: ")
    written = dict(findings(replace(found, reason=why)))["The checkpoint"]
    assert written == [f"No checkpoint was written. {why}"]
    key, why = choose(found, tuned=False, always=True)
    assert key in {"self_extend", "ntk"}
    assert "It gains nothing: at 32 bytes" in why


def test_a_loss_that_is_surely_less_by_next_to_nothing_is_no_gain() -> None:
    """A model that has learned nothing has about the same loss by every method."""
    losses = {"direct": 6.385, "window": 6.386, "drope": 6.373, "yarn": 6.386}
    found = study(**{key: reading(loss, 0.01) for key, loss in losses.items()})
    blind = replace(
        found,
        findings=tuple(
            replace(each, untuned=replace(each.untuned, needles={16: (0.01,), 32: (0.0,)}))
            for each in found.findings
            if each.untuned is not None
        ),
    )
    key, why = choose(blind, tuned=False)
    assert key is None
    assert ", which is within 1% of not stretched (6.385) and a plain sliding window" in why
    assert answer(blind)[0].startswith("Without any training, do not stretch: ")


def test_one_method_that_was_asked_for_is_written_and_said_to_gain_nothing() -> None:
    found = study(**BASE, yarn=reading(4.2, 0.1))
    key, why = choose(found, tuned=False)
    assert key == "yarn"
    assert why.startswith("It was the one asked for. It gains nothing: at 32 bytes yarn")
    assert "is worse than not stretched (4.000) and a plain sliding window (2.400)" in why
    assert "do not stretch" in answer(found)[0]


def test_needles_that_a_window_loses_are_a_gain_at_its_loss() -> None:
    found = study(**BASE, yarn=reading(2.45, 0.9), ntk=reading(2.5, 0.9))
    assert choose(found, tuned=False)[0] == "yarn"
    few = study(**BASE, yarn=reading(2.45, 0.06), ntk=reading(2.5, 0.08))
    assert choose(few, tuned=False)[0] is None, "no more than the window, at more loss"
    much = study(**BASE, yarn=reading(4.5, 0.9), ntk=reading(4.6, 0.9))
    assert choose(much, tuned=False)[0] is None, "needles at more loss than not stretched"


def test_the_reason_does_not_deny_the_table() -> None:
    """A method with less loss that cannot be written is named."""
    found = study(**BASE, segments=reading(2.0), ntk=reading(2.3), yarn=reading(2.35))
    key, why = choose(found, tuned=False)
    assert key == "ntk"
    assert why.endswith("it has the least loss at the new length; segments has less.")
    assert choose(study(**BASE, ntk=reading(2.3), yarn=reading(2.35)), tuned=False)[1].endswith(
        "it has the least loss at the new length."
    )


def test_loss_decides_where_the_original_finds_none() -> None:
    blind = {key: replace(each, needles={16: (0.06,), 32: (0.06,)}) for key, each in BASE.items()}
    found = study(**blind, ntk=reading(2.3, 0.2), rerope=reading(2.6, 0.6))
    assert choose(found, tuned=False)[0] == "ntk"
    assert "needles" not in answer(found)[0]
    assert "says nothing of the methods" in dict(findings(found))["Without training"][2]


def test_what_no_checkpoint_holds_is_not_advised() -> None:
    found = study(**BASE, segments=reading(2.0, 0.9), ntk=reading(2.3, 0.2), yarn=reading(2.5))
    assert choose(found, tuned=False)[0] == "yarn"
    assert choose(study(**BASE, segments=reading(2.0)), tuned=False)[0] is None


def test_a_model_no_better_than_frequencies_is_not_judged() -> None:
    """By its best value: longer contexts may well cost more than frequencies do."""
    known = replace(study(**BASE), trivial=2.2, trivial_rule="byte frequencies")
    assert gate(known) == "", "2.0 at 16"
    assert gate(replace(known, trivial=None)) == ""
    level = replace(known, trivial=2.0)
    assert "at best its loss is 2.000 bits a byte (byte frequencies alone: 2.000)" in gate(level)
    stopped = replace(level, gate=gate(level))
    assert answer(stopped) == [stopped.gate]
    assert choose(stopped, tuned=False)[0] is None
    with pytest.raises(CheckpointError, match=r"better loss than 2\.000 .* got 2\.000 at best"):
        require_learned(stopped)
    require_learned(known)


def test_the_gap_is_paired() -> None:
    difference = gap(reading(2.5), reading(2.3))
    assert difference is not None
    assert difference.mean == pytest.approx(0.2)
    assert difference.half_width == pytest.approx(0, abs=1e-9), "what they share cancels"
    noisy = gap(reading(2.5, spread=0.3), reading(2.3))
    assert noisy is not None
    assert noisy.half_width == pytest.approx(0.3 * 1.998 / 63**0.5, rel=1e-3)


def test_medians_have_an_interval() -> None:
    assert measuring._spread([1.0] * 9 + [40.0]) == 0.0
    assert measuring._spread([5.0, 1.0, 2.0, 4.0, 1.0]) == pytest.approx(1.0)


def test_a_time_that_is_not_known_is_not_compared() -> None:
    slow = replace(reading(2.3, 0.9), per_second=0.25, time_error=0.6)
    told = answer(study(**BASE, rerope=slow))[1]
    assert told.startswith("rerope takes an unknown time (the machine was busy")
    assert slow.speed == "≈ 0"


class Stopwatch:
    """A clock that passes take scripted seconds on."""

    def __init__(self, *seconds: float) -> None:
        self.now, self.passes, self.seconds = 0.0, 0, seconds

    def __call__(self) -> float:
        return self.now

    def run(self, inputs: torch.Tensor) -> None:
        self.now += self.seconds[self.passes % len(self.seconds)]
        self.passes += 1


class Timed(torch.nn.Module):
    """A model that takes as long as a stopwatch says."""

    def __init__(self, clock: Stopwatch) -> None:
        super().__init__()
        self.weight, self.clock = torch.nn.Parameter(torch.zeros(1)), clock

    def forward(self, inputs: torch.Tensor) -> None:
        self.clock.run(inputs)


def test_passes_are_timed_until_their_time_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    steady = Stopwatch(0.01)
    monkeypatch.setattr(measuring.time, "perf_counter", steady)
    spent = measuring.cost(Timed(steady), torch.zeros(1), count=3)
    assert spent.per_second == pytest.approx(300)
    assert spent.time_error == pytest.approx(0, abs=1e-9)
    assert steady.passes == 1 + measuring.FEWEST_PASSES
    busy = Stopwatch(0.01, 0.05, 0.011, 0.3)
    monkeypatch.setattr(measuring.time, "perf_counter", busy)
    spent = measuring.cost(Timed(busy), torch.zeros(1), count=3)
    assert busy.passes > 20, "more passes where they differ"
    assert spent.time_error > 0.2
    assert busy.now < measuring.PATIENCE + 0.7
    rare = Stopwatch(*[0.01] * 9, 0.4)
    monkeypatch.setattr(measuring.time, "perf_counter", rare)
    assert measuring.cost(Timed(rare), torch.zeros(1), count=3).time_error < 0.01


def test_what_a_method_costs_is_said_where_it_is_much() -> None:
    slow = replace(reading(2.3, 0.9), per_second=0.25, peak_memory_bytes=9_000_000)
    assert (
        "rerope takes 4 times as long as the model not stretched"
        in answer(study(**BASE, rerope=slow))[1]
    )
    assert not any("times as long" in told for told in answer(study(**BASE, yarn=reading(2.3))))


def test_the_answer_names_the_method_and_says_how_sure_it_is() -> None:
    found = study(
        **BASE,
        yarn=reading(2.5),
        ntk=reading(2.51, spread=0.3),
        rerope=reading(2.7, 0.52),
        interpolate=reading(3.0, 0.2),
    )
    found = replace(found, chosen="yarn", reason="Because.")
    first, sure, chance = answer(found)
    assert first == (
        "Without any training, use yarn: at 32 bytes, 2 times the trained length, its loss is "
        "2.500 bits a byte (not stretched: 4.000, a plain sliding window: 2.400), and it finds "
        "50% of the needles (not stretched: 10%, a plain sliding window: 5%)."
    )
    assert "ntk cannot be told from it by its loss" in sure
    assert "rerope, the next that loses more, costs 0.200 (0.200 to 0.200) bits a byte more" in sure
    assert "window has less loss" in sure
    assert "64 stretches of text" in sure
    assert "sure to 12%" in chance
    assert "one trained model and one seed" in chance
    assert dict(findings(found))["The checkpoint"] == [
        "Written: yarn. Because.",
        "yarn: yarn has a ramp.",
    ]


def test_what_runs_the_model_as_it_is_is_named_where_it_does_better() -> None:
    found = replace(study(**BASE, segments=reading(2.0), ntk=reading(2.3)), chosen="ntk")
    assert (
        "posenc.extension.segments(model, length=16" in dict(findings(found))["The checkpoint"][1]
    )
    found = replace(study(**BASE, segments=reading(2.5), ntk=reading(2.3)), chosen="ntk")
    assert len(dict(findings(found))["The checkpoint"]) == 1


def test_methods_claim_their_place_and_how_they_are_tried() -> None:
    places = {name: entry.claims.at_twice for name, entry in EXTENSIONS.items()}
    assert places["direct"] == 0
    assert places["rerope"] == places["self_extend"] == 4
    assert places["drope"] is None, "it needs training"
    for name, entry in EXTENSIONS.items():
        assert entry.trials.keys() <= {"text_table", "image_table", "short"}
        for ways in entry.trials.values():
            assert all(Method.parse(f"{name}{way}").spec.startswith(name) for way in ways)


def test_the_expected_order_is_held_to_what_was_found() -> None:
    def told(losses: dict[str, float]) -> list[str]:
        return expectation(study(**{key: reading(loss) for key, loss in losses.items()}))

    good = {"direct": 4.0, "interpolate": 3.5, "ntk": 3.0, "yarn": 2.5, "rerope": 2.0}
    assert told(good)[1] == "So it is here, at 32 bytes."
    bad = good | {"yarn": 3.2}
    assert "yarn is worse than ntk (3.200 against 3.000)." in told(bad)[1]
    assert told(bad)[2] == "yarn: yarn has a ramp."
    tied = good | {"ntk": 3.49}
    assert "interpolate and ntk do not differ by more than 1% here." in told(tied)


def test_what_copies_less_is_named_and_nothing_else() -> None:
    def copying(**copied: float) -> list[str]:
        methods = {
            key: replace(reading(2.3), copied={16: share, 32: share})
            for key, share in copied.items()
        }
        near = dict(findings(study(**BASE, **methods)))["In contexts no longer than before"]
        return [text for text in near if "repeated" in text]

    assert copying(ntk=0.5, yarn=0.87, rerope=0.89) == [
        "Of a word repeated right after itself the original copies 90% at the trained length; "
        "what blurs near distances copies less: ntk 50%, yarn 87%."
    ]
    assert copying(ntk=0.95, yarn=0.89) == [
        "Of a word repeated right after itself the original copies 90% at the trained length; "
        "no method copies less by more than 2 points."
    ]
    blind = study(**{key: replace(each, copied={16: 0.1, 32: 0.1}) for key, each in BASE.items()})
    near = dict(findings(blind))["In contexts no longer than before"]
    assert near == [
        "The model copies 10% of a repeated word at its own length, where a guess copies 4.0%: "
        "it has not learned to, so that what it copies at others says nothing."
    ]


def test_methods_surely_better_than_the_cut_model_are_named() -> None:
    """Of models that are not causal, which have no sliding window."""
    cut = {"cut": reading(2.6)}

    def against(**readings: StudyReading) -> str:
        causal = study(**cut, **readings)
        metrics = tuple(metric for metric in causal.metrics if metric.key == "loss")
        return dict(findings(replace(causal, metrics=metrics, asked=0)))["Without training"][1]

    assert against(yarn=reading(2.3), ntk=reading(2.59, spread=0.3)) == (
        "Cut at 16, as the model was trained, its loss is 2.600 bits a byte. "
        "yarn does surely better."
    )
    assert against(yarn=reading(2.3), ntk=reading(2.4)).endswith("yarn and ntk do surely better.")
    assert against(yarn=reading(2.7)).endswith("No method does surely better.")


def test_no_checkpoint_is_said_to_be_written_where_none_was() -> None:
    none = replace(study(**BASE, yarn=reading(2.3)), reason="It gains nothing.")
    assert dict(findings(none))["The checkpoint"] == [
        "No checkpoint was written. It gains nothing."
    ]
    assert dict(findings(replace(none, gate="Not learned.")))["The checkpoint"] == [
        "No checkpoint was written."
    ]
