"""Models of images, and of pages, which are texts with boxes and images."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.models.layoutlmv2.modeling_layoutlmv2 import LayoutLMv2Encoder

from tests.transformers.acceleration.case import ENCODER, VOCABULARY, Case, images, of, texts
from tests.transformers.acceleration.cases.texts import EAGER, SDPA, T5, pairs

BEIT: dict[str, Any] = ENCODER | {"image_size": 20, "patch_size": 4, "drop_path_rate": 0.0}
BEIT |= {"use_relative_position_bias": True}
SHARED = {"use_relative_position_bias": False, "use_shared_relative_position_bias": True}

SWIN: dict[str, Any] = {"image_size": 16, "patch_size": 2, "embed_dim": 12, "depths": [2, 1]}
SWIN |= {"num_heads": [3, 6], "window_size": 4, "drop_path_rate": 0.0}
"""Windows of 4 × 4, of 8 × 8 cells and then of 4 × 4; the second layer's are shifted."""

VIT: dict[str, Any] = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3}
VIT |= {"image_size": 20, "patch_size": 4, "window_size": 3}
VITDET: dict[str, Any] = VIT | {"pretrain_image_size": 20, "window_block_indices": [0]}
VITDET |= {"residual_block_indices": [1], "use_relative_position_embeddings": True}

SAM: dict[str, Any] = VIT | {"mlp_dim": 32, "output_channels": 8, "global_attn_indexes": [1]}
SAM |= {"num_pos_feats": 4}
PROMPTS = {"hidden_size": 8, "image_size": 20, "patch_size": 4, "mask_input_channels": 4}
MASKS = {"hidden_size": 8, "mlp_dim": 8, "num_attention_heads": 2}
MASKS |= {"attention_downsample_rate": 1, "iou_head_hidden_dim": 8}
PARTS = {"vision_config": SAM, "prompt_encoder_config": PROMPTS, "mask_decoder_config": MASKS}
FINE = PARTS | {"mask_decoder_config": MASKS | {"vit_dim": 24}}
"""Models with the decoder of masks."""

LAYOUT_V2: dict[str, Any] = ENCODER | {"vocab_size": VOCABULARY, "max_position_embeddings": 40}
LAYOUT_V2 |= {"max_2d_position_embeddings": 101, "coordinate_size": 4, "shape_size": 4}
LAYOUT_V2 |= {"rel_pos_bins": 8, "max_rel_pos": 16, "rel_2d_pos_bins": 16, "max_rel_2d_pos": 40}
LAYOUT: dict[str, Any] = LAYOUT_V2 | {"input_size": 20, "patch_size": 4}

UDOP: dict[str, Any] = T5 | {"max_2d_position_embeddings": 64, "image_size": 20, "patch_size": 4}
UDOP["relative_bias_args"] = [
    {"type": "1d", "relative_attention_num_buckets": 8, "max_distance": 16},
    {"type": "horizontal", "relative_attention_num_buckets": 16, "max_distance": 40},
    {"type": "vertical", "scaling_factor": 30},
]
PREFIXED = [{"type": "1d"}, {"type": "vertical", "prefix_bucket": True}]
"""Buckets of their own for what comes before the page."""


def resized() -> dict[str, Any]:
    return images(24, 12) | {"interpolate_pos_encoding": True}


class TextModel(transformers.LayoutLMv2PreTrainedModel):
    """The encoder of LayoutLMv2 over ids, without its network for images, another library's."""

    def __init__(self, config: transformers.LayoutLMv2Config) -> None:
        super().__init__(config)
        self.words = nn.Embedding(config.vocab_size, config.hidden_size)
        self.encoder = LayoutLMv2Encoder(config)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """Keeps the modules' own: the original's asks for the other library."""

    def forward(
        self, input_ids: Tensor, bbox: Tensor, attention_mask: Tensor, image: Tensor | None = None
    ) -> Any:
        mask = (1.0 - attention_mask[:, None, None].float()) * torch.finfo(torch.float32).min
        positions = torch.arange(input_ids.shape[1]).expand_as(input_ids)
        return self.encoder(self.words(input_ids), mask, bbox=bbox, position_ids=positions)


def boxes(corners: Tensor) -> dict[str, Tensor]:
    return {"bbox": torch.cat([corners, 2 * corners], dim=-1)}


def boxed_texts() -> dict[str, Tensor]:
    """Texts with boxes."""
    inputs = texts()
    generator = torch.Generator().manual_seed(2)
    return inputs | boxes(torch.randint(50, (*inputs["input_ids"].shape, 2), generator=generator))


def pages() -> dict[str, Tensor]:
    """Texts with boxes, and images."""
    return boxed_texts() | images()


def one_row() -> dict[str, Tensor]:
    return {name: x[:1] for name, x in pages().items()}


def boxed_pairs() -> dict[str, Tensor]:
    """Texts with boxes, and the texts to be generated."""
    inputs = pairs()
    generator = torch.Generator().manual_seed(2)
    return inputs | boxes(0.5 * torch.rand(*inputs["input_ids"].shape, 2, generator=generator))


