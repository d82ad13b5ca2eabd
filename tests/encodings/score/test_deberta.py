"""DeBERTa's logits against loops and against transformers' attention of both versions."""

from __future__ import annotations

import copy
import math
from fractions import Fraction
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from transformers import DebertaConfig, DebertaV2Config
from transformers.models.deberta.modeling_deberta import DisentangledSelfAttention as AttentionV1
from transformers.models.deberta.modeling_deberta import build_relative_position as offsets_v1
from transformers.models.deberta_v2.modeling_deberta_v2 import (
    DisentangledSelfAttention as AttentionV2,
)
from transformers.models.deberta_v2.modeling_deberta_v2 import build_relative_position as offsets_v2
from transformers.models.deberta_v2.modeling_deberta_v2 import make_log_bucket_position

import posenc
from posenc import Encoding, Grid, Layout, attend
from posenc.encodings.score.deberta import Deberta, RelativeEmbeddings
from posenc.errors import ArgumentError
from posenc.testing.oracles import attention_by_loops
from tests.encodings.grids import GRIDS, inputs
from tests.support.exhaustive import in_turn


def make(**options: object) -> Deberta:
    torch.manual_seed(5)
    part = Deberta(**({"dim": 10, "heads": 6, "head_dim": 8} | options)).double()  # type: ignore[arg-type]
    with torch.no_grad():
        for parameter in part.parameters():
            parameter.normal_(std=0.5)
    return part


def log_bucket_by_loops(distance: int, buckets: int, most: int, clamp: str) -> int:
    """The signed bucket of i - j, with the power of the logarithm decided in fractions."""
    if clamp == "before":
        distance = max(1 - most, min(most - 1, distance))
    middle, size = buckets // 2, abs(distance)
    if size <= middle:
        return distance
    t = 0
    while Fraction(size, middle) ** (middle - 1) > Fraction(most - 1, middle) ** t and t < buckets:
        t += 1
    return (middle + t) * (1 if distance > 0 else -1)


VERSIONS = {
    "clipped at 3": {"max_distance": 3},
    "never clipped": {"max_distance": 50},
    "log buckets": {"max_distance": 12, "buckets": 6},
    "log buckets, rows limited": {"max_distance": 12, "buckets": 6, "clamp": "after"},
    "as released": {"max_distance": 12, "buckets": 6, "lookup": "released"},
}


@pytest.mark.parametrize(("grid", "options"), in_turn(2, GRIDS, VERSIONS))
def test_equals_loops(grid: Grid, options: dict[str, object]) -> None:
    q, k, v = inputs(grid)
    part = make(**options).requires_grad_(False)
    assert part.query is not None
    assert part.key is not None
    queries = part.query(part.relative.rows).view(-1, 6, 8)
    keys = part.key(part.relative.rows).view(-1, 6, 8)
    buckets, most = options.get("buckets"), int(str(options["max_distance"]))
    clamp = str(options.get("clamp", "before"))
    span = most if buckets is None else int(str(buckets))

    def delta(i: float, j: float) -> int:
        distance = round(i - j)
        if buckets is not None:
            distance = log_bucket_by_loops(distance, span, most, clamp)
        return max(0, min(2 * span - 1, distance + span))

    def logit(query: Tensor, key: Tensor, h: int, at: float, to: float) -> Tensor:
        back = delta(at, to) if options.get("lookup") == "released" else delta(to, at)
        total = query @ key + query @ keys[delta(at, to), h] + key @ queries[back, h]
        return total / math.sqrt(3 * 8)

    expected = attention_by_loops(q, k, v, grid, logit=logit)
    torch.testing.assert_close(attend(q, k, v, grid, Encoding(score=part)), expected)


def test_a_number_by_hand() -> None:
    # C = D = 1, P = (1, 2, 4, 8) for i - j = -2, -1, 0, 1; W_Q = 10 with bias 0, W_K = 100.
    part = make(dim=1, heads=1, head_dim=1, max_distance=2)
    assert part.query is not None
    assert part.key is not None
    assert part.query.bias is not None
    with torch.no_grad():
        part.relative.rows.copy_(torch.tensor([[1.0], [2.0], [4.0], [8.0]]))
        part.query.weight.fill_(10.0)
        part.query.bias.zero_()
        part.key.weight.fill_(100.0)
    q, k = torch.full((1, 1, 2, 1), 3.0).double(), torch.full((1, 1, 2, 1), 5.0).double()
    scores = part(q, k, Grid.of(Layout.sequence(2)), scale=1.0)[0, 0].tolist()
    # Query 0, key 1: i - j = -1 reads 2 there; j - i = 1 reads 8 back: 3·200 + 5·80.
    assert scores == [[3 * 400 + 5 * 40, 3 * 200 + 5 * 80], [3 * 800 + 5 * 20, 3 * 400 + 5 * 40]]


