"""``benchmarks.attention``: what it measures, against what, and the pages it makes. Untimed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from operator import attrgetter
from typing import Any

import pytest
import torch
from benchmarks import pages
from benchmarks.attention.chart import draw
from benchmarks.attention.contenders import Eager, Plain, WrittenOut
from benchmarks.attention.limits import BY_AMX, LIMITS, Limit, Readings
from benchmarks.attention.memory import SEPARATE_BLOCKS, MemoryMeter
from benchmarks.attention.page import tables
from benchmarks.attention.plan import Job, Plan
from benchmarks.attention.run import measure
from benchmarks.measuring import filled, table

from posenc.lab.bench import METHODS
from posenc.lab.bench.passes import Case, Pass
from posenc.lab.bench.run import MIDDLE, PLAIN
from tests.lab.bench.failing import Environment, Failing, Fatal


def reading(contender: str = "posenc", **values: object) -> dict[str, object]:
    case = {"encoding": "t5", "length": 64, "causal": False, "dtype": "float32", "batch": 1}
    missing = ("forward_ratio", "both_ratio", "both_seconds", "forward_memory", "both_memory")
    given = {"contender": contender, "level": "call", "heads": 8, **case, **dict.fromkeys(missing)}
    return given | values


# Memory


@pytest.fixture(scope="module")
def meter() -> Iterator[MemoryMeter]:
    """Peaks in a process that all tests share, and whose settings are not left in this one."""
    before = [os.environ.get(name) for name in SEPARATE_BLOCKS]
    with MemoryMeter("cpu") as meter:
        yield meter
    assert [os.environ.get(name) for name in SEPARATE_BLOCKS] == before


def test_peaks_tell_linear_memory_from_quadratic(meter: MemoryMeter) -> None:
    one = Case(encoding="t5", length=2048, heads=2, head_dim=8)
    logits = 2 * 2048**2 * 4
    peaks = [meter.measure(contender, one) for contender in (Plain(), Eager(), Plain())]
    before = meter.measure(WrittenOut(), replace(one, encoding="nope"))
    (forward, plain), (_, eager), (_, again) = peaks
    assert 3 * 2 * 2048 * 8 * 4 <= plain < logits / 2
    assert eager > 2 * logits
    assert forward <= plain
    # What came before does not raise what comes after.
    assert again < logits / 2
    assert before == "there is no score to write out"


def test_memory_is_measured_in_a_process_of_its_own(meter: MemoryMeter) -> None:
    one = Case(encoding="nope", length=16, heads=2, head_dim=8)
    expected = f"{torch.get_num_threads()} threads, blocks of 65536"
    with pytest.raises(KeyError, match="nothing"):
        meter.measure(Failing(), one)
    with pytest.raises(RuntimeError, match=expected):
        meter.measure(Environment(), one)
    reason = "its process was ended, for want of memory perhaps"
    assert meter.measure(Fatal(), one) == reason
    assert isinstance(meter.measure(Plain(), one), tuple)


# Limits


def test_limits_compare_with_the_right_readings() -> None:
    rows = [
        reading(PLAIN, encoding="nope", both_memory=100, forward_memory=10),
        reading(forward_ratio=1.2, both_ratio=1.4, both_seconds=2.0),
        reading(both_memory=400, forward_memory=30),
        reading("FlexAttention", both_seconds=5.0),
        reading(level="layer", forward_ratio=9.0),
        reading(length=128, forward_ratio=9.0, causal=True),
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
        limit = Limit(row="", encoding="t5", quantity=quantity, length=64, bound=bound)
        assert Readings(rows).value(limit) == value
        assert limit.met(value) == met
    limit = Limit(row="", encoding="t5", quantity="forward", length=128, bound=1.0)
    assert Readings(rows).value(limit) is None


def test_limits_of_generation_compare_with_rope_and_transformers() -> None:
    rows = [
        reading("posenc", level="token", causal=True, forward_ratio=1.1),
        reading("transformers", level="token", causal=True, forward_ratio=1.2),
    ]
    for quantity, value in (("of rope", 1.1), ("of transformers", 1.1 / 1.2)):
        limit = Limit(row="", encoding="t5", quantity=quantity, length=64, bound=1.0, causal=True)
        assert Readings(rows).value(limit) == pytest.approx(value)


def test_limits_in_half_precision_are_wider() -> None:
    bounds = {(x.encoding, x.quantity, x.dtype, x.length): x.bound for x in LIMITS["cpu"]}
    assert bounds["swin", "both", "bfloat16", 2048] == pytest.approx(1.3 * 1.1)


def test_limits_by_amx_are_stricter_than_those_they_stand_for() -> None:
    pairs = zip(LIMITS["cpu"], LIMITS["amx"], strict=True)
    changed = [(limit, by_amx) for limit, by_amx in pairs if limit.bound != by_amx.bound]
    assert len(changed) == len(BY_AMX)
    for limit, by_amx in changed:
        assert by_amx == replace(limit, bound=BY_AMX[limit.encoding, limit.length, limit.quantity])
        assert by_amx.bound < limit.bound
        assert (limit.dtype, limit.causal, limit.batch) == ("bfloat16", False, 1)


# Plans


def contenders(job: Job) -> list[str]:
    return [contender.name for contender in job.contenders]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_full_plan_measures_what_every_limit_needs(device: str) -> None:
    plan = Plan(device=device, full=device == "cpu")
    jobs = plan.jobs()
    assert {limit.encoding for limit in plan.limits()} <= {job.case.encoding for job in jobs}
    assert plan.limits() == list(LIMITS[device])
    same = attrgetter("encoding", "length", "causal", "dtype", "batch", "heads")
    for limit in plan.limits():
        found = [
            job
            for job in jobs
            if same(job.case) == same(limit)
            and (not any(job.rounds) or job.contenders[0].level == limit.level)
            and "posenc" in contenders(job)
        ]
        assert any(job.memory if limit.about_memory else job.rounds[0] for job in found), limit
        if limit.about_memory and limit.quantity != "fits":
            measured = [job for job in jobs if job.case.length == limit.length and job.memory]
            assert any(PLAIN in contenders(job) for job in measured)


def test_timed_jobs_begin_with_their_base() -> None:
    for job in Plan(full=True).jobs():
        if job.rounds[0]:
            first, *others = job.contenders
            assert first.name in (PLAIN, "plain layer", "posenc, rope")
            assert {contender.level for contender in others} == {first.level}


def test_a_plan_alone_has_posenc_and_sdpa() -> None:
    jobs = Plan(alone=True, parts=["calls"]).jobs()
    assert {job.case.encoding for job in jobs} == set(METHODS)
    assert {name for job in jobs for name in contenders(job)} == {PLAIN, "posenc"}
    assert not any(job.memory for job in jobs)


def test_a_plan_for_cuda_has_rotations_within_the_kernels_and_before() -> None:
    found = {
        (job.case.encoding, job.case.length): contenders(job)
        for job in Plan(device="cuda").jobs()
        if job.rounds[0] and not job.case.causal and job.contenders[0].level == "call"
    }
    assert "posenc triton" in found["nope", MIDDLE["cuda"]]
    assert found["rope", MIDDLE["cuda"]][-2:] == ["posenc triton", "posenc triton-unfused"]
    assert "posenc triton" not in found["t5", MIDDLE["cuda"]]


def test_a_full_plan_has_both_masks_and_dtypes_and_every_part() -> None:
    jobs = Plan(full=True, encodings=["t5", "cope"], lengths=[32]).jobs()
    calls = {
        (job.case.encoding, job.case.causal, job.case.dtype)
        for job in jobs
        if job.rounds[0] and job.contenders[0].name == PLAIN and job.case.batch == 1
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
    assert {job.case.length for job in jobs if not job.rounds[0]} == {16384}
    swin = [job for job in Plan(full=True).jobs() if job.case.encoding == "swin"]
    assert not any(job.case.causal for job in swin)


# Measurements


def small(**options: object) -> Plan:
    return Plan(encodings=["shaw"], lengths=[16], rounds=1, **options)


def rows(job: Job) -> list[dict[str, Any]]:
    with MemoryMeter("cuda") as meter:  # in this process
        return measure(job, meter)


def test_rows_have_times_errors_and_memory() -> None:
    (job,) = small(parts=["calls"], causal=False, alone=True).jobs()
    plain, mine = rows(replace(job, memory=True))
    assert (plain["forward_ratio"], plain["both_ratio"]) == (1.0, 1.0)
    assert mine["served_by"]
    assert 0 < mine["output_error"] < 1e-5
    assert 0 < mine["gradient_error"] < 1e-4
    assert mine["both_memory"] is not None
    assert (mine["refusal"], mine["rounds"], mine["heads"]) == ("", (1, 1), 8)


class Broken(Plain):
    """Another library that fails."""

    name, foreign = "broken", True

    def prepare(self, call: object) -> Pass:
        raise RuntimeError("no compiler")


def test_only_other_libraries_may_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    (job,) = small(parts=["calls"], causal=False, alone=True).jobs()
    broken = replace(job, contenders=(*job.contenders, Broken()))
    *_, row = rows(broken)
    assert (row["refusal"], row["forward_ratio"]) == ("it fails with RuntimeError", None)
    monkeypatch.setattr(Broken, "foreign", False)
    with pytest.raises(RuntimeError, match="no compiler"):
        rows(broken)


def test_a_bench_of_generation() -> None:
    job = small(parts=["decoding"]).jobs()[0]
    short = replace(job, case=replace(job.case, length=16))
    found = {row["contender"]: row for row in rows(short)}
    assert found["posenc"]["forward_ratio"] is not None
    assert found["posenc"]["both_ratio"] is None
    theirs = found["transformers"]
    assert (theirs["forward_ratio"] is None) == bool(theirs["refusal"])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_bench_on_a_gpu_measures_what_flex_takes() -> None:
    (job,) = Plan(encodings=["t5"], lengths=[256], rounds=2, device="cuda", parts=["calls"]).jobs()
    found = {row["contender"]: row for row in rows(job)}
    for name in (PLAIN, "posenc", "FlexAttention"):
        assert found[name]["both_ratio"] is not None, found[name]["refusal"]
        assert found[name]["both_memory"] is not None


# Pages


def test_pages_follow_from_their_results() -> None:
    """``make pages`` wrote them, and would write them again."""
    for path, text in pages.pages().items():
        assert path.read_text() == text, f"{path.name} is not current: run make pages"


def test_values_over_their_limits_are_bold() -> None:
    rows = [
        reading(PLAIN, length=2048, forward_ratio=1.0, both_ratio=1.0),
        reading(length=2048, forward_ratio=1.13, both_ratio=0.9),
        reading("eager", length=2048, forward_ratio=3.0, both_ratio=None),
    ]
    found = tables(rows)
    assert "| `t5` | **1.13** / 0.90 |" in found["times in float32"]
    assert "| `t5`, 2,048 | 1.13 / 0.90 | 3.00 / – |" in found["other contenders"]
    assert found["limits"] == "1 of 2 limits are met; missed: `t5` 1.\n"
    assert set(found) == {"times in float32", "other contenders", "limits"}


def test_a_table_escapes_what_would_end_its_cells() -> None:
    assert table(("a", "b"), [("1|2", "3")]) == "| a | b |\n| --- | --- |\n| 1\\|2 | 3 |\n"


def test_a_page_has_a_place_for_each_part() -> None:
    page = "before\n<!-- one -->\nold\n<!-- end -->\n<!-- two -->\n<!-- end -->\n"
    assert filled(page, {"one": "new\n"}) == page.replace("old", "new")
    with pytest.raises(ValueError, match="no place for three"):
        filled(page, {"three": ""})


def test_the_chart_has_a_panel_an_encoding_and_logarithmic_axes() -> None:
    rows = [
        reading(name, encoding=encoding, length=n, both_seconds=1e-3, both_memory=10**6)
        for encoding in ("t5", "shaw")
        for name in (PLAIN, "posenc")
        for n in (16, 32)
    ]
    spec = draw(rows, "a machine")
    assert len(spec["vconcat"]) == 2
    for part in spec["vconcat"]:
        encoding = part["spec"]["encoding"]
        assert encoding["x"]["scale"]["type"] == encoding["y"]["scale"]["type"] == "log"
        assert encoding["strokeDash"]["scale"]["domain"] == [PLAIN, "posenc"]
    assert draw([reading()], "") is None
