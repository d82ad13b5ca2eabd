"""Panels of the theory's pictures, computed by the library."""

from __future__ import annotations

import math
from collections.abc import Callable
from html import escape

import torch
from torch import Tensor

import posenc
from posenc import Grid, Layout
from posenc.encodings.query_key.rope import Rope
from posenc.extension import extend
from posenc.extension.banded import BandedRope
from posenc.lab.evaluation.probe import ConvFeatures
from posenc.lab.visualization.panels import Curves, Heat, Panel, Trail

QUERY, KEY, DISTANCE, POSITION = "query", "key", "distance in tokens", "position"


def order() -> list[Panel]:
    words = torch.tensor([0.5, 0.6, 0.7])
    maps = torch.stack([words.outer(words), words.outer(words + torch.arange(3))])
    names = ("without positions", "positions on the keys")
    return [Heat(title="products", maps=maps, names=names, rows=QUERY, columns=KEY)]


def absolute() -> list[Panel]:
    waves = posenc.create("sinusoidal", dim=32).embedding.table(torch.arange(64.0))
    noise = torch.randn(64, 32, generator=torch.Generator().manual_seed(0))
    products = [table @ table[0] / table[0].square().sum() for table in (waves, noise)]
    return [
        Heat(title="sinusoidal vectors", maps=waves[None], rows=POSITION, columns="feature"),
        Curves(
            title="by distance",
            x=torch.arange(64.0),
            x_label=DISTANCE,
            values=torch.stack(products),
            y_label="product",
            names=("sinusoidal", "random, as a learned table begins"),
        ),
    ]


def masks() -> list[Panel]:
    tokens = Layout.sequence(12)
    grids = (
        Grid.of(tokens, causal=True),
        Grid.of(tokens, causal=True, window=4),
        Grid.of(Layout.packed([7, 5]), causal=True),
        Grid(Layout.sequence(4, 8), tokens, causal=True),
    )
    maps = torch.zeros(4, 12, 12)
    for seen, grid in zip(maps, grids, strict=True):
        seen[12 - grid.query.length :] = grid.visible[0, 0].float()
    names = ("causal", "window", "packed", "generation")
    return [Heat(title="visible pairs", maps=maps, names=names, rows=QUERY, columns=KEY)]


def terms() -> list[Panel]:
    torch.manual_seed(0)
    x = torch.randn(24, 32)
    p = posenc.create("sinusoidal", dim=32).embedding.table(torch.arange(24.0))
    maps = torch.stack([x @ x.T, x @ p.T, p @ x.T, p @ p.T]).clamp(-20, 20)
    names = ("content to content", "content to position")
    names += ("position to content", "position to position")
    return [Heat(title="four terms", maps=maps, names=names, rows=QUERY, columns=KEY)]


def rope() -> list[Panel]:
    one, many = (_cosines(2), _cosines(64))
    q = torch.ones(1, 1, 48, 64) / 8
    grid = Grid.of(Layout.sequence(48), causal=False)
    rotated, keys = posenc.create("rope", head_dim=64).query_key(q, q, grid)
    return [
        Heat(title="32 pairs", maps=(rotated @ keys.mT)[0], rows=QUERY, columns=KEY),
        Curves(
            title="by distance",
            x=torch.arange(64.0),
            x_label=DISTANCE,
            values=torch.stack([one[:64], many[:64]]),
            y_label="product",
            names=("one pair", "mean of 32 pairs"),
        ),
    ]


def _cosines(head_dim: int, count: int = 257) -> Tensor:
    """Products of equal unit contents by distance, as RoPE rotates them."""
    x = torch.ones(1, 1, count, head_dim, dtype=torch.float64) / math.sqrt(head_dim)
    at_0 = Layout.at(torch.zeros(1))
    grid = Grid(query=at_0, key=Layout.sequence(count), causal=False)
    q, k = posenc.create("rope", head_dim=head_dim).query_key(x[:, :, :1], x, grid)
    return (q @ k.mT)[0, 0, 0].float()


def decay() -> list[Panel]:
    theta = posenc.create("rope", head_dim=128).query_key.frequencies(like=torch.empty(0))
    distance = torch.arange(257.0)
    waves = torch.polar(torch.ones(257, 64), distance.unsqueeze(1) * theta)
    bound = waves.cumsum(1).abs().mean(1) / 32.5
    law = 1 - (distance.clamp(min=1).log() + 0.5772) / math.log(10000)
    law[:4] = torch.nan
    return [
        Curves(
            title="relative to distance 0",
            x=distance,
            x_label=DISTANCE,
            values=torch.stack([bound, _cosines(128), law.nan_to_num(1.0)]),
            y_label="",
            names=("bound", "equal contents", "logarithmic law"),
        )
    ]


