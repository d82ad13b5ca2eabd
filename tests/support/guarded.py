"""Tensors behind whose last number the process may read nothing."""

from __future__ import annotations

import ctypes
import mmap
import os

import torch
from torch import Tensor


def guarded(x: Tensor) -> Tensor:
    """A copy that ends where a page ends; the next page ends a process that reads or writes it.

    Of a dense tensor on the CPU and on POSIX; any other tensor itself.
    """
    plain = type(x) is Tensor and x.layout is torch.strided and x.device.type == "cpu"
    if os.name != "posix" or not plain or not x.numel():
        return x
    size = -(-x.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    pages = mmap.mmap(-1, size + mmap.PAGESIZE)
    begin = ctypes.addressof(ctypes.c_char.from_buffer(pages))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mprotect(ctypes.c_void_p(begin + size), ctypes.c_size_t(mmap.PAGESIZE), 0):
        raise OSError(ctypes.get_errno(), "mprotect")
    copy = torch.frombuffer(pages, dtype=x.dtype, count=x.numel(), offset=size - x.nbytes)
    return copy.view(x.shape).copy_(x.detach()).requires_grad_(x.requires_grad)
