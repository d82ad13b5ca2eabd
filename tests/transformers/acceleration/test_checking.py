"""The comparison of ``accelerate``: inputs, precision and devices of the models it runs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    BertConfig,
    BertLMHeadModel,
    DebertaV2Config,
    DebertaV2Model,
    GptOssConfig,
    GptOssModel,
    LayoutLMv3Model,
    MPNetConfig,
    MPNetModel,
    MptConfig,
    MptModel,
    PreTrainedModel,
    SpeechT5Config,
    SpeechT5Model,
    SwinConfig,
    SwinModel,
    T5Config,
    T5EncoderModel,
    T5ForConditionalGeneration,
    T5Model,
    UperNetConfig,
    UperNetForSemanticSegmentation,
    VisionEncoderDecoderModel,
    WhisperConfig,
    WhisperModel,
)
from transformers.models.layoutlmv3 import LayoutLMv3Config

from posenc.errors import ArgumentError
from posenc.transformers.acceleration import AccelerateReport, accelerate
from posenc.transformers.acceleration.checking import OutputComparison, Precision
from posenc.transformers.acceleration.families.buckets import MPNetAttention
from tests.transformers.acceleration.cases.deberta_v2 import SIZES as DEBERTA
from tests.transformers.acceleration.cases.layoutlmv3 import SIZES as LAYOUT
from tests.transformers.acceleration.cases.mpnet import SIZES as MPNET
from tests.transformers.acceleration.cases.speecht5 import SIZES as SPEECH
from tests.transformers.acceleration.cases.swin import SIZES as SWIN
from tests.transformers.acceleration.cases.t5 import SIZES as T5
from tests.transformers.acceleration.test_laws import accelerated, put_under


def checked(make: Callable[[], nn.Module]) -> AccelerateReport:
    """The report of an accelerated model, whose outputs were compared."""
    torch.manual_seed(0)
    report = accelerate(make().eval(), shortest=0)
    assert report.difference is not None
    assert report.accelerated > 0
    return report


@pytest.mark.parametrize("positions", [3, 5, 8, 80])
def test_few_positions(positions: int) -> None:
    few = {"max_position_embeddings": positions}
    checked(lambda: MPNetModel(MPNetConfig(**MPNET | few)))
    checked(lambda: DebertaV2Model(DebertaV2Config(**DEBERTA | few)))
    checked(lambda: LayoutLMv3Model(LayoutLMv3Config(**LAYOUT | few)))
    checked(
        lambda: MptModel(
            MptConfig(d_model=24, n_heads=3, n_layers=1, vocab_size=9, max_seq_len=positions)
        )
    )


def test_one_position() -> None:
    one = {"max_position_embeddings": 1}
    checked(lambda: DebertaV2Model(DebertaV2Config(**DEBERTA | one)))


def test_a_shorter_table_than_the_config_says() -> None:
    model = MPNetModel(MPNetConfig(**MPNET | {"max_position_embeddings": 512}))
    model.embeddings.position_embeddings = nn.Embedding(20, 24)
    checked(lambda: model)


def test_a_config_that_an_encoder_has_changed() -> None:
    config = T5Config(**T5)
    T5EncoderModel(config)
    checked(lambda: T5Model(config))


def composed(name: str) -> PreTrainedModel:
    """A model put together from others."""
    text = BertConfig(
        vocab_size=9,
        hidden_size=24,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=3,
        is_decoder=True,
        add_cross_attention=True,
    )
    if name == "reader":
        encoder = SwinModel(SwinConfig(**SWIN))
        return VisionEncoderDecoderModel(encoder=encoder, decoder=BertLMHeadModel(text))
    stages = {"depths": [1] * 4, "num_heads": [1] * 4, "image_size": 64}
    names = ["stage1", "stage2", "stage3", "stage4"]
    backbone = SwinConfig(**SWIN | stages, out_features=names)
    config = UperNetConfig(backbone_config=backbone, hidden_size=16, auxiliary_channels=8)
    return UperNetForSemanticSegmentation(config)


@pytest.mark.parametrize("name", ["reader", "segmenter"])
def test_parts_of_other_models(name: str) -> None:
    checked(lambda: composed(name))


def test_derived_classes_and_parts() -> None:
    class Own(T5ForConditionalGeneration):
        """A user's class, in no package of transformers."""

    class Holder(nn.Module):
        """A user's module with two models."""

        def __init__(self) -> None:
            super().__init__()
            self.first = MPNetModel(MPNetConfig(**MPNET))
            self.second = T5EncoderModel(T5Config(**T5))

    checked(lambda: Own(T5Config(**T5)))
    checked(lambda: SpeechT5Model(SpeechT5Config(**SPEECH)).encoder)
    assert checked(Holder).accelerated == 5


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize("seed", [0, 7])
def test_quantized_models(seed: int) -> None:
    """Activations in 8 bits are a step apart here and there."""
    torch.manual_seed(seed)
    sizes = {"hidden_size": 48, "intermediate_size": 96, "max_position_embeddings": 512}
    buckets = {"position_buckets": 32, "max_relative_positions": 64}
    model = DebertaV2Model(DebertaV2Config(**DEBERTA | sizes | buckets)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    quantized = torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, torch.qint8)
    report = accelerate(quantized, shortest=0)
    assert report.difference is not None
    assert report.difference < 0.1