def digits() -> list[Panel]:
    positions = torch.arange(81.0)
    radix = posenc.create("radix", dim=4, base=3, digits=4).embedding
    written = radix.digits_of(positions).T.flip(0) / 2.0
    speeds = 2 * math.pi / 3 ** torch.arange(4.0, 0, -1)
    waves = torch.cos(speeds.unsqueeze(1) * positions)
    return [
        Heat(title="digits in base 3", maps=written[None], rows="digit", columns=POSITION),
        Heat(title="cosines of pairs", maps=waves[None], rows="pair", columns=POSITION),
    ]


def stretching() -> list[Panel]:
    rope = posenc.create("rope", head_dim=128)
    names = ("interpolate", "ntk", "ntk_by_parts", "yarn")
    lengths = {"ntk_by_parts": 4096, "yarn": 4096}
    parts = [extend(rope, name, factor=4, length=lengths.get(name)).query_key for name in names]
    shares = [[1 / d for d in part.divisors or ()] for part in parts if isinstance(part, Rope)]
    methods = ("rerope", "leaky_rerope", "self_extend")
    distances = [_distances(name) for name in methods]
    return [
        Curves(
            title="share of the frequency",
            x=torch.arange(64.0),
            x_label="pair",
            values=torch.tensor(shares),
            y_label="",
            names=names,
        ),
        Curves(
            title="distance that is rotated by",
            x=torch.arange(256.0),
            x_label=DISTANCE,
            values=torch.stack(distances),
            y_label="",
            names=methods,
        ),
    ]


def _distances(name: str) -> Tensor:
    """Distances that the last of 256 queries is rotated by, the nearest key first."""
    score = extend(posenc.create("rope", head_dim=2), name, factor=4, length=64).score
    assert isinstance(score, BandedRope)
    last = Layout.sequence(1, start=255)
    grid = Grid(query=last, key=Layout.sequence(256), causal=True)
    band = score.band_of(grid)[0, 0]
    by_band = [
        (moved.query[0, 0] - (0 if moved.key is None else moved.key[0])).expand(256)
        for moved in score.moved(grid)
    ]
    return torch.stack(by_band)[band, torch.arange(256)].flip(0)


def dynamics() -> list[Panel]:
    lengths = []
    for step in ("linear", "free"):
        torch.manual_seed(0)
        part = posenc.create("recursive", dim=16, step=step).embedding
        with torch.no_grad():
            part.recursion.weight.add_(0.005 * torch.randn(16, 16))
            lengths.append(part.table(Layout.sequence(257))[0].norm(dim=-1).float())
    torch.manual_seed(3)
    floater = posenc.create("floater", dim=8, start="random", unit=0.3, step=0.25).embedding
    with torch.no_grad():
        path = floater.path(torch.arange(0, 12, 0.5).unsqueeze(0))[0].float()
    return [
        Curves(
            title="size of the vector",
            x=torch.arange(257.0),
            x_label=POSITION,
            values=torch.stack(lengths),
            y_label="",
            names=("rotation", "unconstrained"),
        ),
        Trail(
            title="solution of FLOATER's equation",
            points=path[:, :2],
            x_label="feature 0",
            y_label="feature 1",
        ),
    ]


def complex_order() -> list[Panel]:
    encoding = posenc.create("complex_order", dim=24)
    x = torch.ones(1, 48, 12, dtype=torch.complex64)
    with torch.no_grad():
        phases = encoding.embed(x, Layout.sequence(48))[0].angle().T
    return [
        Heat(title="phase", maps=phases[None], rows="feature", columns=POSITION, values="angles")
    ]


def padding() -> list[Panel]:
    maps = []
    images = torch.rand(256, 3, 24, 24, generator=torch.Generator().manual_seed(0))
    for kind in ("zeros", "circular"):
        torch.manual_seed(1)
        with torch.no_grad():
            seen = ConvFeatures(width=24, padding=kind)(images).mean(0)
        busiest = seen.flatten(1).mean(1).argmax()
        maps.append(seen[busiest])
    names = ("zero padding", "circular padding")
    return [Heat(title="mean feature", maps=torch.stack(maps), names=names, rows="y", columns="x")]


def images() -> list[Panel]:
    window = posenc.create("swin", heads=1, window=(2, 3)).score.offsets
    index = window.index(Grid.of(Layout.image(2, 3), causal=False).offset[0])
    sines = posenc.create("sine2d", dim=64)
    vectors = sines.embed(torch.zeros(1, 64, 64), Layout.image(8, 8))[0]
    near = (vectors @ vectors[27] / vectors[27].square().sum()).reshape(1, 8, 8)
    return [
        Heat(title="Swin's index", maps=index[None].float(), rows=QUERY, columns=KEY),
        Heat(title="similarity to row 3, column 3", maps=near, rows="y", columns="x"),
    ]


