"""The bench: what it measures, against what, and what it makes of it. Nothing here is timed."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from posenc.bench import run as run_module
from posenc.bench.case import Case
from posenc.bench.chart import draw
from posenc.bench.clock import Entrant, interleaved, median_ratio
from posenc.bench.contenders import PLAIN, Eager, Plain, Prepared, WrittenOut
from posenc.bench.files import write_results
from posenc.bench.limits import CPU, CUDA, METHODS, NOT_MEASURED, Limit, judge
from posenc.bench.memory import MemoryMeter, Peak
from posenc.bench.plan import MIDDLE, plan
from posenc.bench.results import Reading, Report
from posenc.bench.run import Step, bench
from posenc.bench.settings import Settings
from posenc.errors import ArgumentError, OutputError, UnknownNameError
from tests.bench.failing import Failing, Fatal


def reading(contender: str = "posenc", **values: object) -> Reading:
    given: dict[str, object] = {"encoding": "t5", "length": 64, "causal": False, "level": "call"}
    return Reading(contender=contender, **given | values)  # type: ignore[arg-type]


def pretend_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2**36, 2**36))


# Clock


def test_rounds_interleave_and_turn_around() -> None:
    ran: list[str] = []
    entrants = {
        "a": Entrant(lambda: ran.append("a"), 3),
        "b": Entrant(lambda: ran.append("b"), 2, calls=2),
        "c": Entrant(lambda: ran.append("c"), 1),
    }
    seconds = interleaved(entrants, device="cpu")
    assert "".join(ran) == "abbc" + "bba" + "a"
    assert {name: len(each) for name, each in seconds.items()} == {"a": 3, "b": 2, "c": 1}


def test_ratio_is_the_median_over_the_rounds_both_took_part_in() -> None:
    assert median_ratio([2.0, 9.0, 4.0], [1.0, 3.0, 4.0, 100.0]) == 2.0


# Memory


def test_peaks_tell_linear_memory_from_quadratic() -> None:
    one = Case(encoding="t5", length=2048, heads=2, head_dim=8)
    logits = 2 * 2048**2 * 4
    with MemoryMeter("cpu") as meter:
        peaks = [meter.measure(contender, one) for contender in (Plain(), Eager(), Plain())]
        before = meter.measure(WrittenOut(), replace(one, encoding="nope"))
    plain, eager, again = peaks
    assert isinstance(plain, Peak)
    assert isinstance(eager, Peak)
    assert isinstance(again, Peak)
    assert 3 * 2 * 2048 * 8 * 4 <= plain.both < logits / 2
    assert eager.both > 2 * logits
    assert plain.forward <= plain.both
    # What came before does not raise what comes after.
    assert again.both < logits / 2
    assert before == "there is no score to write out"


def test_what_fails_apart_is_told_here() -> None:
    one = Case(encoding="nope", length=16, heads=2, head_dim=8)
    with MemoryMeter("cpu") as meter:
        with pytest.raises(RuntimeError, match="KeyError"):
            meter.measure(Failing(), one)
        reason = "its process was ended, for want of memory perhaps"
        assert meter.measure(Fatal(), one) == reason


# Limits


def test_limits_compare_with_the_right_readings() -> None:
    readings = [
        reading(PLAIN, encoding="nope", both_memory=100, forward_memory=10),
        reading(forward_ratio=1.2, both_ratio=1.4, both_seconds=2.0),
        reading(both_memory=400, forward_memory=30),
        reading("FlexAttention", both_seconds=5.0),
        reading(level="layer", forward_ratio=9.0),
        reading(length=128, forward_ratio=9.0, causal=True),
        reading(encoding="alibi", refusal="it would take about 9 GB"),
    ]
    wanted = {
        ("forward", 1.1): (1.2, False),
        ("both", 1.5): (1.4, True),
        ("forward memory", 20.0): (20.0, True),
        ("both memory", 299.0): (300.0, False),
        ("beats flex", 2.5): (2.5, True),
        ("beats flex", 2.6): (2.5, False),
        ("fits", 1.0): (1.0, True),
    }
    for (quantity, bound), (value, met) in wanted.items():
        limit = Limit(row="", encodings=["t5"], quantity=quantity, lengths=[64], bound=bound)  # type: ignore[arg-type]
        (verdict,) = judge([limit], readings)
        assert (verdict.value, verdict.met) == (value, met)
    limit = Limit(row="", encodings=["t5", "alibi"], quantity="forward", lengths=[128], bound=1.0)
    assert [v.reason for v in judge([limit], readings)] == [NOT_MEASURED, NOT_MEASURED]
    limit = replace(limit, lengths=[64])
    assert judge([limit], readings)[1].reason == "it would take about 9 GB"
    assert not judge([limit], readings)[1].met


# Plans


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_full_plan_measures_what_every_limit_needs(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_cuda(monkeypatch)
    settings = Settings(device=device, full=device == "cpu")
    assert settings.limits == (CUDA if device == "cuda" else CPU)
    jobs = plan(settings)
    for limit in settings.limits:
        for name in limit.encodings:
            for length in limit.lengths:
                found = [
                    job
                    for job in jobs
                    if (job.case.encoding, job.case.length, job.case.causal, job.case.dtype)
                    == (name, length, limit.causal, limit.dtype)
                    and (job.case.batch, job.case.heads) == (limit.batch, limit.heads)
                    and (not job.timed or job.contenders[0].level == limit.level)
                    and "posenc" in {contender.name for contender in job.contenders}
                ]
                assert any(job.memory if limit.about_memory else job.timed for job in found)
                if limit.about_memory and limit.quantity != "fits":
                    assert any(
                        PLAIN in {contender.name for contender in job.contenders}
                        for job in jobs
                        if job.case.length == length and job.memory
                    )


def test_timed_jobs_begin_with_their_base() -> None:
    for job in plan(Settings(full=True)):
        if job.timed:
            first, *others = job.contenders
            assert first.name in (PLAIN, "plain layer", "posenc, rope")
            assert {contender.level for contender in others} == {first.level}


def test_work_grows_as_the_logits() -> None:
    job = next(job for job in plan(Settings()) if job.case.length == MIDDLE["cpu"])
    longer = replace(job, case=replace(job.case, length=8 * job.case.length))
    assert longer.work == 64 * job.work


def test_a_quick_plan_is_short_and_alone() -> None:
    jobs = plan(Settings(quick=True))
    assert {job.case.length for job in jobs} == {MIDDLE["cpu"]}
    assert {job.case.encoding for job in jobs} == set(METHODS)
    assert {contender.name for job in jobs for contender in job.contenders} == {PLAIN, "posenc"}
    usual = plan(Settings())
    assert sum(job.work for job in jobs) < sum(job.work for job in usual) / 4


def test_a_plan_for_cuda_has_rotations_within_the_kernels_and_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pretend_cuda(monkeypatch)
    found = {
        (job.case.encoding, job.case.length): [contender.name for contender in job.contenders]
        for job in plan(Settings(device="cuda"))
        if job.timed and not job.case.causal and job.contenders[0].level == "call"
    }
    assert "posenc triton" in found["nope", 8192]
    assert found["rope", 8192][-2:] == ["posenc triton", "posenc triton-unfused"]
    assert "posenc triton" not in found["t5", 8192]


def test_a_chosen_plan_has_what_was_chosen() -> None:
    settings = Settings(
        encodings=["kerple", "cope"], lengths=[96, 64, 96], backends=["auto", "blockwise"]
    )
    jobs = plan(settings)
    found = [(job.case.encoding, job.case.length, job.case.causal) for job in jobs]
    assert found == [
        ("kerple", 64, False),
        ("cope", 64, True),
        ("kerple", 96, False),
        ("cope", 96, True),
    ]
    names = [contender.name for contender in jobs[0].contenders]
    assert names[:3] == [PLAIN, "posenc", "posenc blockwise"]


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({"encodings": []}, ArgumentError),
        ({"encodings": ["learned"]}, ArgumentError),
        ({"lengths": [1]}, ArgumentError),
        ({"encodings": ["cope"], "causal": False}, ArgumentError),
        ({"backends": ["fast"]}, UnknownNameError),
        ({"rounds": 0}, ArgumentError),
        ({"threads": True}, ArgumentError),
        ({"device": "tpu"}, ArgumentError),
        ({"device": "cuda:99"}, ArgumentError),
        ({"dtypes": ["int8"]}, UnknownNameError),
        ({"dtypes": []}, ArgumentError),
        ({"what": ["speed"]}, UnknownNameError),
    ],
)
def test_settings_refuse_what_makes_no_sense(
    options: dict[str, object], kind: type[Exception]
) -> None:
    with pytest.raises(kind):
        Settings(**options)  # type: ignore[arg-type]


def test_limits_are_for_the_usual_sizes_alone() -> None:
    assert Settings(full=True).limits == CPU
    assert {limit.dtype for limit in Settings().limits} == {"float32"}
    assert {limit.dtype for limit in Settings(dtypes=["bfloat16"]).limits} == {"bfloat16"}
    assert Settings(heads=4).limits == ()
    assert Settings(dtypes=["float16"]).limits == ()
    (both,) = [
        x.bound
        for x in CPU
        if (x.row, x.quantity, x.dtype, x.causal) == ("images", "both", "bfloat16", False)
    ]
    assert both == pytest.approx(1.3 * 1.1)


def test_a_full_plan_has_both_masks_and_dtypes_and_every_part() -> None:
    jobs = plan(Settings(full=True, encodings=["t5", "cope"], lengths=[32]))
    calls = {
        (job.case.encoding, job.case.causal, job.case.dtype)
        for job in jobs
        if job.timed and job.contenders[0].name == PLAIN and job.case.batch == 1
    }
    assert calls == {
        (name, causal, dtype)
        for name, masks in (("t5", (False, True)), ("cope", (True,)))
        for causal in masks
        for dtype in ("float32", "bfloat16")
    }
    rows = {(job.case.batch, job.case.heads, job.case.length) for job in jobs if job.case.batch > 1}
    assert rows == {(16, 12, 128)}
    tokens = [job for job in jobs if job.contenders[0].level == "token"]
    assert {job.case.length for job in tokens} == {256, 1024, 4096}
    assert {job.case.length for job in jobs if not job.timed} == {16384}


def test_lengths_are_those_of_the_parts_that_were_asked_for() -> None:
    settings = Settings(what=["decoding", "memory"], encodings=["t5"], lengths=[32])
    assert [(job.case.length, job.timed) for job in plan(settings)] == [(32, True), (32, False)]


# The whole


@pytest.fixture(scope="module")
def report() -> Report:
    """A bench of two encodings at two tiny lengths."""
    settings = Settings(
        encodings=["t5", "shaw@frozen"], lengths=[16, 32], heads=2, head_dim=8, rounds=2, quick=True
    )
    steps: list[Step] = []
    before = torch.get_num_threads(), dict(os.environ)
    done = bench(settings, progress=steps.append)
    assert (torch.get_num_threads(), dict(os.environ)) == before
    shares = [step.share for step in steps]
    assert shares == sorted(shares)
    assert shares[0] == 0.0
    assert shares[-1] < 1.0
    assert steps[0].title == "t5, 16 tokens: calls"
    return done


def test_a_bench_measures_everything_of_everyone(report: Report) -> None:
    cases = {(r.encoding, r.length, r.contender) for r in report.readings}
    assert cases == {
        (encoding, length, contender)
        for encoding in ("t5", "shaw@frozen")
        for length in (16, 32)
        for contender in (PLAIN, "posenc")
    }
    for one in report.readings:
        assert one.refusal == ""
        assert one.forward_seconds is not None
        assert one.both_seconds is not None
        assert one.rounds[0] == one.rounds[1] > 0
        assert one.output_error is not None
        assert one.output_error < 1e-5
        assert one.gradient_error is not None
        if one.contender == PLAIN:
            assert (one.forward_ratio, one.both_ratio) == (1.0, 1.0)
        else:
            assert one.served_by != ""
    assert report.verdicts == ()


def test_results_are_written_whole(report: Report, tmp_path: Path) -> None:
    files = write_results(report, tmp_path / "results")
    assert sorted(path.name for path in (tmp_path / "results").iterdir()) == [
        "attention_cpu.json",
        "attention_cpu.png",
        "attention_cpu.svg",
    ]
    plain = json.loads(files.json.read_text())
    assert len(plain["readings"]) == len(report.readings)
    assert plain["versions"]["torch"] == torch.__version__
    assert plain["settings"]["threads"] == torch.get_num_threads()
    assert files.pictures[0].read_bytes().startswith(b"\x89PNG")
    assert "milliseconds" in files.pictures[1].read_text()
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError):
        write_results(report, tmp_path / "file")


def test_the_chart_has_a_panel_an_encoding_and_logarithmic_axes(report: Report) -> None:
    weighed = replace(
        report, readings=tuple(replace(r, both_memory=10**6) for r in report.readings)
    )
    spec = draw(weighed)
    assert spec is not None
    assert len(spec["vconcat"]) == 2
    for part in spec["vconcat"]:
        encoding = part["spec"]["layer"][0]["encoding"]
        assert encoding["x"]["scale"]["type"] == encoding["y"]["scale"]["type"] == "log"
        assert part["facet"]["sort"] == ["t5", "shaw@frozen"]
        assert encoding["color"]["scale"]["domain"] == [PLAIN, "posenc"]
    assert draw(replace(report, readings=())) is None


def test_another_number_of_threads_is_refused() -> None:
    present = torch.get_num_threads()
    settings = Settings(encodings=["t5"], lengths=[16], threads=present + 1)
    with pytest.raises(ArgumentError, match=f"threads: expected {present}, .*got {present + 1}"):
        bench(settings)
    assert torch.get_num_threads() == present


class Environment(Plain):
    """Fails with the settings of its process."""

    def prepare(self, call: object) -> Prepared:
        blocks = os.environ["MALLOC_MMAP_THRESHOLD_"]
        raise RuntimeError(f"{torch.get_num_threads()} threads, blocks of {blocks}")


def test_the_process_for_memory_has_an_environment_of_its_own() -> None:
    before = dict(os.environ)
    expected = f"{torch.get_num_threads()} threads, blocks of 65536"
    with MemoryMeter("cpu") as meter, pytest.raises(RuntimeError, match=expected):
        meter.measure(Environment(), Case(encoding="nope", length=16, heads=2, head_dim=8))
    assert dict(os.environ) == before


class Broken(Plain):
    """Other people's code that fails."""

    foreign = True

    @property
    def name(self) -> str:
        return "broken"

    def prepare(self, call: object) -> Prepared:
        raise RuntimeError("no compiler")


