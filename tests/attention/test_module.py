"""The attention layer: heads, cross-attention, windows, dropout."""

from __future__ import annotations

import copy

import pytest
import torch

import posenc
from posenc import Attention, Encoding, Layout
from posenc.errors import ArgumentError


def make(**options: object) -> Attention:
    torch.manual_seed(0)
    fields = {"dim": 24, "heads": 4, "encoding": posenc.create("rope", head_dim=6)} | options
    return Attention(**fields).eval()  # type: ignore[arg-type]


def test_cross_attention_sees_the_context_by_its_layout() -> None:
    layer, x, context = make(), torch.randn(2, 3, 24), torch.randn(2, 5, 24)
    here, there = Layout.sequence(3), Layout.padded([5, 2])
    out = layer(x, here, context=context, context_layout=there)
    cut = layer(x[1:], here, context=context[1:, :2], context_layout=Layout.sequence(2))
    torch.testing.assert_close(out[1:], cut)


def test_grouped_heads_have_fewer_keys() -> None:
    layer = make(kv_heads=2)
    assert layer.key.weight.shape == layer.value.weight.shape == (12, 24)
    assert layer(torch.randn(1, 3, 24), Layout.sequence(3)).shape == (1, 3, 24)


def test_no_bias_is_kept_from_layer_to_layer() -> None:
    """NeMo #15751: what backward needs of four layers is linear in the length."""
    length, encodings = 400, posenc.create_layers("t5", layers=4, heads=4, causal=True)
    most = {}
    for backend in ("blockwise", "reference"):
        layers = [make(encoding=each, causal=True, backend=backend) for each in encodings]
        x, sizes = torch.randn(1, length, 24), []

        def note(tensor: torch.Tensor, sizes: list[int] = sizes) -> torch.Tensor:
            sizes.append(tensor.untyped_storage().nbytes() // tensor.itemsize)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            for layer in layers:
                x = x + layer(x, Layout.sequence(length))
        x.sum().backward()
        most[backend] = max(sizes)
    assert most["blockwise"] < length * length / 4
    assert most["reference"] >= 4 * length * length


def test_dropout_in_training_only() -> None:
    layer, x = make(dropout=0.5), torch.randn(1, 9, 24)
    layout = Layout.sequence(9)
    torch.testing.assert_close(layer(x, layout), layer(x, layout))
    layer.train()
    assert not torch.allclose(layer(x, layout), layer(x, layout))


def test_head_dim_and_bias_and_scale() -> None:
    layer = make(head_dim=8, bias=True, encoding=Encoding(), scale=1.0)
    assert layer.query.weight.shape == (32, 24)
    assert layer.output.bias is not None
    other = make(head_dim=8, bias=True, encoding=Encoding())
    x = torch.randn(1, 5, 24)
    assert not torch.allclose(layer(x, Layout.sequence(5)), other(x, Layout.sequence(5)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"heads": 5, "encoding": Encoding()}, "a multiple of heads"),
        ({"kv_heads": 3}, "a multiple of kv_heads"),
        ({"heads": 0}, "1 or more"),
        ({"dim": "16"}, "dim: expected a whole number"),
        ({"window": 1.5}, "window: expected a whole number"),
        ({"dropout": 1.0}, "dropout: expected a finite number, 0 or more, less than 1"),
        ({"encoding": "rope"}, "encoding: expected Encoding"),
    ],
)
def test_sizes_that_do_not_fit(options: dict[str, object], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        make(**options)


def test_context_needs_its_layout() -> None:
    with pytest.raises(ArgumentError, match="context_layout"):
        make()(torch.randn(1, 3, 24), Layout.sequence(3), context=torch.randn(1, 5, 24))


def test_a_projected_context_serves_as_well_as_its_vectors() -> None:
    layer, x, context = make(kv_heads=2), torch.randn(2, 3, 24), torch.randn(2, 5, 24)
    here, there = Layout.sequence(3), Layout.padded([5, 2])
    expected = layer(x, here, context=context, context_layout=there)
    projected = layer.project(context, there)
    torch.testing.assert_close(layer(x, here, context=projected), expected)
    swapped = layer(x.flip(0), here, context=projected.select(torch.tensor([1, 0])))
    torch.testing.assert_close(swapped, expected.flip(0))
    with pytest.raises(ArgumentError, match="context_layout"):
        layer(x, here, context=projected, context_layout=there)


@pytest.mark.parametrize("name", ["rope", "deberta"])
def test_merged_projections_are_rows_of_one_matrix(name: str) -> None:
    options = {"projections": "content"} if name == "deberta" else {"dim": None, "heads": None}
    encoding = posenc.create(name, **({"dim": 24, "heads": 4, "head_dim": 6} | options))  # type: ignore[arg-type]
    layer = make(encoding=encoding, merged=True, bias=True, kv_heads=2)
    assert layer.merged is not None
    assert layer.merged.weight.shape == (48, 24)
    names = {n for n in layer.state_dict() if not n.startswith("encoding.")}
    assert names == {"merged.weight", "merged.bias", "output.weight", "output.bias"}
    x, layout = torch.randn(2, 5, 24), Layout.sequence(5)
    # In self-attention one product, to a context two: the same numbers either way.
    itself = layer(x, layout)
    torch.testing.assert_close(layer(x, layout, context=x, context_layout=layout), itself)
    twin = copy.deepcopy(layer).to(torch.float64)
    with torch.no_grad():
        layer.merged.weight.zero_()
    torch.testing.assert_close(twin(x.double(), layout).float(), itself)