PICTURES: dict[str, Callable[[], list[Panel]]] = {
    "order": order,
    "absolute": absolute,
    "masks": masks,
    "terms": terms,
    "rope": rope,
    "decay": decay,
    "digits": digits,
    "stretching": stretching,
    "dynamics": dynamics,
    "complex-order": complex_order,
    "padding": padding,
    "images": images,
}

BOXES = (
    *(("tokens", 10, 62), ("q, k", 190, 20), ("v", 190, 104)),
    *(("logits", 340, 20), ("weights", 480, 20), ("output", 480, 104)),
)
ARROWS = (
    *((90, 70, 190, 40), (90, 86, 190, 118), (270, 34, 340, 34), (420, 34, 480, 34)),
    *((520, 48, 520, 104), (270, 118, 480, 118)),
)
MARKS = (("embedding", 50, 34), ("query_key", 305, 12), ("score", 380, 74), ("value", 375, 144))


def places(words: dict[str, str]) -> str:
    """The diagram of the four places."""
    parts = [
        f'<line x1="{a}" y1="{b}" x2="{c}" y2="{d}" marker-end="url(#places-tip)"/>'
        for a, b, c, d in ARROWS
    ]
    for name, x, y in BOXES:
        parts.append(f'<rect x="{x}" y="{y}" width="80" height="28" rx="5"/>')
        word = escape(words.get(name, name))
        parts.append(f'<text x="{x + 40}" y="{y + 19}">{word}</text>')
    parts += [f'<text class="place" x="{x}" y="{y}">{name}</text>' for name, x, y in MARKS]
    return f"""<svg viewBox="0 0 572 152" width="572" aria-hidden="true" class="places">
<style>.places rect {{ fill: none; stroke: currentColor; }}
.places line {{ stroke: currentColor; }} .places #places-tip path {{ fill: currentColor; }}
.places text {{ fill: currentColor; text-anchor: middle; font-size: 14px; }}
.places .place {{ font-weight: 600; fill: var(--pst-color-primary, #0a65f5); }}
.places {{ overflow: visible; }}
@media (max-width: 36rem) {{ .places text {{ font-size: 18px; }} }}</style>
<defs><marker id="places-tip" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8"
 markerHeight="8" orient="auto"><path d="M0,0L8,4L0,8z"/></marker></defs>
{"".join(parts)}</svg>"""


CHINESE = {
    QUERY: "查询",
    KEY: "键",
    DISTANCE: "距离（词元）",
    POSITION: "位置",
    "products": "内积",
    "without positions": "无位置信息",
    "positions on the keys": "键侧加位置",
    "sinusoidal vectors": "正弦位置向量",
    "sinusoidal": "正弦位置编码",
    "random, as a learned table begins": "随机，可学习位置编码的初始状态",
    "visible pairs": "可见的配对",
    "causal": "因果",
    "window": "窗口",
    "packed": "打包",
    "generation": "生成",
    "content to content": "内容–内容",
    "content to position": "内容–位置",
    "position to content": "位置–内容",
    "position to position": "位置–位置",
    "four terms": "四项",
    "32 pairs": "32 对特征",
    "by distance": "随距离变化",
    "product": "内积",
    "one pair": "一对特征",
    "mean of 32 pairs": "32 对的平均",
    "relative to distance 0": "相对于距离 0",
    "bound": "上界",
    "equal contents": "内容相同",
    "logarithmic law": "对数律",
    "digits in base 3": "三进制数位",
    "cosines of pairs": "各对特征的余弦",
    "digit": "数位",
    "pair": "特征对",
    "share of the frequency": "保留的频率比例",
    "distance that is rotated by": "实际旋转的距离",
    "size of the vector": "向量的模长",
    "rotation": "旋转",
    "unconstrained": "无约束",
    "solution of FLOATER's equation": "FLOATER 方程的解",
    "feature 0": "特征 0",
    "feature 1": "特征 1",
    "phase": "相位",
    "feature": "特征",
    "mean feature": "平均特征",
    "zero padding": "零填充",
    "circular padding": "循环填充",
    "y": "y",
    "x": "x",
    "Swin's index": "Swin 的索引",
    "similarity to row 3, column 3": "与第 3 行第 3 列的相似度",
    "tokens": "词元向量",
    "logits": "logit",
    "weights": "权重",
    "output": "输出",
}
"""Labels in Chinese, by the English ones."""
