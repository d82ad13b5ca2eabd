"""The comparison of ``accelerate``: inputs, precision and devices, and faults that it finds."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from posenc.attention import api
from posenc.attention.dispatch import FEW_LOGITS
from posenc.errors import ArgumentError
from posenc.transformers.acceleration import AccelerateReport, accelerate
from posenc.transformers.acceleration.checking import OutputComparison, Precision
from posenc.transformers.acceleration.families.alibi import MptAlibi
from posenc.transformers.acceleration.families.buckets import MPNetAttention
from tests.support.tiny_models import build
from tests.transformers.acceleration.case import of
from tests.transformers.acceleration.cases.images import LAYOUT, SWIN
from tests.transformers.acceleration.cases.sounds import SPEECH
from tests.transformers.acceleration.cases.texts import DEBERTA_V2, MPNET, MPT, T5
from tests.transformers.acceleration.test_laws import accelerated, put_under


def mpnet(**options: Any) -> transformers.PreTrainedModel:
    return build("MPNetModel", MPNET, **options).eval()


def checked(make: Callable[[], nn.Module]) -> AccelerateReport:
    """The report of an accelerated model, whose outputs were compared."""
    torch.manual_seed(0)
    report = accelerate(make().eval(), shortest=0)
    assert report.difference is not None
    assert report.accelerated > 0
    return report


@pytest.mark.parametrize("positions", [1, 3, 5, 8, 80])
def test_few_positions(positions: int) -> None:
    few = {"max_position_embeddings": positions}
    checked(of("DebertaV2Model", DEBERTA_V2, **few))
    if positions > 1:
        checked(of("MPNetModel", MPNET, **few))
        checked(of("LayoutLMv3Model", LAYOUT, **few))
        checked(of("MptModel", MPT, n_layers=1, max_seq_len=positions))


def test_a_shorter_table_than_the_config_says() -> None:
    model = mpnet(max_position_embeddings=512)
    model.embeddings.position_embeddings = nn.Embedding(20, 24)
    checked(lambda: model)


def test_a_config_that_an_encoder_has_changed() -> None:
    config = transformers.T5Config(**T5)
    transformers.T5EncoderModel(config)
    checked(lambda: transformers.T5Model(config))


BERT = {"hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 1}
BERT |= {"num_attention_heads": 3}


@pytest.mark.parametrize("name", ["reader", "segmenter"])
def test_parts_of_other_models(name: str) -> None:
    if name == "reader":
        text = transformers.BertConfig(
            vocab_size=9, **BERT, is_decoder=True, add_cross_attention=True
        )
        encoder = build("SwinModel", SWIN)
        model = transformers.VisionEncoderDecoderModel(
            encoder=encoder, decoder=transformers.BertLMHeadModel(text)
        )
    else:
        stages = {"depths": [1] * 4, "num_heads": [1] * 4, "image_size": 64}
        names = ["stage1", "stage2", "stage3", "stage4"]
        backbone = transformers.SwinConfig(**SWIN | stages, out_features=names)
        config = transformers.UperNetConfig(
            backbone_config=backbone, hidden_size=16, auxiliary_channels=8
        )
        model = transformers.UperNetForSemanticSegmentation(config)
    checked(lambda: model)


def test_derived_classes_and_parts() -> None:
    class Own(transformers.T5ForConditionalGeneration):
        """A user's class, in no package of transformers."""

    class Holder(nn.Module):
        """A user's module with two models."""

        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = mpnet(), build("T5EncoderModel", T5)

    checked(lambda: Own(transformers.T5Config(**T5)))
    checked(lambda: build("SpeechT5Model", SPEECH).encoder)
    assert checked(Holder).accelerated == 5


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize("seed", [0, 7])
def test_quantized_models(seed: int) -> None:
    """Activations in 8 bits are a step apart here and there."""
    torch.manual_seed(seed)
    sizes = {"hidden_size": 48, "intermediate_size": 96, "max_position_embeddings": 512}
    buckets = {"position_buckets": 32, "max_relative_positions": 64}
    model = build("DebertaV2Model", DEBERTA_V2, **sizes, **buckets).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    quantized = torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, torch.qint8)
    assert accelerate(quantized, shortest=0).difference < 0.1


def test_half_precision_inside_of_float32_outputs() -> None:
    class Wide(transformers.MPNetModel):
        """A model that hands its outputs on in float32."""

        def forward(self, *arguments: Any, **options: Any) -> Any:
            return super().forward(*arguments, **options).last_hidden_state.float()

    report = checked(lambda: Wide(transformers.MPNetConfig(**MPNET)).bfloat16())
    assert 1e-4 < report.difference < 0.1


def test_autocast_and_default_devices_of_the_caller() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert checked(mpnet).difference < 1e-5
    model = mpnet()
    with torch.device("meta"):
        checked(lambda: model)


