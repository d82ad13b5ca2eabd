"""
Speed: attention with an encoding
=================================

Times in multiples of PyTorch's attention without one, forward, over 2,048 tokens, as
measured by ``make bench`` and kept in the repository; ``posenc bench`` measures yours.
"""

import json
from pathlib import Path

import altair

results = Path("../../benchmarks/results")  # the examples run in their own folder
found = {}
for name in ("attention_amd", "attention_amd_others"):
    for row in json.loads((results / f"{name}.json").read_text())["readings"]:
        case = (row["level"], row["length"], row["causal"], row["dtype"])
        if case == ("call", 2048, False, "float32") and row["forward_ratio"]:
            found.setdefault((row["encoding"], row["contender"]), row["forward_ratio"])
rows = [
    {"encoding": encoding, "contender": contender, "times": times}
    for (encoding, contender), times in found.items()
    if encoding in ("rope", "alibi", "t5", "swin", "deberta@buckets=256")
    and contender in ("posenc", "bias written out")
]
chart = altair.Chart(altair.Data(values=rows)).mark_bar()
chart = chart.encode(
    x=altair.X("times:Q", title="time, in multiples of plain attention"),
    y=altair.Y("encoding:N", title=None),
    yOffset="contender:N",
    color=altair.Color("contender:N", title="computed by"),
)
alt = (
    "Bars of five encodings: posenc's are below 1, those with a bias written out above."
)
