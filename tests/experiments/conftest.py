"""Worker processes of comparisons start fast."""

from tests.support.commands import forked_workers

__all__ = ["forked_workers"]
