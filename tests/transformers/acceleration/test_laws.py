"""Laws that every accelerated family keeps."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized, remove_parametrizations
from transformers import PreTrainedModel

from posenc.attention import api, dispatch
from posenc.errors import ArgumentError
from posenc.transformers.acceleration import FAMILIES, AccelerateReport, accelerate, restore
from posenc.transformers.acceleration.accelerated import Accelerated, take_over
from posenc.transformers.acceleration.checking import OutputComparison
from posenc.transformers.acceleration.families import page
from tests.support.exhaustive import kept_in_suite
from tests.support.versions import checkpoint_activations
from tests.transformers.acceleration.case import Case
from tests.transformers.acceleration.cases import CASES

API = "posenc.transformers.acceleration.api"

WITHOUT = [name for name in FAMILIES if not any(key.startswith(f"{name}-") for key in CASES)]
assert not WITHOUT, f"no CASES in tests/transformers/acceleration/cases/ for {', '.join(WITHOUT)}"
FIRST = [next(key for key in CASES if key.startswith(f"{name}-")) for name in FAMILIES]
"""One case of every family."""

pytestmark = pytest.mark.filterwarnings("ignore:Support for mismatched key_padding_mask")  # WavLM's

WAYS = ("bloom", "deberta_v2", "inkling", "sam", "swin", "t5", "wav2vec2_conformer", "xlnet")
"""Families whose layers are taken over in different ways.

