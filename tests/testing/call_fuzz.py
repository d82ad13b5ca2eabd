"""Random invalid calls of the public API: each must raise posenc's own error, naming an argument.

Each is made three times, since what calls remember must not let the later ones through, with
tensors in guarded memory: a read behind them ends the process.

Run more of them with ``python -m tests.testing.call_fuzz --count 1000``.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Mapping
from functools import cache

from torch import Tensor

from posenc.encoding.prepared import Prepared
from posenc.errors import PosencError
from tests.support.guarded import guarded
from tests.testing.wrong.attention import calls_of_attention
from tests.testing.wrong.calls import Call, Finding
from tests.testing.wrong.encodings import calls_of_encodings
from tests.testing.wrong.layouts import calls_of_layouts
from tests.testing.wrong.models import calls_of_models


@cache
def calls() -> tuple[Call, ...]:
    """The public API."""
    return (*calls_of_layouts(), *calls_of_encodings(), *calls_of_attention(), *calls_of_models())


TIMES = 3
"""Equal calls, one after the other."""

SHARED = Prepared()
"""Results of earlier calls, which must not let wrong ones through."""


def run(call: Call, wrong: Mapping[str, object]) -> Finding | None:
    """Call with some wrong arguments; None if each error is posenc's and names one of them."""
    given = {
        name: guarded(value) if isinstance(value, Tensor) else value
        for name, value in (call.valid() | dict(wrong)).items()
    }
    findings = (_run(call, wrong, given) for _ in range(TIMES))
    return next((finding for finding in findings if finding is not None), None)


def _run(call: Call, wrong: Mapping[str, object], given: dict[str, object]) -> Finding | None:
    names = [*wrong, *(other for name in wrong for other in call.others.get(name, ()))]
    try:
        with SHARED:
            call.function(**given)
    except PosencError as error:
        if any(name in error.argument for name in names):
            return None
        return Finding(call.name, wrong, f"names {error.argument!r}: {error}")
    except Exception as error:
        return Finding(call.name, wrong, f"{type(error).__name__}: {error}")
    return Finding(call.name, wrong, "is accepted")


def draw(source: random.Random) -> tuple[Call, dict[str, object]]:
    """A random call with one or two wrong arguments."""
    call = source.choice(calls())
    count = min(len(call.invalid), source.choice((1, 1, 1, 2)))
    return call, {
        name: call.invalid[name](source) for name in source.sample(sorted(call.invalid), count)
    }


def fuzz(count: int, *, seed: int) -> list[Finding]:
    """The findings among a number of calls, reproducible by the seed."""
    source = random.Random(seed)
    outcomes = (run(*draw(source)) for _ in range(count))
    return [finding for finding in outcomes if finding is not None]


def main() -> int:
    """Print the findings; the exit status is 1 if there are any."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    findings = fuzz(arguments.count, seed=arguments.seed)
    for finding in findings:
        sys.stdout.write(f"{finding}\n")
    sys.stdout.write(f"{arguments.count} calls, {len(findings)} findings\n")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
