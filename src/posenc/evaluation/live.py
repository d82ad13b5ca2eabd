"""Language models that transformers runs, stretched in place."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from posenc.encoding import Encoding
from posenc.errors import ArgumentError, CheckpointError
from posenc.integrations.transformers.extended import FIELD
from posenc.layout import Layout


class LiveModel(nn.Module):
    """A language model of transformers, called as posenc's models are.

    Args:
        model: in eval mode.
        served: transformers' ``rope_type`` of a stretched one; "": posenc only, or not stretched.
    """

    auto: ClassVar[str]
    """Class of transformers that loads it."""

    words: ClassVar[str]
    """Description of such a model."""

    def __init__(self, model: Any, *, served: str = "") -> None:
        super().__init__()
        self.model, self.served = model, served

    @classmethod
    def open(cls, folder: Path, *, device: str) -> Self:
        """Load a folder by transformers, in float32.

        Raises:
            CheckpointError: without transformers, or if it cannot load the folder.
        """
        try:
            import transformers
        except ImportError as error:
            raise CheckpointError(
                str(folder),
                expected="transformers, which loads models that posenc has no reader for",
                got="not installed",
                remedy="Install it: pip install 'posenc[transformers]'.",
            ) from error
        try:
            model, found = getattr(transformers, cls.auto).from_pretrained(
                folder, dtype=torch.float32, output_loading_info=True
            )
            absent = [*found["missing_keys"], *found["mismatched_keys"]]
            if absent:
                raise ValueError(f"no {absent[0]}")  # transformers would draw it at random
        except Exception as error:  # of any model type
            raise CheckpointError(
                str(folder),
                expected=f"{cls.words} that transformers loads",
                got=f"{type(error).__name__}: {error}",
                remedy="Name a folder written by save_pretrained.",
            ) from error
        if hasattr(model.config, FIELD):
            from posenc.integrations.transformers import stretch

            stretch(model)
        return cls(model.to(device).eval())

    @property
    def vocabulary(self) -> int:
        """Number of token ids."""
        return int(self.model.config.get_text_config().vocab_size)

    def trained_encodings(self) -> list[Encoding]:
        """The rotation of layers that see everything, as ``encodings_of`` asks for it.

        Raises:
            ArgumentError: for a model without one.
        """
        from posenc.integrations.transformers.stretching.frequencies import frequencies_in
        from posenc.integrations.transformers.stretching.rotary import windowed

        found = [f for f in frequencies_in(self.model) if not windowed(f.layer_type)]
        if not found:
            raise ArgumentError(
                "checkpoint",
                expected="a model with rotary frequencies",
                got=type(self.model).__name__,
                remedy="posenc evaluate measures it as it is.",
            )
        return [found[0].encoding("frequencies")]

    def extended(
        self, method: str, *, factor: float, length: int, options: Mapping[str, Any]
    ) -> Self:
        """The model stretched by a method; weights are shared.

        Raises:
            ArgumentError: if it does not fit.
        """
        from posenc.integrations.transformers import stretch

        tensors = chain(self.model.parameters(), self.model.buffers())
        twin = copy.deepcopy(self.model, {id(tensor): tensor for tensor in tensors})
        report = stretch(twin, method, factor=factor, length=length, **options)
        served = ""
        if report.saved_as == "transformers":
            parameters = twin.config.get_text_config().rope_parameters
            kinds = parameters.get("rope_type") or [p["rope_type"] for p in parameters.values()]
            served = kinds if isinstance(kinds, str) else max(kinds, key=lambda k: k != "default")
        return type(self)(twin, served=served)

    def write(self, folder: Path, *, dtype: torch.dtype) -> None:
        """Write it as ``save_pretrained`` does, in this dtype."""
        self.model.to(dtype).save_pretrained(folder)


class LiveDecoder(LiveModel):
    """A causal language model of transformers, called as posenc's decoders are.

    Args:
        model, served: see ``LiveModel``.
        window: attention is cut to the last tokens, as many as this.
    """

    auto, words = "AutoModelForCausalLM", "a causal language model"

    def __init__(self, model: Any, *, served: str = "", window: int | None = None) -> None:
        super().__init__(model, served=served)
        self.window = window

    @property
    def windowed(self) -> bool:
        """True if some layers see a window already."""
        config = self.model.config.get_text_config()
        return any(
            getattr(config, name, None) is not None
            for name in ("sliding_window", "attention_chunk_size", "local_attention")
        )

    def forward(
        self, tokens: Int[Tensor, "B L"], layout: Layout | None = None
    ) -> Float[Tensor, "B L V"]:
        """Logits of the next token."""
        options = _positions(tokens, layout)
        if self.window is not None:
            seen = torch.ones(2 * tokens.shape[1:], dtype=torch.bool, device=tokens.device).tril()
            seen = seen.triu(1 - self.window).expand(len(tokens), 1, -1, -1)
            lowest = torch.finfo(self.model.dtype).min
            mask = torch.zeros_like(seen, dtype=self.model.dtype)
            options["attention_mask"] = mask.masked_fill(~seen, lowest)
        logits: Tensor = self.model(input_ids=tokens, use_cache=False, **options).logits
        return logits

    def cut(self, window: int) -> LiveDecoder:
        """The model with this attention window; weights are shared."""
        return LiveDecoder(self.model, window=window)


class LiveMaskedLM(LiveModel):
    """A masked language model of transformers, called as posenc's are."""

    auto, words = "AutoModelForMaskedLM", "a masked language model"

    def forward(
        self, tokens: Int[Tensor, "B L"], layout: Layout | None = None
    ) -> Float[Tensor, "B L V"]:
        """Logits of each token."""
        logits: Tensor = self.model(input_ids=tokens, **_positions(tokens, layout)).logits
        return logits


def _positions(tokens: Int[Tensor, "B L"], layout: Layout | None) -> dict[str, Any]:
    """The option of a model of transformers that says where tokens are."""
    if layout is None:
        return {}
    return {"position_ids": layout.positions[..., 0].long().expand(len(tokens), -1)}