def test_only_other_peoples_code_may_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings(encodings=["t5"], lengths=[16], heads=2, head_dim=8, rounds=1, quick=True)
    (job,) = plan(settings)
    broken = replace(job, contenders=(*job.contenders, Broken()), memory=False)
    monkeypatch.setattr(run_module, "plan", lambda settings: [broken])
    report = bench(settings)
    assert report.refusals == {"broken": {"it fails with RuntimeError": ["t5"]}}
    assert [r.forward_ratio is None for r in report.readings] == [False, False, True]
    monkeypatch.setattr(Broken, "foreign", False)
    with pytest.raises(RuntimeError, match="no compiler"):
        bench(settings)


def test_limits_of_generation_compare_with_rope_and_transformers() -> None:
    tokens: dict[str, object] = {"level": "token", "causal": True}
    readings = [
        reading("posenc, rope", forward_ratio=1.0, **tokens),
        reading(forward_ratio=1.1, **tokens),
        reading("transformers", forward_ratio=1.2, **tokens),
    ]
    for quantity, value in (("of rope", 1.1), ("of transformers", 1.1 / 1.2)):
        limit = Limit(
            row="",
            encodings=["t5"],
            quantity=quantity,  # type: ignore[arg-type]
            lengths=[64],
            bound=1.0,
            causal=True,
        )
        (verdict,) = judge([limit], readings)
        assert verdict.value == pytest.approx(value)
        assert verdict.met == (value <= 1)
    (verdict,) = judge([limit], [*readings[:2], reading("transformers", refusal="gone", **tokens)])
    assert (verdict.value, verdict.reason) == (None, "gone")


def test_a_bench_of_generation_and_short_rows() -> None:
    settings = Settings(
        what=["rows", "decoding"],
        encodings=["shaw"],
        lengths=[16],
        heads=2,
        head_dim=8,
        rounds=1,
        threads=1,
    )
    report = bench(settings)
    found = {(r.level, r.contender): r for r in report.readings}
    assert found["call", "posenc"].batch == 16
    assert found["call", "posenc"].both_ratio is not None
    assert found["token", "posenc"].forward_ratio is not None
    assert found["token", "posenc"].both_ratio is None
    theirs = found["token", "transformers"]
    assert (theirs.forward_ratio is None) == bool(theirs.refusal)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_bench_on_a_gpu_measures_what_flex_takes() -> None:
    report = bench(Settings(encodings=["t5"], lengths=[256], rounds=2, device="cuda"))
    found = {r.contender: r for r in report.readings}
    for name in (PLAIN, "posenc", "FlexAttention"):
        assert found[name].both_ratio is not None, found[name].refusal
        assert found[name].both_memory is not None
