"""Latent attention against loops, its two ways of computing, its cache and what it refuses."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import posenc
from posenc import Cache, Encoding, Grid, Layout, create
from posenc.attention import LatentAttention, LayerCache
from posenc.errors import ArgumentError
from posenc.extension import log_n, longrope, yarn
from posenc.models.block import Block, FeedForward
from posenc.registry import ENCODINGS
from posenc.testing.oracles import attention_by_loops

HEADS, RANK, PLAIN, ROTARY, VALUE = 3, 7, 5, 4, 6
SIZES: dict[str, Any] = {
    "dim": 12,
    "heads": HEADS,
    "kv_lora_rank": RANK,
    "qk_nope_head_dim": PLAIN,
    "qk_rope_head_dim": ROTARY,
    "v_head_dim": VALUE,
}
LENGTH = 6

LAYOUTS = {
    "a sequence": Layout.sequence(LENGTH, 3),
    "padded": Layout.padded([LENGTH, 4], side="left"),
    "packed": Layout.packed([4, 2]),
    "irregular": Layout.at(torch.tensor([0.0, 0.5, 2.0, 2.25, 7.0, 40.0])),
}

ROTARIES = [
    name
    for name, entry in ENCODINGS.items()
    if "query_key" in entry.sites and name not in ("rope_pp", "swin_v2")
]


def make(encoding: Encoding | None = None, **options: Any) -> LatentAttention:
    """A layer in float64 whose norms have weights."""
    torch.manual_seed(0)
    encoding = create("rope", head_dim=ROTARY, pairing="adjacent") if encoding is None else encoding
    layer = LatentAttention(**SIZES | {"encoding": encoding, "causal": True} | options).double()
    for norm in layer.modules():
        if isinstance(norm, nn.RMSNorm):
            nn.init.uniform_(norm.weight, 0.5, 2.0)
    return layer.eval()


def vectors(rows: int = 2, length: int = LENGTH) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(rows, length, 12, dtype=torch.float64, generator=generator)


def absorbing(monkeypatch: pytest.MonkeyPatch, way: bool) -> None:
    """Have layers take one of the two ways, whatever is faster."""
    monkeypatch.setattr(LatentAttention, "_absorbs", lambda *_: way)


def normalised(x: Tensor, norm: nn.Module) -> Tensor:
    assert isinstance(norm, nn.RMSNorm)
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * norm.weight


def rotated(x: Tensor, layout: Layout) -> Tensor:
    """Adjacent pairs as complex numbers, turned by p · 10000^(-2t/D)."""
    speeds = [10000 ** (-2 * t / ROTARY) for t in range(ROTARY // 2)]
    angles = layout.positions.double() * torch.tensor(speeds, dtype=torch.float64)
    pairs = torch.view_as_complex(x.contiguous().view(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten(-2)


def by_loops(layer: LatentAttention, x: Tensor, layout: Layout) -> Tensor:
    """The formulas of the paper: each head's keys and values written out."""
    grid = Grid.of(layout, causal=layer.causal, window=layer.window)
    down = x @ layer.down.weight.T
    compressed, shared = normalised(down[..., :RANK], layer.norm), down[..., RANK:]
    low = x
    if isinstance(layer.query_down, nn.Linear):
        low = normalised(x @ layer.query_down.weight.T, layer.query_norm)
    shared = rotated(shared, layout)
    outputs = []
    for h in range(HEADS):
        width = PLAIN + ROTARY
        q = low @ layer.query.weight[h * width : (h + 1) * width].T
        q = torch.cat([q[..., :PLAIN], rotated(q[..., PLAIN:], layout)], dim=-1).unsqueeze(1)
        own = compressed @ layer.up.weight[h * (PLAIN + VALUE) : (h + 1) * (PLAIN + VALUE)].T
        k = torch.cat([own[..., :PLAIN], shared], dim=-1).unsqueeze(1)
        v = own[..., PLAIN:].unsqueeze(1)
        outputs.append(attention_by_loops(q, k, v, grid, scale=(PLAIN + ROTARY) ** -0.5)[:, 0])
    return torch.cat(outputs, dim=-1) @ layer.output.weight.T


