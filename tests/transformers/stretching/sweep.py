"""Every model type of transformers with rotary frequencies, stretched.

``python -m tests.transformers.stretching.sweep [TYPE …]`` prints a line for each type, and counts.
It ends with 1 if a stretched model is wrong or crashes.
"""

from __future__ import annotations

import signal
import sys
import warnings
from collections import Counter
from copy import deepcopy
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from posenc.errors import ArgumentError
from posenc.transformers import restore, stretch
from posenc.transformers.acceleration.trials import run, tensors_in
from posenc.transformers.stretching.configs import SCALED
from posenc.transformers.stretching.frequencies import frequencies_in
from tests.support.caches import cache_of, given
from tests.support.tiny_models import VOCABULARY, tiny_model

LIMIT = 90
"""Seconds for one type."""

LENGTH, TRAINED, FACTOR = 40, 16, 4.0
TOLERANCE = 2e-5


def difference(expected: Tensor, got: Tensor) -> float:
    """The largest difference, as a share of the largest value."""
    return float((expected - got).abs().max() / expected.abs().max().clamp(min=1e-9))


def passes(model: Any, ids: Tensor, **options: Any) -> Any:
    """One pass over a text."""
    if model.config.is_encoder_decoder:
        options["decoder_input_ids"] = ids
        ids = ids[:, : LENGTH // 2]
    return model(input_ids=ids, **options)


def first(output: Any) -> Tensor:
    """The logits or states of an output."""
    return next(tensors_in(output))


def own_yarn(model: Any) -> Any:
    """The model with transformers' own YaRN; None where transformers has none."""
    config = deepcopy(model.config)
    for part in (config, config.get_text_config()):
        parameters = getattr(part, "rope_parameters", None)
        if parameters is None:
            continue
        words = {"rope_type": "yarn", "factor": FACTOR, "original_max_position_embeddings": TRAINED}
        if hasattr(part, "original_max_position_embeddings"):
            part.original_max_position_embeddings = TRAINED
        if "rope_theta" in parameters:
            part.rope_parameters = _kept(parameters) | words
            continue
        part.rope_parameters = {
            kind: value if kind.startswith(("sliding", "chunked")) else _kept(value) | words
            for kind, value in parameters.items()
        }
    try:
        own = type(model)(config).eval()
        own.load_state_dict(model.state_dict())
        for part, other in zip(model.modules(), own.modules(), strict=True):
            if hasattr(part, "mrope_section"):
                other.mrope_section = part.mrope_section
    except Exception:
        return None
    kinds = [f.rope_type for f in frequencies_in(own)]
    return own if "yarn" in kinds else None


def _kept(parameters: Any) -> dict[str, Any]:
    """Rope parameters without those of an extension."""
    return {name: value for name, value in parameters.items() if name not in SCALED}


def yarn(model: Any, ids: Tensor) -> str:
    """YaRN in place against transformers' own."""
    try:
        report = stretch(model, "yarn", factor=FACTOR, length=TRAINED, of="theta")
    except ArgumentError as error:
        return f"refused: {error}"
    with torch.no_grad():
        got = first(passes(model, ids))
    own = own_yarn(model)
    restore(model)
    if own is None or report.place != "frequencies":
        return f"alone, in {report.place}"
    try:
        with torch.no_grad():
            off = difference(first(passes(own, ids)), got)
    except Exception:  # for heads of several widths
        return "alone, transformers' own fails"
    return "equal" if off < TOLERANCE else f"wrong: {off:.0e}"


def rerope(model: Any, ids: Tensor, expected: Tensor) -> str:
    """ReRoPE without an effect against the model; with one, a cache against one pass."""
    try:
        stretch(model, "rerope", length=4 * LENGTH, window=3 * LENGTH, windows=True)
    except ArgumentError as error:
        return f"refused: {error}"
    with torch.no_grad():
        off = difference(expected, first(passes(model, ids)))
        restore(model)
        if off > TOLERANCE:
            return f"wrong: {off:.0e} from the model"
        if not decodes(model, ids) < TOLERANCE:
            return "equal, whole passes alone"
        stretch(model, "rerope", length=TRAINED, window=6, windows=True)
        off = decodes(model, ids)
    restore(model)
    return "equal, cached too" if off < TOLERANCE else f"wrong: {off:.0e} cached"


def decodes(model: Any, ids: Tensor) -> float:
    """Difference between one pass and a prefill with single tokens after it; NaN if it has none."""
    try:
        whole = first(passes(model, ids, use_cache=False))
        start = passes(model, ids[:, :25], use_cache=True)
    except (TypeError, ValueError):
        return float("nan")
    cache = cache_of(start)
    if cache is None or model.config.is_encoder_decoder:
        return float("nan")
    outputs = [first(start)]
    for t in range(25, LENGTH):
        step = ids[:, t : t + 1]
        outputs.append(first(passes(model, step, use_cache=True, **given(model, cache))))
    return difference(whole, torch.cat(outputs, 1))


def check(kind: str) -> dict[str, str] | None:
    """Verdicts on a type by method; None for one without rotary frequencies."""
    try:
        model = tiny_model(kind)
    except Exception as error:
        return {"model": f"not built: {type(error).__name__} {str(error)[:120]!r}"}
    if not list(frequencies_in(model)):
        return None
    ids = torch.randint(3, VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(0))
    try:
        with torch.no_grad():
            run(model)
            expected = first(passes(model, ids))
    except Exception as error:
        return {"model": f"cannot run on a text: {type(error).__name__}"}
    verdicts = {"yarn": yarn(model, ids), "rerope": rerope(model, ids, expected)}
    restore(model)
    with torch.no_grad():
        again = first(passes(model, ids))
    verdicts["restored"] = "equal" if torch.equal(expected, again) else "wrong"
    return verdicts


def main(kinds: list[str]) -> int:
    """Check types, print verdicts."""
    transformers.logging.set_verbosity_error()
    warnings.filterwarnings("ignore")

    def late(*_: object) -> None:
        raise TimeoutError(f"{LIMIT} s")

    signal.signal(signal.SIGALRM, late)
    counts: Counter[str] = Counter()
    for kind in kinds or sorted(CONFIG_MAPPING):
        signal.alarm(LIMIT)
        try:
            torch.manual_seed(0)
            verdicts = check(kind)
        except Exception as error:
            verdicts = {"model": f"crash: {type(error).__name__} {str(error)[:200]!r}"}
        signal.alarm(0)
        if verdicts is None:
            continue
        sys.stdout.write(" | ".join([kind, *(f"{k}: {v}" for k, v in verdicts.items())]) + "\n")
        sys.stdout.flush()
        counts.update(f"{k}: {v.partition(':')[0]}" for k, v in verdicts.items())
    for verdict, count in sorted(counts.items()):
        sys.stdout.write(f"{count:5} {verdict}\n")
    return int(any("wrong" in verdict or "crash" in verdict for verdict in counts))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
