"""Sentence encoders, extended by posenc and loaded by sentence-transformers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

from posenc.lab.evaluation.extend import extend_checkpoint

library = pytest.importorskip("sentence_transformers")

LENGTH, FACTOR = 16, 4
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS = [f"w{number}" for number in range(27)]

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BERT of words that answers its class token, projected and normalised, of short texts."""
    folder = tmp_path_factory.mktemp("encoder")
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(SPECIAL + WORDS),
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=LENGTH,
        initializer_range=0.5,
    )
    BertModel(config).save_pretrained(folder / "bert")
    numbers = {word: number for number, word in enumerate(SPECIAL + WORDS)}
    tokenizer = Tokenizer(models.WordLevel(numbers, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    named = dict(zip(("pad", "unk", "cls", "sep", "mask"), SPECIAL, strict=True))
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=LENGTH,
        **{f"{name}_token": token for name, token in named.items()},
    ).save_pretrained(folder / "bert")
    modules = library.sentence_transformer.modules
    transformer = modules.Transformer(str(folder / "bert"))
    parts = [transformer, modules.Pooling(16, pooling_mode="cls"), modules.Dense(16, 8)]
    made = library.SentenceTransformer(modules=[*parts, modules.Normalize()], device="cpu")
    made.save(str(folder / "sentences"))
    beside = {"max_seq_length": LENGTH, "do_lower_case": False}  # as older versions wrote it
    path = folder / "sentences/sentence_bert_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | beside))
    return folder / "sentences"


def test_sentence_transformers_reads_all_of_longer_texts(encoder: Path, tmp_path: Path) -> None:
    extend_checkpoint(
        encoder, tmp_path / "out", methods="interpolate", factor=float(FACTOR), report=False
    )
    before, after = (
        library.SentenceTransformer(str(folder), device="cpu")
        for folder in (encoder, tmp_path / "out")
    )
    assert list(map(type, after)) == list(map(type, before))
    assert after[1].get_config_dict() == before[1].get_config_dict()
    assert torch.equal(after[2].linear.weight, before[2].linear.weight)
    assert (before.max_seq_length, after.max_seq_length) == (LENGTH, FACTOR * LENGTH)
    start, *ends = (" ".join(words) for words in (WORDS[:20], WORDS[20:23], WORDS[23:]))
    texts = [f"{start} {end}" for end in ends]  # alike up to the old length, and past it
    cut, whole = (model.encode(texts, convert_to_tensor=True) for model in (before, after))
    assert torch.equal(cut[0], cut[1])
    assert (whole[0] - whole[1]).abs().max() > 1e-3
    torch.testing.assert_close(whole.norm(dim=1), torch.ones(2))
