"""Write the page of models with a bias, window, sink or cap, and of what serves them.

Read from the sources of the installed transformers; no model is made. ``make docs`` runs it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import transformers

from posenc.transformers.acceleration import FAMILIES
from posenc.transformers.acceleration.interface import REFUSED_OPTIONS

PAGE = Path(__file__).parent.parent / "docs" / "reference" / "transformers-models.md"

SIGNS = {
    "bias": (
        *("relative_attention_bias", "relative_position_bias", "relative_position_bucket"),
        *("relative_position_embeddings", "rel_logits_proj", "rel_pos_h", "rel_attn_core"),
        *("rel_shift", "relative_shift", "linear_pos(", "distance_embedding", "pos_att_type"),
        *("build_alibi", "alibi =", "attention_biases", "position_bias="),
    ),
    "window": (
        *("create_sliding_window_causal_mask", "create_bidirectional_sliding_window_mask"),
        *("create_chunked_causal_mask", "sliding_attention", "window_partition"),
        "attention_window",
    ),
    "sink": ("s_aux=", " sinks=", "self.sinks"),
    "cap": (
        *("softcap=", "attn_logit_softcapping", "attention_logit_cap", "attn_soft_cap"),
        "attn_logit_cap",
    ),
}
"""Words in modeling files that tell what their attention has."""


@dataclass(frozen=True)
class Model:
    """Facts on its attention in the modeling files of a model.

    Args:
        name: of its package in ``transformers.models``.
        has: keys of ``SIGNS``.
        on_interface: attention, or some of it, goes through transformers' interface.
        given: names of arguments that are handed to the interface.
    """

    name: str
    has: frozenset[str]
    on_interface: bool
    given: frozenset[str]

    @classmethod
    def of(cls, name: str, source: str) -> Model:
        """The model whose modeling files have this source."""
        has = (what for what, words in SIGNS.items() if any(word in source for word in words))
        given = {name for call in calls(source) for name in re.findall(r"(?m)^\s*(\w+)=", call)}
        # A model without attention modules holds models that have them, as transformers assumes.
        own = re.search(r"(?m)^class \w*Attention\w*\(nn\.Module\):", source)
        on_interface = own is None or "ALL_ATTENTION_FUNCTIONS.get_interface(" in source
        return cls(name, frozenset(has), on_interface, frozenset(given))


def served(model: Model) -> str:
    """The part of posenc that serves the model, or why none does."""
    if model.name in FAMILIES:
        return "yes, by modules of its own"
    if not model.on_interface:
        return "no: not on the interface"
    refused = [f"`{name}`" for name in sorted(model.given & REFUSED_OPTIONS)]
    if refused or "position_bias" in model.given:
        return "no: " + ", ".join(refused or ["its bias"])
    return "in part: layers without a bias" if "bias" in model.has else "yes, by the interface"


def calls(source: str) -> Iterator[str]:
    """The arguments of each call of the attention interface."""
    for match in re.finditer(r"attention_interface\(", source):
        depth, end = 1, match.end()
        while depth:
            depth += {"(": 1, ")": -1}.get(source[end], 0)
            end += 1
        yield source[match.end() : end - 1]


def scan() -> list[Model]:
    """Models of the installed transformers that have one of ``SIGNS``, by name."""
    sources: dict[str, str] = {}
    for path in sorted(Path(transformers.__file__).parent.glob("models/*/modeling_*.py")):
        sources[path.parent.name] = sources.get(path.parent.name, "") + path.read_text()
    models = (Model.of(name, source) for name, source in sources.items())
    return [model for model in models if model.has]


def page(models: Sequence[Model], version: str) -> str:
    """The page of a version of transformers."""
    rows = [
        f"| `{model.name}` | {', '.join(what for what in SIGNS if what in model.has)} "
        f"| {served(model)} |"
        for model in models
    ]
    yes, part = (sum(served(x).startswith(word) for x in models) for word in ("yes", "in part"))
    return f"""<!-- made by `make docs` from the sources of transformers -->

# Models of transformers with more than plain attention

transformers {version}: by their sources {len(models)} models have a bias, a window, sinks or a cap
of logits; {yes} of them are served, and {part} in part. *By modules of its own*:
`accelerate(model)` replaces its attention modules; [a guide](../guides/accelerate.md) tells what
stays as it is. *By the interface*: `accelerate(model)` or `attn_implementation="posenc"`. *No* is
followed by what is missing: an argument that posenc's attention refuses by name, or attention that
is not on transformers' interface. All others of transformers have plain attention.

{{.filtered}}
| model | has | served |
|---|---|---|
{chr(10).join(rows)}
"""


if __name__ == "__main__":
    found = scan()
    PAGE.write_text(page(found, transformers.__version__))
    print(f"{PAGE.name}: {len(found)} models")
