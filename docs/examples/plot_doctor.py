"""
A doctor's finding: engines that rotate otherwise
=================================================

A config asks for YaRN with a gain of its own. ``posenc doctor MODEL --engine all``
reads it by the rules of each engine that could serve the model, and names those that
rotate otherwise.
"""

import altair

from posenc.transformers.engines import compare

fields = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "num_attention_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 131072,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 1e6,
        "factor": 4.0,
        "original_max_position_embeddings": 32768,
        "attention_factor": 1.5,
    },
}
rows = []
for served in compare(fields):
    finding = served.difference or "as transformers"
    rows += [
        {"engine": served.engine, "gain": rotation.gain, "finding": finding}
        for rotation in served.rotations.values()
    ]
chart = (
    altair.Chart(altair.Data(values=rows))
    .mark_bar()
    .encode(
        x=altair.X("gain:Q", title="gain: factor of rotated features"),
        y=altair.Y("engine:N", title=None),
        color=altair.Color(
            "finding:N", legend=altair.Legend(orient="bottom", columns=1)
        ),
    )
)
alt = (
    "The factor of rotated features in each engine; not all take the one in the config."
)