def encoded() -> dict[str, Tensor]:
    return {name: x for name, x in boxed_pairs().items() if not name.startswith("decoder")}


ORDER, BOXES = ({f"has_{kind}_attention_bias": False} for kind in ("spatial", "relative"))
ABSOLUTE = {"use_relative_position_embeddings": False}
small, other_size = partial(images, 16, 16), partial(images, 24, 12)

CASES = {
    **{
        family: {
            first: Case(of(f"{name}Model", BEIT), images, accelerated=4),
            "eager": Case(of(f"{name}Model", BEIT, **EAGER), images),
            "shared": Case(of(f"{name}Model", BEIT, **SHARED), images, accelerated=3),
            "both": Case(of(f"{name}Model", BEIT, use_shared_relative_position_bias=True), images),
            "resized": Case(of(f"{name}Model", BEIT), resized),
            "other_size": Case(of(f"{name}Model", BEIT), other_size),
            "classes": Case(of(f"{name}ForImageClassification", BEIT), images),
        }
        for family, name, first in (
            ("beit", "Beit", "model"),
            ("data2vec", "Data2VecVision", "sdpa"),
        )
    },
    **{
        family: {
            "model": Case(of(f"{name}Model", SWIN), small, accelerated=3),
            "no_bias": Case(of(f"{name}Model", SWIN, qkv_bias=False), small),
            "padded": Case(of(f"{name}Model", SWIN), partial(images, 20, 28)),
            "uneven": Case(of(f"{name}Model", SWIN, window_size=3), small),
            "classes": Case(of(f"{name}ForImageClassification", SWIN), small),
        }
        for family, name in (("swin", "Swin"), ("swinv2", "Swinv2"))
    },
    **{
        family: {
            "sdpa": Case(of(f"{name}VisionModel", SAM, **SDPA), images, accelerated=2),
            "eager": Case(of(f"{name}VisionModel", SAM, **EAGER), images),
            "no_relative": Case(of(f"{name}VisionModel", SAM, use_rel_pos=False), images),
            "no_absolute": Case(of(f"{name}VisionModel", SAM, use_abs_pos=False), images),
            "masks": masks,
        }
        for family, name, masks in (
            ("sam", "Sam", Case(of("SamModel", PARTS), images, accelerated=2)),
            ("sam_hq", "SamHQ", Case(of("SamHQModel", FINE), images, relative=1e-4)),
        )
    },
    "vitdet": {
        "model": Case(of("VitDetModel", VITDET), images, accelerated=2),
        "other_size": Case(of("VitDetModel", VITDET), other_size),
        "backbone": Case(of("VitDetBackbone", VITDET), images),
        "no_relative": Case(of("VitDetModel", VITDET, **ABSOLUTE), images),
    },
    "layoutlmv2": {
        "texts": Case(of(TextModel, LAYOUT_V2), boxed_texts, accelerated=3, written=True),
        "slow_qkv": Case(of(TextModel, LAYOUT_V2, fast_qkv=False), boxed_texts),
        "order_alone": Case(of(TextModel, LAYOUT_V2, **ORDER), boxed_texts),
        "boxes_alone": Case(of(TextModel, LAYOUT_V2, **BOXES), boxed_texts),
        "without_biases": Case(of(TextModel, LAYOUT_V2, **ORDER, **BOXES), boxed_texts),
    },
    "layoutlmv3": {
        "eager": Case(of("LayoutLMv3Model", LAYOUT, **EAGER), pages, accelerated=3, written=True),
        "texts": Case(of("LayoutLMv3Model", LAYOUT), boxed_texts),
        "images": Case(of("LayoutLMv3Model", LAYOUT), images),
        "one_row": Case(of("LayoutLMv3Model", LAYOUT), one_row),
        "order_alone": Case(of("LayoutLMv3Model", LAYOUT, **ORDER), pages),
        "without_biases": Case(of("LayoutLMv3Model", LAYOUT, **ORDER, **BOXES), pages),
        "classes": Case(of("LayoutLMv3ForTokenClassification", LAYOUT), pages),
    },
    "udop": {
        "eager": Case(of("UdopModel", UDOP, **EAGER), boxed_pairs, accelerated=12),
        "sdpa": Case(of("UdopModel", UDOP, **SDPA), boxed_pairs),
        "encoder": Case(of("UdopEncoderModel", UDOP), encoded, accelerated=5),
        "images": Case(of("UdopModel", UDOP), lambda: boxed_pairs() | images()),
        "prefixed": Case(of("UdopModel", UDOP, relative_bias_args=PREFIXED), boxed_pairs),
    },
}
CASES["swin"]["eager"] = Case(of("SwinModel", SWIN, **EAGER), small)
FROM_SMALL = of("Swinv2Model", SWIN, pretrained_window_sizes=[2, 2])
CASES["swinv2"]["from_small_windows"] = Case(FROM_SMALL, small)
