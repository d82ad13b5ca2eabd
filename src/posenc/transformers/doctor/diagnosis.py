"""Diagnosis of a folder with ``config.json``, by a process of its own, or of a loaded model."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Mapping
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from textwrap import shorten
from typing import TYPE_CHECKING, Any

from posenc.attention.backends.native.build import description
from posenc.errors import CheckpointError
from posenc.transformers.checkpoints import Fields, read_object, scaling_of
from posenc.transformers.doctor.advice import (
    REFUSED,
    SENTENCES,
    Advice,
    Limit,
    advise,
    limits,
    no_advice,
)
from posenc.transformers.doctor.config_findings import (
    Finding,
    disagreements,
    findings,
    has_rope,
    refused,
    rope_dicts,
)
from posenc.transformers.doctor.config_values import readable
from posenc.transformers.doctor.costs import LayerCost, costs
from posenc.transformers.doctor.facts import (
    UNKNOWN,
    AttentionFacts,
    LayerReading,
    Layers,
    Maybe,
    RotationFacts,
)
from posenc.transformers.engines import Checked, check
from posenc.transformers.engines.config import (
    LAYERS,
    WINDOWS,
    completed,
    head_dim,
    refusal,
    text_part,
)
from posenc.transformers.hub import model_folder
from posenc.transformers.kinds import kind_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SECONDS, BYTES = 120.0, 12 * 2**30
"""Limits of the process."""


class NotRunError(Exception):
    """The model could not be run; the message is the reason."""


def read_by_running(folder: Path, *, seconds: float = SECONDS, memory: int = BYTES) -> LayerReading:
    """The layers of a model folder, whose code is run in another process.

    Args:
        folder: with ``config.json``.
        seconds: after which the process is ended.
        memory: bytes that the process may allocate (on Linux).

    Raises:
        NotRunError: if it could not be run, with the reason.
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    environment |= {"HF_HUB_OFFLINE": "1"}
    # Without stored weights all products are small: more threads wait for one another.
    environment |= {"OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(
            [sys.executable, "-c", f"import {__name__} as p; p.serve()", str(folder), str(memory)],
            env=environment,
            capture_output=True,
            timeout=seconds,
        )
    except subprocess.TimeoutExpired:
        raise NotRunError(f"it took more than {seconds:.0f} s") from None
    if done.returncode:
        last = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise NotRunError(f"its process ended with {done.returncode}: {last[:200]}")
    answer: LayerReading | str = pickle.loads(done.stdout)
    if isinstance(answer, str):
        raise NotRunError(answer)
    return answer


def serve() -> None:
    """Inspect the folder in ``sys.argv``; answer with the reading, or the reason for none."""
    folder, memory = sys.argv[1:]
    _limit(int(memory))
    warnings.simplefilter("ignore")
    with redirect_stdout(sys.stderr):  # of code that prints
        answer = _inspected(Path(folder))
    sys.stdout.buffer.write(pickle.dumps(answer))


def _inspected(folder: Path) -> LayerReading | str:
    if find_spec("transformers") is None:
        return "transformers is not installed"
    import transformers

    from posenc.transformers.doctor.inspection import inspect

    transformers.logging.set_verbosity_error()
    try:
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
        return inspect(config)
    except Exception as error:  # whatever transformers raises
        return shorten(str(error), 240, placeholder=" …")


def _limit(memory: int) -> None:
    try:
        import resource
    except ImportError:  # Windows
        return
    if sys.platform == "linux":
        resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))


UNMEASURED = "Costs were not measured."
CUSTOM_CODE = (
    "code of the model's own, which posenc does not run, reads values of this config by layer"
)


@dataclass(frozen=True)
class Diagnosis:
    """Everything that ``posenc doctor`` reports.

    Args:
        model_type: of the config.
        reading: of its layers.
        limits: on the length of texts.
        findings: settings that do not do what they say.
        advice: for longer texts.
        costs: of one layer; empty if not measured.
        acceleration: whether ``accelerate`` helps, in a sentence.
        kernels: the CPU kernels that posenc uses on this machine, or why none.
    """

    model_type: str
    reading: LayerReading
    limits: tuple[Limit, ...]
    findings: tuple[Finding, ...]
    advice: Advice
    costs: tuple[LayerCost, ...]
    acceleration: str
    kernels: str

    def to_json(self) -> dict[str, Any]:
        """The diagnosis as JSON values."""
        return asdict(self)


