"""``python -m posenc.attention.backends.native``: build the kernels."""

from __future__ import annotations

import sys

from posenc.attention.backends.native.build import build, missing
from posenc.errors import BackendRefusal


def main(arguments: list[str]) -> int:
    """Build; a failure only with ``--require``, since ``blockwise`` serves without them."""
    try:
        build()
        reason = missing()
    except (BackendRefusal, OSError, RuntimeError) as error:  # no compiler, or no folder for them
        reason = str(error)
    if reason is not None:
        sys.stdout.write(f"posenc's CPU kernels cannot be used: {reason}\n")
    return int(reason is not None and "--require" in arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
