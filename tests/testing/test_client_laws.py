"""The laws about other libraries, over every encoding of the registry."""

from __future__ import annotations

import pytest

from posenc.models import Decoder, DecoderConfig
from posenc.registry import ENCODINGS
from posenc.testing import Subject
from tests.support.exhaustive import kept_in_suite
from tests.support.processes import forking
from tests.testing.client_laws import (
    adapters_merge,
    broken_in_parallel,
    offloading_changes_nothing,
    quantisation_is_near,
)

TRAINABLE = [name for name, entry in ENCODINGS.items() if entry.claims.trainable]

READS = {
    "comrope": "a matrix exponential of its parameters",
    "conv": "a convolution",
    "dape": "a network over heads",
    "deberta": "embeddings that all layers share",
    "floater": "parameters in an operator, of dynamics that blocks share",
    "forgetting": "a signal of the layer's input",
    "learned": "a table",
    "path": "projections of its own",
    "recursive": "parameters in a hook",
    "rope_mixed": "frequencies",
    "shaw": "tables of logits and values",
    "swin_v2": "a network, and a scale of its own",
    "t5": "a table that all layers share",
    "transformer_xl": "biases that all layers share",
    "tupe": "positions and projections that all layers share",
}
"""An encoding for each way in which parameters are read, by which wrappers move them."""

OTHERS = [name for name in TRAINABLE if name not in READS]


@pytest.mark.parametrize("name", TRAINABLE)
def test_adapters_merge(name: str) -> None:
    adapters_merge(Subject.of_entry(name, ENCODINGS[name]))


def test_adapters_on_borrowed_projections_merge() -> None:
    options = {"projections": "content", "max_distance": 6}
    adapters_merge(Subject.of_entry("deberta", ENCODINGS["deberta"], **options))


@pytest.mark.parametrize("name", kept_in_suite(TRAINABLE, READS))
def test_offloading_changes_nothing(name: str) -> None:
    offloading_changes_nothing(Subject.of_entry(name, ENCODINGS[name]))


@pytest.mark.parametrize("name", TRAINABLE)
def test_quantisation_is_near(name: str) -> None:
    quantisation_is_near(Subject.of_entry(name, ENCODINGS[name]))


@pytest.mark.parametrize(
    "names",
    [[*READS], pytest.param(OTHERS, marks=pytest.mark.exhaustive)],
    ids=["one a way", "others"],
)
def test_two_processes_train_as_one(names: list[str]) -> None:
    forking()
    assert broken_in_parallel(names) == {}


@pytest.mark.parametrize("name", ["shaw", "contextual"])
def test_adapters_find_projections_where_an_encoding_has_parts_of_their_names(name: str) -> None:
    peft = pytest.importorskip("peft")
    config = DecoderConfig(vocabulary=9, dim=16, heads=2, layers=1, max_length=16, encoding=name)
    decoder = Decoder(config)
    targets = [f"attention.{projection}" for projection in ("query", "key", "value")]
    adapted = peft.get_peft_model(decoder, peft.LoraConfig(r=2, target_modules=targets))
    assert sum("lora_A" in key for key, _ in adapted.named_parameters()) == 3
