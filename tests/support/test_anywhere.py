"""What make test-anywhere changes, which modules it runs, and what it leaves out."""

from __future__ import annotations

import time

import pytest

from posenc.attention.backends import native
from posenc.attention.backends.native import variants
from tests.support import anywhere

VALUES = {pair for setting in anywhere.SETTINGS for pair in setting.environment.items()}


@pytest.mark.parametrize("slow", [False, True])
def test_the_rule_of_slow_products_is_forced(slow: bool) -> None:
    before = native.slow_mkl
    with anywhere.elsewhere({anywhere.SLOW_MKL: str(int(slow))}):
        assert native.slow_mkl() is slow
    assert native.slow_mkl is before


@pytest.mark.parametrize("factor", [0.01, 1.0, 100.0])
@pytest.mark.parametrize("clock", anywhere.CLOCKS)
def test_durations_are_multiplied(
    clock: str, factor: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, clock, lambda: 3.0)
    with anywhere.elsewhere({anywhere.TIMES: str(factor)}):
        assert getattr(time, clock)() == 3.0 * factor
    assert getattr(time, clock)() == 3.0


def test_what_the_processor_cannot_run_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(variants, "instruction_sets", frozenset)
    reasons = {pair: anywhere.missing(*pair) for pair in VALUES}
    assert {value for (_, value), reason in reasons.items() if reason} == {"v3", "v4", "avx2"}
    assert "avx512f" in str(reasons["POSENC_KERNELS", "v4"])


@pytest.mark.parametrize("setting", anywhere.SETTINGS, ids=lambda setting: str(setting.environment))
def test_modules_that_read_the_machine_are_run(setting: anywhere.Setting) -> None:
    files = {str(file.relative_to(anywhere.ROOT / "tests")) for file in anywhere.modules(setting)}
    expected = {"attention/test_repeats.py", "attention/test_api.py"}
    if "ATEN_CPU_CAPABILITY" in setting.environment:
        expected |= {"attention/test_triton.py", "attention/test_threads.py"}
    if anywhere.TIMES in setting.environment:
        expected |= {"lab/cli/test_transcripts.py", "transformers/doctor/test_diagnosis.py"}
    assert expected <= files