def test_position_to_content_reads_the_offset_from_the_key() -> None:
    """METHODS: the third term reads δ(j, i); released code reads δ(i, j) there."""
    grid = Grid.of(Layout.sequence(4))
    q = torch.zeros(1, 6, 4, 8, dtype=torch.float64)
    k = torch.randn(1, 6, 4, 8, dtype=torch.float64)
    for lookup, sign in (("paper", 1), ("released", -1)):
        part = make(max_distance=9, lookup=lookup)
        assert part.query is not None
        rows = part.query(part.relative.rows).view(18, 6, 8)
        scores = part(q, k, grid, scale=1.0)
        for i in range(4):
            for j in range(4):
                expected = (k[0, :, j] * rows[9 + sign * (j - i)]).sum(-1)
                torch.testing.assert_close(scores[0, :, i, j], expected)


def test_clamping_before_or_after_differs_beyond_minus_511() -> None:
    """FIELD: Microsoft clamps before bucketing, transformers after; rows 1 and 0 of 512."""
    ahead = torch.tensor([[510.0], [511.0], [512.0], [513.0], [10000.0]])
    rows = {
        clamp: RelativeEmbeddings(dim=1, buckets=256, clamp=clamp) for clamp in ("before", "after")
    }
    assert rows["before"].delta(ahead).tolist() == [1, 1, 1, 1, 1]
    assert rows["after"].delta(ahead).tolist() == [1, 1, 0, 0, 0]
    behind = torch.arange(0.0, 600.0).neg().unsqueeze(-1)
    assert torch.equal(rows["before"].delta(behind), rows["after"].delta(behind))


def test_log_buckets_equal_transformers() -> None:
    distances = torch.arange(-1500, 1501)
    theirs = make_log_bucket_position(distances, 256, 512).long()
    expected = (theirs + 256).clamp(0, 511)
    ours = RelativeEmbeddings(dim=1, buckets=256, clamp="after")
    assert torch.equal(ours.delta(-distances.float().unsqueeze(-1)), expected)


@pytest.mark.parametrize("clamp", ["before", "after"])
@pytest.mark.parametrize(("buckets", "most"), [(4, 6), (6, 100), (32, 128), (64, 40)])
def test_log_buckets_equal_fractions(buckets: int, most: int, clamp: str) -> None:
    distances = range(-2 * most, 2 * most + 1)
    ours = RelativeEmbeddings(dim=1, buckets=buckets, max_distance=most, clamp=clamp)  # type: ignore[arg-type]
    expected = [
        max(0, min(2 * buckets - 1, log_bucket_by_loops(d, buckets, most, clamp) + buckets))
        for d in distances
    ]
    got = ours.delta(-torch.tensor(distances, dtype=torch.float32).unsqueeze(-1))
    assert got.tolist() == expected


@pytest.mark.parametrize("length", [1, 5, 9])
def test_equals_transformers_version_1(length: int) -> None:
    torch.manual_seed(8)
    config = DebertaConfig(
        hidden_size=12,
        num_attention_heads=3,
        relative_attention=True,
        pos_att_type=["c2p", "p2c"],
        max_relative_positions=6,
    )
    theirs = AttentionV1(config).double().eval()
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    rows = torch.randn(12, 12, dtype=torch.float64, requires_grad=True)
    x = torch.randn(2, length, 12, dtype=torch.float64, requires_grad=True)
    mask = torch.ones(2, 1, length, length, dtype=torch.bool)
    relative = offsets_v1(x, x)
    expected, _ = theirs(x, mask, relative_pos=relative, rel_embeddings=rows)

    part = Deberta(dim=12, heads=3, head_dim=4, max_distance=6, lookup="released").double()
    assert part.query is not None
    assert part.key is not None
    with torch.no_grad():
        part.relative.rows.copy_(rows)
    part.query.load_state_dict(theirs.pos_q_proj.state_dict())
    part.key.load_state_dict(theirs.pos_proj.state_dict())
    q, k, v = theirs.transpose_for_scores(theirs.in_proj(x)).chunk(3, dim=-1)
    q = q + theirs.q_bias.view(1, 3, 1, 4)
    v = v + theirs.v_bias.view(1, 3, 1, 4)
    output = attend(q, k, v, Grid.of(Layout.sequence(length)), Encoding(score=part))
    got = output.transpose(1, 2).flatten(2)
    torch.testing.assert_close(got, expected)
    weight = torch.randn_like(got)
    mine = torch.autograd.grad(
        (got * weight).sum(),
        [x, part.relative.rows, part.query.weight, part.query.bias, part.key.weight],
    )
    wanted = torch.autograd.grad(
        (expected * weight).sum(),
        [x, rows, theirs.pos_q_proj.weight, theirs.pos_q_proj.bias, theirs.pos_proj.weight],
    )
    for gradient, reference in zip(mine, wanted, strict=True):
        torch.testing.assert_close(gradient, reference)


