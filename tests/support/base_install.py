"""Calls of posenc in a process where a base install is all there is.

``python -m tests.support.base_install MODULES`` refuses imports of other top-level modules than
those of Python, posenc and ``MODULES`` (separated by commas), makes each call of ``CALLS``, and
prints what each raised, by name, as JSON.
"""

from __future__ import annotations

import json
import pkgutil
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any, ClassVar

PACKAGES = ("attention", "distributed", "encodings", "extension", "layout", "models", "testing")
"""Packages that a base install serves."""

KERNELS = "posenc.attention.backends.triton."


class OnlyBase(PathFinder):
    """Finds modules that a base install has."""

    modules: ClassVar[set[str]] = {*sys.stdlib_module_names, "posenc", "tests"}

    @classmethod
    def find_spec(
        cls, fullname: str, path: Any = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        top = fullname.partition(".")[0]
        known = top in cls.modules or top.startswith("_sysconfigdata")  # Python's, by platform
        return super().find_spec(fullname, path, target) if known else None


def import_everything() -> None:
    """Import every module of ``PACKAGES``, and read every public name.

    Triton comes with builds of PyTorch for GPUs alone, and so do its kernels.
    """
    for name in PACKAGES:
        package = import_module(f"posenc.{name}")
        for module in pkgutil.walk_packages(package.__path__, f"posenc.{name}."):
            if not module.name.startswith(KERNELS):
                import_module(module.name)
        for public in getattr(package, "__all__", ()):
            getattr(package, public)


def create_from_text() -> None:
    import posenc

    assert posenc.create("rope@pairing=adjacent", head_dim=8).query_key.pairing == "adjacent"
    made = posenc.create("swin@window=3,4", heads=2)
    assert made.score.given["window"] == (3, 4)
    posenc.create_layers("t5@buckets=8", layers=2, heads=2)


def create_each_encoding() -> None:
    """``floater`` with ``dopri5`` needs an extra and says which."""
    import posenc
    from posenc.errors import ArgumentError
    from posenc.testing import Subject

    for name, entry in posenc.ENCODINGS.items():
        try:
            Subject.of_entry(name, entry).make()
        except ArgumentError as error:
            if "posenc[ode]" not in str(error):
                raise


def attend() -> None:
    import torch

    import posenc
    from posenc.attention import attend_complex, attend_linear

    q, k, v = torch.randn(3, 1, 2, 6, 8)
    grid = posenc.Grid(posenc.Layout.sequence(6), posenc.Layout.sequence(6), causal=True)
    for name, options in (("rope", {}), ("alibi", {}), ("t5", {"causal": True})):
        encoding = posenc.create(name, heads=2, head_dim=8, **options)
        posenc.attend(q, k, v, grid, encoding)
        posenc.explain(q, k, v, grid, encoding)
    assert callable(attend_complex)
    assert callable(attend_linear)


def extend() -> None:
    import posenc
    from posenc.extension import EXTENSIONS, extend, search_factors

    rope = posenc.create("rope", head_dim=8)
    extend(rope, "yarn", factor=2.0, length=16)
    search_factors(rope, lambda factors: abs(factors[0] - 2), factor=4, length=64, budget=40)
    assert list(EXTENSIONS)


def models() -> None:
    import torch

    from posenc.models import MODELS, Decoder, DecoderConfig, Greedy, generate, load

    assert list(MODELS)
    model = Decoder(DecoderConfig(vocabulary=20, dim=16, layers=1, heads=2)).eval()
    with TemporaryDirectory() as folder:
        model.save(Path(folder) / "model")
        again = load(Path(folder) / "model")
    tokens = torch.ones(1, 4, dtype=torch.long)
    assert torch.equal(again(tokens), model(tokens))
    generate(model, tokens, max_new_tokens=2, sampling=Greedy())


def distribute() -> None:
    from posenc.distributed import FORMS, balanced, contiguous

    assert FORMS
    assert set(balanced(8, 2, 0).tolist()) == {0, 1, 6, 7}
    assert set(contiguous(8, 2, 0).tolist()) == {0, 1, 2, 3}


def certify() -> None:
    import posenc
    from posenc.testing import IDENTITIES, LAWS, Subject, certify

    assert LAWS
    for check in IDENTITIES.values():
        check()
    certify(Subject.of_entry("alibi", posenc.ENCODINGS["alibi"]), only=("cached_is_full",))


CALLS: dict[str, Callable[[], None]] = {
    call.__name__: call
    for call in (
        *(import_everything, create_from_text, create_each_encoding, attend, extend, models),
        *(distribute, certify),
    )
}

if __name__ == "__main__":
    OnlyBase.modules |= set(sys.argv[1].split(","))
    sys.meta_path = [OnlyBase if finder is PathFinder else finder for finder in sys.meta_path]
    raised = {}
    for name, call in CALLS.items():
        try:
            call()
        except Exception as error:  # whatever a call raises is what is asked for
            raised[name] = f"{type(error).__name__}: {error}"
    sys.stdout.write(json.dumps(raised))
