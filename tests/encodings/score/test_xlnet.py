"""XLNet's logits against the attention of transformers' XLNet."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import XLNetConfig
from transformers.models.xlnet.modeling_xlnet import XLNetModel, XLNetRelativeAttention

from posenc import Encoding, Grid, Layout, attend
from posenc.encodings.score.transformer_xl import TransformerXL
from posenc.encodings.score.xlnet import xlnet

CONFIG = XLNetConfig(vocab_size=5, d_model=12, n_head=3, n_layer=1, d_inner=8, dropout=0.0)


def theirs() -> XLNetRelativeAttention:
    torch.manual_seed(6)
    layer = XLNetRelativeAttention(CONFIG).double().eval()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(std=0.4)
    return layer


def ours(layer: XLNetRelativeAttention) -> TransformerXL:
    part = xlnet(dim=12, heads=3, head_dim=4).double()
    with torch.no_grad():
        part.biases.content.copy_(layer.r_w_bias)
        part.biases.position.copy_(layer.r_r_bias)
        part.weight.copy_(layer.r.permute(1, 2, 0))
    return part


@pytest.mark.parametrize("regular", [True, False])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("queries", "keys"), [(6, 6), (1, 1), (2, 7), (1, 5)])
def test_equals_transformers(queries: int, keys: int, causal: bool, regular: bool) -> None:
    """Values and gradients, with memory in front where there are more keys than queries."""
    layer = theirs()
    part = ours(layer)
    q, k, v = (
        torch.randn(n, 2, 3, 4, dtype=torch.float64, requires_grad=True)
        for n in (queries, keys, keys)
    )
    grid = Grid(Layout.sequence(queries, start=keys - queries), Layout.sequence(keys), causal)
    if not regular:
        layouts = (Layout.at(side.positions) for side in (grid.query, grid.key))
        ordered = (
            Layout(at.positions, side.order)
            for at, side in zip(layouts, (grid.query, grid.key), strict=True)
        )
        grid = Grid(*ordered, causal)
    # float32 in their code; here in float64, so that little else than rounding of r is left
    r = XLNetModel(CONFIG).relative_positional_encoding(queries, keys, bsz=2).double()
    key_rows = torch.einsum("ibh,hnd->ibnd", r, layer.r)
    mask = (~grid.visible[0, 0]).double()[:, :, None, None].expand(-1, -1, 2, -1)
    expected = layer.rel_attn_core(q, k, v, key_rows, attn_mask=mask)
    heads_first = [x.permute(1, 2, 0, 3) for x in (q, k, v)]
    got = attend(*heads_first, grid, Encoding(score=part)).permute(2, 0, 1, 3)
    torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-6)
    weight = torch.randn_like(got)
    mine = torch.autograd.grad(
        (got * weight).sum(), [q, k, v, part.biases.content, part.biases.position, part.weight]
    )
    other = torch.autograd.grad(
        (expected * weight).sum(), [q, k, v, layer.r_w_bias, layer.r_r_bias, layer.r]
    )
    wanted: list[Tensor] = [*other[:-1], other[-1].permute(1, 2, 0)]
    for gradient, reference in zip(mine, wanted, strict=True):
        torch.testing.assert_close(gradient, reference, atol=1e-5, rtol=1e-5)


def test_shift_slices_before_it_crops() -> None:
    """FIELD: XLNet runs from K to -Q and slices; Transformer-XL pads: not interchangeable."""
    keys = queries = 4
    products = torch.arange(float(queries * (keys + queries))).view(1, 1, queries, -1)
    shifted = XLNetRelativeAttention.rel_shift_bnij(products, klen=keys)[0, 0]
    for i in range(queries):
        for j in range(keys):
            distance = i - j
            assert shifted[i, j] == products[0, 0, i, keys - distance]


def test_keys_ahead_are_told_from_keys_behind() -> None:
    part = ours(theirs()).requires_grad_(False)
    q, k = torch.randn(2, 1, 3, 5, 4, dtype=torch.float64)
    same = k[:, :, :1].expand_as(k)
    scores = part(q, same, Grid.of(Layout.sequence(5)), scale=1.0)
    assert not torch.allclose(scores[..., 2, 1], scores[..., 2, 3])
