"""Sentences of a study: when each is said, when not, and with which figures."""

from __future__ import annotations

from dataclasses import replace

import pytest

from posenc.extension import EXTENSIONS
from posenc.lab.evaluation.candidates import Method
from posenc.lab.evaluation.choosing import choose, headline, short_cost, verdicts
from posenc.lab.evaluation.results import Study, StudyReading
from posenc.lab.evaluation.suites.next_token import words
from posenc.lab.evaluation.summary import SLOWER, answer, expectation
from tests.lab.evaluation.studies import BASE, reading, said, study


def near(found: Study) -> list[str]:
    """Sentences on contexts no longer than before."""
    return said(found, "In contexts no longer than before")


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
    assert said(found, "The checkpoint") == ["Written: yarn. Because.", "yarn: yarn has a ramp."]


def test_what_a_method_costs_is_said_where_it_is_much() -> None:
    slow = replace(reading(2.3, 0.9), per_second=0.25, peak_memory_bytes=9_000_000)
    told = answer(study(**BASE, rerope=slow))[1]
    assert "rerope takes 4 times as long as the model not stretched" in told
    assert not any("times as long" in told for told in answer(study(**BASE, yarn=reading(2.3))))
    unknown = replace(slow, time_error=0.6)
    told = answer(study(**BASE, rerope=unknown))[1]
    assert told.startswith("rerope takes an unknown time (the machine was busy")
    assert unknown.speed == "≈ 0"


def test_what_short_texts_cost_is_said_where_it_is_much() -> None:
    dear = replace(reading(2.3, 0.9), loss={16: 2.08, 32: 2.3})
    cheap = replace(reading(2.31, 0.9, spread=0.3), loss={16: 2.01, 32: 2.31})
    found = study(**BASE, yarn=dear, llama3=cheap)
    assert short_cost(found, dear, tuned=False) == pytest.approx(0.04)
    told = answer(found)[1]
    assert "On texts of 16 bytes its loss is +4.0% against the original's" in told
    assert "llama3 +0.5% is level with it on long ones" in told
    assert not any("On texts of" in told for told in answer(study(**BASE, yarn=cheap)))


def test_what_runs_the_model_as_it_is_is_named_where_it_does_better() -> None:
    found = replace(study(**BASE, segments=reading(2.0), ntk=reading(2.3)), chosen="ntk")
    assert "posenc.extension.segments(model, length=16" in said(found, "The checkpoint")[1]
    found = replace(study(**BASE, segments=reading(2.5), ntk=reading(2.3)), chosen="ntk")
    assert len(said(found, "The checkpoint")) == 1


def test_methods_surely_better_than_the_cut_model_are_named() -> None:
    """Of models that are not causal, which have no sliding window."""
    cut = {"cut": reading(2.6)}

    def against(**readings: StudyReading) -> str:
        causal = study(**cut, **readings)
        metrics = tuple(metric for metric in causal.metrics if metric.key == "loss")
        return said(replace(causal, metrics=metrics, asked=0), "Without training")[1]

    assert against(yarn=reading(2.3), ntk=reading(2.59, spread=0.3)) == (
        "Cut at 16, as the model was trained, its loss is 2.600 bits a byte. "
        "yarn does surely better."
    )
    assert against(yarn=reading(2.3), ntk=reading(2.4)).endswith("yarn and ntk do surely better.")
    assert against(yarn=reading(2.7)).endswith("No method does surely better.")


def test_the_expected_order_is_held_to_what_was_found() -> None:
    def told(losses: dict[str, float]) -> list[str]:
        return expectation(study(**{key: reading(loss) for key, loss in losses.items()}))

    good = {"direct": 4.0, "interpolate": 3.5, "ntk": 3.0, "yarn": 2.5, "rerope": 2.0}
    assert told(good)[1] == "So it is here, at 32 bytes."
    bad = good | {"yarn": 3.2}
    assert "yarn is worse than ntk (3.200 against 3.000)." in told(bad)[1]
    assert told(bad)[2] == "yarn: yarn has a ramp."
    tied = good | {"ntk": 3.47}
    assert "interpolate and ntk do not differ by more than 1% here." in told(tied)


def test_methods_claim_their_place_and_how_they_are_tried() -> None:
    places = {name: entry.claims.at_twice for name, entry in EXTENSIONS.items()}
    assert places["direct"] == 0
    assert places["rerope"] == places["self_extend"] == 4
    assert places["drope"] is None, "it needs training"
    for name, entry in EXTENSIONS.items():
        assert entry.trials.keys() <= {"text_table", "image_table", "short"}
        for ways in entry.trials.values():
            assert all(Method.parse(f"{name}{way}").spec.startswith(name) for way in ways)


