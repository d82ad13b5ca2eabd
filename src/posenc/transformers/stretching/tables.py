"""Position tables of text and of images, resized, and linear biases, divided, in place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from inspect import signature
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import embedding, interpolate
from torch.overrides import TorchFunctionMode

from posenc.encoding import Encoding
from posenc.encodings.embedding.learned import Learned
from posenc.encodings.embedding.learned2d import Learned2d
from posenc.encodings.score.alibi import Alibi
from posenc.errors import ArgumentError
from posenc.extension.methods.interpolate import SqueezedAlibi
from posenc.transformers.acceleration.trials import quiet, run, watch
from posenc.transformers.stretching.changes import Change, Undoable
from posenc.transformers.stretching.configs import configs_of

SPECIAL = range(3)
"""Numbers of tokens of an image that are no cells: class and distillation tokens."""

LENGTHS = ("max_position_embeddings", "n_positions", "max_positions", "max_seq_len")
"""Names for the number of positions in configs and modules."""


RESAMPLE = "interpolate_pos_encoding"
"""Method of modules, and option of their passes, that resamples a table for other sizes."""


@dataclass(eq=False)
class LearnedTable:
    """A learned table of a module.

    Args:
        path: of the module in the model.
        module: that has it.
        name: of the parameter, ``[N, C]`` or ``[1, N, C]``.
        prefix: first rows that are no positions.
        cells: (height, width) of an image's cells; None for a text.
    """

    path: str
    module: nn.Module
    name: str
    prefix: int
    cells: tuple[int, int] | None = None

    @property
    def rows(self) -> Float[Tensor, "N C"]:
        table: Tensor = getattr(self.module, self.name)
        return table.detach().flatten(0, -2)

    def encoding(self) -> Encoding:
        """The table as an encoding of posenc."""
        rows = self.rows
        with torch.device("meta"):
            if self.cells is None:
                part: Any = Learned(dim=rows.shape[1], max_length=len(rows))
            else:
                part = Learned2d(dim=rows.shape[1], size=self.cells, special=self.prefix)
        if self.cells is None:
            part.table = nn.Parameter(rows)
        else:
            part.special = nn.Parameter(rows[: self.prefix])
            part.table = nn.Parameter(rows[self.prefix :].view(*self.cells, -1))
        return Encoding.of(part)

    def set_encoding(self, model: nn.Module, encoding: Encoding) -> tuple[list[Change], int]:
        """Replace the table, and the sizes that follow from it; also returns its new length.

        Raises:
            ArgumentError: for an encoding of more than a table.
        """
        part: Any = encoding.embedding
        others = [type(other).__name__ for other in encoding.parts() if other is not part]
        if others:
            raise ArgumentError(
                "method",
                expected="one that changes the table alone",
                got=f"one with {' and '.join(others)}",
                remedy="interpolate and hierarchical do.",
            )
        before: Tensor = getattr(self.module, self.name)
        rows = part.table.detach()
        if self.cells is not None:
            rows = torch.cat([part.special.detach(), rows.flatten(0, 1)])
        old, new = len(self.rows), len(rows)
        table = nn.Parameter(rows.view(*before.shape[:-2], new, -1).clone(), before.requires_grad)
        changes = [Change.of(self.module, self.name, table)]
        if self.cells is None:
            changes += _numbers(
                [*configs_of(model), *model.modules()], LENGTHS, old, self.prefix, new
            )
        else:
            changes += self._image_sizes(model, tuple(part.table.shape[:2]))
        names = ("num_embeddings", "num_positions")
        changes += _numbers([self.module, *model.modules()], names, old, 0, new)
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                if buffer.shape == (1, old) and not buffer.is_floating_point():
                    changes.append(Change.of(module, name, _longer(buffer, new)))
        return changes, new

    def _image_sizes(self, model: nn.Module, cells: tuple[int, ...]) -> list[Change]:
        """Give modules and configs other sizes of images, in pixels and in cells."""
        assert self.cells is not None
        changes = []
        scale = [b / a for a, b in zip(self.cells, cells, strict=True)]
        for owner in [*configs_of(model), *model.modules()]:
            for name in ("image_size", "grid_size", "patch_shape"):
                size = getattr(owner, name, None)
                pair = [size, size] if isinstance(size, int) else size
                if not isinstance(pair, (tuple, list)) or len(pair) != 2:
                    continue
                both: Any = [round(a * b) for a, b in zip(pair, scale, strict=True)]
                if isinstance(size, int) and both[0] == both[1]:
                    both = both[0]
                changes.append(Change.of(owner, name, tuple(both) if type(size) is tuple else both))
        count = self.cells[0] * self.cells[1]
        return changes + _numbers(model.modules(), ("num_patches",), count, 0, cells[0] * cells[1])


def take_any_shape(model: Any, table: LearnedTable) -> list[Undoable]:
    """Let a module read a table that is no square, if its class takes square ones alone.

    Args:
        model: with the new sizes.
        table: the new one.

    Returns:
        The changes; none if a model that transformers makes of the config reads the table.
    """
    cells = None if table.cells is None else _cells(model)
    if cells is None or cells[0] == cells[1]:
        return []
    parent = model.get_submodule(table.path.rpartition(".")[0])
    owner = next((m for m in (table.module, parent) if hasattr(m, RESAMPLE)), None)
    if owner is None or _reads(owner, model, cells):
        return []
    config = _image_config(model)
    change = Change.of(owner, RESAMPLE, partial(_resampled, table, cells, _pair(config.patch_size)))
    hook = owner.register_forward_pre_hook(_resample, with_kwargs=True)
    return [change, hook]


def _reads(owner: nn.Module, model: Any, cells: tuple[int, int]) -> bool:
    """True if a module as transformers makes it of the config takes an image of these cells."""
    config = _image_config(model)
    sides = (a * b for a, b in zip(cells, _pair(config.patch_size), strict=True))
    image = torch.zeros(1, getattr(config, "num_channels", 3), *sides)
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            type(owner)(config)(image)
    except Exception:  # of any class of transformers
        return False
    return True


def _resample(module: Any, arguments: Any, options: dict[str, Any]) -> Any:
    """Pre-forward hook: request that the module resamples its table."""
    if RESAMPLE in signature(module.forward).parameters:
        return arguments, options | {RESAMPLE: True}
    return None


def _resampled(
    table: LearnedTable,
    cells: tuple[int, int],
    patch: tuple[int, int],
    embeddings: Float[Tensor, "B N C"],
    height: int,
    width: int,
) -> Float[Tensor, "1 N C"]:
    """Rows for an image of so many pixels, as transformers resamples square tables."""
    rows: Tensor = getattr(table.module, table.name).flatten(0, -2)
    size = height // patch[0], width // patch[1]
    if size != cells:
        grid = rows[table.prefix :].view(1, *cells, -1).permute(0, 3, 1, 2)
        grid = interpolate(grid.float(), size=size, mode="bicubic")
        rows = torch.cat([rows[: table.prefix], grid[0].flatten(1).mT.to(rows.dtype)])
    return rows.unsqueeze(0)


class Lookups(TorchFunctionMode):
    """Tables that are read at consecutive rows, with the first one."""

    def __init__(self) -> None:
        super().__init__()
        self.first_rows: dict[int, int] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is embedding:
            indices, weight = args[0].flatten(), args[1]
            if len(indices) > 1 and bool((indices.diff() == 1).all()):
                self.first_rows[id(weight)] = int(indices[0])
        return func(*args, **(kwargs or {}))


def tables_in(model: Any) -> list[LearnedTable]:
    """The learned position tables of a model, as a pass over a text or an image reads them."""
    with quiet(model), Lookups() as lookups:
        run(model)
    tables = []
    for path, module in model.named_modules():
        cells = _cells(model) if model.main_input_name == "pixel_values" else None
        for name, parameter in module.named_parameters(recurse=False):
            first = lookups.first_rows.get(id(parameter))
            if cells is None and first is not None:
                tables.append(LearnedTable(path, module, name, first))
            elif cells is not None and (first is not None or parameter.shape[:1] == (1,)):
                prefix = parameter.shape[-2] - cells[0] * cells[1] if parameter.dim() > 1 else -1
                if prefix in SPECIAL:
                    tables.append(LearnedTable(path, module, name, prefix, cells))
    return tables


def _image_config(model: Any) -> Any:
    """The part of a config that describes images."""
    return getattr(model.config, "vision_config", model.config)


def _pair(size: int | Sequence[int]) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else (size[0], size[1])


def _cells(model: Any) -> tuple[int, int] | None:
    """Cells of an image by the config."""
    config = _image_config(model)
    size, patch = getattr(config, "image_size", None), getattr(config, "patch_size", None)
    if size is None or patch is None:
        return None
    sizes, patches = _pair(size), _pair(patch)
    return sizes[0] // patches[0], sizes[1] // patches[1]


def _numbers(owners: Any, names: Sequence[str], old: int, prefix: int, new: int) -> list[Change]:
    """Change numbers of rows, or of positions without the prefix."""
    changes = []
    for owner in owners:
        for name in names:
            value = getattr(owner, name, None)
            if type(value) is int and value in (old, old - prefix):
                changes.append(Change.of(owner, name, value + new - old))
    return changes


def _longer(buffer: Tensor, count: int) -> Tensor:
    """Indices of more positions, or one number for more."""
    rest = torch.arange(count, device=buffer.device, dtype=buffer.dtype).unsqueeze(0)
    if bool((buffer[0] == rest[0, : buffer.shape[1]]).all()):
        return rest
    return buffer[:, :1].expand(1, count).contiguous()


NAMES = ("alibi", "position_bias")
"""Arguments of layers with the bias of each key, ``[…, K]``."""


@dataclass(frozen=True)
class LinearBias:
    """The bias that a layer is given.

    Args:
        path: of the layer in the model.
        layer: the outermost module that is given it.
        name: of the argument.
        heads: with a bias each.
        linear: False if it is no multiple of the distance, as T5's.
    """

    path: str
    layer: nn.Module
    name: str
    heads: int
    linear: bool

    def encoding(self) -> Encoding:
        """The bias as an encoding of posenc, with the slopes of ALiBi.

        Raises:
            ArgumentError: if it is not linear.
        """
        if not self.linear:
            raise ArgumentError(
                "model",
                expected="a bias that is linear in the distance",
                got=f"a learned {self.name} of {type(self.layer).__name__}",
                remedy="No method stretches a table by distance.",
            )
        return Encoding.of(Alibi(heads=self.heads))

    def set_encoding(self, encoding: Encoding) -> tuple[Undoable, float]:
        """Divide the bias as an extended encoding does; also returns the factor.

        Raises:
            ArgumentError: for an encoding that does more.
        """
        part = encoding.score
        if encoding.parts() != (part,) or not isinstance(part, SqueezedAlibi):
            raise ArgumentError(
                "method",
                expected="one that divides slopes",
                got=" and ".join(type(other).__name__ for other in encoding.parts()),
                remedy="interpolate does.",
            )
        divided = Divided(self.name, part.factor)
        return self.layer.register_forward_pre_hook(divided, with_kwargs=True), part.factor


@dataclass(frozen=True)
class Divided:
    """Hook of a layer that divides its bias, and the bias in a mask that holds it too."""

    name: str
    factor: float

    def __call__(
        self, module: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        options = {**options, self.name: options[self.name] / self.factor}
        mask = options.get("attention_mask")
        if isinstance(mask, Tensor) and mask.is_floating_point():
            visible = mask > torch.finfo(mask.dtype).min / 2
            options["attention_mask"] = torch.where(visible, mask / self.factor, mask)
        return arguments, options


def biases_in(model: Any) -> list[LinearBias]:
    """The biases by distance that layers are given in a pass over a text."""
    biases: list[LinearBias] = []
    paths = {module: path for path, module in model.named_modules()}

    def note(module: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        inside = any(paths[module].startswith(f"{bias.path}.") for bias in biases)
        for name in NAMES:
            bias = options.get(name)
            if not inside and isinstance(bias, Tensor):
                steps = bias.diff(dim=-1)
                linear = bool(torch.isclose(steps, steps[..., :1], rtol=2e-2).all())
                biases.append(LinearBias(paths[module], module, name, bias.shape[0], linear))

    watch(model, paths, note)
    return biases
