"""Video and image models of diffusers, stretched along an axis in place and restored."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from posenc.errors import ArgumentError
from posenc.transformers import restore, stretch

diffusers = pytest.importorskip("diffusers")

SMALL: dict[str, Any] = {"num_attention_heads": 2, "num_layers": 1}


def wan() -> nn.Module:
    return diffusers.WanTransformer3DModel(
        **SMALL, attention_head_dim=32, in_channels=4, out_channels=4, text_dim=8, freq_dim=16,
        ffn_dim=16, rope_max_seq_len=64
    )  # fmt: skip


def hunyuan_video() -> nn.Module:
    return diffusers.HunyuanVideoTransformer3DModel(
        **SMALL, in_channels=4, out_channels=4, attention_head_dim=32, num_single_layers=1,
        num_refiner_layers=1, patch_size=1, text_embed_dim=8, pooled_projection_dim=8,
        rope_axes_dim=(16, 8, 8)
    )  # fmt: skip


def flux() -> nn.Module:
    return diffusers.FluxTransformer2DModel(
        **SMALL, in_channels=4, num_single_layers=1, attention_head_dim=32, joint_attention_dim=8,
        pooled_projection_dim=8, axes_dims_rope=(16, 8, 8)
    )  # fmt: skip


def cosmos() -> nn.Module:
    return diffusers.CosmosTransformer3DModel(
        **SMALL, in_channels=4, out_channels=4, attention_head_dim=32, text_embed_dim=8,
        adaln_lora_dim=8, concat_padding_mask=False, extra_pos_embed_type=None
    )  # fmt: skip


def latents(frames: int, height: int = 4, width: int = 4) -> Tensor:
    return torch.zeros(1, 4, frames, height, width)


def ids(frames: int, height: int = 2, width: int = 2) -> Tensor:
    sides = (torch.arange(float(n)) for n in (frames, height, width))
    return torch.cartesian_prod(*sides)


MODELS: dict[str, tuple[Callable[[], nn.Module], str, Callable[..., Tensor], int]] = {
    "wan": (wan, "rope", latents, 6),
    "hunyuan_video": (hunyuan_video, "rope", latents, 8),
    "flux": (flux, "pos_embed", ids, 8),
    "cosmos": (cosmos, "rope", latents, 6),
}
"""Models, the name of their rotary module, its input by frames, and pairs of time."""


def rotary(model: nn.Module, name: str, x: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines ``[L, D]``."""
    cosine, sine = getattr(model, MODELS[name][1])(x)
    return cosine.reshape(-1, 32), sine.reshape(-1, 32)


@pytest.mark.parametrize("name", MODELS)
def test_interpolated_frames_are_every_second_of_twice_as_many(name: str) -> None:
    make, path, given, _ = MODELS[name]
    model = make().eval()
    before = rotary(model, name, given(5))
    report = stretch(model, "interpolate", factor=2, axis=0)
    assert report.stretched == 1
    assert report.parts[0].path == path
    after = rotary(model, name, given(10))
    for old, new in zip(before, after, strict=True):
        torch.testing.assert_close(new.unflatten(0, (10, -1))[::2], old.unflatten(0, (5, -1)))
        assert not torch.allclose(new[: len(old)], old, atol=1e-3)


@pytest.mark.parametrize("name", MODELS)
def test_other_pairs_and_a_restored_model_are_the_same_to_the_bit(name: str) -> None:
    """RIFLEx slows one pair of time; by hand it is the third of these lengths."""
    make, path, given, pairs = MODELS[name]
    model = make().eval()
    x = given(9)
    before = rotary(model, name, x)
    stretch(model, "riflex", factor=2, length=50, repeats=60, axis=0)
    after = rotary(model, name, x)
    changed = sorted(
        {
            t
            for a, b in zip(before, after, strict=True)
            for t in (a != b).any(0).nonzero().flatten().tolist()
        }
    )
    base = {"hunyuan_video": 256.0, "cosmos": 10000 * 2.0 ** (12 / 10)}.get(name, 10000.0)
    periods = [2 * math.pi * base ** (t / pairs) for t in range(pairs)]
    slowed = min(range(pairs), key=lambda t: abs(periods[t] - 60))
    adjacent = [2 * slowed, 2 * slowed + 1]
    assert changed == ([slowed, slowed + 16] if name == "cosmos" else adjacent)
    frame = after[0].unflatten(0, (9, -1))[:, 0, changed[0]]
    expected = (torch.arange(9.0) * 0.9 * 2 * math.pi / 100).cos()
    torch.testing.assert_close(frame, expected, atol=1e-5, rtol=0)
    with pytest.raises(ArgumentError, match="not stretched"):
        stretch(model, "ntk", factor=2, axis=0)
    assert str(restore(model)).startswith(type(model).__name__)
    for old, new in zip(before, rotary(model, name, x), strict=True):
        assert torch.equal(old, new)
    assert "forward" not in vars(getattr(model, path))


def test_the_whole_model_sees_it_and_is_restored_to_the_bit() -> None:
    model = wan().eval()
    call: dict[str, Any] = {
        "hidden_states": torch.randn(1, 4, 6, 4, 4),
        "timestep": torch.tensor([5]),
        "encoder_hidden_states": torch.randn(1, 3, 8),
        "return_dict": False,
    }
    with torch.no_grad():
        before = model(**call)[0]
        stretch(model, "yarn", factor=4, length=8, axis=0, alpha=0.1, beta=1.0)
        longer = model(**call)[0]
        restore(model)
        assert torch.equal(model(**call)[0], before)
    assert not torch.allclose(longer, before, atol=1e-5)


def test_frames_a_second_of_cosmos_are_kept() -> None:
    model = cosmos().eval()
    before = [x.unflatten(0, (5, -1)) for x in model.rope(latents(5), fps=30)]
    stretch(model, "interpolate", factor=2, axis=0)
    after = [x.unflatten(0, (10, -1))[::2] for x in model.rope(latents(10), fps=30)]
    torch.testing.assert_close(after, before)


def test_what_has_no_axes_is_named() -> None:
    with pytest.raises(ArgumentError) as refused:
        stretch(nn.Linear(2, 2), "ntk", factor=2, axis=0)
    assert refused.value.argument == "model"
    model = wan()
    with pytest.raises(ArgumentError) as refused:
        stretch(model, "ntk", factor=2, axis=3)
    assert refused.value.argument == "axis"
    assert "forward" not in vars(model.rope)  # type: ignore[arg-type]
