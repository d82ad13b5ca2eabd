"""Rotary frequencies in the buffers of transformers models, and their stretching in place."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from posenc.encoding import Encoding, Pairing
from posenc.encodings.query_key.axial_rope import AxialRope
from posenc.encodings.query_key.rope import Rope
from posenc.errors import ArgumentError
from posenc.transformers.acceleration.trials import layer_type_of, watch
from posenc.transformers.calls import names_of
from posenc.transformers.checkpoints import TRAINED
from posenc.transformers.stretching.changes import Change, StretchedPart, Undoable, undone_on_error

Of = Literal["frequencies", "theta"]

INNER = "_attn"
"""Method of attention modules that rotate themselves, and are not on the attention interface."""


def varies(rope_type: str) -> bool:
    """True for frequencies that transformers computes anew for each length."""
    return "dynamic" in rope_type or rope_type == "longrope"


def made_of(module: nn.Module, config: Any) -> nn.Module | None:
    """A rotary module as transformers makes it of a config; None if it makes none."""
    try:
        return type(module)(config=config)
    except Exception:  # of any class of transformers
        return None


@dataclass(eq=False)
class Frequencies:
    """A buffer of rotary frequencies, of all layers or of those of one type.

    Args:
        path: of the module in the model.
        module: that holds the buffer.
        buffer: its name, which begins with the type of layers, if there are several.
    """

    path: str
    module: nn.Module
    buffer: str

    @property
    def name(self) -> str:
        return ".".join(filter(None, (self.path, self.buffer)))

    @property
    def prefix(self) -> str:
        """Start of the names of attributes that belong to this buffer."""
        return self.buffer.removesuffix("inv_freq")

    @property
    def layer_type(self) -> str:
        """The layers' type in transformers' words; "" if all layers have these frequencies."""
        return self.prefix.removesuffix("_")

    @property
    def value(self) -> Tensor:
        return getattr(self.module, self.buffer)

    def theta(self) -> Float[Tensor, " T"]:
        """Frequencies in radians per token, float64; 0 for pairs that are not rotated."""
        return self.value.detach().double().flatten()

    def angles(self, by: int) -> Float[Tensor, " T"]:
        """Angles in radians between tokens so far apart, float64."""
        return by * self.theta()

    def exact(self) -> Float[Tensor, " T"]:
        """``theta`` before the model was cast to half precision, if it is that of its config."""
        value = self.value.detach()
        if value.element_size() < 4:
            made = made_of(self.module, getattr(self.module, "config", None))
            recomputed = None if made is None else Frequencies(self.path, made, self.buffer)
            if recomputed is not None and torch.equal(recomputed.value.to(value), value):
                return recomputed.theta().to(value.device)
        return self.theta()

    @property
    def gain_name(self) -> str:
        name = f"{self.prefix}attention_scaling"
        return name if hasattr(self.module, name) else "attention_scaling"

    @property
    def gain(self) -> float:
        """Factor of rotated features."""
        return float(getattr(self.module, self.gain_name, 1.0))

    @property
    def parameters(self) -> Mapping[str, Any]:
        """``rope_parameters`` of these layers in the module's config; empty if it has none."""
        parameters = getattr(getattr(self.module, "config", None), "rope_parameters", None) or {}
        of_type = parameters.get(self.layer_type, parameters)
        return of_type if isinstance(of_type, Mapping) else {}

    @property
    def rope_type(self) -> str:
        kind = getattr(self.module, "rope_type", "default")
        kind = kind.get(self.layer_type, "default") if isinstance(kind, Mapping) else kind
        return kind if isinstance(kind, str) else "default"

    def trained(self, of: Of) -> int | None:
        """The length of training, or that of the frequencies as they are; None if not known."""
        config = getattr(self.module, "config", None)
        longest = getattr(config, "max_position_embeddings", None)
        if of == "frequencies":
            return longest
        original = self.parameters.get(TRAINED) or getattr(config, TRAINED, None)
        return original or longest

    def rotates(self, module: nn.Module, layer_type: str) -> bool:
        """True if layers of a type for which a module is called are rotated by these."""
        return module is self.module and self.layer_type in ("", layer_type)

    def rope(
        self,
        *,
        pairing: Pairing = "half",
        head_dim: int | None = None,
        theta: Float[Tensor, " T"] | None = None,
    ) -> Rope:
        """The rotation as it is, or RoPE with the frequencies above 0 in ``theta``, without a gain.

        Args:
            pairing: of features.
            head_dim: width of a head; by default that of the rotated features.
            theta: other frequencies.

        Raises:
            ArgumentError: for frequencies that do not fall, as those of several axes.
        """
        gain = self.gain if theta is None else 1.0
        theta = self.exact() if theta is None else theta
        moving = theta[theta > 0]
        pairs = len(moving)
        if pairs == 0 or not bool((moving.diff() < 0).all()):
            self._require_values()
            raise ArgumentError(
                "model",
                expected="rotary frequencies of one axis, each lower than the one before",
                got=f"{pairs} above 0 in another order",
                remedy="Only rotations by a token's index are stretched.",
            )
        steps = torch.arange(pairs, dtype=theta.dtype, device=theta.device) / pairs
        read = float(moving[0] / moving[-1]) ** (pairs / max(1, pairs - 1)) if pairs > 1 else 1e4
        bases = [float(self.parameters.get("rope_theta") or 10000.0), read]
        off = {base: moving * base**steps for base in bases}
        tolerance = max(1e-4, 8 * torch.finfo(self.value.dtype).eps)
        plain = [base for base in bases if bool(((off[base] - 1).abs() < tolerance).all())]
        width = head_dim or 2 * pairs
        return Rope(
            head_dim=width,
            base=[*plain, *bases][0],
            pairing=pairing,
            fraction=2 * pairs / width,
            divisors=None if plain else off[bases[0]].reciprocal().tolist(),
            gain=gain,
        )

    def _require_values(self) -> None:
        """Refuse a buffer that the model's config does not explain, as ``to_empty`` leaves it."""
        made = made_of(self.module, getattr(self.module, "config", None))
        stated = None if made is None else getattr(made, self.buffer, None)
        if stated is not None and not torch.allclose(stated.to(self.value), self.value, rtol=1e-2):
            raise ArgumentError(
                "model",
                expected=f"the frequencies of its config in {self.name}",
                got="others, as to_empty leaves them",
                remedy="Load it by from_pretrained, which fills buffers that no file has.",
            )

    def encoding(
        self, of: Of, *, pairing: Pairing = "half", head_dim: int | None = None
    ) -> Encoding:
        """The rotation from which an extension begins.

        Raises:
            ArgumentError: also for frequencies that change with the length.
        """
        base, width = self.parameters.get("rope_theta"), len(self.theta())
        if of == "theta" and base is not None and self.rope_type not in ("default", "proportional"):
            theta = float(base) ** -(torch.arange(width, dtype=torch.float64) / width)
            return Encoding.of(self.rope(pairing=pairing, head_dim=head_dim, theta=theta))
        if varies(self.rope_type):
            raise ArgumentError(
                "model",
                expected="frequencies that are the same for each length",
                got=f"{self.rope_type!r} in {self.name}",
                remedy="of='theta' begins from the frequencies before that extension.",
            )
        return Encoding.of(self.rope(pairing=pairing, head_dim=head_dim))

    def set_rope(self, rope: Rope) -> list[Change]:
        """Replace the frequencies of the pairs that are rotated, and the gain.

        The new ones are at least float32: in half precision a position of a long text would be off
        by radians.
        """
        before = self.value
        theta, dtype = self.exact(), torch.promote_types(before.dtype, torch.float32)
        original, moving = theta.clone(), theta != 0
        theta[moving] = rope.frequencies(like=theta)
        # Pairs that the method leaves alone keep their frequencies to the bit.
        theta = theta.where((theta / original - 1).abs() > 1e-6, original)
        changes = [Change.of(self.module, self.buffer, theta.view_as(before).to(dtype))]
        if self.gain != rope.gain:
            changes.append(Change.of(self.module, self.gain_name, rope.gain))
        if varies(self.rope_type):
            kinds: Any = self.module.rope_type
            default = {**kinds, self.layer_type: "default"} if self.layer_type else "default"
            changes.append(Change.of(self.module, "rope_type", default))
        return changes


