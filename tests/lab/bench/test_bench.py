"""``posenc.lab.bench``: what it times, and what it makes of it. Nothing here is timed."""

from __future__ import annotations

import os

import pytest
import torch

from posenc.errors import ArgumentError, UnknownNameError
from posenc.lab.bench import METHODS, passes
from posenc.lab.bench.passes import Case, Pass, interleaved, timed
from posenc.lab.bench.run import PLAIN, BenchReport, BenchSettings, bench


def test_rounds_interleave_and_turn_around() -> None:
    ran: list[str] = []
    entrants = {
        name: (lambda n=name: ran.append(n), rounds)
        for name, rounds in zip("abc", (3, 2, 1), strict=True)
    }
    seconds = interleaved(entrants, "cpu", repeated=False)
    assert "".join(ran) == "abc" + "ba" + "a"
    assert {name: len(taken) for name, taken in seconds.items()} == {"a": 3, "b": 2, "c": 1}


def test_short_calls_are_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []
    monkeypatch.setattr(passes, "LEAST_SECONDS", 1000.0)
    interleaved({"a": (lambda: ran.append("a"), 1)}, "cpu", repeated=True)
    assert len(ran) == 1 + passes.MOST_CALLS


def test_times_are_of_a_token_and_relative_to_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {"base": 2.0, "mine": 3.0}
    monkeypatch.setattr(
        passes, "interleaved", lambda runs, *_, **__: {n: [seconds[n]] for n in runs}
    )
    x = torch.ones(1)
    ready = {"base": Pass(lambda: x, [x], x), "mine": Pass(lambda: x, [], x, tokens=4)}
    found = timed(ready, dict.fromkeys(ready, (1, 1)), device="cpu", length=4096)
    assert (found["mine"].forward_seconds, found["mine"].forward_ratio) == (0.75, 1.5)
    assert (found["mine"].both_ratio, found["base"].both_ratio) == (None, 1.0)


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        *(({"encodings": names}, ArgumentError) for names in ([], ["learned"])),
        *(({"lengths": [length]}, ArgumentError) for length in (1, 2**40)),
        ({"encodings": ["cope"], "causal": False}, ArgumentError),
        ({"backends": ["fast"]}, UnknownNameError),
        *(({"device": name}, ArgumentError) for name in ("tpu", "mps", "cuda:99")),
        ({"dtypes": ["int8"]}, UnknownNameError),
        *((wrong, ArgumentError) for wrong in ({"rounds": 0}, {"threads": True}, {"dtypes": []})),
    ],
)
def test_settings_refuse_what_makes_no_sense(
    options: dict[str, object], kind: type[Exception]
) -> None:
    with pytest.raises(kind):
        BenchSettings(**options)


def test_all_kinds_of_terms_are_timed_by_default() -> None:
    cases = BenchSettings().cases()
    assert [case.encoding for case in cases] == list(METHODS)
    assert {case.length for case in cases} == {2048}
    assert {case.encoding for case in cases if case.causal} >= {"cope", "forgetting"}
    assert not next(case for case in cases if case.encoding == "t5").causal


def test_cases_are_those_chosen_once_each() -> None:
    settings = BenchSettings(encodings=["kerple", "cope"], lengths=[96, 64, 96])
    wanted = ["kerple, 64 tokens", "cope, 64 tokens, causal"]
    wanted += [case.replace("64", "96") for case in wanted]
    assert [str(case) for case in settings.cases()] == wanted
    both = BenchSettings(encodings=["t5"], dtypes=["float32", "bfloat16"], causal=True, lengths=[8])
    wanted = ["t5, 8 tokens, causal", "t5, 8 tokens, causal, bfloat16"]
    assert [str(case) for case in both.cases()] == wanted
    assert str(Case(encoding="t5", length=8, batch=4)) == "t5, 4 × 8 tokens"


@pytest.fixture(scope="module")
def report() -> BenchReport:
    """A bench of two encodings at two tiny lengths."""
    what = {"encodings": ["t5", "shaw@frozen"], "lengths": [16, 32], "backends": ["auto", "sdpa"]}
    settings = BenchSettings(**what, heads=2, head_dim=8, rounds=2)
    steps: list[tuple[str, float]] = []
    before = torch.get_num_threads(), dict(os.environ)
    done = bench(settings, progress=lambda *step: steps.append(step))
    assert (torch.get_num_threads(), dict(os.environ)) == before
    assert [share for _, share in steps] == [0.0, 0.25, 0.5, 0.75]
    assert steps[0][0] == "t5, 16 tokens"
    return done


def test_a_bench_times_every_backend_in_every_case(report: BenchReport) -> None:
    cases = {(r.encoding, r.length, r.contender) for r in report.readings}
    assert cases == {
        (encoding, length, contender)
        for encoding in ("t5", "shaw@frozen")
        for length in (16, 32)
        for contender in (PLAIN, "posenc", "posenc sdpa")
    }
    for one in report.readings:
        times = one.times
        if one.contender == "posenc sdpa":
            assert "cannot" in one.refusal
            assert times.forward_seconds is None
            continue
        assert one.refusal == ""
        assert min(times.forward_seconds, times.both_seconds) > 0
        assert times.rounds == (2, 2)
        assert (one.served_by == "") == (one.contender == PLAIN)
        if one.contender == PLAIN:
            assert (times.forward_ratio, times.both_ratio) == (1.0, 1.0)


def test_a_report_has_plain_values(report: BenchReport) -> None:
    plain = report.to_json()
    assert len(plain["readings"]) == len(report.readings)
    assert plain["readings"][0]["forward_ratio"] == 1.0
    assert plain["versions"]["torch"] == torch.__version__
    assert plain["settings"]["threads"] == torch.get_num_threads()
    assert plain["machine"]["threads"] == torch.get_num_threads()


def test_another_number_of_threads_is_refused() -> None:
    present = torch.get_num_threads()
    settings = BenchSettings(encodings=["t5"], lengths=[16], threads=present + 1)
    with pytest.raises(ArgumentError, match=f"threads: expected {present}, .*got {present + 1}"):
        bench(settings)
    assert torch.get_num_threads() == present
