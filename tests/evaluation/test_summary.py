"""Sentences of a study: when each is said, when not, and with which figures."""

from __future__ import annotations

from dataclasses import replace

from posenc.evaluation.candidates import Method
from posenc.evaluation.results import StudyReading
from posenc.evaluation.summary import answer, expectation, findings
from posenc.extension import EXTENSIONS
from tests.evaluation.studies import BASE, reading, study


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


def test_what_a_method_costs_is_said_where_it_is_much() -> None:
    slow = replace(reading(2.3, 0.9), per_second=0.25, peak_memory_bytes=9_000_000)
    assert (
        "rerope takes 4 times as long as the model not stretched"
        in answer(study(**BASE, rerope=slow))[1]
    )
    assert not any("times as long" in told for told in answer(study(**BASE, yarn=reading(2.3))))


def test_a_time_that_is_not_known_is_not_compared() -> None:
    slow = replace(reading(2.3, 0.9), per_second=0.25, time_error=0.6)
    told = answer(study(**BASE, rerope=slow))[1]
    assert told.startswith("rerope takes an unknown time (the machine was busy")
    assert slow.speed == "≈ 0"


def test_what_runs_the_model_as_it_is_is_named_where_it_does_better() -> None:
    found = replace(study(**BASE, segments=reading(2.0), ntk=reading(2.3)), chosen="ntk")
    assert (
        "posenc.extension.segments(model, length=16" in dict(findings(found))["The checkpoint"][1]
    )
    found = replace(study(**BASE, segments=reading(2.5), ntk=reading(2.3)), chosen="ntk")
    assert len(dict(findings(found))["The checkpoint"]) == 1


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


def test_no_checkpoint_is_said_to_be_written_where_none_was() -> None:
    none = replace(study(**BASE, yarn=reading(2.3)), reason="It gains nothing.")
    assert dict(findings(none))["The checkpoint"] == [
        "No checkpoint was written. It gains nothing."
    ]
    assert dict(findings(replace(none, gate="Not learned.")))["The checkpoint"] == [
        "No checkpoint was written."
    ]