def test_models_without_values_are_not_compared() -> None:
    with torch.device("meta"):
        model = mpnet()
    report = put_under(model)
    assert report.accelerated == 3
    assert report.difference is None
    assert "not compared, since weights are on the meta device" in str(report)


def test_differences_that_rounding_errors_explain_are_allowed() -> None:
    model = mpnet()
    comparison = OutputComparison(model, [layer.attention.attn for layer in model.encoder.layer])
    comparison.precision = Precision(step=1.0, tolerance=1e-6)
    comparison.require_explained(1e-5, ())
    assert comparison.difference() == 0.0
    comparison.precision = Precision(step=0.0, tolerance=1e-6)
    with pytest.raises(ArgumentError, match="outputs within 1e-06"):
        comparison.require_explained(1e-5, ())


def test_outputs_that_are_no_numbers_beside_good_ones_are_noticed() -> None:
    model = mpnet()
    comparison = OutputComparison(model, list(model.modules()))
    assert comparison.near(comparison.difference())
    model.pooler.register_forward_hook(lambda *given: torch.nan * given[-1])
    assert not comparison.near(comparison.difference())


@torch.no_grad()
def test_trials_leave_the_settings_of_layers() -> None:
    """Swin's layers stop to shift their windows at a picture that one of them spans."""
    sizes = {"image_size": 32, "patch_size": 4, "depths": [2, 2], "num_heads": [2, 2]}
    model = build("SwinModel", SWIN, **sizes).eval()
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.2)
    picture = torch.randn(1, model.config.num_channels, 64, 64)
    fresh = copy.deepcopy(model)(picture).last_hidden_state
    assert "image" in str(accelerate(model))
    torch.testing.assert_close(model(picture).last_hidden_state, fresh, atol=1e-5, rtol=1e-5)


def test_trials_leave_unset_what_a_model_sets_at_its_first_text() -> None:
    class Learning(transformers.MPNetModel):
        """A model that keeps the length of the first text that it reads."""

        first: int | None = None

        def forward(self, *arguments: Any, **options: Any) -> Any:
            if self.first is None:
                self.first = options["input_ids"].shape[1]
            return super().forward(*arguments, **options)

    model = Learning(transformers.MPNetConfig(**MPNET)).eval()
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
    model = mpnet()
    with pytest.raises(ArgumentError, match=r"model: .*MPNetModel.*ValueError: of posenc"):
        accelerate(model)
    assert accelerated(model) == []


def test_spectrograms_of_whisper_are_compared() -> None:
    """They have mel bins before frames, one length, and the decoder's tokens beside them."""
    sizes = {"num_mel_bins": 20, "max_source_positions": 30, "max_target_positions": 20}
    sizes |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    for side in ("encoder", "decoder"):
        sizes |= {f"{side}_layers": 2, f"{side}_attention_heads": 2, f"{side}_ffn_dim": 32}
    config = transformers.WhisperConfig(d_model=32, vocab_size=64, **sizes)
    report = accelerate(transformers.WhisperModel(config).eval())
    assert report.difference < 1e-5
    assert str(report).count("60 frames") == 1
    assert "1 row of" not in str(report)


def test_models_that_raise_are_named() -> None:
    def fail(*arguments: Any, **options: Any) -> None:
        raise ValueError("its own")

    model = mpnet()
    model.embeddings.forward = MethodType(fail, model.embeddings)
    with pytest.raises(ArgumentError, match=r"check: .*MPNetModel.*raises.*ValueError: its own"):
        accelerate(model)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("seed", [0, 1])
