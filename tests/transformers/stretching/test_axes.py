"""Video and image models of diffusers, stretched along an axis in place and restored."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from posenc import Layout, create
from posenc.encodings.query_key.axial_rope import PRESETS
from posenc.errors import ArgumentError
from posenc.extension import extend
from posenc.transformers import restore, stretch

diffusers = pytest.importorskip("diffusers")
pytestmark = pytest.mark.filterwarnings("ignore:In CPU autocast:UserWarning")  # Mochi's

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


def hunyuan_video15() -> nn.Module:
    return diffusers.HunyuanVideo15Transformer3DModel(
        **SMALL, in_channels=4, out_channels=4, attention_head_dim=32, num_refiner_layers=1,
        patch_size=1, patch_size_t=1, text_embed_dim=8, text_embed_2_dim=8, image_embed_dim=8,
        rope_axes_dim=(16, 8, 8), target_size=64
    )  # fmt: skip


def qwen_image() -> nn.Module:
    return diffusers.QwenImageTransformer2DModel(
        **SMALL, in_channels=4, out_channels=4, attention_head_dim=32, joint_attention_dim=8,
        axes_dims_rope=(16, 8, 8)
    )  # fmt: skip


def cogvideox() -> nn.Module:
    return diffusers.CogVideoXTransformer3DModel(
        **SMALL, in_channels=4, out_channels=4, attention_head_dim=32, text_embed_dim=8,
        time_embed_dim=8, sample_width=4, sample_height=4, sample_frames=5, max_text_seq_length=3,
        use_rotary_positional_embeddings=True
    )  # fmt: skip


def ltx() -> nn.Module:
    return diffusers.LTXVideoTransformer3DModel(
        **SMALL, in_channels=4, out_channels=4, attention_head_dim=32, cross_attention_dim=64,
        caption_channels=8
    )  # fmt: skip


def mochi() -> nn.Module:
    model: nn.Module = diffusers.MochiTransformer3DModel(
        **SMALL, in_channels=4, out_channels=4, attention_head_dim=32, pooled_projection_dim=8,
        text_embed_dim=8, time_embed_dim=8, max_sequence_length=3
    )  # fmt: skip
    nn.init.normal_(model.get_parameter("pos_frequencies"), std=0.3)
    return model


def lumina2() -> nn.Module:
    return diffusers.Lumina2Transformer2DModel(
        **SMALL, in_channels=4, hidden_size=64, num_refiner_layers=1, num_kv_heads=2, multiple_of=8,
        axes_dim_rope=(16, 8, 8), axes_lens=(64, 64, 64), cap_feat_dim=8, patch_size=2
    )  # fmt: skip


def latents(frames: int, height: int = 4, width: int = 4) -> Tensor:
    return torch.zeros(1, 4, frames, height, width)


def ids(frames: int, height: int = 2, width: int = 2) -> Tensor:
    sides = (torch.arange(float(n)) for n in (frames, height, width))
    return torch.cartesian_prod(*sides)


def called_with(model: Any, frames: int) -> tuple[Tensor, Tensor]:
    """Tables in a layer of CogVideoX."""
    from diffusers.models.embeddings import get_3d_rotary_pos_embed

    seen = []
    hook = model.transformer_blocks[0].register_forward_pre_hook(
        lambda module, args, kwargs: seen.extend([x for x in (*args, *kwargs.values())
                                                  if isinstance(x, tuple)]), with_kwargs=True
    )  # fmt: skip
    tables = get_3d_rotary_pos_embed(32, ((0, 0), (2, 2)), (2, 2), frames)
    model(
        torch.randn(1, frames, 4, 4, 4),
        torch.randn(1, 3, 8),
        torch.tensor([5]),
        image_rotary_emb=tables,
    )
    hook.remove()
    return seen[0]


MODELS: dict[str, tuple[Callable[[], nn.Module], str, Callable[[Any, int], Any], int]] = {
    "wan": (wan, "rope", lambda model, n: model.rope(latents(n)), 6),
    "hunyuan_video": (hunyuan_video, "rope", lambda model, n: model.rope(latents(n, 2, 2)), 8),
    "hunyuan_video15": (hunyuan_video15, "rope", lambda model, n: model.rope(latents(n, 2, 2)), 8),
    "flux": (flux, "pos_embed", lambda model, n: model.pos_embed(ids(n)), 8),
    "cosmos": (cosmos, "rope", lambda model, n: model.rope(latents(n)), 6),
    "qwen_image": (
        qwen_image, "pos_embed",
        lambda model, n: model.pos_embed([(n, 2, 2)], max_txt_seq_len=3)[0], 8,
    ),
    "cogvideox": (cogvideox, "", called_with, 4),
    "ltx": (
        ltx, "rope",
        lambda model, n: model.rope(torch.zeros(1, 1, 1), n, 2, 2, (8 / 25, 32, 32)), 0,
    ),
    "mochi": (
        mochi, "rope",
        lambda model, n: model.rope(model.pos_frequencies, n, 2, 2, dtype=torch.float32), 0,
    ),
}  # fmt: skip
"""Models, the name of their rotary module, its tables by frames, and pairs of time in a ladder."""

BASES = {"hunyuan_video": 256.0, "hunyuan_video15": 256.0, "cosmos": 10000 * 2.0 ** (12 / 10)}


def rotary(model: nn.Module, name: str, frames: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines ``[L, D]``."""
    with torch.no_grad():
        table = MODELS[name][2](model, frames)
    cosine, sine = (table.real, table.imag) if isinstance(table, Tensor) else table
    return cosine.reshape(4 * frames, -1), sine.reshape(4 * frames, -1)


