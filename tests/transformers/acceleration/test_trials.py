"""What ``accelerate`` compares: padding, tokens behind a cache, and rows of many tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    BertConfig,
    BertModel,
    Cache,
    MPNetConfig,
    MPNetModel,
    MptConfig,
    MptForCausalLM,
    PreTrainedModel,
    SwinConfig,
    SwinModel,
    T5Config,
    T5Model,
)

from posenc.attention import api
from posenc.attention.dispatch import FEW_LOGITS
from posenc.errors import ArgumentError
from posenc.transformers.acceleration import accelerate
from posenc.transformers.acceleration.families.alibi import MptAlibi
from posenc.transformers.acceleration.families.buckets import MPNetAttention
from tests.transformers.acceleration.cases.mpnet import SIZES as MPNET
from tests.transformers.acceleration.cases.swin import SIZES as SWIN
from tests.transformers.acceleration.cases.t5 import SIZES as T5
from tests.transformers.acceleration.test_laws import accelerated

Forward = Callable[..., Any]
BATCH = "2 rows of 48 tokens, one padded"


def mpt(positions: int = 512) -> PreTrainedModel:
    sizes = {"d_model": 24, "n_heads": 3, "n_layers": 2, "vocab_size": 60}
    return MptForCausalLM(MptConfig(**sizes, max_seq_len=positions)).eval()


def mpnet() -> PreTrainedModel:
    return MPNetModel(MPNetConfig(**MPNET | {"max_position_embeddings": 512})).eval()


def drops_its_cache(forward: Forward) -> Forward:
    def faulty(self: Any, *rest: Any, **arguments: Any) -> Any:
        seen = {name: x for name, x in arguments.items() if not isinstance(x, Cache)}
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


FAULTS: list[
    tuple[Callable[[], PreTrainedModel], type[nn.Module], Callable[[Forward], Forward]]
] = [
    (mpt, MptAlibi, drops_its_cache),
    (mpt, MptAlibi, drops_its_cache_at_few_keys),
    (mpt, MptAlibi, ignores_padding),
    (mpt, MptAlibi, is_wrong_for_many_tokens),
    (mpnet, MPNetAttention, is_wrong_for_many_tokens),
]


@pytest.mark.parametrize(
    ("make", "kind", "fault"), FAULTS, ids=[f"{m.__name__}-{f.__name__}" for m, _, f in FAULTS]
)
def test_planted_faults_are_found(
    make: Callable[[], PreTrainedModel],
    kind: type[nn.Module],
    fault: Callable[[Forward], Forward],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    model = make()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4)
    report = accelerate(make())
    assert report.difference is not None
    assert report.difference < 1e-4
    monkeypatch.setattr(kind, "forward", fault(kind.forward))
    with pytest.raises(ArgumentError, match=r"model: "):
        accelerate(model)
    assert accelerated(model) == []


def test_the_report_says_what_was_tried() -> None:
    def tried(model: PreTrainedModel) -> str:
        report = accelerate(model.eval(), shortest=0)
        assert report.tried in str(report)
        return report.tried

    assert tried(mpt()) == f"{BATCH}; 2 steps behind a cache; 1 row of 300 tokens"
    assert tried(T5Model(T5Config(**T5))) == f"{BATCH}; 2 steps behind a cache; 1 row of 300 tokens"
    assert tried(mpnet()) == f"{BATCH}; 1 row of 300 tokens"
    assert tried(SwinModel(SwinConfig(**SWIN))) == "2 images"
    bert = BertConfig(
        hidden_size=24, intermediate_size=32, num_hidden_layers=1, num_attention_heads=3
    )
    assert tried(BertModel(bert)) == f"{BATCH}; 1 row of 300 tokens"
    few = "2 rows of 38 tokens, one padded; 2 steps behind a cache; 1 row of 40 tokens"
    assert tried(mpt(positions=42)) == few
    assert accelerate(mpt(), check=False).tried == ""


def test_what_a_model_cannot_do_itself_is_left_out_and_said() -> None:
    class Short(MPNetModel):
        """A model that takes no long rows, whatever its table of positions says."""

        def forward(self, *arguments: Any, **options: Any) -> Any:
            if options["input_ids"].shape[1] > 100:
                raise ValueError("too long")
            return super().forward(*arguments, **options)

    class Whole(MptForCausalLM):
        """A model without a cache that works."""

    model = Short(mpnet().config).eval()
    assert accelerate(model).tried == f"{BATCH}; no row of 300, which raises ValueError: too long"
    whole: Any = Whole(mpt().config).eval()
    whole.transformer.register_forward_pre_hook(_refuse_caches, with_kwargs=True)
    report = accelerate(whole)
    assert report.tried.startswith(BATCH)
    assert "no steps, which raise ValueError: no caches" in report.tried
    assert report.tried.endswith("1 row of 300 tokens")


def _refuse_caches(module: nn.Module, arguments: Any, options: dict[str, Any]) -> None:
    if any(isinstance(x, Cache) for x in options.values()):
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
    model = mpnet()
    state = torch.get_rng_state()
    assert accelerate(model).tried
    assert torch.equal(torch.get_rng_state(), state)
