"""lm-evaluation-harness on models that posenc stretches: ``python -m posenc.lab.lm_eval``.

The module's command line is the harness's own, with one more model.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from lm_eval.__main__ import cli_evaluate
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM

from posenc.arguments import Length, check
from posenc.errors import ArgumentError
from posenc.extension import EXTENSIONS
from posenc.registration import parse_name
from posenc.transformers.acceleration import accelerate as computed_by_posenc
from posenc.transformers.checkpoints import FIELD
from posenc.transformers.stretching import stretch
from posenc.transformers.stretching.frequencies import varies

Tokens = tuple[Any, list[int], list[int]]
"""A request of the harness: its texts, and the tokens of context and continuation."""


@register_model("posenc")
class PosencLM(HFLM):
    """A language model of transformers that is stretched as soon as it is loaded, ``posenc``.

    A checkpoint that ``posenc extend`` wrote is stretched as it says, without a method.

    Args:
        pretrained: a folder, a name on the hub, or a loaded model, which is changed in place.
        method: of ``stretch``, with its options: ``rerope``, ``yarn@alpha=0.5@beta=4``; None: as
            the config says.
        factor: extension of the trained length.
        length: the trained length; by default that of the config.
        accelerate: compute attention with posenc, as methods that move positions always do.
        max_length: of inputs, in tokens; by default the trained length times the factor.
        **options: of ``HFLM``: ``dtype``, ``batch_size``, ``revision`` …

    Raises:
        ArgumentError: as ``stretch`` and ``accelerate``; for a factor or length without a method,
            or a method beside the one that the checkpoint's config says.
        UnknownNameError: for an unknown method or option of it.
    """

    def __init__(
        self,
        pretrained: Any,
        *,
        method: str | None = None,
        factor: float | None = None,
        length: int | None = None,
        accelerate: bool = False,
        max_length: int | None = None,
        **options: Any,
    ) -> None:
        parsed = parse_name(EXTENSIONS, method) if method else None
        check("accelerate", bool, accelerate)
        if max_length is not None:
            check("max_length", Length, max_length)
        super().__init__(pretrained, max_length=max_length, **options)
        trained = length or self.max_length
        written, place = getattr(self.model.config, FIELD, None), ""
        _require_one(parsed, written, {"factor": factor, "length": length})
        if parsed is not None:
            given: dict[str, Any] = {"factor": factor, "length": length, **parsed.options}
            place = stretch(self.model, parsed.name, **given).place
        elif written is not None:
            place = stretch(self.model).place
            trained, factor = written["length"] or trained, written["factor"]
        if max_length is None and factor is not None and place:
            self._max_length = round(trained * factor)
        if accelerate and place != "attention":
            computed_by_posenc(self.model)
        self._varies = any(map(varies, _methods(self.model.config)))
        self._cuts = "logits_to_keep" in inspect.signature(self.model.forward).parameters
        self._spread: tuple[int, int] | None = None

    def _loglikelihood_tokens(
        self, requests: Sequence[Tokens], *args: Any, **options: Any
    ) -> list[tuple[float, bool]]:
        """Log-probabilities by ``HFLM``, which pads a batch's shorter rows without a mask.

        Where frequencies depend on the length, rows of one length are batched, the shortest first,
        as transformers keeps the frequencies of the longest text so far: a log-probability then
        depends on its text alone.
        """
        lengths = [
            min(len(context) + len(continuation) - 1, self.max_length)
            for _, context, continuation in requests
        ]
        groups: dict[int, list[int]] = defaultdict(list)
        for number, length in enumerate(lengths):
            groups[length if self._varies else 0].append(number)
        answers: dict[int, tuple[float, bool]] = {}
        for _, numbers in sorted(groups.items()):
            grouped = [requests[number] for number in numbers]
            scored = max(len(continuation) for _, _, continuation in grouped)
            self._spread = scored, min(lengths[number] for number in numbers)
            answers |= zip(
                numbers, super()._loglikelihood_tokens(grouped, *args, **options), strict=True
            )
        self._spread = None
        return [answers[number] for number in range(len(requests))]

    def _model_call(self, inps: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        """Logits ``[B, n, V]`` of the last n tokens, those that are scored and the padding.

        All of a long text would take more memory than the model: 75 GiB for 131,072 tokens of a
        vocabulary of 151,936 in float32.
        """
        rows, longest = inps.shape
        if self._spread is None or not self._cuts or args or options:
            return super()._model_call(inps, *args, **options)
        scored, shortest = self._spread
        kept = min(longest, scored + (longest - shortest if rows > 1 else 0))
        device, dtype = self.device.type, self.mixed_precision_dtype
        with torch.no_grad(), torch.autocast(device, dtype=dtype, enabled=dtype is not None):
            logits: torch.Tensor = self.model(inps, logits_to_keep=kept).logits
        return logits


def _require_one(
    parsed: object, written: Mapping[str, Any] | None, given: Mapping[str, object]
) -> None:
    """Raise if what is given would be ignored, or would replace what the config says."""
    if parsed is not None and written is not None:
        raise ArgumentError(
            "method",
            expected=f"none, as the checkpoint's config says {written.get('method')}",
            got="another",
            remedy="Leave it out, or give the checkpoint that was extended.",
        )
    for name, value in given.items():
        if parsed is None and value is not None:
            remedy = "Leave it out." if written is not None else "Give one, such as method=yarn."
            raise ArgumentError(
                name, expected="a method, to which it belongs", got=f"{value} alone", remedy=remedy
            )


def _methods(config: Any) -> Iterator[str]:
    """The names of the methods by which frequencies were extended, in any type of layers."""
    config = config.get_text_config()
    yield from (getattr(config, FIELD, None) or {}).get("method", "").split("+")
    parameters = getattr(config, "rope_parameters", None) or {}
    for part in (parameters, *parameters.values()):
        if isinstance(part, Mapping):
            yield str(part.get("rope_type"))


if __name__ == "__main__":
    cli_evaluate()
