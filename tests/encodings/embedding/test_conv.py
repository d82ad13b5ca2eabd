"""Convolutional positions against torch's convolutions and loops; what leaks position."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import HubertConfig, HubertModel, Wav2Vec2Config, Wav2Vec2Model

from posenc import Layout
from posenc.attention import LayerCache
from posenc.encoding import Encoding
from posenc.encodings.embedding.conv import Conv


def made(**options: Any) -> Conv:
    encoding = Conv(dim=4, **options).double()
    nn.init.normal_(encoding.bias)
    return encoding


def irregular(length: int) -> Layout:
    return Layout.at(torch.arange(length).float())


def loops(encoding: Conv, x: Tensor, layout: Layout) -> Tensor:
    """The docstring's sum, one token and one step at a time, over one axis."""
    kernel = encoding.kernel
    first = 1 - kernel if encoding.causal else -(kernel // 2)
    batch, length, _ = x.shape

    def mark(name: str, row: int, token: int, default: int) -> int:
        values = getattr(layout, name)
        return default if values is None else int(values[row % values.shape[0], token])

    def real(row: int, token: int) -> bool:
        return bool(mark("valid", row, token, 1)) and not mark("special", row, token, 0)

    added, width = torch.zeros_like(x), 4 // encoding.groups
    whole = torch.zeros(4, 4, kernel, dtype=x.dtype)  # zero between channels of two groups
    for channel, put in itertools.product(range(4), range(width)):
        whole[channel, channel // width * width + put] = encoding.weight[channel, put]
    for row in range(batch):
        for i in range(length):
            if not real(row, i):
                continue
            added[row, i] += encoding.bias
            document = mark("document", row, i, 0)
            ring = [
                j for j in range(length) if real(row, j) and mark("document", row, j, 0) == document
            ]
            for cell in range(kernel):
                j = i + first + cell
                if encoding.padding == "circular":
                    j = ring[(ring.index(i) + first + cell) % len(ring)]
                elif j not in ring:
                    continue
                added[row, i] += whole[..., cell] @ x[row, j]
            if encoding.activation == "gelu":
                z = added[row, i].clone()
                added[row, i] = z * (1 + (z / 2**0.5).erf()) / 2
    return x + added


LAYOUTS = {
    "regular": Layout.sequence(9, start=4),
    "irregular": irregular(9),
    "packed": Layout.packed([4, 1, 4]),
    "left": Layout.padded([9, 4, 1], side="left"),
    "right": Layout.padded([9, 4, 1]),
    "special": Layout.sequence(8, prefix=1),
    "special, left": Layout.padded([8, 4, 1], side="left", prefix=1),
    "special, right": Layout.padded([7, 4, 1], prefix=2),
}


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"kernel": 5},
        {"kernel": 1},
        {"kernel": 11},
        {"causal": True},
        {"causal": True, "kernel": 4},
        {"padding": "circular"},
        {"padding": "circular", "kernel": 7},
        {"kernel": 4, "groups": 2, "activation": "gelu"},
        {"kernel": 2, "padding": "circular", "groups": 1},
    ],
    ids=str,
)
def test_equals_loops(name: str, options: dict[str, object]) -> None:
    encoding, layout = made(**options), LAYOUTS[name]
    x = torch.randn(3, 9, 4, dtype=torch.float64)
    got, expected = encoding(x, layout), loops(encoding, x, layout)
    if layout.valid is not None:
        got, expected = (y[layout.valid] for y in (got, expected))
    torch.testing.assert_close(got, expected)
    wanted = torch.autograd.grad(expected.sin().sum(), list(encoding.parameters()))
    found = torch.autograd.grad(got.sin().sum(), list(encoding.parameters()))
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("padding", ["zeros", "circular"])
def test_equals_torch(padding: str) -> None:
    torch_conv = nn.Conv1d(6, 6, 5, padding=2, groups=6, padding_mode=padding)  # type: ignore[arg-type]
    encoding = Conv(dim=6, kernel=5, padding=padding)  # type: ignore[arg-type]
    encoding.load_state_dict(torch_conv.state_dict())
    x = torch.randn(2, 8, 6)
    expected = x + torch_conv(x.mT).mT
    torch.testing.assert_close(encoding(x, Layout.sequence(8)), expected)
    torch.testing.assert_close(encoding(x, irregular(8)), expected)


@pytest.mark.parametrize("stable", [False, True])
@pytest.mark.parametrize("kind", [(Wav2Vec2Config, Wav2Vec2Model), (HubertConfig, HubertModel)])
def test_equals_wav2vec(kind: tuple[Any, Any], stable: bool) -> None:
    """What reaches the first norm or block of the encoders, on a padded batch."""
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1}
    sizes |= {"intermediate_size": 32, "do_stable_layer_norm": stable}
    encoder = kind[1](kind[0](**sizes)).encoder.eval().requires_grad_(False)
    convolution = encoder.pos_conv_embed.conv
    nn.init.normal_(convolution.bias)
    options = {"kernel": 128, "groups": 16, "activation": "gelu"}
    encoding = Conv(dim=32, **options)  # type: ignore[arg-type]
    encoding.load_state_dict({"weight": convolution.weight, "bias": convolution.bias})
    seen: list[Tensor] = []
    first = encoder.layers[0] if stable else encoder.layer_norm
    first.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    layout = Layout.padded([200, 70])
    x = torch.randn(2, 200, 32)
    assert layout.valid is not None
    encoder(x.clone(), attention_mask=layout.valid)
    got = encoding(x, layout)
    torch.testing.assert_close(got[layout.valid], seen[0][layout.valid], rtol=1e-5, atol=1e-5)
    assert (got - x).abs().max() > 0.1