@pytest.mark.parametrize("name", MODELS)
def test_interpolated_frames_are_every_second_of_twice_as_many(name: str) -> None:
    """As seen from the first token: the origin of LTX-Video's coordinates is no token."""
    make, path, _, _ = MODELS[name]
    model: Any = make().eval()

    def turned(frames: int) -> Tensor:
        table = torch.complex(*rotary(model, name, frames))
        return (table * table[:4].conj().repeat(frames, 1)).view(frames, 4, -1)

    before = turned(5)
    report = stretch(model, "interpolate", factor=2, axis=0)
    assert report.stretched == 1
    assert report.parts[0].path == path
    after = turned(10)
    tolerance = 2e-3 if name == "ltx" else 1e-5  # its angles, of 15,708 radians, are float32
    torch.testing.assert_close(after[::2], before, atol=tolerance, rtol=0)
    assert not torch.allclose(after[:5], before, atol=1e-2)


@pytest.mark.parametrize("name", [name for name, model in MODELS.items() if model[3]])
def test_other_pairs_and_a_restored_model_are_the_same_to_the_bit(name: str) -> None:
    """RIFLEx slows one pair of time; by hand it is the third of these lengths."""
    make, path, _, pairs = MODELS[name]
    model: Any = make().eval()
    before = rotary(model, name, 9)
    stretch(model, "riflex", factor=2, length=50, repeats=60, axis=0)
    after = rotary(model, name, 9)
    changed = sorted(
        {
            t
            for a, b in zip(before, after, strict=True)
            for t in (a != b).any(0).nonzero().flatten().tolist()
        }
    )
    periods = [2 * math.pi * BASES.get(name, 10000.0) ** (t / pairs) for t in range(pairs)]
    slowed = min(range(pairs), key=lambda t: abs(periods[t] - 60))
    own = {"cosmos": [slowed, slowed + 16], "qwen_image": [slowed]}
    assert changed == own.get(name, [2 * slowed, 2 * slowed + 1])
    frame = after[0].view(9, 4, -1)[:, 0, changed[0]]
    expected = (torch.arange(9.0) * 0.9 * 2 * math.pi / 100).cos()
    torch.testing.assert_close(frame, expected, atol=1e-5, rtol=0)
    with pytest.raises(ArgumentError, match="not stretched"):
        stretch(model, "ntk", factor=2, axis=0)
    assert str(restore(model)).startswith(type(model).__name__)
    for old, new in zip(before, rotary(model, name, 9), strict=True):
        assert torch.equal(old, new)
    assert "forward" not in vars(model.get_submodule(path))


@pytest.mark.parametrize(("name", "method"), [("ltx", "ntk"), ("ltx", "interpolate")])
def test_ladders_across_heads_equal_the_preset(name: str, method: str) -> None:
    model: Any = ltx().eval()
    stretch(model, method, factor=4, axis=0)
    rope = create("axial_rope", head_dim=32, heads=2, pairs=(10, 10, 10), **PRESETS["ltx_video"])
    longer = extend(rope, "on_axis", method=method, factor=4, axis=0)
    expected = torch.complex(*longer.cos_sin(Layout.cells(9, 2, 2))).transpose(1, 2).flatten(2)[0]
    got = torch.complex(*rotary(model, name, 9))
    relative = [x * x[:1].conj() for x in (got, expected)]
    torch.testing.assert_close(*relative, atol=5e-3, rtol=0)


def test_words_and_cells_of_an_image_are_stretched_alike() -> None:
    """Qwen-Image's words are on the diagonal: an axis of theirs is slowed too."""
    model: Any = qwen_image().eval()
    _, words = model.pos_embed([(1, 4, 6)], max_txt_seq_len=6)
    stretch(model, "interpolate", factor=2, axis=2)
    cells, stretched = model.pos_embed([(1, 4, 6)], max_txt_seq_len=6)
    assert torch.equal(stretched[:, :12], words[:, :12])
    theta = 10000 ** (-torch.arange(4.0) / 4)
    angle = torch.arange(3.0, 9.0).unsqueeze(1) * theta / 2
    torch.testing.assert_close(stretched[:, 12:], torch.polar(torch.ones(()), angle))
    columns = torch.arange(-3.0, 3.0).unsqueeze(1) * theta / 2
    torch.testing.assert_close(cells[:6, 12:], torch.polar(torch.ones(()), columns))


