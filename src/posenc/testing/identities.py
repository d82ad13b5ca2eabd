"""Identities between encodings whose formulas coincide.

Each identity is a function without arguments that raises ``LawBroken``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from posenc.attention import Attention, attend
from posenc.encoding import Encoding
from posenc.encodings.embedding.sinusoidal import Sinusoidal
from posenc.encodings.query_key.rope import Rope
from posenc.encodings.score.alibi import Alibi, geometric_slopes
from posenc.encodings.score.kerple import Kerple
from posenc.encodings.score.sandwich import Sandwich
from posenc.encodings.score.shaw import shaw
from posenc.encodings.score.t5 import T5
from posenc.grid import Grid
from posenc.layout import Layout
from posenc.testing.subject import LawBroken, agree, named, seeded

Identity = Callable[[], None]

IDENTITIES: dict[str, Identity] = {}
"""All identities by name."""

LENGTH, HEADS, WIDTH = 9, 3, 8
EXACT = 1e-9
ORDER = torch.tensor([3, 0, 6, 1, 8, 5, 2, 7, 4])


def identity(check: Identity) -> Identity:
    """Add an identity to ``IDENTITIES``."""
    IDENTITIES[check.__name__] = named(check)
    return IDENTITIES[check.__name__]


def _draw(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def _operands() -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (_draw(1, HEADS, LENGTH, WIDTH, seed=seed) for seed in range(3))
    return q, k, v


def _times() -> Layout:
    return Layout.at(torch.arange(LENGTH, dtype=torch.float64))


def _differ(label: str, got: Tensor, other: Tensor) -> None:
    if torch.allclose(got, other, atol=1e-4):
        raise LawBroken(f"{label} makes no difference")


@identity
def continuous_sinusoid_is_discrete() -> None:
    """The sinusoid of real positions equals the table's rows at integer positions."""
    sinusoid = Sinusoidal(dim=WIDTH)
    x = torch.zeros(1, LENGTH, WIDTH, dtype=torch.float64)
    table = sinusoid(x, _times())
    discrete = sinusoid(x, Layout.sequence(LENGTH))
    agree("the table", table, discrete, tolerance=1e-5)
    between = sinusoid(x[:, :1], Layout.at(torch.tensor([0.5], dtype=torch.float64)))
    _differ("position 0.5 instead of 0", between, table[:, :1])


@identity
def continuous_rope_is_discrete() -> None:
    """RoPE of real positions equals RoPE of a sequence at integer positions."""
    q, k, v = _operands()
    rope = Encoding(query_key=Rope(head_dim=WIDTH))
    outputs = [
        attend(q, k, v, Grid.of(layout, causal=True), rope)
        for layout in (_times(), Layout.sequence(LENGTH))
    ]
    agree("attention", *outputs, tolerance=1e-5)


@identity
def sinusoid_shift_is_a_rotation() -> None:
    """A shift by k multiplies every sinusoid by the same matrix."""
    sinusoid = Sinusoidal(dim=WIDTH, base=50.0)  # a larger base makes the fit ill-conditioned
    table = sinusoid.table(torch.arange(60, dtype=torch.float64))
    first, rest = table[: WIDTH + 2], table[WIDTH + 2 : -5]
    rotation = torch.linalg.lstsq(first, table[5 : WIDTH + 7]).solution
    agree("rows 5 further", rest @ rotation, table[WIDTH + 7 :])
    product = rotation @ rotation.mT
    agree("the matrix", product, torch.eye(WIDTH).double())


@identity
def rope_pairings_are_permutations() -> None:
    """RoPE with half and with adjacent pairs are equal up to the order of features."""
    q, k, v = _operands()
    order = torch.arange(WIDTH).view(2, -1).mT.flatten()  # 0 4 1 5 …: halves made neighbours
    grid = Grid.of(_times(), causal=True)
    half = attend(q, k, v, grid, Encoding(query_key=Rope(head_dim=WIDTH)))
    adjacent = Encoding(query_key=Rope(head_dim=WIDTH, pairing="adjacent"))
    permuted = attend(q[..., order], k[..., order], v, grid, adjacent)
    agree("attention", permuted, half, tolerance=EXACT)


@identity
def rope_product_is_sandwich_similarity() -> None:
    """⟨R_m 1, R_n 1⟩ of vectors of ones is twice Sandwich's sum of cosines."""
    one = torch.ones(1, 1, LENGTH, WIDTH, dtype=torch.float64)
    rotated, others = Rope(head_dim=WIDTH)(one, one, Grid.of(_times()))
    offset = Grid.of(_times()).offset[..., 0]
    cosines = 8 * Sandwich(heads=1, width=WIDTH).bias(offset).transpose(0, 1)
    agree("the products", rotated @ others.mT, 2 * cosines, tolerance=EXACT)


