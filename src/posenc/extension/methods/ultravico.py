"""UltraViCo: positive logits of keys beyond the trained window are made smaller."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from posenc.arguments import Natural, Positive, Share
from posenc.encoding import Encoding, ScoreTerm
from posenc.encoding.tensors import Keys, Queries, Scores
from posenc.encodings.common.special_tokens import zero_special_pairs
from posenc.encodings.query_key.axial_rope import AxialRope
from posenc.encodings.query_key.rope import Rope
from posenc.errors import ArgumentError
from posenc.extension.entry import Extension
from posenc.extension.fitting import NotApplicable, Trained
from posenc.grid import Grid


def ultravico(
    encoding: Encoding,
    *,
    length: Trained,
    alpha: Share = 0.9,
    beta: Share = 0.6,
    period: Positive | None = None,
    width: Positive = 4.0,
    axis: Natural = 0,
) -> Encoding:
    """UltraViCo: positive logits of keys beyond the trained window are multiplied by α.

    ``s_ij = λ(Δ) · max(0, s) + min(0, s)``, ``s = scale · q_i·k_j`` after the rotation, with λ = β
    where ``|Δ|`` is within γ of a multiple of the period P, else α where ``|Δ| > L / 2``, else 1.

    Δ is the offset along ``axis``, ``L`` is ``length``, P ``period`` and γ ``width``, all in tokens
    along it, in video in latent frames. Pairs with special tokens have λ = 1. Attention to far
    frames stays weak, so that more frames do not draw it off the near ones; models that repeat
    themselves have P too. Cost: Q·K·H, from the definition alone. Differs from the authors' code in
    counting whole frames, where that counts tokens, and in leaving out, in Wan, that queries of the
    first frame see no key past frame L.

    Args:
        encoding: with RoPE or axial RoPE and no score part.
        length: L, trained; 21 latent frames in Wan, 33 in HunyuanVideo.
        alpha: α; smaller for sharper images, larger for steadier motion.
        beta: β, in HunyuanVideo.
        period: P, from which on the trained model repeats itself, 50 in HunyuanVideo; None: none.
        width: γ.
        axis: 0 is the first, time in video.

    Raises:
        ArgumentError: if the encoding does not fit, or an argument is outside its domain; in
            ``forward``, for positions without that axis.

    Reference: Zhao et al. 2025, "UltraViCo: Breaking Extrapolation Limits in Video Diffusion
    Transformers", https://arxiv.org/abs/2511.20123.

    >>> import posenc
    >>> from posenc.extension import ultravico
    >>> ultravico(posenc.create("axial_rope", head_dim=12), length=21).score
    OutOfWindow(window=10.5, alpha=0.9, beta=0.6, period=None, width=4, axis=0)
    """
    rotates = isinstance(encoding.query_key, Rope | AxialRope)
    if not rotates or encoding.score is not None:
        raise NotApplicable.of("ultravico", "rope or axial_rope without a score part", encoding)
    term = OutOfWindow(
        window=length / 2, alpha=alpha, beta=beta, period=period, width=width, axis=axis
    )
    return Encoding.of(*encoding.parts(), term)


class OutOfWindow(ScoreTerm):
    """``s_ij += (λ(Δ) - 1) · max(0, scale · q_i·k_j)``; see ``ultravico``.

    Args:
        window: L / 2, offsets up to which λ is 1.
        alpha, beta, period, width, axis: as in ``ultravico``.
    """

    axes = (1, 2, 3, 4)

    window: Positive
    alpha: Share
    beta: Share
    period: Positive | None
    width: Positive
    axis: Natural

    def forward(self, q: Queries, k: Keys, grid: Grid, *, scale: float) -> Scores:
        logits = q @ k.mT * scale
        factor = self.factor(self._distance(grid)).unsqueeze(1).to(logits.dtype)
        return zero_special_pairs((factor - 1) * logits.clamp(min=0), grid)

    def factor(self, distance: Float[Tensor, "*dims"]) -> Float[Tensor, "*dims"]:
        """λ at distances in tokens."""
        ones = torch.ones_like(distance)
        factor = torch.where(distance > self.window, self.alpha * ones, ones)
        if self.period is None:
            return factor
        nearest = (distance / self.period).round().clamp(min=1) * self.period
        repeated = (distance - nearest).abs() <= self.width
        return torch.where(repeated, self.beta * ones, factor)

    def _distance(self, grid: Grid) -> Float[Tensor, "b Q K"]:
        if self.axis >= grid.query.axes:
            raise ArgumentError(
                "axis",
                expected=f"0 to {grid.query.axes - 1}, an axis of the positions",
                got=self.axis,
                remedy="In video 0 is time, 1 height, 2 width.",
            )
        return grid.offset[..., self.axis].abs()


ENTRY = Extension(
    function=ultravico,
    summary="Makes positive logits of keys beyond the trained window smaller.",
    on=("axial_rope", "rope"),
    identity_at_one=False,
    training="none",
    expect="Video to four times the trained frames, sharper than by other positions alone.",
    cost="Q·K·H, from the definition alone",
    sample={"period": 4.0, "width": 1.0},
)