@pytest.mark.parametrize("padding", ["zeros", "circular"])
@pytest.mark.parametrize(("height", "width"), [(5, 4), (1, 7), (6, 1), (1, 1)])
def test_images_equal_torch(height: int, width: int, padding: str) -> None:
    """PEG: the class token passes unchanged, the cells are convolved as an image."""
    encoding = Conv(dim=6, axes=2, padding=padding)  # type: ignore[arg-type]
    x = torch.randn(2, 2 + height * width, 6)
    image = x[:, 2:].mT.reshape(2, 6, height, width)
    mode = "constant" if padding == "zeros" else "circular"
    framed = nn.functional.pad(image, (1, 1, 1, 1), mode=mode)
    mixed = nn.functional.conv2d(framed, encoding.weight, encoding.bias, groups=6)
    got = encoding(x, Layout.image(height, width, prefix=2))
    torch.testing.assert_close(got[:, :2], x[:, :2])
    torch.testing.assert_close(got[:, 2:], (image + mixed).flatten(2).mT)


def test_padding_cells_are_zeros() -> None:
    """A 3×3 image in a 4×4 frame is convolved as it is by itself, whatever the frame holds."""
    valid = torch.zeros(1, 4, 4, dtype=torch.bool)
    valid[:, :3, :3] = True
    encoding = made(axes=2)
    x = torch.randn(1, 4, 4, 4, dtype=torch.float64)
    alone = encoding(x[:, :3, :3].reshape(1, 9, 4), Layout.image(3, 3))
    x[~valid] = float("nan")
    framed = encoding(x.reshape(1, 16, 4), Layout.image(4, 4, valid=valid))
    torch.testing.assert_close(framed[valid.flatten(1)], alone[0])


def test_worked_by_hand() -> None:
    encoding = Conv(dim=1, causal=True)
    with torch.no_grad():
        encoding.weight.copy_(torch.tensor([[[100.0, 10.0, 1.0]]]))
        encoding.bias.fill_(0.5)
    x = torch.tensor([[[1.0], [2.0], [3.0], [4.0]]])
    got = encoding(x, Layout.sequence(4)).flatten().tolist()
    assert got == [1 + 1.5, 2 + 12.5, 3 + 123.5, 4 + 234.5]


def test_zeros_leak_position_and_a_ring_does_not() -> None:
    """Equal tokens: with zeros those at the border are told apart, on a ring none are."""
    ones = torch.ones(1, 7, 4, dtype=torch.float64)
    zeros, ring = (
        made(padding=padding)(ones, Layout.sequence(7)) for padding in ("zeros", "circular")
    )
    assert not torch.allclose(zeros[:, 0], zeros[:, 3])
    torch.testing.assert_close(zeros[:, 2], zeros[:, 3])
    torch.testing.assert_close(ring, ring[:, :1].expand_as(ring))


@pytest.mark.parametrize("layout", [Layout.sequence(7), irregular(7)])
def test_a_ring_is_shift_equivariant(layout: Layout) -> None:
    x = torch.randn(2, 7, 4, dtype=torch.float64)
    ring, zeros = made(padding="circular", kernel=5), made(kernel=5)
    torch.testing.assert_close(ring(x.roll(3, 1), layout), ring(x, layout).roll(3, 1))
    assert not torch.allclose(zeros(x.roll(3, 1), layout), zeros(x, layout).roll(3, 1))


def test_a_ring_of_two_axes_is_shift_equivariant() -> None:
    x = torch.randn(2, 5, 6, 4, dtype=torch.float64)
    encoding, layout = made(padding="circular", axes=2), Layout.image(5, 6)
    shifted = encoding(x.roll((2, 3), (1, 2)).flatten(1, 2), layout)
    expected = encoding(x.flatten(1, 2), layout).reshape(2, 5, 6, 4).roll((2, 3), (1, 2))
    torch.testing.assert_close(shifted, expected.flatten(1, 2))


def test_a_truncated_cache_drops_the_graph() -> None:
    encoding, cache = Encoding.of(made(causal=True)), LayerCache()
    for start in (0, 4):
        x = torch.randn(1, 4, 4, dtype=torch.float64, requires_grad=True)
        cache.embed(encoding, x.sin(), Layout.sequence(4, start)).sum().backward()  # type: ignore[no-untyped-call]
        assert x.grad is not None
        assert x.grad.any()
        cache.truncate(4)


def test_never_reads_a_later_token_out_of_order() -> None:
    """Tokens out of order in the row are not taken for neighbours."""
    layout = Layout.at(torch.tensor([2.0, 0.0, 1.0]))
    layout = Layout(layout.positions, torch.tensor([[2, 0, 1]]))
    x = torch.randn(1, 3, 4, dtype=torch.float64)
    changed = x.clone()
    changed[:, 0] = 100.0
    encoding = made(causal=True)
    torch.testing.assert_close(encoding(changed, layout)[:, 1:], encoding(x, layout)[:, 1:])