@dataclass(eq=False)
class SineTable(Frequencies):
    """A buffer ``[N, 2T]`` of sines and cosines by position, of one layer or of all."""

    @property
    def prefix(self) -> str:
        return ""

    def theta(self) -> Float[Tensor, " T"]:
        return self.angles(1)

    def angles(self, by: int) -> Float[Tensor, " T"]:
        """Angles of the table's row, rounded as it is; beyond the table, multiples of ``theta``."""
        if abs(by) >= len(self.value):
            return by * self.theta()
        sine, cosine = self.value[abs(by)].detach().double().chunk(2)
        return torch.atan2(sine, cosine) * (1 if by >= 0 else -1)

    def exact(self) -> Float[Tensor, " T"]:
        return self.theta()

    def trained(self, of: Of) -> int | None:
        return len(self.value)

    def set_rope(self, rope: Rope, rows: int | None = None) -> list[Change]:
        """Replace the table by one of ``rows`` positions."""
        before = self.value
        positions = torch.arange(rows or len(before), dtype=torch.float64, device=before.device)
        angles = positions.unsqueeze(1) * rope.frequencies(like=positions)
        table = torch.cat([angles.sin(), angles.cos()], 1) * rope.gain
        return [Change.of(self.module, self.buffer, table.to(before.dtype))]


