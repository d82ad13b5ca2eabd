"""Launching the kernels that carry sums from key to key. Imports Triton."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
import triton
from torch import Tensor
from triton.language import constexpr

from posenc.attention.backends.triton.form import empty_as
from posenc.attention.backends.triton.kernels.arguments import CarriedSums, Carries, KernelArguments
from posenc.attention.backends.triton.kernels.configs import CARRY_KEYS
from posenc.attention.backends.triton.kernels.memory import LOG2E
from posenc.attention.backends.triton.kernels.sums import (
    EXACT,
    GONE,
    carries_kernel,
    sums_forward_kernel,
)
from posenc.attention.backends.triton.kernels.sums_gradients import (
    sums_keys_kernel,
    sums_queries_kernel,
)
from posenc.attention.backends.triton.launch import Launch, blocks, numbers, tokens
from posenc.attention.backends.triton.segments import SUMMARY_BLOCK
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
        query_start: as of ``KernelArguments``.
    """

    x: KernelProblem
    query_start: int | None = None

    @property
    def products(self) -> Tensor | None:
        return self.x.pairs.tensors[0] if self.x.pairs.tensors else None

    @cached_property
    def sums(self) -> CarriedSums:
        """The sums as the kernels take them.

        Pairs of float32 in 64 bits: each product less the rise to the next, and that rise.
        """
        products, pairs, limit, width, bits = self.products, None, GONE.value, 0, 0
        if products is not None:
            width = products.shape[-1]
            bits = min(EXACT.value, 31 - (width + LARGEST_TILE).bit_length())
            limit = (width - 1) << bits
            scaled = products * LOG2E.value
            rise = torch.nn.functional.pad(scaled.diff(dim=-1), (0, 1))
            pairs = torch.stack([scaled - rise, rise], dim=-1).view(torch.int64).squeeze(-1)
        return CarriedSums(
            pairs=pairs,
            limit=limit,
            sticks=constexpr(products is None),
            rest_to_self=constexpr(self.x.pairs.kind == "sticks_self"),
            width=constexpr(width),
            bits=constexpr(bits),
            terms=constexpr(TERMS[self.x.q.dtype]),
        )

    def arguments(self, launch: Launch, *, for_keys: bool = False) -> KernelArguments:
        args = launch.arguments(for_keys=for_keys)
        return args._replace(sums=self.sums, query_start=self.query_start)

    def forward(self) -> tuple[Tensor, Tensor]:
        """Output ``[B, H, Q, E]``, and LSE or the binary logarithm of the rest, ``[B, H, Q]``."""
        q, v = self.x.q, self.x.v
        output = empty_as(q, v.shape[-1])
        lse = q.new_empty(q.shape[:3], dtype=torch.float32)
        launch, programs = Launch(self.x), blocks(q.shape[2], q.shape[0] * q.shape[1])
        args = self.arguments(launch)
        launch.run(sums_forward_kernel, programs, args, tokens(output), numbers(lse))
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
        dq, dk, dv = (empty_as(like, like.shape[-1]) for like in (x.q, x.k, x.v))
        if queries > size:
            dk, dv = (torch.zeros_like(like, dtype=torch.float32) for like in (dk, dv))
        product_gradients: list[Tensor] = []
        for begin in range(0, queries, size):
            rows = slice(begin, min(begin + size, queries))
            count = rows.stop - begin
            sums = lse.new_empty(*batch_heads, tiles, count, dtype=dtype)
            carries = Carries(
                sums,
                torch.empty_like(sums, dtype=torch.float32),
                lse.new_empty(*batch_heads, count, dtype=torch.int32),
            )
            block = SumsLaunch(_query_block(x, rows), begin)
            launch = Launch(
                block.x,
                gradient=gradient[:, :, rows],
                output=None if self.products is None else output[:, :, rows],
                lse=lse[:, :, rows].contiguous(),
                of_lse=None if of_lse is None else of_lse[:, :, rows],
            )
            of_keys = (dk, dv)
            if queries > size:
                of_keys = (torch.empty_like(dk), torch.empty_like(dv))
            of_products = block._queries(launch, carries, dq[:, :, rows])
            block._keys(launch, carries, of_keys)
            if queries > size:
                dk += of_keys[0]
                dv += of_keys[1]
            if of_products is not None:
                product_gradients.append(of_products)
        gradients = {"q": dq, "k": dk.to(x.k.dtype), "v": dv.to(x.v.dtype)}
        if product_gradients:
            gradients["pairs.tensors.0"] = torch.cat(product_gradients, dim=2)
        return gradients

    def _queries(self, launch: Launch, carries: Carries, dq: Tensor) -> Tensor | None:
        """Gradients of queries, and of the products if there are any."""
        args = self.arguments(launch)
        programs = blocks(dq.shape[2], dq.shape[0] * dq.shape[1], "block_q")
        launch.run(carries_kernel, programs, args, carries, block_k=CARRY_KEYS)
        ends = far = pairs = None
        if self.products is not None:
            ends = self.products.new_zeros(*self.products.shape, 2)
            far, pairs = ends.new_empty(ends.shape[:3]), ends.view(torch.int64)
        into = (tokens(dq), pairs, far, carries)
        launch.run(sums_queries_kernel, programs, args, *into, block_k=CARRY_KEYS)
        if ends is None or far is None:
            return None
        total, fraction_sums = ends.unbind(-1)
        # Of pairs from each whole count on; differences are of those at a count.
        before = torch.cat([fraction_sums[..., :1], fraction_sums[..., :-1]], dim=-1)
        from_count = total - fraction_sums + before
        gradients = from_count - torch.nn.functional.pad(from_count[..., 1:], (0, 1))
        gradients[..., -1] += far
        return gradients

    def _keys(self, launch: Launch, carries: Carries, of_keys: tuple[Tensor, Tensor]) -> None:
        count = triton.cdiv(of_keys[0].shape[2], CARRY_KEYS)
        programs = (count * of_keys[0].shape[0] * of_keys[0].shape[1],)
        args, (dk, dv) = self.arguments(launch, for_keys=True), map(tokens, of_keys)
        launch.run(sums_keys_kernel, programs, args, dk, dv, carries, block_k=CARRY_KEYS)


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