def test_what_copies_less_is_named_and_nothing_else() -> None:
    def copying(**copied: float) -> list[str]:
        methods = {
            key: replace(reading(2.3), copied={16: share, 32: share})
            for key, share in copied.items()
        }
        return [text for text in near(study(**BASE, **methods)) if "repeated" in text]

    begin = "Of a word repeated right after itself the original copies 90% at the trained length; "
    assert copying(ntk=0.5, yarn=0.87, rerope=0.89) == [
        begin + "what blurs near distances copies less: ntk 50%, yarn 87%."
    ]
    assert copying(ntk=0.95, yarn=0.89) == [begin + "no method copies less by more than 2 points."]
    never = study(**{key: replace(each, copied={16: 0.1, 32: 0.1}) for key, each in BASE.items()})
    assert near(never) == [
        "The model copies 10% of a repeated word at its own length, where a guess copies 4.0%: "
        "it has not learned to, so that what it copies at others says nothing."
    ]


def test_no_checkpoint_is_said_to_be_written_where_none_was() -> None:
    none = replace(study(**BASE, yarn=reading(2.3)), reason="It gains nothing.")
    written = said(none, "The checkpoint")
    assert written == ["No checkpoint was written. It gains nothing."]
    gated = replace(none, gate="Not learned.")
    assert said(gated, "The checkpoint") == ["No checkpoint was written."]


def of_images(**readings: StudyReading) -> Study:
    """The same values as shares of images classified right, at sides of 16 and 32 pixels."""
    found = study(**readings)
    shares = tuple(
        replace(
            method,
            role="baseline" if method.key == "scaled" else method.role,
            writable=method.key != "scaled",
            untuned=replace(method.untuned, right=method.untuned.loss),
        )
        for method in found.findings
    )
    accuracy = words("images", deciding="accuracy", unit="pixel", goal=32, first=16, count=64)
    return replace(found, unit="pixel", asked=0, findings=shares, metrics=accuracy["metrics"][:1])


def test_a_larger_image_is_compared_with_one_of_the_trained_size() -> None:
    """Whole images, not pixels: twice the side is no reason to double the time."""
    slow = replace(reading(0.8), per_second=0.5, peak_memory_bytes=9_000_000)
    cost = answer(of_images(scaled=reading(0.6), interpolate=slow))[1]
    assert cost == (
        "interpolate takes 2 times as long for an image of 32 pixels a side as the model as "
        "trained for one of 16 here, and takes 9 MiB beside 1 B."
    )


def test_a_longer_text_is_compared_with_the_trained_length() -> None:
    """Passes of twice the tokens take twice the time at equal tokens a second."""
    cut = {"cut": reading(2.6)}
    told = answer(study(**cut, yarn=replace(reading(2.3, 0.9), per_second=0.5)))[1]
    assert told.startswith(
        "yarn takes 4 times as long for 32 bytes as the model as trained for 16 here, and"
    )
    told = answer(study(**cut, yarn=reading(2.3, 0.9)))[1]
    assert told.startswith("yarn takes 2 times as long for 32 bytes"), "however fast"
    for error, base_error in ((0.21, 0.0), (0.0, 0.21)):
        base = replace(cut["cut"], time_error=base_error)
        told = answer(study(cut=base, yarn=replace(reading(2.3, 0.9), time_error=error)))[1]
        assert told.startswith("yarn takes an unknown time (the machine was busy")
        assert "for 32 bytes as the model as trained for 16 here" in told
        assert "times as long" not in told


@pytest.mark.parametrize(
    ("per_second", "error", "base_error", "told"),
    [
        (0.25, 0.0, 0.0, "rerope takes 4 times as long"),
        (0.5, 0.0, 0.0, "rerope takes 2 times as long"),
        (1 / SLOWER, 0.2, 0.2, "rerope takes 1.5 times as long"),
        (0.7, 0.0, 0.0, ""),
        (4.0, 0.0, 0.0, ""),
        (0.25, 0.21, 0.0, "rerope takes an unknown time"),
        (0.25, 0.0, 0.21, "rerope takes an unknown time"),
        (4.0, 0.21, 0.0, "rerope takes an unknown time"),
        (1.0, 0.0, 0.21, "rerope takes an unknown time"),
    ],
)
def test_times_are_compared_where_both_are_measured(
    per_second: float, error: float, base_error: float, told: str
) -> None:
    """A slow method is named by its time; one that was timed badly is named however slow it is."""
    slow = replace(reading(2.3, 0.9), per_second=per_second, time_error=error)
    base = BASE | {"direct": replace(BASE["direct"], time_error=base_error)}
    costs = [text for text in answer(study(**base, rerope=slow)) if text.startswith("rerope takes")]
    assert [text[: len(told)] for text in costs] == ([told] if told else [])


