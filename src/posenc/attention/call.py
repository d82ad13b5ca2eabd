"""One call of ``attend``, and the problem that it is to each backend."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Float
from torch import Tensor

from posenc.attention.backends.common.base import Backend, Problem, Whole
from posenc.attention.backends.native.rotation import rotate
from posenc.attention.dropout import KeyedDropout
from posenc.attention.lowering import lower, reads_tokens, repeat_heads
from posenc.encoding import Encoding, Rotation
from posenc.errors import ArgumentError
from posenc.grid import Grid, zero_invalid_signals
from posenc.layout.padding import zero_invalid


@dataclass(eq=False)
class AttentionCall:
    """The arguments of ``attend``; problems are made from them once, when first needed.

    Backends get queries and keys after the query_key part. One that fuses rotations gets them
    before it, with the rotation, where the part is nothing but a rotation.

    Args: as ``attend``; ``whole`` and ``keyed`` as of ``Problem``.
    """

    q: Float[Tensor, "B H Q D"]
    k: Float[Tensor, "B G K D"]
    v: Float[Tensor, "B G K E"]
    grid: Grid
    encoding: Encoding
    dropout: float = 0.0
    scale: float | None = None
    whole: Whole | None = None
    keyed: KeyedDropout | None = None
    _transformed: Problem | None = field(default=None, init=False, repr=False)
    _rotated: Problem | None = field(default=None, init=False, repr=False)
    _fused: tuple[Problem | None] | None = field(default=None, init=False, repr=False)
    _lowered_rotation: tuple[Rotation | None] | None = field(default=None, init=False, repr=False)

    def autocast(self) -> AttentionCall:
        """The call with operands cast as autocast casts them; positions and biases are not."""
        device = self.q.device.type
        if device == "meta" or not torch.is_autocast_enabled(device):
            return self
        if self.q.dtype == torch.float64:
            return self
        dtype = torch.get_autocast_dtype(device)
        return replace(self, q=self.q.to(dtype), k=self.k.to(dtype), v=self.v.to(dtype))

    def without_padding(self) -> AttentionCall:
        """The call with zeros at invalid tokens, so that no backend reads what they hold."""
        q = zero_invalid(self.q, self.grid.query, dim=2)
        k, v = (zero_invalid(x, self.grid.key, dim=2) for x in (self.k, self.v))
        return replace(self, q=q, k=k, v=v, grid=zero_invalid_signals(self.grid))

    def logit_scale(self) -> float:
        """Factor of the logits: as given, or the encoding's default."""
        if self.scale is not None:
            return self.scale
        return self.encoding.default_scale(self.q.shape[-1])

    def problem(self, backend: Backend) -> Problem:
        """The problem in the form that a backend takes."""
        if backend.fuse_rotations:
            if self._fused is None:
                self._fused = (self._fused_problem(),)
            if self._fused[0] is not None:
                return self._fused[0]
        return self.rotated() if backend.rotates_compiled else self.transformed()

    def rotated(self) -> Problem:
        """The problem with queries and keys transformed, by the compiled kernel where it can."""
        if self._rotated is None:
            rotation = self._rotation()
            if rotation is None:
                self._rotated = self.transformed()
                return self._rotated
            q, k = rotate(rotation, self.q, self.k)
            fused = None if self._fused is None else self._fused[0]
            if fused is None:
                self._rotated = self._problem(q, k, self.v, None)
            else:  # nothing of its terms reads queries or keys
                self._rotated = replace(fused, q=q, k=k, rotation=None)
        return self._rotated

    def transformed(self) -> Problem:
        """The problem with queries and keys transformed."""
        if self._transformed is None:
            q, k, v = self.q, self.k, self.v
            if self.encoding.query_key is not None:
                q, k = self.encoding.query_key(q, k, self.grid)
                self._require_shapes(q, k)
                v = repeat_heads(v, k.shape[1])  # keys may have come back with one a query head
            self._transformed = self._problem(q, k, v, None)
        return self._transformed

    def _require_shapes(self, q: Tensor, k: Tensor) -> None:
        """Compare transformed queries and keys with those before: kernels take their shapes."""
        (batch, heads, queries), (_, groups, keys) = self.q.shape[:3], self.k.shape[:3]
        fit = q.shape[:3] == (batch, heads, queries) and k.shape[3] == q.shape[3]
        if not (
            fit and k.shape[1] in (groups, heads) and (k.shape[0], k.shape[2]) == (batch, keys)
        ):
            raise ArgumentError(
                f"{type(self.encoding.query_key).__name__}.forward",
                expected=f"queries [{batch}, {heads}, {queries}, E] and "
                f"keys [{batch}, {groups} or {heads}, {keys}, E]",
                got=f"{list(q.shape)} and {list(k.shape)}",
                remedy="Return as many queries and keys as there were, of one width.",
            )

    def _fused_problem(self) -> Problem | None:
        """The problem with queries and keys yet to be rotated; None where that has to come first.

        That is so where the angles need gradients, which kernels do not give, and where score parts
        read rotated queries or keys.
        """
        rotation = self._rotation()
        if rotation is None:
            return None
        problem = self._problem(self.q, self.k, self.v, rotation)
        if problem.lowered is None or any(reads_tokens(term) for term in problem.lowered):
            return None
        return problem

    def _rotation(self) -> Rotation | None:
        """The query_key part's rotation; None without one, or where its angles have gradients."""
        if self._lowered_rotation is None:
            self._lowered_rotation = (self._lower_transform(),)
        return self._lowered_rotation[0]

    def _lower_transform(self) -> Rotation | None:
        transform = self.encoding.query_key
        if transform is None:
            return None
        graded = torch.is_grad_enabled()
        if graded and any(parameter.requires_grad for parameter in transform.parameters()):
            return None
        rotation = transform.lower(self.q, self.k, self.grid)
        return None if rotation is None or (graded and rotation.has_gradient) else rotation

    def _problem(self, q: Tensor, k: Tensor, v: Tensor, rotation: Rotation | None) -> Problem:
        grid, encoding, scale = self.grid, self.encoding, self.logit_scale()
        lowered = lower(encoding, q, k, grid, scale=scale, value_dim=v.shape[3])
        return Problem(
            *(q, k, v, grid, encoding, scale, self.dropout, lowered, rotation),
            whole=self.whole,
            keyed=self.keyed,
        )
