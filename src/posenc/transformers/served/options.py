"""Options of llama.cpp that change RoPE, on the parameters of its file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from posenc.transformers.engines.config import FULL
from posenc.transformers.engines.llama_cpp import KEY, TENSOR
from posenc.transformers.engines.rotation import RopeParameters
from posenc.transformers.served.launch import StartedServer

Options = Mapping[str, Sequence[str]]
"""Values of each option in their order, by its name without hyphens."""

NUMBERS = (
    *("rope-scale", "rope-freq-scale", "rope-freq-base", "yarn-orig-ctx", "yarn-ext-factor"),
    *("yarn-attn-factor", "yarn-beta-slow", "yarn-beta-fast", "ctx-size", "parallel"),
)

FILE_KEYS = {
    "rope.scaling.attn_factor": KEY,
    "rope.scaling.factor": "factor",
    "rope.scaling.type": "rope_type",
}
"""Parameters by the end of a key that ``--override-kv`` replaces."""


def with_options(launch: StartedServer, options: Options) -> StartedServer:
    """A server of a file with the options of its command.

    By common/arg.cpp and src/llama-context.cpp, 2026-11: windows keep base and scale of the file;
    ``--yarn-attn-factor`` is replaced by YaRN's own gain, so that it counts without YaRN alone.

    Raises:
        ValueError: for a value that is no number.
    """
    numbers = {name: float(options[name][-1]) for name in NUMBERS if options.get(name)}
    keys = dict(_override(text) for text in options.get("override-kv", ()))
    base = keys.pop("rope.freq_base", None)
    longest = int(numbers.get("ctx-size") or keys.get("context_length") or 0) or launch.longest
    slots = int(numbers.get("parallel", 1))
    if longest and slots > 1 and not {"kv-unified", "kvu"} & set(options):
        longest //= slots
    ropes, refusals = {}, launch.refusals
    for kind, rope in launch.ropes.items():
        changed = _with_keys(rope, keys, base)
        if kind in ("", FULL):
            changed = _scaled(changed, numbers, _last(options, "rope-scaling"))
        ropes[kind] = replace(changed, served=longest)
    if numbers.get("yarn-ext-factor", 1.0) not in (0.0, 1.0) and numbers["yarn-ext-factor"] > 0:
        refusals += ("is not compared: it mixes frequencies by --yarn-ext-factor",)
    return replace(launch, ropes=ropes, longest=longest, refusals=refusals)


def _last(options: Options, name: str) -> str:
    values = options.get(name)
    return values[-1] if values else ""


def _override(text: str) -> tuple[str, Any]:
    """The key without its architecture, and the value, of ``KEY=TYPE:VALUE``."""
    key, _, value = text.partition("=")
    kind, _, value = value.partition(":")
    number = float(value) if kind in ("int", "float") else value
    return key.partition(".")[2], number


def _with_keys(rope: RopeParameters, keys: Mapping[str, Any], base: Any) -> RopeParameters:
    given = {FILE_KEYS[key]: value for key, value in keys.items() if key in FILE_KEYS}
    if given.get("rope_type") == "none":
        given["rope_type"] = "default"
    longest = keys.get("context_length")
    trained = keys.get("rope.scaling.original_context_length")
    return replace(
        rope,
        parameters={**rope.parameters, **given},
        base=float(base or rope.base),
        longest=int(longest or rope.longest),
        trained=int(trained) if trained else rope.trained,
    )


def _scaled(rope: RopeParameters, numbers: Mapping[str, float], scaling: str) -> RopeParameters:
    """Parameters of the layers without windows."""
    parameters = dict(rope.parameters)
    kind = rope.kind
    factor = float(parameters.get("factor") or 1.0) if kind in ("linear", "yarn", TENSOR) else 1.0
    if numbers.get("rope-scale"):
        factor = numbers["rope-scale"]
    elif numbers.get("rope-freq-scale"):
        factor = 1 / numbers["rope-freq-scale"]
    if kind in ("default", "linear", "yarn"):
        kind = {"none": "default"}.get(scaling, scaling) or (
            "linear" if kind == "default" and factor != 1 else kind
        )
        if kind == "yarn" and numbers.get("yarn-ext-factor") == 0:
            kind = "linear"
        parameters |= {"rope_type": kind, "factor": factor}
    elif kind == TENSOR:
        parameters["factor"] = 1.0 if scaling == "none" else factor
    if kind != "yarn" and "yarn-attn-factor" in numbers:
        parameters[KEY] = numbers["yarn-attn-factor"] * rope.number(KEY, 1.0)
    for end in ("slow", "fast"):
        if f"yarn-beta-{end}" in numbers:
            parameters[f"beta_{end}"] = numbers[f"yarn-beta-{end}"]
    return replace(
        rope,
        parameters=parameters,
        base=numbers.get("rope-freq-base") or rope.base,
        trained=int(numbers.get("yarn-orig-ctx") or 0) or rope.trained,
    )
