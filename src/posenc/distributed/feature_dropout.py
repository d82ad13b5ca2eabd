"""Dropout of features whose mask is the same however tokens are spread over ranks."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from posenc.attention import Attention
from posenc.attention.problem.dropout import KeyedDropout, token_numbers
from posenc.distributed.group import Group
from posenc.distributed.session import Session
from posenc.encoding import Encoding
from posenc.errors import ArgumentError
from posenc.layout import Layout


def key_dropout(model: nn.Module, group: Group) -> None:
    """Replace every ``nn.Dropout`` of a model by ``TokenDropout``, in place; not in encodings."""
    before: list[TokenDropout] = []
    encodings = [module for module in model.modules() if isinstance(module, Encoding)]
    others = {module for encoding in encodings for module in encoding.modules()}
    for module in [module for module in model.modules() if module not in others]:
        layers = [child for child in module.children() if isinstance(child, Attention)]
        for name, child in module.named_children():
            if type(child) is not nn.Dropout or not 0.0 < child.p < 1.0:
                continue
            dropout = TokenDropout(child.p, group).train(child.training)
            setattr(module, name, dropout)
            if layers:
                layers[0].register_forward_pre_hook(Placing([dropout], 1), with_kwargs=True)
            else:
                before.append(dropout)
    if before:
        model.register_forward_pre_hook(Placing(before), with_kwargs=True)


class TokenDropout(nn.Dropout):
    """Dropout of ``x`` ``[B, L, C]`` by a hash of batch row, token, feature and rank 0's number.

    Args:
        p: probability of dropping a feature.
        group: the ranks that the tokens are spread over; all of them call it.

    Attributes:
        layouts: of the tokens of the next calls; the last is used by all that follow.
    """

    def __init__(self, p: float, group: Group) -> None:
        super().__init__(p)
        self.group = group
        self.layouts: list[Layout] = []

    def forward(self, x: Float[Tensor, "B L C"]) -> Float[Tensor, "B L C"]:
        if not self.training:
            return x
        layout = self.layouts.pop(0) if len(self.layouts) > 1 else next(iter(self.layouts), None)
        if layout is None or x.dim() != 3 or layout.length != x.shape[1]:
            raise ArgumentError(
                "layout",
                expected=f"the layout of the tokens of x, {list(x.shape)}, with dropout over ranks",
                got=layout,
                remedy="Call the model that was passed to parallelize, with its tokens' layouts.",
            )
        seed = Session(self.group).seed(x.device)
        features = torch.arange(x.shape[2], device=x.device).unsqueeze(0)
        dropout = KeyedDropout(self.p, seed, token_numbers(layout), features)
        return x * dropout.factors(x.unsqueeze(1)).squeeze(1)


@dataclass(frozen=True, eq=False)
class Placing:
    """Hook that passes the layouts among a module's arguments to dropouts.

    Args:
        dropouts: called within the module.
        most: number of layouts; the first of an attention layer's is of its queries.
    """

    dropouts: list[TokenDropout]
    most: int | None = None

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        names = [*inspect.signature(module.forward).parameters, *kwargs]
        by_place = sorted(kwargs, key=names.index)
        arguments = (*args, *(kwargs[name] for name in by_place))
        layouts = [x for x in arguments if isinstance(x, Layout)]
        for dropout in self.dropouts:
            dropout.layouts = layouts[: self.most]
