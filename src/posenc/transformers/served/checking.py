"""A loaded model's rotation beside that of the server that is to run it."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from posenc.transformers.engines import engine_named, reason_of
from posenc.transformers.engines.config import ModelConfig, NotServedError
from posenc.transformers.engines.rotation import EngineRotation, RopeParameters, differing_pairs
from posenc.transformers.engines.serving import OVERRIDING, overrides
from posenc.transformers.engines.transformers import TRANSFORMERS, Checked, check
from posenc.transformers.served.launch import OVERRIDDEN, StartedServer, windows
from posenc.transformers.served.settings import launches

if TYPE_CHECKING:
    from torch import nn

VARYING = ("dynamic", "longrope")
"""Scalings that change with the length."""


@dataclass(frozen=True)
class ServedDifference:
    """One thing that differs.

    Args:
        what: such as ``"base"``.
        layer_type: of the layers; "": all.
        trained, served: in training and in the server, in words.
        effect: on texts; "": none is told.
    """

    what: str
    layer_type: str
    trained: str
    served: str
    effect: str = ""

    def __str__(self) -> str:
        layers = f" of {self.layer_type}" if self.layer_type else ""
        effect = f": {self.effect}" if self.effect else ""
        if self.what == "start":
            return self.served
        return f"{self.what}{layers}: {self.trained} in training, {self.served} served{effect}"


@dataclass(frozen=True)
class CheckedServer:
    """A server beside a model.

    Args:
        engine: its name.
        longest: tokens of the longest text that it serves; None: no limit, or not known.
        mismatches: what differs; empty if both compute the same.
        remedy: the line that mends it; "": none is needed or known.
        unread: settings that could not be read.
    """

    engine: str
    longest: int | None
    mismatches: tuple[ServedDifference, ...] = ()
    remedy: str = ""
    unread: tuple[str, ...] = field(default=())

    @property
    def same(self) -> bool:
        """True if both compute the same rotation, windows and lengths."""
        return not self.mismatches


@dataclass(frozen=True)
class _Trained:
    """Rotary frequencies in training.

    Args:
        checked: as the model has them.
        rope: parameters of its config, if it rotates by them; None if not.
    """

    checked: Checked
    rope: RopeParameters | None

    def rotation(self, length: int) -> EngineRotation:
        if self.rope is not None and self.rope.kind in VARYING:
            return TRANSFORMERS.rotate({"": self.rope}, length)[""]
        return self.checked.own


def check_served(
    model: nn.Module,
    settings: str | Mapping[str, Any] | StartedServer | Any,
    *,
    engine: str | None = None,
    longest: int | None = None,
) -> tuple[CheckedServer, ...]:
    """A loaded model beside the server that its weights are for: frequencies, gains and windows.

    Args:
        model: of transformers, also wrapped by FSDP, DDP, PEFT or ``torch.compile``.
        settings: a server's command line, or the path of a file with it; a dict, or a JSON file,
            of engine arguments (``hf_overrides``, ``max_model_len``, ``json_model_override_args``)
            or of a ``config.json``; a folder; a GGUF file.
        engine: where settings are a config alone; None: all that have rules.
        longest: tokens of the longest text in training; None: as the model's config says.

    Returns:
        One entry, or one an engine for a config alone.

    Raises:
        ArgumentError: if the settings start no server, or the model has no rotary frequencies.
        CheckpointError: if a file that they name cannot be read.

    Rules are those of ``posenc.transformers.engines``; overrides are applied as
    ``posenc.transformers.served.launch`` says, with source and date.
    """
    from posenc.errors import ArgumentError

    config = _config(model)
    if isinstance(settings, StartedServer):
        found = [settings]
    else:
        source = str(getattr(config, "_name_or_path", "") or "")
        found = launches(settings, model=source)
    if engine is not None:
        name = engine_named(engine).name
        found = [one for one in found if one.engine.name == name]
        if not found:
            remedy = "Leave out the engine, or pass a config.json alone."
            raise ArgumentError(
                "engine", expected="that of the settings", got=engine, remedy=remedy
            )
    checked = check(model)
    if not checked or config is None:
        raise ArgumentError(
            "model",
            expected="a model of transformers with rotary frequencies",
            got=type(model).__name__,
            remedy="Models with tables or biases take no settings of RoPE.",
        )
    fields = ModelConfig.of(config.to_dict())
    longest = longest or fields.longest
    return tuple(_checked(one, checked, fields, longest) for one in found)


def _config(model: nn.Module) -> Any:
    """The config of the innermost model; None if there is none."""
    configs = (getattr(module, "config", None) for module in model.modules())
    return next((one for one in configs if hasattr(one, "to_dict")), None)


def _checked(
    launch: StartedServer, checked: tuple[Checked, ...], config: ModelConfig, longest: int | None
) -> CheckedServer:
    mismatches = tuple(_mismatches(launch, checked, config, longest))
    remedy = _remedy(launch, checked, config, longest) if mismatches else ""
    return CheckedServer(launch.engine.name, launch.longest, mismatches, remedy, launch.unread)


def _mismatches(
    launch: StartedServer, checked: tuple[Checked, ...], config: ModelConfig, longest: int | None
) -> Iterator[ServedDifference]:
    for reason in launch.refusals:
        yield ServedDifference("start", "", "", reason)
    if launch.refusals and not launch.ropes:
        return
    ropes = TRANSFORMERS.ropes(config)
    for one in checked:
        rope = None if one.problem else ropes.get(one.layer_type)
        yield from _of_layers(launch, _Trained(one, rope), len(checked) > 1)
    if longest and launch.longest and launch.longest < longest:
        effect = "longer ones are refused or cut"
        yield ServedDifference("longest text", "", f"{longest:,}", f"{launch.longest:,}", effect)
    yield from _windows(launch, windows(config.completed))


def _of_layers(
    launch: StartedServer, trained: _Trained, several: bool
) -> Iterator[ServedDifference]:
    """Differences of the rotation of one type of layers."""
    kind = trained.checked.layer_type
    layers = kind if several else ""
    served = launch.ropes.get(kind) or launch.ropes.get("") or next(iter(launch.ropes.values()))
    rope = trained.rope
    most = launch.longest or served.longest
    first = min(served.length, rope.length if rope else served.length)
    lengths = sorted({min(n, most) for n in (first, first + 1, most)})
    try:
        pairs = [
            (n, trained.rotation(n), launch.engine.rotate({"": served}, n)[""]) for n in lengths
        ]
    except NotServedError as error:
        yield ServedDifference("start", layers, "", reason_of(error))
        return
    unlike = [(n, one, two) for n, one, two in pairs if not one.like(two)]
    if not unlike:
        return
    n, one, two = unlike[-1]
    widths = [2 * len(rotation.frequencies) for rotation in (one, two)]
    if widths[0] != widths[1]:
        yield ServedDifference("rotated features of a head", layers, *map(str, widths))
        return
    unlike_pairs = differing_pairs(one.frequencies, two.frequencies)
    if unlike_pairs:
        agreement = one.agreement(two, n)
        effect = (
            f"{unlike_pairs} pairs differ, angles at {n:,} tokens agree by {agreement:.2f} of 1"
        )
        causes = list(_causes(rope, served, layers, effect))
        yield from causes
        if not causes:
            trained_words, served_words = "these", "others"
            if rope is not None and rope.kind in VARYING and n < most:
                trained_words = f"those of {rope.kind} for {n:,} tokens"
                served_words = "those of longer texts"
            yield ServedDifference("frequencies", layers, trained_words, served_words, effect)
    if not one.same_gain(two):
        ratio = two.logit_gain / one.logit_gain
        effect = f"logits {ratio:.3g} times as large"
        yield ServedDifference("gain", layers, f"{one.gain:.5g}", f"{two.gain:.5g}", effect)


def _causes(
    rope: RopeParameters | None, served: RopeParameters, layers: str, effect: str
) -> Iterator[ServedDifference]:
    """Parameters that differ; none where the model does not rotate by its config."""
    if rope is None:
        return
    if not math.isclose(rope.base, served.base, rel_tol=1e-5):
        yield ServedDifference("base", layers, f"{rope.base:,.10g}", f"{served.base:,.10g}", effect)
    one, two = map(_scaling, (rope, served))
    if one != two:
        yield ServedDifference("scaling", layers, one, two, effect)
    elif rope.kind in ("yarn", "llama3", "longrope") and rope.length != served.length:
        lengths = (f"{rope.length:,}", f"{served.length:,}")
        yield ServedDifference("trained length", layers, *lengths, effect)


def _scaling(rope: RopeParameters) -> str:
    name = rope.kind.replace(" of transformers", "").replace("deepseek_yarn", "yarn")
    if name == "default":
        return "none"
    return name if name in ("tensor", "longrope") else f"{name} by {rope.factor:g}"


def _windows(launch: StartedServer, trained: tuple[int, ...]) -> Iterator[ServedDifference]:
    if launch.windows is None or len(launch.windows) != len(trained):
        return
    pairs: dict[tuple[int, int], list[int]] = {}
    for layer, sizes in enumerate(zip(trained, launch.windows, strict=True)):
        if sizes[0] != sizes[1]:
            pairs.setdefault(sizes, []).append(layer)
    for sizes, layers in pairs.items():
        words = (f"{size:,} tokens" if size else "none" for size in sizes)
        what = f"window of layers {', '.join(map(str, layers))}"
        yield ServedDifference(what, "", *words)


def _remedy(
    launch: StartedServer, checked: tuple[Checked, ...], config: ModelConfig, longest: int | None
) -> str:
    """The line that makes both the same, as tried; in words where no option does."""
    wrong = next((one for one in checked if one.problem), None)
    if wrong is not None:
        return (
            f"The loaded model {wrong.problem}: write the config first, and load the model by "
            "from_pretrained after it."
        )
    goal = max(longest or 0, config.longest or 0)
    option = launch.engine.option
    if option in OVERRIDING:
        _, fields_option, length_option = OVERRIDING[option]
        given = overrides(config, goal=goal)
        base = ModelConfig.of(config.root)
        mended = StartedServer.of(launch.engine, OVERRIDDEN[option](base, given), longest=goal)
        if not any(_mismatches(mended, checked, config, longest)):
            text = shlex.quote(json.dumps(given))
            return f"{fields_option} {text} {length_option} {goal}"
    else:
        mended = StartedServer.of(launch.engine, launch.engine.with_options(config))
        if not any(_mismatches(mended, checked, config, longest)):
            rope = mended.ropes.get("")
            if option == "llama.cpp" and rope is not None:
                return _options_of_llama(rope, launch.family, goal)
            parameters = config.written.get("rope_parameters")
            lines = {"rope_parameters": parameters, "max_position_embeddings": goal}
            return f"In config.json: {json.dumps(lines)}"
    return (
        f"No option of {launch.engine.name} computes it. posenc extend FOLDER --for {option} "
        "names the methods that it has."
    )


def _options_of_llama(rope: RopeParameters, family: str, goal: int) -> str:
    from posenc.transformers.engines.llama_cpp import KEY, NAMES

    if rope.kind not in ("default", "linear", "yarn"):
        return "python convert_hf_to_gguf.py FOLDER --outfile model.gguf, with the trained folder"
    words = [f"-c {goal}", f"--rope-freq-base {rope.base:.10g}"]
    if rope.kind == "default":
        words.append("--rope-scaling none")
    else:
        words += [f"--rope-scaling {rope.kind}", f"--rope-scale {rope.factor:g}"]
    if rope.kind == "yarn":
        words.append(f"--yarn-orig-ctx {rope.length}")
    gain = rope.parameters.get(KEY)
    if gain is not None:
        arch = NAMES.get(family, family or "ARCH")
        words.append(f"--override-kv {arch}.rope.scaling.attn_factor=float:{gain:.9g}")
    return " ".join(words)