@pytest.mark.parametrize("projections", ["content", "own"])
@pytest.mark.parametrize("length", [1, 7, 30])
def test_equals_transformers_version_2(length: int, projections: str) -> None:
    """With the content's projections their gradients come from content and positions alike."""
    torch.manual_seed(9)
    config = DebertaV2Config(
        hidden_size=12,
        num_attention_heads=3,
        relative_attention=True,
        pos_att_type=["c2p", "p2c"],
        max_relative_positions=20,
        position_buckets=8,
        share_att_key=projections == "content",
    )
    theirs = AttentionV2(config).double().eval()
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    rows = torch.randn(16, 12, dtype=torch.float64, requires_grad=True)
    x = torch.randn(2, length, 12, dtype=torch.float64, requires_grad=True)
    mask = torch.ones(2, 1, length, length, dtype=torch.bool)
    relative = offsets_v2(x, x, bucket_size=8, max_position=20)
    expected, _ = theirs(x, mask, relative_pos=relative, rel_embeddings=rows)

    part = Deberta(
        dim=12,
        heads=3,
        head_dim=4,
        max_distance=20,
        buckets=8,
        clamp="after",
        projections=projections,  # type: ignore[arg-type]
        lookup="released",
    )
    layer = posenc.Attention(dim=12, heads=3, encoding=Encoding(score=part), bias=True).double()
    layer.query.load_state_dict(theirs.query_proj.state_dict())
    layer.key.load_state_dict(theirs.key_proj.state_dict())
    layer.value.load_state_dict(theirs.value_proj.state_dict())
    with torch.no_grad():
        layer.output.weight.copy_(torch.eye(12))
        layer.output.bias.zero_()
        part.relative.rows.copy_(rows)
    pairs = [(x, x), (part.relative.rows, rows)]
    pairs += [(layer.query.weight, theirs.query_proj.weight)]
    pairs += [(layer.query.bias, theirs.query_proj.bias)]
    pairs += [(layer.key.weight, theirs.key_proj.weight)]
    if part.query is not None and part.key is not None:
        part.query.load_state_dict(theirs.pos_query_proj.state_dict())
        with torch.no_grad():
            part.key.weight.copy_(theirs.pos_key_proj.weight)
        pairs += [(part.query.weight, theirs.pos_query_proj.weight)]
        pairs += [(part.query.bias, theirs.pos_query_proj.bias)]
        pairs += [(part.key.weight, theirs.pos_key_proj.weight)]
    got = layer(x, Layout.sequence(length))
    near = {"atol": 1e-5, "rtol": 1e-5}  # their scale is a float32 square root
    torch.testing.assert_close(got, expected, **near)
    weight = torch.randn_like(got)
    mine = torch.autograd.grad((got * weight).sum(), [a for a, _ in pairs])
    wanted = torch.autograd.grad((expected * weight).sum(), [b for _, b in pairs])
    for gradient, reference in zip(mine, wanted, strict=True):
        torch.testing.assert_close(gradient, reference, **near)


def test_queries_may_be_fewer_than_keys() -> None:
    """FIELD: transformers swaps two sizes if lengths differ; here rows are the whole's."""
    part = make(max_distance=12, buckets=6)
    q, k, v = inputs(Grid.of(Layout.sequence(9)))
    layout = Layout.sequence(9)
    whole = attend(q, k, v, Grid.of(layout), Encoding(score=part))
    some = Grid(layout.slice(2, 6), layout)
    torch.testing.assert_close(
        attend(q[:, :, 2:6], k, v, some, Encoding(score=part)), whole[:, :, 2:6]
    )