def test_routers_that_rounding_makes_choose_other_experts(seed: int, dtype: torch.dtype) -> None:
    """Outputs differ by far more than rounding, as those of the model itself do from float32."""
    sizes = {"vocab_size": 160, "hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
    sizes |= {"num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 16}
    config = transformers.GptOssConfig(**sizes, max_position_embeddings=128)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = transformers.GptOssModel(config).eval()
        for parameter in model.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.15)
    report = accelerate(model.to(dtype), shortest=1)
    assert report.accelerated == config.num_hidden_layers


# Trials: padding, tokens behind a cache, and rows of many tokens

Forward = Callable[..., Any]
BATCH = "2 rows of 48 tokens, one padded"


def mpt(positions: int = 512) -> transformers.PreTrainedModel:
    return build("MptForCausalLM", MPT, max_seq_len=positions).eval()


def long_mpnet() -> transformers.PreTrainedModel:
    return mpnet(max_position_embeddings=512)


def drops_its_cache(forward: Forward) -> Forward:
    def faulty(self: Any, *rest: Any, **arguments: Any) -> Any:
        seen = {name: x for name, x in arguments.items() if not isinstance(x, transformers.Cache)}
        return forward(self, *rest, **seen)

    return faulty


def drops_its_cache_at_few_keys(forward: Forward) -> Forward:
    def faulty(self: Any, *rest: Any, **arguments: Any) -> Any:
        return (drops_its_cache(forward) if self.shortest else forward)(self, *rest, **arguments)

    return faulty


def ignores_padding(forward: Forward) -> Forward:
    def faulty(self: Any, *rest: Any, attention_mask: Any = None, **arguments: Any) -> Any:
        if attention_mask is not None and attention_mask.dim() == 2:  # True or 1 for what counts
            padding = isinstance(self, MptAlibi)
            attention_mask = torch.full_like(attention_mask, not padding)
        return forward(self, *rest, attention_mask=attention_mask, **arguments)

    return faulty


def is_wrong_for_many_tokens(forward: Forward) -> Forward:
    def faulty(self: Any, hidden_states: Any, *rest: Any, **arguments: Any) -> Any:
        output, *others = forward(self, hidden_states, *rest, **arguments)
        return (output * (2.0 if hidden_states.shape[1] >= 256 else 1.0), *others)

    return faulty


@pytest.mark.parametrize(
    ("make", "kind", "fault"),
    [
        (mpt, MptAlibi, drops_its_cache),
        (mpt, MptAlibi, drops_its_cache_at_few_keys),
        (mpt, MptAlibi, ignores_padding),
        (mpt, MptAlibi, is_wrong_for_many_tokens),
        (long_mpnet, MPNetAttention, is_wrong_for_many_tokens),
    ],
)
def test_planted_faults_are_found(
    make: Callable[[], transformers.PreTrainedModel],
    kind: type[nn.Module],
    fault: Callable[[Forward], Forward],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    model = make()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4)
    assert accelerate(make()).difference < 1e-4
    monkeypatch.setattr(kind, "forward", fault(kind.forward))
    with pytest.raises(ArgumentError, match=r"model: "):
        accelerate(model)
    assert accelerated(model) == []


def test_the_report_says_what_was_tried() -> None:
    def tried(model: transformers.PreTrainedModel) -> str:
        report = accelerate(model.eval(), shortest=0)
        assert report.tried in str(report)
        return report.tried

    long, steps = "1 row of 300 tokens", "2 steps behind a cache"
    few = f"2 rows of 38 tokens, one padded; {steps}; 1 row of 40 tokens"
    for model, expected in (
        (mpt(), f"{BATCH}; {steps}; {long}"),
        (transformers.T5Model(transformers.T5Config(**T5)), f"{BATCH}; {steps}; {long}"),
        (long_mpnet(), f"{BATCH}; {long}"),
        (build("SwinModel", SWIN), "2 images"),
        (transformers.BertModel(transformers.BertConfig(**BERT)), f"{BATCH}; {long}"),
        (mpt(positions=42), few),
    ):
        assert tried(model) == expected
    assert accelerate(mpt(), check=False).tried == ""


def test_what_a_model_cannot_do_itself_is_left_out_and_said() -> None:
    class Short(transformers.MPNetModel):
        """A model that takes no long rows, whatever its table of positions says."""

        def forward(self, *arguments: Any, **options: Any) -> Any:
            if options["input_ids"].shape[1] > 100:
                raise ValueError("too long")
            return super().forward(*arguments, **options)

    class Whole(transformers.MptForCausalLM):
        """A model without a cache that works."""

    model = Short(long_mpnet().config).eval()
    assert accelerate(model).tried == f"{BATCH}; no row of 300, which raises ValueError: too long"
    whole: Any = Whole(mpt().config).eval()
    whole.transformer.register_forward_pre_hook(_refuse_caches, with_kwargs=True)
    report = accelerate(whole)
    assert report.tried.startswith(BATCH)
    assert "no steps, which raise ValueError: no caches" in report.tried
    assert report.tried.endswith("1 row of 300 tokens")


def _refuse_caches(module: nn.Module, arguments: Any, options: dict[str, Any]) -> None:
    if any(isinstance(x, transformers.Cache) for x in options.values()):
        raise ValueError("no caches")


def test_long_rows_are_computed_as_long_texts_are(monkeypatch: pytest.MonkeyPatch) -> None:
    rules: list[str] = []
    choose = api.choose

    def noted(*arguments: Any, **options: Any) -> Any:
        choice = choose(*arguments, **options)
        rules.append(choice.rule.name)
        return choice

    monkeypatch.setattr(api, "choose", noted)
    accelerate(mpt())
    assert set(rules) > {FEW_LOGITS}


def test_random_numbers_of_the_caller_stay_as_they_were() -> None:
    torch.manual_seed(5)
    model = long_mpnet()
    state = torch.get_rng_state()
    assert accelerate(model).tried
    assert torch.equal(torch.get_rng_state(), state)
