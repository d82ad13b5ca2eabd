"""Factors of logits that grow with the logarithm of the number of keys."""

from __future__ import annotations

import math
from typing import Literal

from jaxtyping import Float
from torch import Tensor

from posenc.arguments import Positive
from posenc.encoding.scaling import LogitFactor

Form = Literal["log", "llama4", "ministral3", "beam"]
"""``ln max(1, n/L)``, or ``ln(1 + ⌊m/L⌋)`` with m = n (Llama 4) or n - 1 (Ministral 3).

``"beam"`` is another κ, ``(1 + n/L)^growth``.
"""


class LogFactor(LogitFactor):
    """``κ = 1 + growth · ln max(1, n/L)``, or of another ``Form``.

    Args:
        length: L, up to which κ is 1, but for Beam's.
        growth: of κ where n grows by a factor of e; by default ``1 / ln L``, which makes κ
            ``max(1, ln n / ln L)``.
        form: of the term, or of κ.
        of_position: as of ``LogitFactor``.
    """

    length: Positive
    growth: Positive | None = None
    form: Form = "log"
    of_position: bool = False

    def forward(self, n: Float[Tensor, "b q"]) -> Float[Tensor, "b 1 q"]:
        growth = 1 / math.log(self.length) if self.growth is None else self.growth
        if self.form == "beam":
            return (1 + n / self.length).pow(growth).unsqueeze(1)
        if self.form == "log":
            logs = (n / self.length).clamp(min=1).log()
        else:
            before = n if self.form == "llama4" else n - 1
            logs = (before / self.length).floor().clamp(min=0).log1p()
        return (1 + growth * logs).unsqueeze(1)