def test_content_projections_serve_grouped_heads() -> None:
    """Shared key heads: each group's key rows are repeated to its query heads."""
    part = Deberta(dim=12, heads=6, head_dim=2, max_distance=3, projections="content")
    layer = posenc.Attention(dim=12, heads=6, kv_heads=3, encoding=Encoding(score=part))
    keys, queries = part._tables(torch.arange(6))
    rows = part.relative.rows
    turned = rows[[5, 5, 4, 3, 2, 1]]
    torch.testing.assert_close(queries[5], turned @ layer.query.weight[10:12].T)
    torch.testing.assert_close(keys[5], rows @ layer.key.weight[4:6].T)
    torch.testing.assert_close(keys[4], keys[5])


def test_borrowed_projections_are_in_no_state_dict_twice() -> None:
    part = Deberta(dim=12, heads=3, head_dim=4, max_distance=3, projections="content")
    layer = posenc.Attention(dim=12, heads=3, encoding=Encoding(score=part))
    assert [name for name in layer.state_dict() if "encoding" in name] == [
        "encoding.score.relative.rows"
    ]
    copied, x = copy.deepcopy(layer), torch.randn(1, 5, 12)
    with torch.no_grad():
        layer.query.weight.zero_()  # type: ignore[union-attr]
    assert not torch.equal(copied(x, Layout.sequence(5)), layer(x, Layout.sequence(5)))
    rows = copied.encoding.score._tables(torch.arange(6))[1]  # type: ignore[union-attr, operator]
    expected = copied.query(part.relative.rows[[5, 5, 4, 3, 2, 1]])  # type: ignore[misc]
    torch.testing.assert_close(rows.transpose(0, 1).flatten(1), expected)


def test_borrowed_projections_must_be_there_and_fit() -> None:
    part = Deberta(dim=12, heads=3, head_dim=4, max_distance=3, projections="content")
    q = torch.zeros(1, 3, 2, 4)
    with pytest.raises(ArgumentError, match="projections"):
        part(q, q, Grid.of(Layout.sequence(2)), scale=1.0)
    with pytest.raises(ArgumentError, match="query"):
        posenc.Attention(dim=24, heads=3, head_dim=4, encoding=Encoding(score=part))
    posenc.Attention(dim=12, heads=3, encoding=Encoding(score=part))
    with pytest.raises(ArgumentError, match="other layer"):
        posenc.Attention(dim=12, heads=3, encoding=Encoding(score=part))


@pytest.mark.parametrize("projections", ["own", "content"])
def test_options_keep_the_laws(projections: str) -> None:
    options = {"buckets": 6, "max_distance": 20, "projections": projections, "normalize": True}
    subject = posenc.testing.Subject.of_entry("deberta", posenc.ENCODINGS["deberta"], **options)
    traced = {"compiles_once", "exports"} if projections == "own" else set()  # as by default
    posenc.testing.certify(subject, only=[law for law in posenc.testing.LAWS if law not in traced])


@pytest.mark.parametrize("options", [{}, {"buckets": 64}, {"lookup": "released"}])
def test_only_rows_that_the_grid_reaches_are_projected(options: dict[str, Any]) -> None:
    """32 tokens meet 63 of the 1,024 rows."""
    part = Deberta(dim=8, heads=2, head_dim=4, **options)
    counts: list[int] = []
    for layer in (part.query, part.key):
        assert layer is not None
        layer.register_forward_pre_hook(lambda _, operands: counts.append(operands[0].shape[0]))
    q, k = torch.randn(2, 2, 2, 32, 4)
    places = torch.arange(32.0)
    irregular = (Layout.at(places), Layout.at(0.9 * places), Layout.at(0.7 * places.flip(0)))
    for layout in (Layout.sequence(32, 7), Layout.padded([32, 20]), *irregular):
        grid = Grid.of(layout)
        wanted = part(q, k, grid, scale=1.0)
        part.lower(q, k, grid, scale=1.0)
        assert max(counts) <= 65
        with patch.object(torch.compiler, "is_compiling", lambda: True):
            torch.testing.assert_close(part(q, k, grid, scale=1.0), wanted)
        assert max(counts) > 100
        counts.clear()
