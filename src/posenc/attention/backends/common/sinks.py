"""Attention sinks from output and LSE, for kernels without sinks."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from posenc.attention.backends.common.base import Result
from posenc.attention.softmax import log_add_exp


def add_sinks(result: Result, sinks: Float[Tensor, " H"] | None, *, lse: bool) -> Result:
    """Attention with sinks, from output and LSE without them; returns the LSE if ``lse``."""
    if sinks is None:
        return result if lse else result._replace(lse=None)
    assert result.lse is not None
    sinks = sinks.to(result.lse.dtype).unsqueeze(-1)
    of_keys = result.lse.clamp(min=torch.finfo(result.lse.dtype).min)  # no -inf - -inf
    weight = (of_keys - sinks).sigmoid().unsqueeze(-1)  # of all keys together
    output = (result.output * weight).to(result.output.dtype)
    return Result(output, log_add_exp(result.lse, sinks) if lse else None)
