"""A method of RoPE on one axis of a position."""

from __future__ import annotations

from posenc.arguments import Count, Natural
from posenc.encoding import Encoding
from posenc.encodings.query_key.axial_rope import AxialRope, by_axis
from posenc.encodings.query_key.rope import Rope
from posenc.errors import ArgumentError
from posenc.extension.entry import Extension
from posenc.extension.fitting import NotApplicable, Stretch, Trained, replaced, require_part
from posenc.extension.registry import EXTENSIONS, extend
from posenc.registration import parse_name


def on_axis(
    encoding: Encoding,
    *,
    factor: Stretch,
    length: Trained | None = None,
    method: str = "ntk",
    axis: Natural = 0,
    axes: Count = 3,
) -> Encoding:
    """A method that divides RoPE's frequencies, on one axis of ``axial_rope``.

    ``θ'_at = θ_at / d_t`` for axis a, with the divisors d that the method gives RoPE of the axis's
    own pairs and base; other axes are kept. A ``band`` is taken from its fastest pair on. Learned
    frequencies, which have no order, take ``interpolate`` alone: their ``step`` is divided.

    Cosmos stretches time by ``ntk``, HunyuanVideo and CogVideoX have ``riflex``. Lumina-Next's NTK,
    with base ``b · s`` on both axes, is ``ntk`` with a factor of ``s^((d-2)/d)``, d the features of
    the axis. A method's gain (YaRN's) is of the whole head. Cost: none. Repeat it for further axes.

    Args:
        encoding: with ``axial_rope``, of no band with ``spacing="linear"``.
        factor: of the axis, 1 or more.
        length: trained length of the axis in cells, for methods that need one.
        method: name of one that divides frequencies, with its options: ``"yarn"``,
            ``"riflex@repeats=48"``.
        axis: 0 is the first, time in video.
        axes: of positions, if the encoding has no ``pairs`` that say it.

    Raises:
        ArgumentError: if it has no such encoding, no such axis with pairs, or the method does not
            only divide frequencies.

    Reference: NVIDIA 2025, "Cosmos World Foundation Model Platform for Physical AI",
    https://arxiv.org/abs/2501.03575.

    >>> import posenc
    >>> from posenc.extension import on_axis
    >>> video = posenc.create("axial_rope", head_dim=12, pairs=(3, 2, 1))
    >>> on_axis(video, factor=9, method="ntk", axis=0).query_key.divisors
    (1.0, 3.0, 9.0, 1.0, 1.0, 1.0)
    """
    axial = require_part(encoding, AxialRope, "on_axis", "axial_rope")
    if axial.band is not None and axial.spacing == "linear":
        raise NotApplicable.of("on_axis", "axial_rope of geometric frequencies", encoding)
    if axial.learned and method != "interpolate":
        raise NotApplicable.of(
            "on_axis", "axial_rope of frequencies that are not learned", encoding
        )
    pairs = axial.counts(axes)
    if axis >= len(pairs) or not (axial.learned or pairs[axis]):
        raise ArgumentError(
            "axis",
            expected=f"0 to {len(pairs) - 1}, an axis with pairs of {tuple(pairs)}",
            got=axis,
            remedy="In video 0 is time, 1 height, 2 width.",
        )
    steps = list(by_axis(axial.step, len(pairs)))
    if axial.learned:
        steps[axis] /= factor
        slower = AxialRope(**{**axial.given, "step": steps})
        slower.frequencies = axial.frequencies
        return replaced(encoding, axial, slower)
    own = slice(sum(pairs[:axis]), sum(pairs[: axis + 1]))
    divisors = list(axial.divisors or [1.0] * sum(pairs))
    base, fastest, order = by_axis(axial.base, len(pairs))[axis], steps[axis], 1
    if axial.band is not None:
        fastest, order = fastest * max(axial.band), 1 if axial.band[0] > axial.band[1] else -1
        base = (max(axial.band) / min(axial.band)) ** (pairs[axis] / max(1, pairs[axis] - 1))
    before = divisors[own][::order]
    rope = Rope(
        head_dim=2 * pairs[axis],
        base=base,
        divisors=before if any(divisor != 1 for divisor in before) else None,
    )
    parsed = parse_name(EXTENSIONS, method)  # tokens are counted in turns of the fastest pair
    in_turns = {name: parsed.options[name] * fastest for name in {"repeats"} & {*parsed.options}}
    stretched = extend(
        Encoding(query_key=rope),
        parsed.name,
        factor=factor,
        length=None if length is None else length * fastest,
        **{**parsed.options, **in_turns},
    )
    changed = stretched.query_key
    if not isinstance(changed, Rope) or len(stretched.parts()) > 1:
        raise ArgumentError(
            "method",
            expected="one that divides frequencies, such as ntk, yarn or riflex",
            got=method,
            remedy="Methods that move positions are for one axis.",
        )
    divisors[own] = (changed.divisors or (1.0,) * pairs[axis])[::order]
    made = axial.stretched(pairs, divisors, gain=axial.gain * changed.gain)
    return replaced(encoding, axial, made)


ENTRY = Extension(
    function=on_axis,
    summary="Applies a method of RoPE to one axis of video or images.",
    on=("axial_rope",),
    training="helps",
    expect="As the method on text: ntk for larger images, riflex for longer video.",
    sample={"method": "interpolate", "axes": 1},
)
