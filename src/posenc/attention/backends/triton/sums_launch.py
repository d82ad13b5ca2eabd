"""Launching the kernels that carry sums from key to key. Imports Triton."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
from torch import Tensor

from posenc.attention.backends.triton.form import FAR
from posenc.attention.backends.triton.forms import numbers, tokens
from posenc.attention.backends.triton.kernels import arguments
from posenc.attention.backends.triton.kernels.configs import CARRY_KEYS, FP_FUSION
from posenc.attention.backends.triton.kernels.memory import LOG2E
from posenc.attention.backends.triton.kernels.sums import EXACT, GONE
from posenc.attention.backends.triton.kernels.sums_forward import (
    carries_kernel,
    sums_forward_kernel,
)
from posenc.attention.backends.triton.kernels.sums_keys import sums_keys_kernel
from posenc.attention.backends.triton.kernels.sums_queries import sums_queries_kernel
from posenc.attention.backends.triton.launch import Launch, blocks
from posenc.attention.backends.triton.posing import SUMMARY_BLOCK, empty_as
from posenc.attention.problem.record import KernelProblem

LARGEST_TILE = 128
"""Keys of the largest tiles: so many gates may be added to a count at its limit."""

TERMS = {torch.float32: 3, torch.float16: 2, torch.bfloat16: 2}
"""Numbers of 16 bits that gradients are split into where they are summed up, by dtype."""


@dataclass(frozen=True, eq=False)
class SumsLaunch:
    """A problem with carried sums, and the launches of its kernels.

    Args:
        x: its pairs' tensors are products ``[B, H, Q, N]`` of queries with vectors by count, in
            float32; none for stick breaking.
    """

    x: KernelProblem

    @property
    def products(self) -> Tensor | None:
        return self.x.pairs.tensors[0] if self.x.pairs.tensors else None

    @property
    def rest_to_self(self) -> bool:
        """True if stick breaking gives the remaining weight to the key at the query's position."""
        return self.x.pairs.kind == "sticks_self"

    def forward(self) -> tuple[Tensor, Tensor]:
        """Output ``[B, H, Q, E]``, and LSE or the binary logarithm of the rest, ``[B, H, Q]``."""
        q, v = self.x.q, self.x.v
        output = empty_as(q, v.shape[-1])
        lse = q.new_empty(q.shape[:3], dtype=torch.float32)
        common, lanes = Launch(self.x).common(for_keys=False), q.shape[0] * q.shape[1]
        sums_forward_kernel[blocks(q.shape[2], lanes)](
            **_chosen(common, "tables", "dropout"),
            **self._constants(),
            pairs=self._pairs(),
            output=tokens(output),
            lse=numbers(lse),
            rest_to_self=self.rest_to_self,
            edged=self._edged,
            enable_fp_fusion=FP_FUSION,
        )
        return output, lse

    def backward(
        self, gradient: Tensor, output: Tensor, lse: Tensor, of_lse: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Gradients of queries, keys and values, and of products if there are any, by their paths.

        Some queries at a time, so that what they leave to the keys takes as much memory as the
        keys and values themselves.
        """
        x, queries, batch_heads = self.x, self.x.q.shape[2], self.x.q.shape[:2]
        width = max(x.q.shape[-1], x.v.shape[-1])
        tiles = triton.cdiv(x.k.shape[2], CARRY_KEYS)
        dtype = torch.float32 if self.products is None else torch.int32
        size = triton.cdiv(CARRY_KEYS * width, SUMMARY_BLOCK) * SUMMARY_BLOCK
        dq, dk, dv = (empty_as(each, each.shape[-1]) for each in (x.q, x.k, x.v))
        if queries > size:
            dk, dv = (torch.zeros_like(each, dtype=torch.float32) for each in (dk, dv))
        product_gradients: list[Tensor] = []
        for begin in range(0, queries, size):
            rows = slice(begin, min(begin + size, queries))
            count = rows.stop - begin
            sums = lse.new_empty(*batch_heads, tiles, count, dtype=dtype)
            carries = arguments.Carries(
                sums,
                torch.empty_like(sums, dtype=torch.float32),
                lse.new_empty(*batch_heads, count, dtype=torch.int32),
            )
            block = SumsLaunch(_query_block(x, rows))
            launch = Launch(
                block.x,
                gradient=gradient[:, :, rows],
                output=None if self.products is None else output[:, :, rows],
                lse=lse[:, :, rows].contiguous(),
                of_lse=None if of_lse is None else of_lse[:, :, rows],
            )
            pairs, of_keys = block._pairs(), (dk, dv)
            if queries > size:
                of_keys = (torch.empty_like(dk), torch.empty_like(dv))
            of_products = block._queries(launch, carries, pairs, dq[:, :, rows], begin)
            block._keys(launch, carries, pairs, of_keys, begin)
            if queries > size:
                dk += of_keys[0]
                dv += of_keys[1]
            if of_products is not None:
                product_gradients.append(of_products)
        gradients = {"q": dq, "k": dk.to(x.k.dtype), "v": dv.to(x.v.dtype)}
        return gradients | (
            {"pairs.tensors.0": torch.cat(product_gradients, dim=2)} if product_gradients else {}
        )

    def _queries(
        self,
        launch: Launch,
        carries: arguments.Carries,
        pairs: Tensor | None,
        dq: Tensor,
        begin: int,
    ) -> Tensor | None:
        """Gradients of queries, and of the products if there are any."""
        common, constants = launch.common(for_keys=False), self._constants()
        programs = blocks(dq.shape[2], dq.shape[0] * dq.shape[1], "block_q")
        carries_kernel[programs](
            **_chosen(common),
            **{name: each for name, each in constants.items() if name != "width"},
            sums=carries.sums,
            first_tiles=carries.first_tiles,
            edged=self._edged,
            block_k=CARRY_KEYS,
            enable_fp_fusion=FP_FUSION,
        )
        ends = far = None
        if self.products is not None:
            ends = self.products.new_zeros(*self.products.shape, 2)
            far = ends.new_empty(ends.shape[:3])
        sums_queries_kernel[programs](
            **_chosen(common, "dropout"),
            **constants,
            pairs=pairs,
            carries=carries,
            into=arguments.SumGradients(
                tokens(dq), None if ends is None else ends.view(torch.int64), far
            ),
            query_start=begin,
            rest_to_self=self.rest_to_self,
            edged=self._edged,
            terms=TERMS[self.x.q.dtype],
            block_k=CARRY_KEYS,
            enable_fp_fusion=FP_FUSION,
        )
        if ends is None or far is None:
            return None
        total, fraction_sums = ends.unbind(-1)
        # Of pairs from each whole count on; differences are of those at a count.
        from_count = (
            total
            - fraction_sums
            + torch.cat([fraction_sums[..., :1], fraction_sums[..., :-1]], dim=-1)
        )
        gradients = from_count - torch.nn.functional.pad(from_count[..., 1:], (0, 1))
        gradients[..., -1] += far
        return gradients

    def _keys(
        self,
        launch: Launch,
        carries: arguments.Carries,
        pairs: Tensor | None,
        of_keys: tuple[Tensor, Tensor],
        begin: int,
    ) -> None:
        dk, dv = of_keys
        count = triton.cdiv(dk.shape[2], CARRY_KEYS) * dk.shape[0] * dk.shape[1]
        sums_keys_kernel[(count,)](
            **_chosen(launch.common(for_keys=True), "dropout"),
            **self._constants(),
            pairs=pairs,
            carries=carries,
            into=tokens(dk),
            second=tokens(dv),
            query_start=begin,
            rest_to_self=self.rest_to_self,
            terms=TERMS[self.x.q.dtype],
            block_k=CARRY_KEYS,
            enable_fp_fusion=FP_FUSION,
        )

    @property
    def _edged(self) -> bool:
        """True if the first keys of a row may be hidden from a query."""
        return self.x.geometry.lowest > -FAR or self.x.segments.query_ids is not None

    def _constants(self) -> dict[str, Any]:
        """Arguments of all kernels that follow from the number of vectors by count."""
        if self.products is None:
            return {"sticks": True, "limit": GONE.value, "width": 0, "bits": 0}
        width = self.products.shape[-1]
        bits = min(EXACT.value, 31 - (width + LARGEST_TILE).bit_length())
        return {"sticks": False, "limit": (width - 1) << bits, "width": width, "bits": bits}

    def _pairs(self) -> Tensor | None:
        """Pairs of float32 in 64 bits: each product less the rise to the next, and that rise."""
        if self.products is None:
            return None
        scaled = self.products * LOG2E.value
        rise = torch.nn.functional.pad(scaled.diff(dim=-1), (0, 1))
        return torch.stack([scaled - rise, rise], dim=-1).view(torch.int64).squeeze(-1)


def _chosen(common: dict[str, Any], *more: str) -> dict[str, Any]:
    names = ("x", "y", "band", "sizes", "scale", "key", "summary_block", "precision", *more)
    return {name: common[name] for name in names}


def _query_block(x: KernelProblem, queries: slice) -> KernelProblem:
    """The problem of some queries."""
    summary_blocks = slice(queries.start // SUMMARY_BLOCK, triton.cdiv(queries.stop, SUMMARY_BLOCK))
    ids, summary = x.segments.query_ids, x.segments.query_summary
    products = tuple(each[:, :, queries] for each in x.pairs.tensors)
    return replace(
        x,
        q=x.q[:, :, queries],
        pairs=replace(x.pairs, tensors=products),
        geometry=replace(x.geometry, shift=x.geometry.shift - queries.start),
        segments=replace(
            x.segments,
            query_ids=None if ids is None else ids[:, queries],
            query_summary=None if summary is None else summary[:, summary_blocks],
        ),
    )
