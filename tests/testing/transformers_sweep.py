"""Every model type of the installed transformers under posenc's attention, against its own.

    python -m tests.testing.transformers_sweep
    python -m tests.testing.transformers_sweep gemma3 gpt_oss

Tiny random models (``tiny_models``), whole, padded on either side, and decoding with a cache, have
to equal themselves in eager attention, or be refused by name; so do gradients, once for each
pattern of pairs. Types that no tiny model is made of are listed with the reasons.
"""

from __future__ import annotations

import argparse
import signal
import sys
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

from posenc.errors import ArgumentError
from posenc.transformers.acceleration import accelerate
from posenc.transformers.acceleration.routing import Record, recorded
from posenc.transformers.acceleration.trials import tensors_in
from posenc.transformers.calls import cache_name, names_of
from tests.support.caches import cache_of, given
from tests.testing.tiny_models import Unbuilt, first_line, inputs_of, kinds, tiny_model

TOLERANCE = {torch.float32: 2e-5, torch.float64: 5e-6}
"""Of the largest value; some models compute parts in float32 all the same."""

SECONDS = 60
"""That a type may take."""

EQUAL, REFUSED, UNBUILT, WRONG = "equal", "refused", "not built", "WRONG"


class Slow(BaseException):
    """A model type took too long; no error of a model's, which ``outcome`` tells."""


def outcome(kind: str, patterns: set[str], dtype: torch.dtype = torch.float32) -> tuple[str, str]:
    """The outcome for a model type, and the reason or the largest difference.

    A type that is off in float32, as routers and deep models may be by rounding alone, has to be
    equal in float64.

    Args:
        patterns: those whose gradients were compared; these are added.
        dtype: of the weights.
    """
    try:
        model, padded = tiny_model(kind).to(dtype), []
        expected = [outputs(model, {})]
        for padding in ("left", "right"):
            try:
                padded.append(inputs_of(model, padding=padding))
                expected.append(outputs(model, padded[-1]))
            except Exception:
                del padded[len(expected) - 1 :]
    except Unbuilt as error:
        return UNBUILT, str(error)
    except Exception as error:
        return UNBUILT, f"its own attention raises {first_line(error)}"
    own = deepcopy(model)
    try:
        accelerate(model, check=False, shortest=0)
        with recorded() as calls:
            got = [outputs(model, inputs) for inputs in ({}, *padded)]
    except ArgumentError as error:
        return REFUSED, str(error).splitlines()[0][:110]
    except Exception as error:
        return WRONG, first_line(error)
    off = max(map(difference, expected, got), default=0.0)
    try:
        off = max(off, decoded_difference(own, model))
        if new := {reason for _, _, reason in calls} - patterns:
            off = max(off, gradient_difference(own, model))
            patterns |= new
    except Exception as error:
        return WRONG, first_line(error)
    if off > TOLERANCE[dtype] and dtype != torch.float64:
        result, reason = outcome(kind, set(), torch.float64)
        return result, f"{off:.1e}, in float64 {reason}"
    return (EQUAL if off <= TOLERANCE[dtype] else WRONG), f"{off:.1e}; {summary(calls)}"


@torch.no_grad()
def outputs(model: PreTrainedModel, inputs: dict[str, Tensor]) -> list[Tensor]:
    """Floating-point outputs, zero for padding."""
    inputs = inputs or inputs_of(model)
    inputs = {n: x.to(model.dtype) if x.is_floating_point() else x for n, x in inputs.items()}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made = [x.clone() for x in tensors_in(model(**inputs))]
    mask = inputs.get("attention_mask")
    for x in made:
        if mask is not None and x.shape[:2] == mask.shape:
            x[mask == 0] = 0
    return made


def difference(expected: Sequence[Tensor], got: Sequence[Tensor]) -> float:
    """The largest difference, as a share of each tensor's largest value."""
    pairs = [(a, b) for a, b in zip(expected, got, strict=True) if a.numel()]
    return max((_share(a, b) for a, b in pairs), default=0.0)


def _share(expected: Tensor, got: Tensor) -> float:
    finite = expected.isfinite()  # eager attention makes NaN of rows that see nothing
    off = (expected - got).where(finite, 0.0).abs().max()
    return float(off / expected.where(finite, 0.0).abs().max().clamp(min=1.0))


@torch.no_grad()
def decoded_difference(own: PreTrainedModel, model: PreTrainedModel) -> float:
    """Of the states of tokens after a cache, 20 tokens, 3 and 1 at a time."""
    inputs = inputs_of(own)
    names = names_of(own.forward)
    if set(inputs) != {"input_ids"} or cache_name(names) is None or "use_cache" not in names:
        return 0.0
    ids, states = inputs["input_ids"], []
    for part in (own, model):
        cache: Any = None
        found = []
        for begin, end in ((0, 20), (20, 23), (23, 24)):
            output = part(ids[:, begin:end], use_cache=True, **given(part, cache))
            cache = cache_of(output)
            if cache is None:
                return 0.0
            found.append(output[0])
        states.append(found)
    return difference(*states)


def gradient_difference(own: PreTrainedModel, model: PreTrainedModel) -> float:
    """Of the gradients of all weights, as a share of the largest of them all."""
    gradients = []
    for part in (own, model):
        part.zero_grad()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            made = list(tensors_in(part(**inputs_of(part))))
        torch.stack([x.sin().sum() for x in made if x.requires_grad]).sum().backward()
        gradients.append([torch.zeros(()) if p.grad is None else p.grad for p in part.parameters()])
    largest = max(float(x.abs().max()) for x in gradients[0])
    pairs = zip(*gradients, strict=True)
    return max(float((a - b).abs().max()) for a, b in pairs) / max(1.0, largest)


def summary(calls: Record) -> str:
    """Patterns, and who computed them."""
    counts = Counter(f"{by}: {reason}" for _, by, reason in calls)
    return ", ".join(counts) or "no call of the interface"


@contextmanager
def limited(seconds: int) -> Iterator[None]:
    """A context that raises after so many seconds."""

    def stop(*_: object) -> None:
        raise Slow

    previous = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="Compare posenc's attention with transformers'.")
    parser.add_argument("kinds", nargs="*", help="model types (all)")
    chosen = parser.parse_args().kinds or kinds()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    counts, patterns = Counter[str](), set[str]()
    for kind in chosen:
        try:
            with limited(SECONDS):
                result, reason = outcome(kind, patterns)
        except Slow:
            result, reason = UNBUILT, f"slower than {SECONDS} s"
        counts[result] += 1
        sys.stdout.write(f"{kind}: {result}, {reason}\n")
        sys.stdout.flush()
    sys.stdout.write(f"{len(chosen)} model types: {dict(counts)}\n")
    return min(counts[WRONG], 1)


if __name__ == "__main__":
    sys.exit(main())
