"""Contenders of a bench: cases, ways to compute them, and their errors."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch
from benchmarks.attention.accuracy import expect
from benchmarks.attention.contenders import Contender, Eager, Flex, Plain, Posenc, WrittenOut
from benchmarks.attention.layers import LAYERS, PlainLayer, PosencLayer, Transformers, XTransformers
from torch import Tensor

from posenc.attention import attend
from posenc.errors import ArgumentError, UnknownNameError
from posenc.lab.bench import METHODS
from posenc.lab.bench.passes import Case, Pass, parse_name, past_only


def case(encoding: str, length: int = 40, **options: object) -> Case:
    return Case(encoding=encoding, length=length, heads=2, head_dim=8, **options)


# Names and cases


def test_names_carry_options_and_frozen() -> None:
    assert parse_name("shaw@max_distance=3@frozen") == ("shaw", {"max_distance": 3}, {"frozen"})
    assert parse_name("rope+alibi") == ("rope+alibi", {}, set())
    assert case("shaw@scores").build().encoding.value is None


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("ropee", UnknownNameError),
        ("t5@bucket=3", UnknownNameError),
        ("sinusoidal", ArgumentError),
        ("rope@randomized", ArgumentError),
    ],
)
def test_names_that_cannot_be_measured_are_refused(name: str, kind: type[Exception]) -> None:
    with pytest.raises(kind):
        parse_name(name)


def test_a_case_is_the_same_at_every_call() -> None:
    builds = [case("t5").build() for _ in range(2)]
    first, second = ([*call.wanted, call.weight] for call in builds)
    torch.testing.assert_close(first, second, rtol=0, atol=0)


def test_gradients_are_wanted_of_all_parameters_unless_frozen() -> None:
    assert len(case("t5").build().wanted) == 4
    assert len(case("t5@frozen").build().wanted) == 3
    half = case("deberta", length=8, dtype="bfloat16").build()
    assert {x.dtype for x in half.wanted} == {torch.bfloat16}


def test_images_have_as_many_cells_as_there_are_tokens() -> None:
    call = case("swin", length=24).build()
    assert call.layout.extent == (4, 6)
    assert call.encoding.score.window[0] == 4


def test_every_encoding_with_limits_can_be_built() -> None:
    for name in METHODS:
        call = case(name, length=16, causal=past_only(name)).build()
        assert Posenc().prepare(call).run().shape == (1, 2, 16, 8)


# Contenders

SAME = [Posenc(backend="reference"), Posenc(backend="blockwise"), Eager(), WrittenOut()]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", ["alibi", "t5", "transformer_xl", "rope+t5", "deberta"])
@pytest.mark.parametrize("contender", SAME, ids=lambda contender: contender.name)
def test_contenders_compute_the_same(contender: Contender, name: str, causal: bool) -> None:
    call = case(name, causal=causal, dtype="float64").build()
    call.encoding.double()
    expected = attend(*call.inputs, call.grid, call.encoding, backend="reference")
    assert contender.refusal(call) is None
    prepared = contender.prepare(call)
    torch.testing.assert_close(prepared.run(), expected)
    wanted = torch.autograd.grad(expected, call.wanted, call.weight)
    torch.testing.assert_close(tuple(prepared.both()), wanted)


def test_a_bias_without_gradient_is_written_once(monkeypatch: pytest.MonkeyPatch) -> None:
    written = {}
    for name in ("t5@frozen", "t5"):
        call, count = case(name).build(), []
        score = call.encoding.score

        def counted(*args: Tensor, inner=score.forward, to=count, **options: object) -> Tensor:
            if "method" not in options:  # not to lower it
                to.append(1)
            return inner(*args, **options)

        monkeypatch.setattr(score, "forward", counted)
        prepared = WrittenOut().prepare(call)
        prepared.both()
        prepared.both()
        written[name] = len(count)
    assert written == {"t5@frozen": 1, "t5": 2}


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
def test_contenders_refuse_what_they_cannot_do() -> None:
    assert WrittenOut().refusal(case("nope").build()) == "there is no score to write out"
    assert WrittenOut().refusal(case("shaw").build()) == "its value part is no bias"
    assert "without gradient" in str(Posenc(backend="sdpa").refusal(case("t5").build()))
    for name in ("rope", "shaw", "swin", "nope"):
        assert Flex().refusal(case(name).build()) is not None
    assert Flex().refusal(case("kerple").build()) is None
    assert not Flex().prepare(case("kerple").build()).wanted  # no backward on the CPU


def test_what_would_not_fit_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    call = case("t5", length=512).build()
    assert Eager().refusal(call) is None
    monkeypatch.setattr("benchmarks.attention.contenders.available_memory", lambda device: 2**20)
    for contender in (Eager(), WrittenOut()):
        assert "GB" in str(contender.refusal(call))


# Layers of other libraries


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # x-transformers' own
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("library", [XTransformers(), Transformers()], ids=lambda one: one.name)
def test_layers_of_other_libraries_run(library: XTransformers, name: str) -> None:
    if find_spec(library.package) is None:
        pytest.skip(f"{library.package} is not installed")
    call = case(name, length=12).build()
    if library.refusal(call) is not None:
        assert name not in library.makers
        return
    prepared = library.prepare(call)
    gradients = prepared.both()
    assert prepared.run().shape == call.x.shape
    assert gradients[0].any()


def test_a_library_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.attention.layers.find_spec", lambda name: None)
    reason = XTransformers().refusal(case("t5").build())
    assert reason == "it is not installed (pip install 'posenc[bench]')"


def test_the_plain_layer_is_posencs_without_positions() -> None:
    call = case("nope", causal=True).build()
    plain, ours = PlainLayer().prepare(call), PosencLayer().prepare(call)
    with torch.no_grad():
        for mine, theirs in zip(ours.wanted[1:], plain.wanted[1:], strict=True):
            mine.copy_(theirs)
    torch.testing.assert_close(ours.run(), plain.run())


# Accuracy


class Bent(Contender):
    """Posenc, but for a percent."""

    name = "bent"

    def __init__(self, *, output: float = 1.0, table: float = 1.0) -> None:
        self.output, self.table = output, table

    def prepare(self, call: object) -> Pass:
        straight = Posenc(backend="reference").prepare(call)
        straight.wanted[3].register_hook(lambda gradient: gradient * self.table)
        return replace(straight, run=lambda: straight.run() * self.output)


@pytest.mark.parametrize("name", ["t5", "shaw", "forgetting", "swin"])
def test_errors_are_those_of_the_dtype(name: str) -> None:
    causal = name == "forgetting"
    for dtype, least, most in (("float32", 1e-9, 1e-5), ("bfloat16", 1e-4, 0.1)):
        call = case(name, length=128, dtype=dtype, causal=causal).build()
        contender = Posenc(backend="reference")
        errors = expect(contender, call).compare(contender.prepare(call))
        assert least < errors.output < most
        assert least < errors.gradient < most


def test_errors_of_output_and_of_gradients_are_told_apart() -> None:
    call = case("t5", length=96).build()
    expected = expect(Bent(), call)
    both = expected.compare(Bent(output=1.01).prepare(call))
    assert both.output == pytest.approx(0.01, rel=1e-2)
    only = expected.compare(Bent(table=1.01).prepare(call))
    assert only.output < 1e-5
    assert only.gradient == pytest.approx(0.01, rel=1e-2)
    forward = replace(Bent(table=2.0).prepare(call), wanted=[])
    assert expected.compare(forward).gradient is None


def test_plain_sdpa_is_held_to_attention_without_an_encoding() -> None:
    call = case("t5", length=96).build()
    errors = expect(Plain(), call).compare(Plain().prepare(call))
    assert errors.output < 1e-5
    assert errors.gradient < 1e-5
