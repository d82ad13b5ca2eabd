"""The trial of a backend on a device: wrong numbers are found, told and kept."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from posenc import Grid, Layout
from posenc.attention import dispatch, trial
from posenc.attention.backends.common.base import Backend, Plan, Refusal, Result
from posenc.attention.call import Call
from posenc.attention.dispatch import BACKENDS
from posenc.attention.problem.problem import Problem
from posenc.encoding import BucketedTerms, Encoding

CPU = torch.device("cpu")


class Damaged(Backend):
    """Blocks whose bias, or output, is wrong; or which fail."""

    def __init__(self, kind: str) -> None:
        self.name, self.kind, self.runs = f"damaged-{kind}", kind, 0

    def plan(self, problem: Problem) -> Plan | Refusal:
        if self.kind == "bias" and problem.lowered:
            first = problem.lowered[0]
            assert isinstance(first, BucketedTerms)
            assert first.table is not None
            terms = (replace(first, table=0.5 * first.table), *problem.lowered[1:])
            problem = replace(problem, lowered=terms)
        plan = BACKENDS["blockwise"].plan(problem)
        assert isinstance(plan, Plan)

        def compute(*, lse: bool) -> Result:
            self.runs += 1
            if self.kind == "failing":
                raise RuntimeError("out of shared memory")
            found = plan.run(lse=lse)
            return found._replace(output=found.output * (1.2 if self.kind == "output" else 1.0))

        return Plan("damaged", compute, trial="")


@pytest.fixture(autouse=True)
def _empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(trial, "_DIFFERENCES", {})


@pytest.mark.parametrize("name", ["blockwise", "native"])
def test_right_backends_pass(name: str) -> None:
    backend = BACKENDS[name]
    if backend.unavailable(CPU) is None:
        assert trial.difference(backend, CPU) == ""


class WithoutValues(Backend):
    """Another backend without a value part, which may leave out the score part."""

    name = "without-values"

    def __init__(self, name: str = "reference", *, wrong: bool = False) -> None:
        self.backend, self.wrong, self.seen = BACKENDS[name], wrong, 0

    def plan(self, problem: Problem) -> Plan | Refusal:
        if problem.encoding.value is not None:
            return Refusal("it has no place for a value part")
        self.seen += 1
        if self.wrong:
            problem = replace(problem, encoding=Encoding(), lowered=())
        return self.backend.plan(problem)


@pytest.mark.parametrize("name", ["reference", "blockwise", "native"])
def test_backends_without_a_value_part_are_tried_without_one(name: str) -> None:
    right = WithoutValues(name)
    if right.backend.unavailable(CPU) is None:
        assert trial.difference(right, CPU) == ""
        assert right.seen == 2
        assert "its output" in trial.difference(WithoutValues(name, wrong=True), CPU)


def test_tile_sizes_are_measured_where_the_first_do_not_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backend, large = WithoutValues(), Damaged("failing")
    monkeypatch.setattr(backend, "untuned", lambda: large)
    grid = Grid.of(Layout.sequence(9), causal=True)
    assert trial.difference(backend, CPU, grid=grid) == ""
    assert backend.seen == 2
    assert large.runs == 4


@pytest.mark.parametrize(
    ("kind", "words"),
    [("bias", "its output"), ("output", "its output"), ("failing", "out of shared memory")],
)
def test_wrong_backends_are_put_aside_once(kind: str, words: str) -> None:
    backend = Damaged(kind)
    with pytest.warns(RuntimeWarning, match="is put aside"):
        found = trial.refusal(backend, CPU, torch.bfloat16)
    assert found is not None
    assert words in found.reason
    runs = backend.runs
    assert trial.refusal(backend, CPU, torch.bfloat16) == found
    trial._DIFFERENCES.clear()  # as in another process
    assert trial.refusal(backend, CPU, torch.bfloat16) == found
    assert backend.runs == runs


def test_each_dtype_has_a_trial_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def difference(*_: object, dtypes: tuple[torch.dtype, ...], kernels: str) -> str:
        return "wrong" if dtypes == (torch.bfloat16,) else ""

    monkeypatch.setattr(trial, "difference", difference)
    call = BACKENDS["blockwise"], CPU
    assert trial.refusal(*call, torch.float32) is None
    with pytest.warns(RuntimeWarning, match="is put aside"):
        assert trial.refusal(*call, torch.bfloat16) is not None
    assert trial.refusal(*call, torch.float32) is None


def test_auto_goes_on_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = Damaged("output")
    monkeypatch.setitem(BACKENDS._read, backend.name, backend)
    monkeypatch.setattr(
        dispatch,
        "preference",
        lambda device, make_problem: (dispatch.NAMED, [backend.name, "reference"]),
    )
    q = torch.randn(1, 2, 5, 8)
    call = Call(q, q, q, Grid.of(Layout.sequence(5)), Encoding())
    with pytest.warns(RuntimeWarning, match="put aside"):
        choice = dispatch.choose(call, "auto")
    assert choice.backend is BACKENDS["reference"]
    assert "off the definition" in choice.refusals[backend.name]


def test_what_the_caller_set_stays() -> None:
    state = torch.get_rng_state()
    with torch.inference_mode():
        assert trial.refusal(BACKENDS["blockwise"], CPU, torch.float32) is None
        assert torch.is_inference_mode_enabled()
    assert torch.equal(torch.get_rng_state(), state)


def test_only_trials_of_this_user_are_believed(tmp_path: Path) -> None:
    backend = Damaged("output")
    call = backend, CPU, torch.float32
    with pytest.warns(RuntimeWarning, match="put aside"):
        assert trial.refusal(*call) is not None
    (kept,) = (tmp_path / "posenc" / "trials").iterdir()
    for content, mode in ((b"", 0o666), (b"\xff", 0o600)):
        trial._DIFFERENCES.clear()
        kept.write_bytes(content)
        kept.chmod(mode)
        with pytest.warns(RuntimeWarning, match="put aside"):
            assert trial.refusal(*call) is not None


def test_trials_without_a_home_folder_are_kept_in_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", "here")
    monkeypatch.setenv("HOME", "here")
    with pytest.warns(RuntimeWarning, match="put aside"):
        trial.refusal(Damaged("output"), CPU, torch.float32)
    assert not list(tmp_path.iterdir())
