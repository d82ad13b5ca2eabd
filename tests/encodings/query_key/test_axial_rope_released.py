"""Presets of axial RoPE against the code of the models, where it is installed.

The models compute angles in float32; here their files compute in float64, so that rounding does not
hide a wrong convention: numbers then agree to 1e-6.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from posenc import Encoding, Grid, Layout
from posenc.encodings.query_key.axial_rope import PRESETS, AxialRope

FRAMES, HEIGHT, WIDTH, HEADS = 3, 4, 5, 2
VIDEO = Layout.cells(FRAMES, HEIGHT, WIDTH)
LATENTS = torch.zeros(1, 1, FRAMES, HEIGHT, WIDTH)


class InDouble:
    """PyTorch for a module, in which ``float32`` is float64."""

    float32 = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@contextmanager
def in_double(*modules: ModuleType) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for module in modules:
            patch.setattr(module, "torch", InDouble())
        patch.setattr(Tensor, "float", Tensor.double)
        torch.set_default_dtype(torch.float64)
        try:
            yield
        finally:
            torch.set_default_dtype(torch.float32)


def of_diffusers(name: str) -> ModuleType:
    """A file of diffusers's models."""
    pytest.importorskip("diffusers")
    return importlib.import_module(f"diffusers.models.{name}")


def transformer(name: str) -> ModuleType:
    return of_diffusers(f"transformers.transformer_{name}")


def by_feature(q: Tensor, cos_sin: tuple[Tensor, Tensor], **how: Any) -> Tensor:
    """Rotated as most Transformers of diffusers do."""
    embeddings = of_diffusers("embeddings")
    rotated: Tensor = embeddings.apply_rotary_emb(q, cos_sin, **how)
    return rotated


def wan(q: Tensor) -> Tensor:
    """What reaches attention in the attention module, whose projections change nothing."""
    module, seen = transformer("wan"), []
    width = HEADS * q.shape[-1]
    attention = module.WanAttention(width, HEADS, q.shape[-1], processor=module.WanAttnProcessor())
    attention.to_q = attention.to_k = attention.norm_q = attention.norm_k = torch.nn.Identity()

    def attend(query: Tensor, *others: Tensor, **options: object) -> Tensor:
        seen.append(query)
        return query

    with in_double(module, of_diffusers("embeddings")), pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "dispatch_attention_fn", attend)
        rotary = module.WanRotaryPosEmbed(q.shape[-1], (1, 1, 1), 64)(LATENTS)
        attention.double()(q.transpose(1, 2).flatten(2), rotary_emb=rotary)
    return seen[0].transpose(1, 2)


def mochi(q: Tensor) -> Tensor:
    """Rows and columns around the middle, stretched to an area of 192 by 192."""
    module, processors, seen = transformer("mochi"), of_diffusers("attention_processor"), []
    width = HEADS * q.shape[-1]
    attention = processors.MochiAttention(
        width, 1, processors.MochiAttnProcessor2_0(), HEADS, q.shape[-1], out_dim=width
    ).double()
    attention.to_q = attention.to_k = attention.norm_q = attention.norm_k = torch.nn.Identity()

    def attend(query: Tensor, *others: Tensor, **options: object) -> Tensor:
        seen.append(query)
        return query

    with in_double(module, processors), pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.functional, "scaled_dot_product_attention", attend)
        sizes = FRAMES, HEIGHT, WIDTH
        rotary = module.MochiRoPE()(frequencies_of_mochi(), *sizes, dtype=torch.float64)
        text, mask = torch.zeros(1, 1, 1), torch.ones(1, 1)
        attention(q.transpose(1, 2).flatten(2), text, mask, image_rotary_emb=rotary)
    return seen[0][:, :, : q.shape[2]]


def frequencies_of_mochi() -> Tensor:
    """``[3, H, D/2]``, which training would have found."""
    generator = torch.Generator().manual_seed(5)
    return torch.randn(3, HEADS, 64, generator=generator, dtype=torch.float64)


def hunyuan_video(q: Tensor) -> Tensor:
    module = transformer("hunyuan_video")
    with in_double(module, of_diffusers("embeddings")):
        rotary = module.HunyuanVideoRotaryPosEmbed(1, 1, [16, 56, 56])(LATENTS)
        return by_feature(q, rotary)


def cogvideox(q: Tensor) -> Tensor:
    embeddings, sides = of_diffusers("embeddings"), (HEIGHT, WIDTH)
    with in_double(embeddings):
        rotary = embeddings.get_3d_rotary_pos_embed(64, ((0, 0), sides), sides, FRAMES)
        return by_feature(q, rotary)


