"""The command line, ``posenc``."""

from __future__ import annotations

__all__ = ["main"]


def main() -> None:
    """Run the command line with the process's arguments; never returns."""
    import sys

    try:
        from posenc.cli.app import run
    except KeyboardInterrupt:  # while PyTorch was still being imported
        sys.exit(130)
    run()
