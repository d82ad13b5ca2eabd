"""lm-evaluation-harness on models that posenc stretches: ``python -m posenc.lab.lm_eval``.

The module's command line is the harness's own, with one more model.
"""

from __future__ import annotations

from typing import Any

from lm_eval.__main__ import cli_evaluate
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM

from posenc.extension import EXTENSIONS
from posenc.registration import parse_name
from posenc.transformers.acceleration import accelerate as computed_by_posenc
from posenc.transformers.checkpoints import FIELD
from posenc.transformers.stretching import stretch


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
        ArgumentError: as ``stretch`` and ``accelerate``.
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
        super().__init__(pretrained, max_length=max_length, **options)
        trained = length or self.max_length
        written, place = getattr(self.model.config, FIELD, None), ""
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


if __name__ == "__main__":
    cli_evaluate()