def test_words_before_an_image_are_stretched_alike() -> None:
    """Lumina's words have ids on axis 0 alone; padding stays 0."""
    model: Any = lumina2().eval()
    mask = torch.tensor([[1, 1, 1, 1, 0]])
    image = torch.zeros(1, 4, 6, 8)
    before = model.rope_embedder(image, mask)
    stretch(model, "interpolate", factor=2, axis=1)
    after = model.rope_embedder(image, mask)
    rows = torch.arange(3.0).repeat_interleave(4).unsqueeze(1) * 10000 ** (-torch.arange(4.0) / 4)
    expected = torch.polar(torch.ones(()), rows / 2).to(after[2])
    torch.testing.assert_close(after[2][0, :, 8:12], expected)
    assert torch.equal(after[1], before[1])
    assert (after[1][0, 4] == 0).all()
    others = [*range(8), *range(12, 16)]
    assert torch.equal(after[2][..., others], before[2][..., others])


def test_tables_of_other_frequencies_are_refused() -> None:
    """Those that pipelines give a model are compared with what it was stretched by."""
    model: Any = cogvideox().eval()
    stretch(model, "interpolate", factor=2, axis=0)
    rope = create("axial_rope", head_dim=32, pairs=(4, 6, 6), base=(100.0, 10000.0, 10000.0))
    tables = [x[0].float() for x in rope.cos_sin(Layout.cells(5, 2, 2))]
    call = torch.randn(1, 5, 4, 4, 4), torch.randn(1, 3, 8), torch.tensor([5])
    for given in (tuple(tables), None):
        with pytest.raises(ArgumentError) as refused:
            model(*call, image_rotary_emb=given)
        assert refused.value.argument == "image_rotary_emb"


def test_tables_of_half_precision_are_read_as_exactly_as_they_are() -> None:
    """A fast pair says what slow ones, of three digits, leave open at 90 frames."""
    from posenc.transformers.stretching.axes import StretchedTable, rotations

    rope = create("axial_rope", head_dim=32, pairs=(4, 6, 6))
    longer = extend(rope, "on_axis", method="interpolate", factor=2, axis=0)
    (given,) = rotations(cogvideox())
    change = StretchedTable(given.ladders, longer.query_key, 0, verified=False)  # type: ignore[arg-type]
    video = Layout.cells(90, 2, 2)
    tables = [x[0].bfloat16() for x in rope.cos_sin(video)]
    expected = [x[0] for x in longer.cos_sin(video)]
    for got, exact in zip(change(*tables), expected, strict=True):
        torch.testing.assert_close(got.float(), exact, atol=1e-2, rtol=0)


def test_learned_frequencies_take_interpolation_alone() -> None:
    model: Any = mochi()
    with pytest.raises(ArgumentError) as refused:
        stretch(model, "ntk", factor=2, axis=0)
    assert refused.value.argument == "encoding"
    frequencies = model.pos_frequencies
    report = stretch(model, "interpolate", factor=4, axis=2)
    assert "divided by 4" in report.parts[0].encoding
    assert model.pos_frequencies is frequencies
    cosine, _ = model.rope(frequencies, 1, 1, 5, dtype=torch.float32)
    places = torch.linspace(-2, 2, 5) * math.sqrt(192**2 / 5)
    expected = torch.einsum("n,hf->nhf", places, frequencies[2].detach() / 4).cos()
    torch.testing.assert_close(cosine, expected, atol=1e-4, rtol=0)


def test_the_whole_model_sees_it_and_is_restored_to_the_bit() -> None:
    model: Any = wan().eval()
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
    model: Any = cosmos().eval()
    before = [x.unflatten(0, (5, -1)) for x in model.rope(latents(5), fps=30)]
    stretch(model, "interpolate", factor=2, axis=0)
    after = [x.unflatten(0, (10, -1))[::2] for x in model.rope(latents(10), fps=30)]
    torch.testing.assert_close(after, before)


def test_what_has_no_axes_is_named() -> None:
    with pytest.raises(ArgumentError) as refused:
        stretch(nn.Linear(2, 2), "ntk", factor=2, axis=0)
    assert refused.value.argument == "model"
    model: Any = wan()
    with pytest.raises(ArgumentError) as refused:
        stretch(model, "ntk", factor=2, axis=3)
    assert refused.value.argument == "axis"
    assert "forward" not in vars(model.rope)
