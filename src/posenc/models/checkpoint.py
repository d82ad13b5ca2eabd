"""Saving and loading models as safetensors and JSON, checked on the meta device first."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar, Generic, Self, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from posenc import storage
from posenc.errors import ArgumentError, CheckpointError
from posenc.models.stack import state_by_layer
from posenc.registration import Registry

TENSORS, CONFIG = "model.safetensors", "config.json"
MISMATCH = f"{TENSORS} and {CONFIG} do not match."

Config = TypeVar("Config")


class SavedModel(nn.Module, Generic[Config]):
    """Base class of models that are made from a configuration and saved with it.

    Args:
        config: of the class ``made_from``.
        named: False for a model with encoding objects, which cannot be saved.

    Attributes:
        kind: of the model, in ``config.json``.
        made_from: class of its configuration, a dataclass of plain values.

    Raises:
        ArgumentError: for a configuration of another model.
    """

    kind: ClassVar[str]
    made_from: ClassVar[type[Any]]

    def __init__(self, config: Config, *, named: bool = True) -> None:
        super().__init__()
        if not isinstance(config, self.made_from):
            expected, got = self.made_from.__name__, type(config).__name__
            remedy = f"Use {type(self).__name__}({expected}(…))."
            raise ArgumentError("config", expected=f"a {expected}", got=got, remedy=remedy)
        self.config, self.named = config, named

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "kind" in cls.__dict__:
            MODELS.register(cls.kind, cls)

    def save(self, folder: Path | str) -> None:
        """Write ``model.safetensors`` and ``config.json`` into ``folder``, each atomically.

        Shared tensors are written once. The tensor file also contains the configuration, covered
        by its checksum.

        Raises:
            ArgumentError: for a model with encoding objects.
            OutputError: if the folder is not writable; existing files stay intact.
        """
        if not all(getattr(module, "named", True) for module in self.modules()):
            raise ArgumentError(
                "encodings",
                expected="an encoding by name",
                got="records, which config.json cannot hold",
                remedy="Make the model from names and options, or save its state_dict() yourself.",
            )
        folder = storage.as_path(folder)
        storage.make_folder(folder)
        described = {"kind": self.kind, "config": asdict(cast(Any, self.config))}
        storage.save_tensors(folder / TENSORS, stored_tensors(self), described)
        storage.write_json(folder / CONFIG, described)

    @classmethod
    def load(cls, folder: Path | str, *, device: torch.device | str = "cpu") -> Self:
        """Read the model that ``save`` wrote, in eval mode.

        Raises:
            CheckpointError: if a file is missing, damaged or of another kind, or a tensor is
                missing, unknown or of another shape.
        """
        folder = storage.as_path(folder)
        described = storage.read_json(folder / CONFIG)
        if _kind(described) != cls.kind:
            raise _of_another_kind(folder / CONFIG, described, f"the configuration of a {cls.kind}")

        def fits(shapes: storage.Shapes, meta: dict[str, Any]) -> None:
            if meta != described:
                raise CheckpointError(
                    str(folder / CONFIG),
                    expected=f"the configuration that {TENSORS} was saved with",
                    got="another one",
                    remedy="Restore both files from a copy, or save the model again.",
                )
            _require_counts(described["config"], shapes, folder / CONFIG)
            empty = made(lambda: meta_init(make))
            _require_shapes(empty, shapes, folder / TENSORS)

        def make() -> SavedModel[Config]:
            return cls(cls.made_from(**described["config"]))

        def made(make: Callable[[], SavedModel[Config]]) -> SavedModel[Config]:
            try:
                return make()
            except Exception as error:  # an arbitrary file
                raise CheckpointError(
                    str(folder / CONFIG),
                    expected=f"the configuration of a {cls.kind}",
                    got=error,
                    remedy="It was changed, or written by another version of posenc.",
                ) from error

        tensors, _ = storage.load_tensors(folder / TENSORS, fits=fits)
        model = made(make)
        expected = stored_tensors(model)
        with torch.no_grad():
            for name, tensor in tensors.items():
                expected[name].copy_(tensor)
        return cast(Self, model.to(device).eval())


MODELS: Registry[type[SavedModel[Any]]] = Registry(
    SavedModel, "model", group="posenc.models", classes=True
)
"""Every class of models by its ``kind``; a subclass is known as soon as it is defined."""


def load(folder: Path | str, *, device: torch.device | str = "cpu") -> SavedModel[Any]:
    """Read a model of any kind that its ``save`` wrote.

    Raises:
        CheckpointError: when its kind is unknown, or as ``SavedModel.load``.
    """
    folder = storage.as_path(folder)
    described = storage.read_json(folder / CONFIG)
    kind = _kind(described)
    if kind is None or kind not in MODELS:
        expected = f"a model of a kind among {', '.join(MODELS)}"
        raise _of_another_kind(folder / CONFIG, described, expected)
    return MODELS[kind].load(folder, device=device)


def _kind(described: Any) -> str | None:
    """The kind of a model by its configuration file; None: posenc did not write it."""
    kind = described.get("kind") if isinstance(described, dict) else None
    return kind if isinstance(kind, str) else None


def _of_another_kind(path: Path, described: Any, expected: str) -> CheckpointError:
    kind = _kind(described)
    if kind is not None and kind in MODELS:
        got, remedy = f"that of a {kind}", "posenc.models.load reads models of every kind."
    elif kind is not None:
        got, remedy = repr(kind), "Import or install the package that defines it."
    elif isinstance(described, dict) and "model_type" in described:
        got = f"a checkpoint of transformers ({described['model_type']})"
        remedy = "transformers reads it: AutoModel.from_pretrained(FOLDER)."
    else:
        got, remedy = "another file", "Name a folder that a model's save has written."
    return CheckpointError(str(path), expected=expected, got=got, remedy=remedy)


def stored_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers to save, each under its first name."""
    distinct: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in state_by_layer(model, keep_vars=True).items():
        distinct.setdefault(id(tensor), (name, tensor))
    return dict(distinct.values())