def diagnose(
    source: Path | str | PreTrainedModel, *, budget: float = 60.0, run_seconds: float = SECONDS
) -> Diagnosis:
    """The layers of a transformers model as they compute, their limits, costs and ignored settings.

    Reads ``config.json`` and, if it is there, ``tokenizer_config.json``; weights are not needed.
    The model is built without storing weights and run in a process of its own.

    Args:
        source: a folder written by ``save_pretrained``, or a name on the hub
            (``org/name@revision``), of which small files are fetched; or a loaded model, whose
            config is read.
        budget: seconds to measure costs for; 0: none.
        run_seconds: limit of that process; 0: the config alone is read.

    Raises:
        CheckpointError: if there is no such file, or it is not a JSON object, or no positions are
            computed by its values; or as ``HubName.folder``.
    """
    if isinstance(source, Path | str):
        folder = model_folder(source, weights=False)
        return _diagnose(folder, Path(source), budget, run_seconds)
    with TemporaryDirectory() as written:
        source.config.save_pretrained(written)
        named = Path(source.name_or_path or "FOLDER")
        return _diagnose(Path(written), named, budget, run_seconds)


def _diagnose(folder: Path, named: Path, budget: float, run_seconds: float) -> Diagnosis:
    """The diagnosis of a folder that commands call by a name."""
    fields = Fields.read(folder)
    values, unread = readable(fields)
    tokenizer = read_object(folder / "tokenizer_config.json")
    why = "" if unread else refusal(values)
    # defaults of a class in transformers are not those of the model's own code
    config = text_part(values if unread else completed(values))
    try:
        if unread:
            raise NotRunError(CUSTOM_CODE)
        reading = read_by_running(folder, seconds=run_seconds)
    except NotRunError as error:
        reading = _read_config(config, str(error))
    cut = read_object(folder / SENTENCES).get("max_seq_length")
    bounds = limits(config, reading, cut if type(cut) is int and cut > 0 else None)
    longest = min((bound.tokens for bound in bounds if bound.beyond == "breaks"), default=None)
    config_findings = findings(text_part(values), tokenizer, longest, switched=config)
    config_findings += [*refused(why, config_findings), *unread, *_unknown_types(config, reading)]
    rows, acceleration = costs(folder, budget=budget) if budget else ([], UNMEASURED)
    return Diagnosis(
        str(fields.values.get("model_type", "")),
        reading,
        bounds,
        (*config_findings, *disagreements(config, reading)),
        no_advice(REFUSED) if why else advise(named, fields, config, reading),
        tuple(rows),
        acceleration,
        description(),
    )


def check_source(source: Path | str) -> tuple[Checked, ...]:
    """``check`` of ``open_source``."""
    return check(open_source(source))


def open_source(source: Path | str) -> PreTrainedModel:
    """A model as transformers loads it, in the dtype of its weights.

    Args:
        source: a folder with ``config.json`` and safetensors, or a name on the hub.

    Raises:
        CheckpointError: if transformers cannot load it; or as ``HubName.folder``.
    """
    folder = model_folder(source, weights=True)
    config = Fields.read(folder)
    kind = kind_of(config)
    if kind is None:
        raise CheckpointError(
            f"model_type in {config.path}",
            expected="a model of text or images that transformers loads",
            got=repr(config.values.get("model_type", "none")),
            remedy="Read its config alone: leave out --live.",
        )
    model: PreTrainedModel = kind.open(config, device="cpu", dtype="auto").model
    return model


Config = Mapping[str, Any]
FULL = ("full_attention", "attention")
SLIDING = ("sliding_attention", "hybrid_sliding")
ATTENTION = frozenset(
    {*FULL, *SLIDING, "chunked_attention", "window_attention", "reference_sliding_attention"}
    | {"indexed_attention", "deepseek_sparse_attention", "qwen_sparse_attention"}
    | {"compressed_sparse_attention", "heavily_compressed_attention", "minimax_m3_sparse", "hybrid"}
)
"""Types of layers with attention; of the others than ``FULL``, windows and chunks it is not known
what they see."""