def flux(q: Tensor) -> Tensor:
    module = transformer("flux")
    with in_double(module, of_diffusers("embeddings")):
        return by_feature(q, module.FluxPosEmbed(10000, [16, 56, 56])(VIDEO.positions[0]))


def qwen_image(q: Tensor) -> Tensor:
    module = transformer("qwenimage")
    with in_double(module):
        rope = module.QwenEmbedRope(10000, [16, 56, 56], scale_rope=True)
        image, _ = rope([(FRAMES, HEIGHT, WIDTH)], max_txt_seq_len=1)
        rotated = module.apply_rotary_emb_qwen(q.transpose(1, 2), image, use_real=False)
        return rotated.transpose(1, 2)


def lumina2(q: Tensor) -> Tensor:
    """Cells of an image after FRAMES words, which keep axis 0; here with those of each frame."""
    module = transformer("lumina2")
    with in_double(module, of_diffusers("embeddings")):
        rope = module.Lumina2RotaryPosEmbed(10000, [32, 32, 32], (8, 8, 8))
        frequencies = rope._get_freqs_cis(VIDEO.positions)
        return by_feature(q.transpose(1, 2), frequencies, use_real=False).transpose(1, 2)


def ltx_video(q: Tensor) -> Tensor:
    """With the pipeline's scale at 25 frames a second."""
    module = transformer("ltx")
    x, size = q.transpose(1, 2).flatten(2), (FRAMES, HEIGHT, WIDTH)
    with in_double(module):
        rotary = module.LTXVideoRotaryPosEmbed(x.shape[-1])(x, *size, (8 / 25, 32, 32))
        rotated = module.apply_rotary_emb(x, rotary)
        return rotated.unflatten(2, (HEADS, -1)).transpose(1, 2)


def cosmos(q: Tensor) -> Tensor:
    module = transformer("cosmos")
    with in_double(module, of_diffusers("embeddings")):
        rotary = module.CosmosRotaryPosEmbed(128, patch_size=(1, 1, 1))(LATENTS)
        return by_feature(q, rotary, use_real_unbind_dim=-2)


def timm(q: Tensor) -> Tensor:
    module = pytest.importorskip("timm.layers.pos_embed_sincos")
    with in_double(module):
        rope = module.RotaryEmbeddingCat(q.shape[-1], dtype=torch.float64)
        return module.apply_rot_embed_cat(q, rope.get_embed([HEIGHT, WIDTH], torch.float64))


def dinov3(q: Tensor) -> Tensor:
    module = pytest.importorskip("timm.layers.pos_embed_sincos")
    with in_double(module):
        rope = module.RotaryEmbeddingDinoV3(q.shape[-1], dtype=torch.float64)
        return module.apply_rot_embed_cat(q, rope.get_embed([HEIGHT, WIDTH]), half=True)


