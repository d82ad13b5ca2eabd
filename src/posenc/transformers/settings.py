"""Contexts that put settings back: of a model's modules, and of what transformers prints."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


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


@contextmanager
def settings_kept(model: nn.Module) -> Iterator[None]:
    """Put the settings of modules back that passes change.

    Swin's layers of transformers lose their shift at a picture that one window spans, and with it
    what they compute for the next, larger one.
    """
    plain = (bool, int, float, str, tuple, type(None))
    settings = [
        (module, {name: x for name, x in vars(module).items() if isinstance(x, plain)})
        for module in model.modules()
    ]
    try:
        yield
    finally:
        for module, before in settings:
            vars(module).update({name: x for name, x in before.items() if name in vars(module)})
