"""Triton's interpreter, without what makes it slow."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest


@pytest.fixture(scope="session", autouse=True)
def language_patched_once() -> Iterator[None]:
    """Functions that a kernel calls use the language as the kernel has patched it.

    Triton searches the language for what to patch at every call of a function, which takes
    longer than most functions do.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    patch_language: Callable[[Callable[..., Any]], Any] = interpreter._patch_lang

    def patch_once(function: Callable[..., Any]) -> Any:
        used = [value for value in function.__globals__.values() if value in (tl, tl.core)]
        if used and all(language.static_print is print for language in used):
            return interpreter._LangPatchScope()
        return patch_language(function)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_lang", patch_once)
        yield
