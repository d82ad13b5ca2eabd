"""One palette of all pages and charts: of words, edges and series, on light and dark paper."""

from __future__ import annotations

COLOURS = (
    *("#0a65f5", "#e46107", "#075343", "#fc0b8c", "#ab1300"),
    *("#0696b6", "#bb5f52", "#011ed9", "#b30455", "#7f0577"),
)
DARK_COLOURS = (
    *("#8492ff", "#f09308", "#1cead0", "#d13978", "#ed0617"),
    *("#01d6ef", "#ffad8e", "#7858fc", "#f94a70", "#d80fae"),
)
"""Series colours on light and on dark paper, of equal hues. At least 11 apart (CIEDE2000) from one
another and from the control's, for readers with deuteranopia or protanopia too."""

SERIES = tuple(f"--series-{number}" for number in range(len(COLOURS)))
CONTROL = "--control"
"""Names of these colours, and of controls', in charts that follow the paper."""

LIGHT = {"--paper": "#ffffff", "--ink": "#1c2126", "--soft": "#5b6570", "--edge": "#858d96"}
LIGHT |= {"--line": "#e3e6ea", "--tint": "#f5f7f9", "--shade": "#f3f6f9"}
LIGHT |= {"--good": "#1d7a4f", "--fair": "#8a5c06", "--bad": "#b3323e"}
LIGHT |= {CONTROL: "#747c84", **dict(zip(SERIES, COLOURS, strict=True))}

DARK = {"--paper": "#14171a", "--ink": "#e6e9ec", "--soft": "#9ba5af", "--edge": "#6d7781"}
DARK |= {"--line": "#2c3238", "--tint": "#1c2126", "--shade": "#1b1f24"}
DARK |= {"--good": "#5cc492", "--fair": "#dca84a", "--bad": "#f0808a"}
DARK |= {CONTROL: "#8f98a1", **dict(zip(SERIES, DARK_COLOURS, strict=True))}
"""Colours by name on light and on dark paper: of words (``ink``, ``soft``), edges of axes, lines
that only guide the eye, backgrounds (``tint``, ``shade``), verdicts and series."""

SHAPES = (
    "circle",
    "square",
    "triangle-up",
    "diamond",
    "triangle-down",
    "cross",
    "triangle-right",
    "triangle-left",
)
"""Marks, so that series differ without colours too."""

OUTLINES = {
    "circle": "M-4,0a4,4 0 1,0 8,0a4,4 0 1,0 -8,0",
    "square": "M-3.5,-3.5h7v7h-7z",
    "triangle-up": "M0,-4.2L4.4,3.6H-4.4z",
    "diamond": "M0,-5L4,0L0,5L-4,0z",
    "triangle-down": "M0,4.2L4.4,-3.6H-4.4z",
    "cross": "M-1.6,-4.6h3.2v3h3v3.2h-3v3h-3.2v-3h-3v-3.2h3z",
    "triangle-right": "M4.2,0L-3.6,4.4V-4.4z",
    "triangle-left": "M-4.2,0L3.6,4.4V-4.4z",
}
"""The marks as paths of SVG, about ten pixels wide, around zero."""