def _require_counts(config: object, stored: storage.Shapes, path: Path) -> None:
    """Limit layers by the number of tensors, and heads by the number of weights.

    Other sizes are compared after creating the model, which these would make slow.
    """
    limits = {
        "layers": len(stored),
        "depths": len(stored),
        "heads": sum(math.prod(shape) for shape in stored.values()),
    }
    for name, value in config.items() if isinstance(config, dict) else ():
        limit = limits.get(name.rpartition("_")[2], math.inf)
        for count in value if isinstance(value, list) else [value]:
            if isinstance(count, int) and count > limit:
                raise CheckpointError(
                    f"{name} in {path}",
                    expected=f"at most {limit}, for weights of this size",
                    got=count,
                    remedy=MISMATCH,
                )


def _require_shapes(model: nn.Module, stored: storage.Shapes, path: Path) -> None:
    """Require exactly the model's tensors."""
    expected = stored_tensors(model)
    for name in sorted(expected.keys() | stored.keys()):
        if name not in stored or name not in expected:
            wanted = "exactly the tensors of its configuration"
            got = f"{'no' if name in expected else 'an unknown'} {name}"
        elif stored[name] != tuple(expected[name].shape):
            wanted, got = f"{name} of shape {list(expected[name].shape)}", str(list(stored[name]))
        else:
            continue
        raise CheckpointError(str(path), expected=wanted, got=got, remedy=MISMATCH)


Model = TypeVar("Model", bound=nn.Module)

IN_PLACE = ("normal_", "uniform_", "copy_", "fill_", "zero_", "clamp_")
"""In-place initialisers, skipped like ``torch.nn.init``: on the meta device they do nothing, but
some of them, and ``arange``, import PyTorch's compiler."""


def meta_init(make: Callable[[], Model]) -> Model:
    """A model on the meta device, without memory for its weights and without initial values."""
    with torch.device("meta"), _Uninitialized():
        return make()


class _Uninitialized(TorchFunctionMode):
    """Skips initialisers in this thread."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        named = dict(kwargs or {})
        if getattr(func, "__module__", "") == "torch.nn.init" or func.__name__ in IN_PLACE:
            return args[0] if args else named["tensor"]
        if func is torch.arange and str(named.get("device") or "meta") == "meta":
            return _arange(*args, dtype=named.get("dtype"))
        return func(*args, **named)


def _arange(*bounds: float, dtype: torch.dtype | None) -> Tensor:
    """``torch.arange`` on the meta device."""
    values = range(*map(math.ceil, bounds))
    return torch.empty(len(values), dtype=dtype or torch.int64)
