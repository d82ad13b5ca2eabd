"""Tensors of any strides, behind whose last number the process may read nothing.

Kernels that are given pointers read what is not theirs without a word: wrong strides show as wrong
values, or end the process at the page behind the tensor, which may not be read.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable

import torch
from torch import Tensor

Form = Callable[[Tensor], Tensor]


def _steps(x: Tensor, dim: int) -> Tensor:
    """Every second element along ``dim`` of a tensor whose other elements are NaN."""
    spaced = torch.full_like(x, torch.nan).unsqueeze(dim + 1).repeat_interleave(2, dim + 1)
    spaced.select(dim + 1, 0).copy_(x)
    whole = spaced.flatten(dim, dim + 1)
    return whole.narrow(dim, 0, whole.shape[dim] - 1)[
        (slice(None),) * dim + (slice(None, None, 2),)
    ]


def _behind(x: Tensor) -> Tensor:
    """The same after three elements of NaN, so that it is aligned to nothing."""
    room = torch.cat([x.new_full((3,), torch.nan), x.flatten()])
    return room[3:].view(x.shape)


FORMS: dict[str, Form] = {
    "contiguous": lambda x: x.clone(),
    "offset": _behind,
    "transposed": lambda x: x.mT.contiguous().mT,
    "heads after tokens": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "tokens first": lambda x: x.movedim(-2, 0).contiguous().movedim(0, -2),
    "every second feature": lambda x: _steps(x, x.dim() - 1),
    "every second token": lambda x: _steps(x, x.dim() - 2),
    "one feature": lambda x: x[..., :1].clone().expand_as(x),
    "one token": lambda x: x[..., :1, :].clone().expand_as(x),
    "one head": lambda x: x[..., :1, :, :].clone().expand_as(x) if x.dim() > 2 else x,
    "one number": lambda x: x.flatten()[0].clone().expand_as(x),
    "flipped": lambda x: x.mT.contiguous().flip(-1).mT,
    "overlapping": lambda x: (
        x.flatten()[: x.shape[-2] + x.shape[-1] - 1]
        .clone()
        .unfold(0, x.shape[-1], 1)
        .expand(*x.shape)
    ),
    "negated": lambda x: torch._neg_view(x.clone()),
}


def guarded(x: Tensor) -> Tensor:
    """A copy of these strides that ends where a page ends; to read or write the next is the end.

    Of a dense tensor on the CPU and on POSIX; any other tensor itself.
    """
    plain = type(x) is Tensor and x.layout is torch.strided and x.device.type == "cpu"
    if os.name != "posix" or not plain or not x.numel():
        return x
    if x.is_neg():
        return torch._neg_view(guarded(torch._neg_view(x)))
    steps = [(size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True)]
    count = sum(steps) + 1
    size = -(-count * x.itemsize // mmap.PAGESIZE) * mmap.PAGESIZE
    pages = mmap.mmap(-1, size + mmap.PAGESIZE)
    begin = ctypes.addressof(ctypes.c_char.from_buffer(pages))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mprotect(ctypes.c_void_p(begin + size), ctypes.c_size_t(mmap.PAGESIZE), 0):
        raise OSError(ctypes.get_errno(), "mprotect")
    room = torch.frombuffer(pages, dtype=x.dtype, count=count, offset=size - count * x.itemsize)
    room.copy_(x.detach().as_strided((count,), (1,)))
    return room.as_strided(x.shape, x.stride(), room.storage_offset()).requires_grad_(
        x.requires_grad
    )