def test_half_precision_inside_of_float32_outputs() -> None:
    class Wide(MPNetModel):
        """A model that hands its outputs on in float32."""

        def forward(self, *arguments: Any, **options: Any) -> Any:
            return super().forward(*arguments, **options).last_hidden_state.float()

    report = checked(lambda: Wide(MPNetConfig(**MPNET)).bfloat16())
    assert 1e-4 < (report.difference or 0.0) < 0.1


def test_autocast_and_default_devices_of_the_caller() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert (checked(lambda: MPNetModel(MPNetConfig(**MPNET))).difference or 0.0) < 1e-5
    model = MPNetModel(MPNetConfig(**MPNET))
    with torch.device("meta"):
        checked(lambda: model)


def test_models_without_values_are_not_compared() -> None:
    with torch.device("meta"):
        model = MPNetModel(MPNetConfig(**MPNET)).eval()
    report = put_under(model)
    assert report.accelerated == 3
    assert report.difference is None
    assert "not compared, since weights are on the meta device" in str(report)


def test_differences_that_rounding_errors_explain_are_allowed() -> None:
    model = MPNetModel(MPNetConfig(**MPNET)).eval()
    comparison = OutputComparison(model, [layer.attention.attn for layer in model.encoder.layer])
    comparison.precision = Precision(step=1.0, tolerance=1e-6)
    comparison.require_explained(1e-5, ())
    assert comparison.difference() == 0.0
    comparison.precision = Precision(step=0.0, tolerance=1e-6)
    with pytest.raises(ArgumentError, match="outputs within 1e-06"):
        comparison.require_explained(1e-5, ())


def test_outputs_that_are_no_numbers_beside_good_ones_are_noticed() -> None:
    model = MPNetModel(MPNetConfig(**MPNET)).eval()
    comparison = OutputComparison(model, list(model.modules()))
    assert comparison.near(comparison.difference())
    model.pooler.register_forward_hook(lambda *given: torch.nan * given[-1])
    assert not comparison.near(comparison.difference())


@torch.no_grad()
def test_trials_leave_the_settings_of_layers() -> None:
    """Swin's layers stop to shift their windows at a picture that one of them spans."""
    sizes = SWIN | {"image_size": 32, "patch_size": 4, "window_size": 4, "depths": [2, 2]}
    model = SwinModel(SwinConfig(**sizes | {"num_heads": [2, 2]})).eval()
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.2)
    picture = torch.randn(1, model.config.num_channels, 64, 64)
    fresh = copy.deepcopy(model)(picture).last_hidden_state
    assert "image" in str(accelerate(model))
    torch.testing.assert_close(model(picture).last_hidden_state, fresh, atol=1e-5, rtol=1e-5)


def test_trials_leave_unset_what_a_model_sets_at_its_first_text() -> None:
    class Learning(MPNetModel):
        """A model that keeps the length of the first text that it reads."""

        first: int | None = None

        def forward(self, *arguments: Any, **options: Any) -> Any:
            if self.first is None:
                self.first = options["input_ids"].shape[1]
            return super().forward(*arguments, **options)

    model = Learning(MPNetConfig(**MPNET)).eval()
    model.first = None
    assert accelerate(model).difference is not None
    model(input_ids=torch.arange(2, 7).unsqueeze(0))
    assert model.first == 5


def test_errors_of_accelerated_modules_are_not_blamed_on_inputs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*arguments: Any, **options: Any) -> None:
        raise ValueError("of posenc")

    monkeypatch.setattr(MPNetAttention, "forward", fail)
    model = MPNetModel(MPNetConfig(**MPNET)).eval()
    with pytest.raises(ArgumentError, match=r"model: .*MPNetModel.*ValueError: of posenc"):
        accelerate(model)
    assert accelerated(model) == []


def test_spectrograms_of_whisper_are_compared() -> None:
    """They have mel bins before frames, one length, and the decoder's tokens beside them."""
    sizes = {"num_mel_bins": 20, "max_source_positions": 30, "max_target_positions": 20}
    layers = {
        f"{side}_{name}": 2
        for side in ("encoder", "decoder")
        for name in ("layers", "attention_heads")
    }
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    config = WhisperConfig(
        d_model=32,
        vocab_size=64,
        encoder_ffn_dim=32,
        decoder_ffn_dim=32,
        **sizes,
        **layers,
        **tokens,
    )
    report = accelerate(WhisperModel(config).eval())
    assert report.difference is not None
    assert report.difference < 1e-5
    assert str(report).count("60 frames") == 1
    assert "1 row of" not in str(report)


def test_models_that_raise_are_named() -> None:
    def fail(*arguments: Any, **options: Any) -> None:
        raise ValueError("its own")

    model = MPNetModel(MPNetConfig(**MPNET)).eval()
    model.embeddings.forward = MethodType(fail, model.embeddings)
    with pytest.raises(ArgumentError, match=r"check: .*MPNetModel.*raises.*ValueError: its own"):
        accelerate(model)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("seed", [0, 1])
def test_routers_that_rounding_makes_choose_other_experts(seed: int, dtype: torch.dtype) -> None:
    """Outputs differ by far more than rounding, as those of the model itself do from float32."""
    config = GptOssConfig(
        vocab_size=160,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=128,
        sliding_window=16,
        num_local_experts=8,
        num_experts_per_tok=2,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = GptOssModel(config).eval()
        for parameter in model.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.15)
    report = accelerate(model.to(dtype), shortest=1)
    assert report.accelerated == config.num_hidden_layers