By a bias over all tokens, over windows or the axes of an image, by terms of queries and keys, with
memories, with gates, or in a page.
"""

one_a_family = pytest.mark.parametrize("case", [CASES[key] for key in FIRST], ids=FIRST)
FIRST_OF_WAYS = [key for key in FIRST if key.partition("-")[0] in WAYS]
one_a_way = pytest.mark.parametrize("key", kept_in_suite(FIRST, FIRST_OF_WAYS))
"""Of laws about ``accelerate`` alone, which all families share."""


def put_under(model: PreTrainedModel, **options: Any) -> AccelerateReport:
    """Accelerate a model at all lengths."""
    return accelerate(model, shortest=0, **options)


def accelerated(model: nn.Module) -> list[Accelerated]:
    return [module for module in model.modules() if isinstance(module, Accelerated)]


def require_near(
    got: list[Tensor], expected: list[Tensor], relative: float = 1e-5, label: str | None = None
) -> None:
    for a, b in zip(got, expected, strict=True):
        bound = relative * float(b.detach().abs().max()) + 1e-7
        torch.testing.assert_close(a, b, rtol=0, atol=bound, msg=label)


@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_all_modules_are_accelerated_and_outputs_and_gradients_stay(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = case.model()
    expected = case.results(model)
    report = put_under(model)
    assert report.difference is not None
    assert report.difference < 1e-4
    assert report.accelerated == (case.accelerated or len(report.modules)) > 0
    assert all(module.reason for module in report.modules)
    assert len(accelerated(model)) == report.accelerated
    assert {type(module).original for module in accelerated(model)} <= {
        kind for family in FAMILIES.values() for kind in family.classes
    }
    _require_results(case, model, expected, "auto")
    with monkeypatch.context() as patch:  # as for long inputs
        patch.setattr(dispatch, "SMALL", 0)
        _require_results(case, model, expected, "auto for long inputs")
    restore(model)
    put_under(model, check=False, backend="reference")
    _require_results(case, model, expected, "reference")


def _require_results(
    case: Case,
    model: PreTrainedModel,
    expected: tuple[list[Tensor], dict[str, Tensor]],
    backend: str,
) -> None:
    """Require the expected outputs and gradients of an accelerated model."""
    (outputs, gradients), (got_outputs, got) = expected, case.results(model)
    require_near(got_outputs, outputs, case.relative, backend)
    assert got.keys() == gradients.keys(), backend
    largest = max(float(gradient.abs().max()) for gradient in gradients.values())
    for name, gradient in gradients.items():
        # Gradients that are zero but for rounding, such as a key bias's, are compared with others.
        bound = 10 * case.relative * max(float(gradient.abs().max()), 1e-3 * largest)
        off = float((got[name] - gradient).abs().max())
        assert off <= bound, f"{name} by {backend} is {off} off"


def posenc_calls(case: Case, model: PreTrainedModel) -> int:
    """Number of times that posenc computes attention, or writes its bias, in a pass."""
    calls = []
    where, name = (page, "dense_attention") if case.written else (api, "choose")
    function = getattr(where, name)

    def counted(*arguments: Any, **options: Any) -> Any:
        calls.append(name)
        return function(*arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(where, name, counted)
        case.outputs(model)
    return len(calls)


@one_a_family
def test_what_runs_is_posenc(case: Case) -> None:
    model = case.model()
    put_under(model, check=False)
    assert posenc_calls(case, model) > 0


@one_a_family
def test_restored_models_are_the_same_to_the_bit(case: Case) -> None:
    model = case.model()
    kinds, config = [type(module) for module in model.modules()], model.config
    outputs = case.outputs(model)
    names, settings = list(model.state_dict()), config.to_json_string()
    put_under(model)
    assert list(model.state_dict()) == names
    assert model.config.to_json_string() == settings
    restore(model)
    assert [type(module) for module in model.modules()] == kinds
    assert model.config is config
    assert not any("_posenc_settings" in module.__dict__ for module in model.modules())
    for a, b in zip(case.outputs(model), outputs, strict=True):
        assert torch.equal(a, b)
    restore(model)


@one_a_way
def test_a_second_call_changes_nothing(key: str) -> None:
    case = CASES[key]
    model = case.model()
    first = put_under(model)
    kinds = [type(module) for module in model.modules()]
    second = accelerate(model, backend="reference")
    assert second.modules == first.modules
    assert [type(module) for module in model.modules()] == kinds


@one_a_family
def test_copies_are_accelerated_and_pickles_are_not(case: Case) -> None:
    model = case.model()
    for module in list(model.modules()):
        if is_parametrized(module):  # PyTorch cannot pickle weight norm
            remove_parametrizations(module, "weight")
            module._load_state_dict_pre_hooks.clear()
    own = case.outputs(model)
    put_under(model)
    copied = copy.deepcopy(model)
    assert len(accelerated(copied)) == len(accelerated(model)) > 0
    require_near(case.outputs(copied), case.outputs(model), 0.0)
    stored = pickle.dumps(model)
    assert b"posenc" not in stored
    loaded = pickle.loads(stored)
    assert accelerated(loaded) == []
    for a, b in zip(case.outputs(loaded), own, strict=True):
        assert torch.equal(a, b)
    assert accelerated(model)


@one_a_way
def test_short_inputs_run_as_they_did(key: str) -> None:
    case = CASES[key]
    model = case.model()
    outputs = case.outputs(model)
    accelerate(model, shortest=100_000)
    for a, b in zip(case.outputs(model), outputs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@one_a_way
def test_a_failure_leaves_the_model_as_it_was(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[key]
    model = case.model()
    kinds = [type(module) for module in model.modules()]
    monkeypatch.setattr(OutputComparison, "difference", lambda comparison, **options: float("nan"))
    with pytest.raises(ArgumentError, match="within"):
        accelerate(model)
    assert [type(module) for module in model.modules()] == kinds
    assert not any(
        "config_behind" in type(m.config).__dict__ for m in model.modules() if hasattr(m, "config")
    )


@one_a_way
def test_a_failure_half_way_leaves_the_model_as_it_was(
    key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = CASES[key]
    model = case.model()
    kinds, outputs = [type(module) for module in model.modules()], case.outputs(model)
    changed: list[Any] = []

    def fail_at_the_second(module: Any, *arguments: Any) -> None:
        if changed:
            raise RuntimeError("half-way")
        changed.append(module)
        take_over(module, *arguments)

    monkeypatch.setattr(f"{API}.take_over", fail_at_the_second)
    with pytest.raises(RuntimeError, match="half-way"):
        accelerate(model)
    assert changed
    assert [type(module) for module in model.modules()] == kinds
    for a, b in zip(case.outputs(model), outputs, strict=True):
        assert torch.equal(a, b)


@one_a_way
def test_random_states_and_training_flags_are_kept(key: str) -> None:
    case = CASES[key]
    model = case.model().train()
    model.get_submodule(next(name for name, _ in model.named_modules() if name)).eval()
    flags, state = [module.training for module in model.modules()], torch.get_rng_state()
    put_under(model)
    assert [module.training for module in model.modules()] == flags
    assert torch.equal(torch.get_rng_state(), state)


@one_a_family
def test_training_with_dropout_and_checkpointing(case: Case) -> None:
    model = case.model()
    put_under(model)
    if model.supports_gradient_checkpointing:
        expected = case.gradients(model)
        model.train()
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
            if isinstance(module, torch.nn.BatchNorm1d):
                module.eval()
            if isinstance(getattr(module, "dropout", None), float):
                module.dropout = 0.0
        checkpoint_activations(model, reentrant=False)
        got = case.gradients(model)
        for name, gradient in expected.items():
            torch.testing.assert_close(got[name], gradient, rtol=1e-3, atol=1e-4)
    dropped = case.model().train()
    put_under(dropped)
    assert all(gradient.isfinite().all() for gradient in case.gradients(dropped).values())


OWN_WEIGHTS = ("bloom-padded", "deberta-padded", "deberta_v2-v3", "mpt-padded")
"""Cases whose models make attention weights without being told to be eager."""


@pytest.mark.parametrize("key", [*(key for key in CASES if key.endswith("-eager")), *OWN_WEIGHTS])
def test_attention_weights_are_the_original_ones(key: str) -> None:
    case = CASES[key]
    model = case.model()
    expected, plain = case.outputs(model, output_attentions=True), case.outputs(model)
    assert len(expected) > len(plain)
    put_under(model)
    require_near(case.outputs(model, output_attentions=True), expected)


@one_a_family
def test_half_precision(case: Case) -> None:
    model = case.model()
    expected = case.outputs(model)
    put_under(model)
    with torch.autocast("cpu", torch.bfloat16):
        got = case.outputs(model)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a.float(), b, rtol=0, atol=0.1 * float(b.detach().abs().max()))


@one_a_family
def test_weights_in_half_precision(case: Case) -> None:
    def narrow(x: Any) -> Any:
        return x.bfloat16() if isinstance(x, Tensor) and x.is_floating_point() else x

    inputs = {name: narrow(x) for name, x in case.inputs().items()}
    half = replace(case, inputs=lambda: inputs)
    model = half.model().bfloat16()
    expected = half.outputs(model)
    put_under(model)
    for a, b in zip(half.outputs(model), expected, strict=True):
        assert a.dtype == b.dtype
        # Root mean squares, since routers may send a token elsewhere.
        off, size = (x.detach().float().square().mean().sqrt() for x in (a.float() - b.float(), b))
        assert off < 0.1 * size
