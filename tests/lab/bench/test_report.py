"""The report of a bench is true of its times, and its commands are ones that bench takes."""

from __future__ import annotations

import shlex
from dataclasses import replace

import pytest

from posenc.lab.bench import METHODS
from posenc.lab.bench.passes import Times, ratio
from posenc.lab.bench.report import bench_page, opening
from posenc.lab.bench.run import PLAIN, BenchReading, BenchReport, BenchSettings
from posenc.lab.reporting.opening import LONGEST, Opening
from tests.support.commands import printed

Both = float | tuple[float, float] | None
"""Ratio in training, alone or with half its interval; None: refused."""


def report(lengths: tuple[int, ...] = (2048,), **ratios: Both) -> BenchReport:
    """A bench of encodings whose forward passes are all as fast as plain attention."""
    readings = []
    for length in lengths:
        for name, given in ratios.items():
            both, spread = given if isinstance(given, tuple) else (given, 0.01)
            forward = {"forward_seconds": 1e-3, "forward_ratio": 1.0, "forward_spread": 0.01}
            trained = {"both_seconds": 3e-3, "both_ratio": both, "both_spread": spread}
            case = {"encoding": name, "length": length, "causal": False, "dtype": "float32"}
            refusal = "it has no such terms" if both is None else ""
            shown = Times() if refusal else Times(rounds=(7, 7), **forward, **trained)
            readings += [
                BenchReading(contender=PLAIN, times=Times(both_ratio=1.0), **case),
                BenchReading(contender="posenc", times=shown, refusal=refusal, **case),
            ]
    about = {"device": "cpu", "date": "2026-01-01", "machine": {}, "versions": {"torch": "2.13"}}
    settings = BenchSettings(encodings=list(ratios), lengths=list(lengths))
    return BenchReport(settings=settings, about=about, seconds=9.0, readings=tuple(readings))


def training(opened: Opening) -> dict[str, str]:
    return {row.name: row.words[1] for row in opened.verdicts.rows}


def test_the_word_follows_from_the_ratio_and_its_interval() -> None:
    wanted = {  # by the encoding: the ratio and the word, the fastest first
        "nope": (1.099, "fast"),
        "rope": (1.101, "slower"),
        "cope": ((1.5, 0.6), "unsure"),
        "fire": ((1.5, 0.3), "slower"),
        "t5": (2.0, "slower"),
        "kerple": (2.01, "slow"),
        "path": (None, "untestable"),
    }
    found = opening(report(**{name: given for name, (given, _) in reversed(wanted.items())}))
    assert training(found) == {name: word for name, (_, word) in wanted.items()}
    assert list(training(found))[:2] == ["nope", "rope"], "the fastest first"
    assert list(training(found))[-2:] == ["kerple", "path"], "what was refused last"
    assert {row.words[0] for row in found.verdicts.rows} == {"fast", "untestable"}
    assert set(found.verdicts.meanings) == {"fast", "slower", "unsure", "slow", "untestable"}
    assert "10%" in found.verdicts.meanings["fast"]
    assert "2 ×" in found.verdicts.meanings["slow"]


FAST = "rope and t5 train as fast as plain attention"
NEAREST = "trains as fast as plain attention; t5 comes nearest (1.20 ×)"


@pytest.mark.parametrize(
    ("ratios", "expected"),
    [
        ({"t5": 1.02, "rope": 0.98, "cope": 3.2}, f"{FAST}; cope takes 3.20 × its time"),
        ({"t5": 1.02, "rope": 0.98}, "Both train as fast as plain attention"),
        ({"t5": 1.2, "cope": 12.4}, f"None {NEAREST}"),
        ({"t5": (1.2, 1.5), "cope": 3.0}, f"None surely {NEAREST}"),
        ({"t5": 1.02}, "t5 trains as fast as plain attention, 1.02 × its time"),
        ({"t5": 1.3}, "t5 takes 1.30 × the time of plain attention to train"),
        ({"t5": None, "cope": None}, "None of the 2 could be timed: see why below"),
        ({"t5": None}, "It could not be timed: see why below"),
        ({"t5": 1.0, "rope": 1.0, "cope": (2.4, 2.5)}, FAST),
    ],
)
def test_the_headline_is_true(ratios: dict[str, Both], expected: str) -> None:
    headline = opening(report(**ratios)).headline
    assert headline.replace("t5 and rope", "rope and t5") == expected


def test_headlines_fit_a_line() -> None:
    many = dict.fromkeys(METHODS, 1.0)
    assert opening(report(**many)).headline == "All 22 train as fast as plain attention"
    some = many | {METHODS[-1]: 40.4}
    expected = "21 of the 22 train as fast as plain attention; path takes 40 × its time"
    assert opening(report(**some)).headline == expected
    name = "rope+alibi+sandwich+kerple+fire"
    for ratios in ({name: 1.0}, {name: 3.0}, {name: 1.0, "t5": 4.0}, {name: 3.0, "t5": 4.0}):
        assert len(opening(report(**ratios)).headline) <= LONGEST


def test_verdicts_are_on_the_longest_length() -> None:
    short, long = report((64,), t5=1.0), report((128,), t5=3.0)
    settings = BenchSettings(encodings=["t5"], lengths=[64, 128])
    for readings in (short.readings + long.readings, long.readings + short.readings):
        found = opening(replace(short, settings=settings, readings=readings))
        assert training(found) == {"t5": "slow"}
        assert found.verdicts.title == "Verdicts at 128 tokens"


def test_more_rounds_settle_what_is_undecided() -> None:
    (remedy,) = opening(report((64,), t5=(1.5, 2.0), cope=1.0)).remedies
    assert remedy.text == (
        "Undecided: the rounds differ on the time of t5. "
        "On an idle machine, 28 rounds may settle it:"
    )
    words = shlex.split(remedy.command)
    assert words[:2] == ["posenc", "bench"]
    assert words[words.index("--encodings") + 1] == "t5"
    dumped = printed(*words[1:], "--dump-config")
    assert 'rounds = "28"' in dumped
    assert 'lengths = "64"' in dumped
    assert opening(report(t5=1.0)).remedies == ()


def test_a_ratio_has_the_interval_of_its_rounds() -> None:
    found = ratio([2.0, 9.0, 28.0], [1.0, 3.0, 4.0, 100.0])
    assert (found.mean, found.n) == (3.0, 3)
    assert found.half_width == pytest.approx(4.3027 * 7**0.5 / 3**0.5, rel=1e-4)
    assert ratio([2.0], [1.0]).half_width is None


def test_the_page_has_every_number() -> None:
    text = bench_page(report((64, 128), t5=1.234, cope=None), "posenc bench").render()
    for part in ("1.23", "(1.22 to 1.24)", "3.00", "it has no such terms", "cope"):
        assert part in text
