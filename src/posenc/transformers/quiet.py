"""Calls of transformers without what it prints."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Keep transformers from printing bars and warnings."""
    from transformers.utils import logging as library

    logger, bars = logging.getLogger("transformers"), library.is_progress_bar_enabled()
    level = logger.level
    logger.setLevel(logging.ERROR)
    library.disable_progress_bar()
    try:
        yield
    finally:
        logger.setLevel(level)
        if bars:
            library.enable_progress_bar()
