"""Sinks by the LSE, for kernels that have none of their own."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from posenc.attention.backends.common.base import Result
from posenc.attention.softmax import log_add_exp


def beside_sinks(result: Result, sinks: Float[Tensor, " H"] | None, *, lse: bool) -> Result:
    """Attention beside sinks, from output and LSE of attention without; with its LSE if wanted."""
    if sinks is None:
        return result if lse else result._replace(lse=None)
    assert result.lse is not None
    sinks = sinks.to(result.lse.dtype).unsqueeze(-1)
    of_keys = result.lse.clamp(min=torch.finfo(result.lse.dtype).min)  # no -inf - -inf
    weight = (of_keys - sinks).sigmoid().unsqueeze(-1)  # of all keys together
    output = (result.output * weight).to(result.output.dtype)
    return Result(output, log_add_exp(result.lse, sinks) if lse else None)
