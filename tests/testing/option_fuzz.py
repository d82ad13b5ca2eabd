"""Random option values for every method: each must work or raise ArgumentError.

Run more samples with ``python -m tests.testing.option_fuzz --samples 100000``.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin

import torch
from torch import Tensor

from posenc.attention import Attention
from posenc.encoding import Encoding
from posenc.encoding.entry import CONTEXT
from posenc.errors import ArgumentError
from posenc.layout import Layout
from posenc.registry import ENCODINGS, create
from posenc.testing.subject import fold

MODEL: dict[str, Any] = {"dim": 16, "heads": 2, "head_dim": 8, "max_length": 64, "causal": True}

LARGEST = 64
"""Largest model width for which attention is computed."""

SLOW = 20.0
"""CPU seconds after which a sample fails."""

INTEGERS = (0, -1, 1, 2, 3, 4, 5, 7, 8, 10, 32, 100, 1024, 10**6, 10**9, 2**53, 2**63, 10**400)
REALS = (0.0, -0.5, 1e-300, 1e-9, 0.1, 0.5, 0.999, 1.0, 1.5, 8.0, 1e3, 1e9, 1e30, 1e300)
OTHERS: tuple[Any, ...] = (
    *(None, True, False, "", "x", "8", "true", b"8", 1j, float("nan"), float("inf"), -float("inf")),
    *(
        (),
        (1,),
        (2, 3),
        [2, 3],
        (2, 3, 4),
        [2, "x"],
        (0, 5),
        (1.5, 2),
        (10**9, 10**9),
        {},
        {"a": 1},
    ),
    *(object, torch.tensor(3), torch.tensor([1.0, 2.0]), range(3)),
)


@dataclass(frozen=True)
class Sample:
    """A call of ``create`` with some random arguments."""

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class Finding:
    """A sample with neither a finite output nor an ArgumentError."""

    sample: Sample
    problem: str


def draw(source: random.Random) -> Sample:
    """A random method with one to three random arguments; the others are of a small model."""
    name = source.choice(sorted(ENCODINGS))
    parameters = ENCODINGS[name].parameters()
    arguments = dict(MODEL)
    if ENCODINGS[name].claims.axes == (2,):
        arguments["causal"] = False
    for chosen in source.sample(sorted({*parameters, *CONTEXT}), source.randint(1, 3)):
        names = _names(parameters[chosen].annotation) if chosen in parameters else ()
        pools: list[tuple[Any, ...]] = [INTEGERS, REALS, OTHERS]
        arguments[chosen] = source.choice(names or source.choice(pools))
    return Sample(name, arguments)


def _names(annotation: Any) -> tuple[str, ...]:
    """The valid names of a parameter, and an invalid one."""
    return (*get_args(annotation), "x") if get_origin(annotation) is Literal else ()


def run(sample: Sample) -> Finding | None:
    """Create the encoding and attend with it; None if that works or raises ArgumentError."""
    begin = time.process_time()
    try:
        output = _attend(create(sample.name, **sample.arguments), sample)
    except ArgumentError:
        output = None
    except Exception as error:
        return Finding(sample, f"{type(error).__name__}: {error}")
    if output is not None and not bool(output.isfinite().all()):
        return Finding(sample, "the output is not finite")
    if time.process_time() - begin > SLOW:
        return Finding(sample, f"took more than {SLOW:g} seconds")
    return None


def _attend(encoding: Encoding, sample: Sample) -> Tensor | None:
    """A layer's output with the encoding; None if the model is too large."""
    sizes = {name: sample.arguments[name] for name in ("dim", "heads", "head_dim")}
    if any(not isinstance(size, int) or size > LARGEST for size in sizes.values()):
        return None
    causal = bool(sample.arguments["causal"])
    attention = Attention(encoding=encoding, causal=causal, **sizes).eval()
    x = torch.randn(2, 12, sizes["dim"], generator=torch.Generator().manual_seed(1))
    layout = _layout(encoding)
    tokens = torch.arange(12).expand(2, -1) % 3
    with torch.no_grad():
        output: Tensor = attention(encoding.embed(x, layout, tokens=tokens), layout)
    return output


def _layout(encoding: Encoding) -> Layout:
    """Twelve tokens on the smallest number of axes that all parts support."""
    served = [set(part.axes) for part in encoding.parts() if part.axes is not None]
    axes = min(set.intersection(*served)) if served else 1
    return Layout.image(3, 4) if axes == 2 else fold(Layout.sequence(12), axes)


def fuzz(samples: int, *, seed: int) -> list[Finding]:
    """The findings among a number of samples, reproducible by the seed."""
    source = random.Random(seed)
    outcomes = (run(draw(source)) for _ in range(samples))
    return [finding for finding in outcomes if finding is not None]


def main() -> int:
    """Print the findings; the exit status is 1 if there are any."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=20000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    findings = fuzz(arguments.samples, seed=arguments.seed)
    for finding in findings:
        sys.stdout.write(
            f"{finding.sample.name} {dict(finding.sample.arguments)}: {finding.problem}\n"
        )
    sys.stdout.write(f"{arguments.samples} samples, {len(findings)} findings\n")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
