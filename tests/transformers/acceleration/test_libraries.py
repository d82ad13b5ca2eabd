"""Accelerated models in pipelines and in sentence-transformers, with a tokenizer beside them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    DebertaV2Config,
    DebertaV2ForSequenceClassification,
    MPNetConfig,
    MPNetModel,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    pipeline,
)

from posenc.transformers.acceleration import accelerate, restore
from tests.transformers.acceleration.case import VOCABULARY
from tests.transformers.acceleration.cases.deberta_v2 import SIZES as DEBERTA
from tests.transformers.acceleration.cases.mpnet import SIZES as MPNET

WORDS = ["a", "b", "c", "d"]
SENTENCES = ["a b c d a b c", "d c b", "a a a a a a a a a b"]
PAIRS = [("a b c", "d d d a b c a"), ("b", "c d")]

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


def stored(model: PreTrainedModel, folder: Path) -> str:
    """A folder with the model, and with a tokenizer of four words."""
    special = ["<s>", "<pad>", "</s>", "<unk>"]
    words = {word: number for number, word in enumerate([*special, *WORDS])}
    words |= {f"unused{number}": number for number in range(len(words), VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    named = {"cls_token": "<s>", "pad_token": "<pad>", "sep_token": "</s>", "unk_token": "<unk>"}
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=32, **named)
    wrapped.save_pretrained(folder)
    model.save_pretrained(folder)
    return str(folder)


def classifier(labels: int) -> PreTrainedModel:
    torch.manual_seed(0)
    config = DebertaV2Config(**DEBERTA | {"num_labels": labels, "pad_token_id": 1})
    return DebertaV2ForSequenceClassification(config).eval()


def near(found: Any, expected: Any) -> None:
    torch.testing.assert_close(
        torch.as_tensor(found), torch.as_tensor(expected), rtol=1e-4, atol=1e-5
    )


def test_pipelines(tmp_path: Path) -> None:
    folder = stored(classifier(3), tmp_path)
    classify = pipeline("text-classification", model=folder, device="cpu", top_k=None)

    def scores() -> list[list[float]]:
        rows = classify(SENTENCES, batch_size=3)
        return [[part["score"] for part in sorted(row, key=lambda p: p["label"])] for row in rows]

    expected = scores()
    assert accelerate(classify.model, shortest=0).accelerated == 3
    near(scores(), expected)


def test_sentence_encoders_of_mpnet(tmp_path: Path) -> None:
    library = pytest.importorskip("sentence_transformers")
    torch.manual_seed(0)
    folder = stored(MPNetModel(MPNetConfig(**MPNET)), tmp_path)
    model = library.SentenceTransformer(folder, device="cpu")
    expected = model.encode(SENTENCES)
    assert accelerate(model, shortest=0).accelerated == 3
    near(model.encode(SENTENCES), expected)
    restore(model)
    assert (model.encode(SENTENCES) == expected).all()


def test_cross_encoders_of_deberta(tmp_path: Path) -> None:
    library = pytest.importorskip("sentence_transformers")
    model = library.CrossEncoder(stored(classifier(1), tmp_path), device="cpu")
    texts = [text for _, text in PAIRS]
    expected, ranked = model.predict(PAIRS), model.rank("a b c", texts)
    assert accelerate(model, shortest=0).accelerated == 3
    near(model.predict(PAIRS), expected)
    found = model.rank("a b c", texts)
    assert [row["corpus_id"] for row in found] == [row["corpus_id"] for row in ranked]