def test_a_loss_at_the_trained_length_rises_by_a_share_of_itself() -> None:
    """2.0 bits before: 2.1 are 5 % more, and 2.03 are within 2 %."""
    after = {"yarn": 2.1, "ntk": 2.03, "rerope": 2.5, "interpolate": 1.5}
    methods = {
        key: replace(reading(2.3 + n / 10), loss={16: now, 32: 2.3 + n / 10})
        for n, (key, now) in enumerate(after.items())
    }
    rises = "At the trained length the loss rises by more than 2% with yarn +5.0%, rerope +25.0%."
    assert rises in near(study(**BASE, **methods))
    none = "At the trained length no method's loss rises by more than 2%."
    assert none in near(study(**BASE, yarn=reading(2.3)))


def test_a_recall_at_the_trained_length_falls_by_points() -> None:
    """40 % before: 36 % are 4 points less, a tenth of it; 39 % are within 2 points."""
    recall = words("retrieval", goal=32, count=64, depths=1)["metrics"]

    def told(**shares: float) -> list[str]:
        readings = {
            key: replace(reading(2.0), needles={16: (share,), 32: (share,)})
            for key, share in ({"cut": 0.4} | shares).items()
        }
        return near(replace(study(**readings), metrics=recall))

    assert told(yarn=0.36, ntk=0.39, rerope=0.2, interpolate=0.9) == [
        "At the trained length the recall falls by more than 2 points with yarn -4, rerope -20."
    ]
    expected = ["At the trained length no method's recall falls by more than 2 points."]
    assert told(ntk=0.39, interpolate=0.9) == expected


def test_the_nearest_of_worse_methods_is_named() -> None:
    """With its deficit: of 0.2 and 0.7 bits, the smaller."""
    found = study(**BASE, yarn=reading(2.5), rerope=reading(2.7), interpolate=reading(3.2))
    sure = answer(found)[1]
    assert "rerope, the next that loses more, costs 0.200" in sure
    assert "interpolate" not in sure


def test_a_window_is_beaten_by_more_than_a_tie() -> None:
    """2.4 bits with the window: 2.38 is within 1 % of it, 2.37 is not."""

    def beaten(**losses: float) -> str:
        methods = {key: reading(loss) for key, loss in losses.items()}
        told = said(study(**BASE, **methods), "Without training")
        return next(text for text in told if text.startswith("A plain sliding window"))

    assert beaten(yarn=2.38, ntk=2.37).endswith(
        "reaches 2.400. ntk has less loss than it by more than 1%."
    )
    assert "No method has less loss" in beaten(yarn=2.38, ntk=2.5)


def test_what_holds_and_yet_gains_nothing_is_explained() -> None:
    """A verdict compares with the trained length, advice with the model as it is at the goal."""
    level = {"direct": reading(2.05, 0.9), "yarn": reading(2.05, 0.9)}
    clause = (
        "; that it holds says that it is at most 5% worse than the model as trained is at 16, "
        "not that it gains"
    )
    found = study(**level)
    assert {method.key: each[0] for method, each in verdicts(found)}["yarn"] == "holds"
    assert headline(found).startswith("Do not stretch by yarn")
    told = answer(found)[0]
    assert told.startswith("Without any training, do not stretch: ")
    assert told.endswith(f"{clause}.")
    two = study(**level, ntk=reading(2.06, 0.9))
    assert choose(two, tuned=False)[1].endswith(f"{clause}.")
    assert choose(found, tuned=False)[1].endswith(f"{clause}.")
    worse = study(direct=reading(2.11, 0.9), yarn=reading(2.11, 0.9))
    assert "holds" not in answer(worse)[0], "it degrades"
    gains = study(direct=reading(4.0, 0.1), yarn=reading(2.05, 0.9))
    assert "holds" not in answer(gains)[0], "use it"