@pytest.mark.parametrize("way", [True, False], ids=["absorbed", "expanded"])
@pytest.mark.parametrize("where", LAYOUTS)
@pytest.mark.parametrize(
    "options",
    [{}, {"q_lora_rank": 8, "window": 3}, {"causal": False}],
    ids=["causal", "low rank, window", "both sides"],
)
def test_equals_loops(
    options: dict[str, Any], where: str, way: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    absorbing(monkeypatch, way)
    layer, layout, x = make(**options), LAYOUTS[where], vectors()
    seen = torch.ones(2, LENGTH, dtype=torch.bool) if layout.valid is None else layout.valid
    with torch.no_grad():
        expected = by_loops(layer, x, layout)
        got = layer(x.masked_fill(~seen.unsqueeze(-1), torch.nan), layout)
    torch.testing.assert_close(got[seen], expected[seen], rtol=1e-10, atol=1e-10)


def test_two_tokens_by_hand() -> None:
    """Logits (√2 + cos 1)/√3 and 1/√3 of the second token, values √2 and 0."""
    rope = create("rope", head_dim=2, pairing="adjacent")
    widths = {"qk_nope_head_dim": 1, "qk_rope_head_dim": 2, "v_head_dim": 1}
    sizes: dict[str, Any] = {"dim": 2, "heads": 1, "kv_lora_rank": 2} | widths
    layer = LatentAttention(encoding=rope, bias=True, causal=True, **sizes)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.zero_()
        layer.norm.weight.fill_(1.0)
        layer.down.weight[:2] = torch.eye(2)  # c = √2 x
        layer.down.bias[2] = 1.0  # b = (1, 0)
        layer.query.weight[:2] = 1.0  # q = 1 and r = (1, 0)
        layer.up.weight[:, 0] = 1.0  # k = v = c's first
        layer.output.weight[0, 0] = 1.0
        got = layer(torch.eye(2).unsqueeze(0), Layout.sequence(2))[0, :, 0]
    first, second = (math.sqrt(2) + math.cos(1)) / math.sqrt(3), 1 / math.sqrt(3)
    share = math.exp(first) / (math.exp(first) + math.exp(second))
    assert share * math.sqrt(2) == pytest.approx(0.8972, abs=1e-4)
    assert got.tolist() == pytest.approx([math.sqrt(2), share * math.sqrt(2)], abs=1e-5)


@pytest.mark.parametrize("name", ROTARIES)
def test_every_transform_of_queries_and_keys_serves(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Absorbed, expanded and cached are the same, and positions matter."""
    encoding = create(name, dim=12, heads=HEADS, head_dim=8, causal=True)
    part = encoding.query_key
    assert part is not None
    axes = min(part.axes or (1,))
    layer = make(encoding, qk_rope_head_dim=8)
    positions = torch.arange(LENGTH * axes, dtype=torch.float64).view(1, LENGTH, axes).sqrt()
    layout = Layout(positions, torch.arange(LENGTH).unsqueeze(0))
    x, outputs = vectors(), []
    with torch.no_grad():
        for way in (True, False):
            absorbing(monkeypatch, way)
            cache = LayerCache()
            steps = [
                layer(x[:, begin:end], layout.slice(begin, end), cache=cache)
                for begin, end in ((0, 3), (3, 4), (4, LENGTH))
            ]
            outputs += [layer(x, layout), torch.cat(steps, dim=1)]
        for other in outputs[1:]:
            torch.testing.assert_close(other, outputs[0], rtol=1e-10, atol=1e-10)
        moved = layer(x, layout.with_positions(positions * positions))
    reads_tokens = name in ("repo", "selective_rope", "grape_contextual")
    assert torch.allclose(moved, outputs[0]) == reads_tokens


def test_gradients_are_the_same_either_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of loops too, through a cache too."""
    layer, x = make(q_lora_rank=8), vectors().requires_grad_()
    wanted, layout = [x, *layer.parameters()], Layout.sequence(LENGTH)
    weight = vectors(2, LENGTH).sin()
    expected = torch.autograd.grad((by_loops(layer, x, layout) * weight).sum(), wanted)
    for way, begin in product((True, False), (0, 4)):
        absorbing(monkeypatch, way)
        cache = LayerCache()
        parts = [layer(x[:, :begin], layout.slice(0, begin), cache=cache)] if begin else []
        parts.append(layer(x[:, begin:], layout.slice(begin, LENGTH), cache=cache))
        loss = (torch.cat(parts, dim=1) * weight).sum()
        got = torch.autograd.grad(loss, wanted)
        torch.testing.assert_close(got, expected, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("rotates", [True, False])
def test_a_cache_has_one_latent_and_one_key_for_all_heads(rotates: bool) -> None:
    """In place without gradients; rows are chosen and tokens forgotten as in any cache."""
    layer = make(None if rotates else Encoding())
    x, cache, layout = vectors(3, 9), Cache(layers=1), Layout.sequence(9)
    rows = torch.tensor([2, 0])
    with torch.no_grad():
        layer(x[:, :5], layout.slice(0, 5), cache=cache[0])
        for at in range(5, 8):
            layer(x[:, at : at + 1], layout.slice(at, at + 1), cache=cache[0])
        keys, values = cache[0].keys, cache[0].values
        assert keys is not None
        assert values is not None
        assert keys.numel() + values.numel() == 3 * 8 * (RANK + ROTARY)
        assert cache[0].transformed == rotates
        grown = copy.copy(cache[0])
        cache.select(rows)
        last = layer(x[rows, 8:], layout.slice(8, 9), cache=cache[0])
        torch.testing.assert_close(last, layer(x[rows], layout)[:, 8:], rtol=1e-10, atol=1e-10)
        windowed = copy.deepcopy(layer)
        windowed.window = 4
        grown.truncate(3)
        assert grown.length == 3
        last = layer(x[:, 8:], layout.slice(8, 9), cache=grown)
        expected = windowed(x, layout)[:, 8:]
        torch.testing.assert_close(last, expected, rtol=1e-10, atol=1e-10)


def test_few_queries_read_latents_and_many_expand_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """The way with fewer products, counted for heads in loops."""
    heads: list[int] = []

    def spy(q: Tensor, k: Tensor, *args: Any, **options: Any) -> Any:
        heads.append(k.shape[1])
        return posenc.attend(q, k, *args, **options)

    monkeypatch.setattr("posenc.attention.latent.attend", spy)
    layer = make(kv_lora_rank=16, backend="reference")
    x, way = vectors(1, 40), {1: "absorbed", HEADS: "expanded"}
    taken = set()
    for past, new in ((0, 8), (8, 1), (30, 3), (30, 9), (8, 20), (1, 1), (0, 1)):
        cache = LayerCache()
        with torch.no_grad():
            if past:
                layer(x[:, :past], Layout.sequence(past), cache=cache)
            layer(x[:, past : past + new], Layout.sequence(new, past), cache=cache)
        keys = past + new
        cost = {
            "absorbed": new * 16 * (PLAIN + VALUE) + new * keys * (16 + ROTARY + 16),
            "expanded": keys * 16 * (PLAIN + VALUE) + new * keys * (PLAIN + ROTARY + VALUE),
        }
        assert cost[way[heads[-1]]] == min(cost.values()), (past, new)
        taken.add(heads[-1])
    assert taken == {1, HEADS}


class Adapter(nn.Linear):
    """A layer that computes more than the product with its weight."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).sin()


@pytest.mark.parametrize("kind", ["module", "hook"])
def test_what_is_in_the_place_of_the_expansion_is_called(kind: str) -> None:
    layer, x = make(kv_lora_rank=16), vectors(1, 9)
    assert layer._absorbs(1, 9)
    if kind == "module":
        layer.up = Adapter(16, layer.up.out_features, bias=False).double()
    else:
        layer.up.register_forward_hook(lambda _, args, output: output.sin())
    cache = LayerCache()
    with torch.no_grad():
        layer(x[:, :8], Layout.sequence(8), cache=cache)
        last = layer(x[:, 8:], Layout.sequence(1, 8), cache=cache)
        whole = layer(x, Layout.sequence(9))
    torch.testing.assert_close(last, whole[:, 8:], rtol=1e-10, atol=1e-10)


def test_factors_of_logits_are_of_unrotated_features_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The temperature squared of YaRN and LongRoPE, and log-n's of each query."""
    rope, x, layout = create("rope", head_dim=ROTARY), vectors(1), Layout.sequence(LENGTH)
    cold = yarn(rope, factor=16, length=64, temperature=1.0)
    hot = yarn(rope, factor=16, length=64)
    squared = (0.1 * math.log(16) + 1) ** 2
    usual = (PLAIN + ROTARY) ** -0.5
    varying = [longrope(rope, factor=2, length=4, temperature=m) for m in (1.0, 1.5)]
    for way in (True, False):
        absorbing(monkeypatch, way)
        expected = make(cold, scale=usual * squared)(x, layout)
        torch.testing.assert_close(make(hot)(x, layout), expected, rtol=1e-10, atol=1e-10)
        expected = make(varying[0], scale=usual * 1.5**2)(x, layout)
        torch.testing.assert_close(make(varying[1])(x, layout), expected, rtol=1e-10, atol=1e-10)
        scaled = make(log_n(hot, length=2, growth=0.7))(x, layout)
        for at in range(LENGTH):
            factor = 1 + 0.7 * max(0.0, math.log((at + 1) / 2))
            expected = make(cold, scale=usual * squared * factor)(x, layout)[:, at]
            torch.testing.assert_close(scaled[:, at], expected, rtol=1e-10, atol=1e-10)


def test_compiled_in_one_graph_equals_eager() -> None:
    layer, x = make(kv_lora_rank=16), vectors(1, 9)
    keys = torch.randn(1, 1, 8, 16 + ROTARY, dtype=torch.float64)

    def step(x: Tensor, keys: Tensor) -> Tensor:
        cache = LayerCache()
        cache.keys, cache.values, cache.transformed = keys, keys[..., :0], True
        cache.layout = Layout.sequence(8)
        out: Tensor = layer(x, Layout.sequence(1, 8), cache=cache)
        return out

    def whole(x: Tensor) -> Tensor:
        out: Tensor = layer(x, Layout.sequence(9))
        return out

    functions: list[tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = [
        (whole, (x,)),
        (step, (x[:, 8:], keys)),
    ]
    for function, arguments in functions:
        compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(*arguments), function(*arguments))


def test_copies_and_states_have_the_same_weights() -> None:
    layer, x, layout = make(q_lora_rank=8, bias=True), vectors(), Layout.sequence(LENGTH)
    names = {name.rsplit(".", 1)[0] for name in layer.state_dict()}
    assert names == {"query_down", "query_norm", "query", "down", "norm", "up", "output"}
    assert {n for n in layer.state_dict() if n.endswith("bias")} == {
        "query_down.bias",
        "down.bias",
        "output.bias",
    }
    expected = layer(x, layout)
    loaded = make(q_lora_rank=8, bias=True)
    loaded.load_state_dict(layer.state_dict())
    for other in (copy.deepcopy(layer), loaded):
        with torch.no_grad():
            torch.testing.assert_close(other(x, layout), expected)
    twin = copy.deepcopy(layer)
    with torch.no_grad():
        twin.up.weight.zero_()
    torch.testing.assert_close(layer(x, layout), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype) -> None:
    """By its own weights and under autocast: the cache is half too, positions are not."""
    layer, x, far = make(), vectors(1, 9), 50_000
    expected = layer(x, Layout.sequence(9, far))
    halved, single = copy.deepcopy(layer).to(dtype), copy.deepcopy(layer).float()
    for used, given, automatic in ((halved, x.to(dtype), False), (single, x.float(), True)):
        cache = LayerCache()
        with torch.no_grad(), torch.autocast("cpu", dtype, enabled=automatic):
            first = used(given[:, :8], Layout.sequence(8, far), cache=cache)
            last = used(given[:, 8:], Layout.sequence(1, far + 8), cache=cache)
        assert cache.keys is not None
        assert cache.keys.dtype == dtype
        got = torch.cat([first, last], dim=1).double()
        torch.testing.assert_close(got, expected, rtol=0.05, atol=0.05)


def test_dropout_in_training_only() -> None:
    layer, x, layout = make(dropout=0.5), vectors(), Layout.sequence(LENGTH)
    torch.testing.assert_close(layer(x, layout), layer(x, layout))
    layer.train()
    assert not torch.allclose(layer(x, layout), layer(x, layout))


def test_a_block_takes_it() -> None:
    feed_forward = FeedForward(dim=12, hidden=8).double()
    block = Block(dim=12, attention=make(), feed_forward=feed_forward).double()
    x, cache = vectors(), LayerCache()
    with torch.no_grad():
        whole = block(x, Layout.sequence(LENGTH))
        block(x[:, :4], Layout.sequence(4), cache=cache)
        rest = block(x[:, 4:], Layout.sequence(2, 4), cache=cache)
    torch.testing.assert_close(rest, whole[:, 4:], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("alibi", "expected one that transforms .* got Alibi"),
        ("rotated_values", "got RotatedValues"),
        ("rope_pp", "got RopePp"),
        ("swin_v2", "got SwinV2Bias, CosineLogits"),
    ],
)
def test_encodings_that_no_latent_has_are_refused(name: str, message: str) -> None:
    other = create(name, heads=4, head_dim=ROTARY, causal=False)
    with pytest.raises(ArgumentError, match=message):
        make(other, causal=False, heads=4)
    layer = make(causal=False, heads=4)
    layer.encoding = other
    with pytest.raises(ArgumentError, match=message):
        layer(vectors(), Layout.sequence(LENGTH))


def test_sizes_that_do_not_fit() -> None:
    with pytest.raises(ArgumentError, match="kv_lora_rank: expected a whole number"):
        make(kv_lora_rank=1.5)
    with pytest.raises(ArgumentError, match="for head_dim=4"):
        make(create("rope", head_dim=8))
    with pytest.raises(ArgumentError, match="B, 6, 12"):
        make()(vectors()[..., :8], Layout.sequence(LENGTH))
    with pytest.raises(ArgumentError, match="cache"):
        make()(vectors(), Layout.sequence(LENGTH), cache=Cache(layers=1))
    for cache in (None, LayerCache()):
        with pytest.raises(ArgumentError, match="1 axes"):
            make()(vectors(), Layout.image(2, 3), cache=cache)