NO_ATTENTION = frozenset({"linear_attention", "conv", "mamba", "mamba2", "recurrent", "moe", "mlp"})
"""Types of layers without softmax attention."""


def _read_config(config: Config, reason: str) -> LayerReading:
    """The layers that a config describes, and why there is no better source.

    Args:
        config: of the text model.
        reason: why the model's code could not be run.
    """
    types = _layer_types(config)
    layers = [
        Layers(
            numbers=tuple(n for n, other in enumerate(types) if other == kind),
            attention=_attention(config, kind),
        )
        for kind in dict.fromkeys(types)
    ]
    return LayerReading(layers=tuple(layers), by="config", reason=reason)


def _layer_types(config: Config) -> list[str]:
    """The type of every layer, "" where it is unknown; types beyond the layers are left out."""
    count = next((config[name] for name in LAYERS if isinstance(config.get(name), int)), 0)
    types = list(config.get("layer_types") or ())
    return [*types[:count], *[""] * (count - len(types))] if count else types


def _unknown_types(config: Config, reading: LayerReading) -> list[Finding]:
    """A finding on unknown types of layers, if only the config was read."""
    types = _layer_types(config) if reading.by == "config" else []
    counts = Counter(kind for kind in types if kind and kind not in (*ATTENTION, *NO_ATTENTION))
    if not counts:
        return []
    names = ", ".join(
        f"{kind!r} ({count} layer{'s' * (count > 1)})" for kind, count in counts.items()
    )
    problem = f"has {names}, which posenc does not know: how these attend is not known"
    change = f"one of {', '.join(sorted(ATTENTION | NO_ATTENTION))}, if it is meant"
    return [Finding("layer_types", problem, change, unread=True)]


def window_size(config: Config) -> int | None:
    """Tokens of a window or chunk; None where the config has none."""
    sizes = (config.get(name) for name in WINDOWS)
    return next((size for size in sizes if isinstance(size, int) and size > 0), None)


def _attention(config: Config, kind: str) -> AttentionFacts:
    module = kind or "layers"
    if kind in NO_ATTENTION:
        return AttentionFacts(
            module=module, kind="none", instead=(kind,), sources={"kind": "config"}
        )
    window = window_size(config)
    back = chunk = None
    if kind in SLIDING:
        back = UNKNOWN if window is None else window - 1
    elif kind == "chunked_attention":
        chunk = UNKNOWN if window is None else window
    elif kind and kind not in FULL:
        back = UNKNOWN
    elif not kind and window is not None and config.get("use_sliding_window", True):
        back = UNKNOWN  # of all layers, of some or of none
    heads = config.get("num_attention_heads") or config.get("n_head")
    dim = head_dim(config)
    return AttentionFacts(
        module=module,
        kind="self" if kind in ATTENTION else UNKNOWN,
        heads=heads,
        key_heads=config.get("num_key_value_heads") or heads,
        head_dim=dim,
        rotation=_rotation(config, kind, dim),
        absolute=UNKNOWN,
        back=back,
        ahead=UNKNOWN,
        chunk=chunk,
        sinks=UNKNOWN,
        cap=config.get("attn_logit_softcapping", UNKNOWN),
        temperature=UNKNOWN,
        sources=dict.fromkeys(("heads", "rotation", "back", "chunk", "cap"), "config"),
    )


def _rotation(config: Config, kind: str, dim: int | None) -> RotationFacts | Maybe:
    """The rotation of a layer type, which the config does not say each layer has."""
    if not has_rope(config) or (kind and kind not in ATTENTION):
        return UNKNOWN
    dicts = rope_dicts(config)
    rope = dicts.get(kind) or dicts.get("") or {}
    base = rope.get("rope_theta") or config.get("rope_theta")
    share = rope.get("partial_rotary_factor", config.get("partial_rotary_factor")) or 1.0
    scaled = scaling_of(rope) != "default"
    features = None if dim is None else 2 * (int(dim * share) // 2)
    if not base or not features or scaled:
        return RotationFacts(features=features)
    frequencies = (float(f"{base ** (-2 * i / features):.6g}") for i in range(features // 2))
    return RotationFacts(features=features, frequencies=tuple(frequencies))