def rotary_embedding_torch(q: Tensor) -> Tensor:
    module = pytest.importorskip("rotary_embedding_torch.rotary_embedding_torch")
    with in_double(module):
        rope = module.RotaryEmbedding(q.shape[-1] // 2, freqs_for="pixel")
        frequencies = rope.get_axial_freqs(HEIGHT, WIDTH).flatten(0, 1)
        return module.apply_rotary_emb(frequencies, q)


CELLS = {
    "mochi": Layout.cells(FRAMES, HEIGHT, WIDTH, coordinates=("indices", "midpoints", "midpoints")),
    "qwen_image": Layout.cells(
        FRAMES, HEIGHT, WIDTH, coordinates=("indices", "centred", "centred")
    ),
    "timm": Layout.cells(HEIGHT, WIDTH, coordinates="ends"),
    "dinov3": Layout.cells(HEIGHT, WIDTH, coordinates="midpoints"),
    "rotary_embedding_torch": Layout.cells(HEIGHT, WIDTH, coordinates="ends"),
}
RELEASED: dict[str, Callable[[Tensor], Tensor]] = {
    function.__name__: function
    for function in (
        *(wan, mochi, hunyuan_video, cogvideox, flux, qwen_image, lumina2, ltx_video, cosmos),
        *(timm, dinov3, rotary_embedding_torch),
    )
}


@pytest.mark.filterwarnings("ignore:In CPU autocast:UserWarning")  # Mochi's, of float64
@pytest.mark.parametrize("name", RELEASED)
def test_equals_the_models_code(name: str) -> None:
    layout = CELLS.get(name, VIDEO)
    small = ("cogvideox", "timm", "dinov3", "rotary_embedding_torch")
    width = 64 if name in small else 96 if name == "lumina2" else 128
    heads = HEADS if name in ("ltx_video", "mochi") else None
    options = dict(PRESETS[name])
    if name == "mochi":
        options["step"] = (1.0, 96 * (HEIGHT / WIDTH) ** 0.5, 96 * (WIDTH / HEIGHT) ** 0.5)
    rope = AxialRope(head_dim=width, heads=heads, **options)
    if rope.frequencies is not None:
        rope = rope.double()
        with torch.no_grad():
            rope.frequencies.copy_(frequencies_of_mochi())
    q = torch.randn(1, HEADS, layout.length, width, dtype=torch.float64)
    theirs = RELEASED[name](q)
    got, _ = rope(q, q, Grid.of(exact(layout, name)))
    torch.testing.assert_close(got, theirs, atol=1e-6, rtol=0)


def exact(layout: Layout, name: str) -> Layout:
    """The layout with its fractions, multiples of 1 / (n - 1) or 1 / n, in float64.

    But for timm, whose grid is float32 whatever the dtype of the rest.
    """
    if name == "timm":
        return layout
    parts = torch.tensor(
        {"mochi": [1.0, HEIGHT, WIDTH], "dinov3": [HEIGHT, WIDTH]}.get(
            name, [max(1, n - 1) for n in (FRAMES, HEIGHT, WIDTH)[-layout.axes :]]
        ),
        dtype=torch.float64,
    )
    return layout.with_positions((layout.positions * parts).round() / parts)


def test_there_is_a_preset_of_each() -> None:
    assert {*RELEASED} == {*PRESETS}


def test_text_follows_the_image_of_qwen_image() -> None:
    """Words are on the diagonal, from half the longer side on."""
    module = transformer("qwenimage")
    q = torch.randn(1, HEADS, 3, 128, dtype=torch.float64)
    with in_double(module):
        rope = module.QwenEmbedRope(10000, [16, 56, 56], scale_rope=True)
        _, words = rope([(1, 4, 7)], max_txt_seq_len=3)
        expected = module.apply_rotary_emb_qwen(q.transpose(1, 2), words, use_real=False)
    text = Layout.at(torch.arange(3.0, 6.0).view(1, -1, 1).expand(1, -1, 3))
    mine = AxialRope(head_dim=128, **PRESETS["qwen_image"])(q, q, Grid.of(text))[0]
    torch.testing.assert_close(mine.transpose(1, 2), expected, atol=1e-6, rtol=0)


def test_crops_of_cogvideox_are_coordinates() -> None:
    """A resized image has the trained coordinates, at steps that are no whole numbers."""
    embeddings, start, stop = of_diffusers("embeddings"), (1, 2), (7, 10)
    with in_double(embeddings):
        crop = start, stop
        cosine, sine = embeddings.get_3d_rotary_pos_embed(64, crop, (HEIGHT, WIDTH), FRAMES)
    steps = [
        (last * (size - 1) / size - first) / (size - 1)
        for first, last, size in zip(start, stop, (HEIGHT, WIDTH), strict=True)
    ]
    rope = AxialRope(head_dim=64, **PRESETS["cogvideox"], origin=(0.0, *start), step=(1.0, *steps))
    got = Encoding(query_key=rope).cos_sin(VIDEO.in_precision_of(cosine))
    expected = cosine.unsqueeze(0), sine.unsqueeze(0)
    torch.testing.assert_close(got, expected, atol=1e-6, rtol=0)


def test_frames_a_second_of_cosmos_are_steps() -> None:
    module = transformer("cosmos")
    with in_double(module):
        expected = module.CosmosRotaryPosEmbed(128, patch_size=(1, 1, 1))(LATENTS, fps=30)
    rope = AxialRope(head_dim=128, **PRESETS["cosmos"], step=(24 / 30, 1.0, 1.0))
    got = Encoding(query_key=rope).cos_sin(VIDEO.in_precision_of(expected[0]))
    torch.testing.assert_close(got, tuple(x.unsqueeze(0) for x in expected), atol=1e-6, rtol=0)


def test_defaults_are_those_of_lumina() -> None:
    """Words are at (i, 0, 0), and cells at (words, row, column)."""
    rope = transformer("lumina2").Lumina2RotaryPosEmbed(10000, [32, 32, 32], [30, 20, 20])
    image, words = torch.zeros(1, 1, 2 * HEIGHT, 2 * WIDTH), 6
    expected = rope(image, torch.ones(1, words, dtype=torch.int64))[3]
    cells = Layout.cells(1, HEIGHT, WIDTH).positions + torch.tensor([float(words), 0.0, 0.0])
    text = torch.arange(float(words)).unsqueeze(-1) * torch.tensor([1.0, 0.0, 0.0])
    layout = Layout.at(torch.cat([text, cells[0]]).double().unsqueeze(0))
    angles = AxialRope(head_dim=96).angles(layout)
    torch.testing.assert_close(torch.polar(torch.ones_like(angles), angles), expected)
