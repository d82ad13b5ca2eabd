"""Logits of CTranslate2, on the processor: its own converter and weights in float32."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import ctranslate2
import numpy as np
import transformers
from ctranslate2.converters import TransformersConverter
from loop import main


class Converter(TransformersConverter):
    """The converter with a tokenizer of no family, and an unknown token, without which it fails."""

    def load_tokenizer(
        self, tokenizer_class: type, model_name_or_path: str, **_: object
    ) -> transformers.PreTrainedTokenizerBase:
        tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(model_name_or_path)
        tokenizer.unk_token = tokenizer.pad_token
        return tokenizer


def load(folder: Path) -> Callable[[list[int]], np.ndarray]:
    with tempfile.TemporaryDirectory() as work:
        model = Converter(str(folder)).convert(f"{work}/model", quantization="float32")
        generator = ctranslate2.Generator(model, device="cpu", compute_type="float32")

    def logits(tokens: list[int]) -> np.ndarray:
        return np.array(generator.forward_batch([tokens]))[0]

    return logits


def release() -> str:
    return str(ctranslate2.__version__)


if __name__ == "__main__":
    main(load, release)
