"""Settings of a model's modules, which a pass may change."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


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
