"""The command line, ``posenc``."""

from __future__ import annotations

__all__ = ["main"]


def main() -> None:
    """Run the command line with the process's arguments; never returns."""
    from posenc.cli.app import run

    run()