@identity
def kerple_with_exponent_one_is_alibi() -> None:
    """KERPLE's power kernel with exponents 1 and ALiBi's slopes is ALiBi."""
    kerple = Kerple(heads=6, kernel="power").double()
    kerple.set_kernel(torch.tensor(geometric_slopes(6)).double(), torch.ones(6).double())
    offset = torch.linspace(-300, 300, 201, dtype=torch.float64)
    agree("the bias", kerple.bias(offset), Alibi(heads=6).bias(offset))


@identity
def learned_alibi_starts_as_alibi() -> None:
    """Learned slopes, symmetric or not, start as the fixed ones."""
    offset = torch.arange(-20.0, 21.0)
    fixed = Alibi(heads=6).bias(offset)
    for asymmetric in (False, True):
        learned = Alibi(heads=6, learned=True, asymmetric=asymmetric).bias(offset)
        agree(f"asymmetric={asymmetric}", learned, fixed)


@identity
def learned_rope_starts_as_rope() -> None:
    """Learned frequencies start at the fixed ones."""
    q, k, _ = _operands()
    grid = Grid.of(Layout.sequence(LENGTH))
    learned = Rope(head_dim=WIDTH, learned=True)(q, k, grid)
    fixed = Rope(head_dim=WIDTH)(q, k, grid)
    for name, got, expected in zip(("queries", "keys"), learned, fixed, strict=True):
        agree(name, got, expected, tolerance=1e-5)


@identity
def shaw_wide_enough_never_clips() -> None:
    """Shaw's rows beyond the largest offset have no effect; with k = 0 offsets have none."""
    q, k, v = _operands()
    grid = Grid.of(Layout.sequence(LENGTH))
    wide = shaw(head_dim=WIDTH, max_distance=2 * LENGTH).double()
    tight = shaw(head_dim=WIDTH, max_distance=LENGTH - 1).double()
    with torch.no_grad():
        for name, rows in tight.named_parameters():
            middle = wide.get_parameter(name)[LENGTH + 1 : -LENGTH - 1]
            rows.copy_(middle)
    outputs = [attend(q, k, v, grid, encoding) for encoding in (wide, tight)]
    agree("attention", *outputs, tolerance=EXACT)
    blind = shaw(head_dim=WIDTH, max_distance=0).double()
    moved = attend(q, k[:, :, ORDER], v[:, :, ORDER], grid, blind)
    agree("k = 0, keys moved", moved, attend(q, k, v, grid, blind), tolerance=EXACT)


@identity
def t5_with_a_bucket_a_distance_is_a_free_bias() -> None:
    """T5 with more exact buckets than offsets learns one number per offset."""
    t5 = T5(heads=HEADS, buckets=8 * LENGTH, max_distance=16 * LENGTH).double()
    buckets = t5.bucket(torch.arange(1 - LENGTH, LENGTH).unsqueeze(-1).double())
    if len(set(buckets.tolist())) != 2 * LENGTH - 1:
        raise LawBroken("two offsets share a bucket")


@identity
def bidirectional_nope_is_order_blind() -> None:
    """Without a mask, layers without positions are permutation-equivariant."""
    x, layout = _draw(1, LENGTH, HEADS * WIDTH), Layout.sequence(LENGTH)
    plain, moved = _two_layers(x, layout), _two_layers(x[:, ORDER], layout)
    agree("two layers", moved, plain[:, ORDER], tolerance=EXACT)
    rope = Rope(head_dim=WIDTH)
    plain, moved = (_two_layers(tokens, layout, rope) for tokens in (x, x[:, ORDER]))
    _differ("another order of tokens under RoPE", moved, plain[:, ORDER])


@identity
def causal_nope_tells_order() -> None:
    """With a causal mask, the last token after two layers depends on the order of earlier ones.

    After one layer it does not: its output is a weighted mean of the past.
    """
    x, layout = _draw(1, LENGTH, HEADS * WIDTH), Layout.sequence(LENGTH)
    swapped = x[:, [1, 0, *range(2, LENGTH)]]
    ends = [_two_layers(tokens, layout, causal=True)[:, -1] for tokens in (x, swapped)]
    _differ("swapping two tokens", *ends)
    layer = _layer(0, None, causal=True)
    ends = [layer(tokens, layout)[:, -1] for tokens in (x, swapped)]
    agree("one layer", *ends, tolerance=EXACT)


def _layer(seed: int, rope: Rope | None, *, causal: bool) -> Attention:
    with seeded(seed):
        encoding = Encoding(query_key=rope)
        dim = HEADS * WIDTH
        layer = Attention(dim=dim, heads=HEADS, encoding=encoding, causal=causal)
        return layer.double().eval()


def _two_layers(
    x: Tensor, layout: Layout, rope: Rope | None = None, *, causal: bool = False
) -> Tensor:
    for seed in (0, 1):
        x = x + 3 * _layer(seed, rope, causal=causal)(x, layout)
    return x