def frequencies_in(model: nn.Module) -> Iterator[Frequencies]:
    """All rotary frequencies of a model."""
    for path, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name.endswith("inv_freq") and not name.endswith("original_inv_freq"):
                yield Frequencies(path, module, name)
            elif _holds_sines(buffer) and (rotates_itself(module) or _hands_out(module, buffer)):
                yield SineTable(path, module, name)


def rotates_itself(module: nn.Module) -> bool:
    """True for an attention module that is not on the attention interface."""
    return callable(getattr(module, INNER, None))


def _hands_out(module: nn.Module, table: Tensor) -> bool:
    """True for a rotary module: its answer is the sines and the cosines of positions."""
    if not {"x", "position_ids"} <= set(names_of(module.forward)):
        return False
    ids = torch.arange(2, device=table.device).unsqueeze(0)
    answer = type(module).forward(module, x=table, position_ids=ids)  # without hooks
    halves = [half.unsqueeze(0) for half in table[:2].chunk(2, dim=-1)]
    return isinstance(answer, tuple) and len(answer) == 2 and all(map(torch.equal, answer, halves))


def _holds_sines(buffer: Tensor) -> bool:
    """True if the first row holds sines and cosines of 0."""
    if buffer.dim() != 2 or buffer.is_meta or len(buffer) < 2 or not buffer.is_floating_point():
        return False
    sine, cosine = buffer[0].chunk(2)
    return bool((sine == 0).all() and (cosine == 1).all())


Calls = dict[tuple[nn.Module, str], tuple[Any, Any]]
"""Arguments of the first call of each rotary module for each type of layers."""


def divides_frequencies(encoding: Encoding) -> bool:
    """True if an encoding is RoPE with other frequencies and another gain, and nothing else."""
    return type(encoding.query_key) is Rope and len(encoding.parts()) == 1


def windowed(layer_type: str) -> bool:
    """True for a type of layers that see a window."""
    return layer_type.startswith(("sliding", "chunked"))


def called(model: Any, frequencies: list[Frequencies]) -> tuple[list[Frequencies], Calls]:
    """Frequencies that a text is rotated by, and the calls of their modules."""
    calls: Calls = {}

    def note(module: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        calls.setdefault((module, layer_type_of(arguments, options)), (arguments, options))

    watch(model, dict.fromkeys(f.module for f in frequencies), note)
    used = [f for f in frequencies if any(f.rotates(*call) for call in calls)]
    return used, calls


def set_ropes(
    stretched: Mapping[Frequencies, Encoding], calls: Calls, factor: float | None
) -> list[Undoable]:
    """Replace frequencies.

    Raises:
        ArgumentError: if a module does not read its gain.
    """
    with undone_on_error() as changes:
        for frequencies, encoding in stretched.items():
            rope = encoding.query_key
            assert isinstance(rope, Rope)
            if isinstance(frequencies, SineTable):
                rows = round(len(frequencies.value) * (factor or 1))
                changes += frequencies.set_rope(rope, rows)
                continue
            changes += frequencies.set_rope(rope)
            _require_gain(frequencies, rope, calls)
    return changes


def _require_gain(frequencies: Frequencies, rope: Rope, calls: Calls) -> None:
    for (module, kind), (arguments, options) in calls.items():
        if not frequencies.rotates(module, kind):
            continue
        with torch.no_grad():
            gain = _gain(module(*arguments, **options))
        if abs(gain - rope.gain) > 0.01 * rope.gain:
            raise ArgumentError(
                "method",
                expected=f"one without a gain, which {frequencies.path} does not read",
                got=f"gain {rope.gain:.4g}",
                remedy="temperature=1 leaves it out of yarn; ntk and interpolate have none.",
            )


def _gain(output: Any) -> float:
    """The length of the first token's first pair."""
    if isinstance(output, tuple):
        cosine, sine = (float(x.flatten()[0]) for x in output)
        return math.hypot(cosine, sine)
    return float(output.flatten()[0].abs())


def rows(
    frequencies: list[Frequencies],
    stretched: Mapping[Frequencies, Encoding],
    used: list[Frequencies],
) -> tuple[StretchedPart, ...]:
    """Report of frequencies."""
    parts = []
    for f in frequencies:
        kind = type(f.module).__name__
        if f in stretched:
            parts.append(StretchedPart(f.name, kind, True, describe(stretched[f])))
            continue
        reason = "its layers see a window" if f in used else "no text is rotated by it"
        parts.append(StretchedPart(f.name, kind, False, reason))
    return tuple(parts)


def describe(encoding: Encoding) -> str:
    """An encoding in a few words."""
    part = encoding.score or encoding.query_key
    if part is None:
        return "no positions"
    if not isinstance(part, Rope | AxialRope):
        return f"{type(part).__name__}({part.extra_repr()})"
    divisors = part.divisors or (1.0,)
    gain = "" if part.gain == 1 else f", gain {part.gain:.4g}"
    return f"frequencies divided by {min(divisors):.4g} to {max(divisors):.4g}{gain}"
