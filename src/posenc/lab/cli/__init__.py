"""The command line, ``posenc``."""

from __future__ import annotations

__all__ = ["main"]


def main() -> None:
    """Run the command line with the process's arguments; never returns."""
    import sys

    try:
        from posenc.lab.cli.app import run

        run()
    except KeyboardInterrupt:  # during imports
        sys.exit(130)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "posenc":
            raise
        sys.stderr.write(
            f"error: posenc: expected the packages of this command, got no {error.name}.\n"
            "Install them: pip install 'posenc[cli]'\n"
        )
        sys.exit(2)
