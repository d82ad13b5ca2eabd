"""Settings that start a server: a command line, those of a trainer, a config or a GGUF file."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path, PurePath
from typing import Any

from posenc import storage
from posenc.errors import ArgumentError
from posenc.transformers.checkpoints import Fields
from posenc.transformers.engines import ENGINES, OTHERS, reason_of
from posenc.transformers.engines.config import Engine, ModelConfig, NotServedError
from posenc.transformers.hub import model_folder
from posenc.transformers.served.gguf import MAGIC, launch_of
from posenc.transformers.served.launch import OVERRIDDEN, StartedServer
from posenc.transformers.served.options import with_options

ARGUMENT = "settings"
EXPECTED = "a server's command line, a JSON file of its settings, config.json, a folder or GGUF"

OF_MODULE = {
    "vllm.entrypoints.openai.api_server": "vLLM",
    "sglang.launch_server": "SGLang",
    "mlx_lm.server": "mlx-lm",
    "mlx_lm": "mlx-lm",
}
"""Engines by what is started."""

SERVERS = {"vllm": "vLLM", "sglang": "SGLang", "transformers": "transformers", "trl": "vLLM"}
"""Engines by the program whose next word is ``serve``."""

LONG = {"m": "model", "c": "ctx-size", "np": "parallel", "model-path": "model"}
LONG |= {"model-tag": "model", "n-parallel": "parallel"}
"""Full names of options."""

REMOVED = ("rope-scaling", "rope-theta")
"""Options that vLLM had up to 0.11.0."""

MULTIPLES = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}

OVERRIDES = {
    "hf_overrides": "vLLM",
    "hf_config_overrides": "vLLM",
    "json_model_override_args": "SGLang",
}
LENGTHS = {
    "max_model_len": "vLLM",
    "max_model_length": "vLLM",
    "vllm_max_model_length": "vLLM",
    "context_length": "SGLang",
}
MODELS = ("model", "model_path", "model_name", "model_name_or_path", "path")
"""Names in settings of trainers."""

MOST = 1 << 20
"""Bytes of a file with a command line, at most."""


def launches(settings: object, *, model: str = "") -> list[StartedServer]:
    """The servers that settings start: one, or for a config alone one of each engine.

    Args:
        settings: a command line, a path, or a dict of settings or of a ``config.json``.
        model: folder of the model where settings name none.

    Raises:
        ArgumentError: if they start none.
        CheckpointError: if a file that they name cannot be read.
    """
    if isinstance(settings, Mapping):
        return _of_dict(settings, model)
    if not isinstance(settings, str | PurePath):
        raise _unknown(type(settings).__name__)
    path = Path(settings)
    try:
        exists = path.exists()
    except (OSError, ValueError):  # a long command line is no path
        exists = False
    if not exists:
        if len(str(settings).split()) < 2:
            raise _unknown(f"{str(settings)!r}, which is no file")
        return [_of_command(str(settings))]
    if path.is_dir():
        return _of_dict(Fields.read(path).values, str(path))
    return _of_file(path, model)


def _of_file(path: Path, model: str) -> list[StartedServer]:
    with path.open("rb") as file:
        start = file.read(4)
    if start == MAGIC or path.suffix == ".gguf":
        return [launch_of(path)]
    try:
        content = storage.read_bytes(path, most=MOST).decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise _unknown(f"{path}, which is no text of at most {MOST:,} bytes") from error
    if path.suffix == ".json" or content.lstrip().startswith(("{", "[")):
        value = _json(content, str(path))
        here = str(path.parent) if path.name == "config.json" else model
        return _of_dict(value, here)
    if path.suffix in (".yaml", ".yml"):
        raise _unknown(f"{path}, which is YAML")
    return [_of_command(content)]


def _unknown(got: str) -> ArgumentError:
    return ArgumentError(
        ARGUMENT,
        expected=EXPECTED,
        got=got,
        remedy="Such as: vllm serve FOLDER --max-model-len 131072",
    )


def _json(text: str, name: str) -> dict[str, Any]:
    try:
        value = storage.parse_json(text)
    except ValueError as error:
        raise ArgumentError(
            ARGUMENT,
            expected=f"JSON in {name}",
            got=f"{text[:60]!r} ({error})",
            remedy="Quote it as one word of the shell, with double quotes inside.",
        ) from error
    if not isinstance(value, dict):
        raise ArgumentError(
            ARGUMENT,
            expected=f"a JSON object in {name}",
            got=type(value).__name__,
            remedy='Such as {"max_model_len": 131072}',
        )
    return value


def _of_dict(settings: Mapping[str, Any], model: str) -> list[StartedServer]:
    if "model_type" in settings or "text_config" in settings:
        config = ModelConfig.of(settings)
        return [StartedServer.of(engine, config) for engine in OTHERS]
    found = dict(_known(settings))
    names = {**OVERRIDES, **LENGTHS}
    engines = {names[name] for name in found if name in names}
    if len(engines) != 1:
        what = " and ".join(sorted(engines)) or "none of vLLM or SGLang"
        raise ArgumentError(
            ARGUMENT,
            expected=f"settings of one engine, such as {', '.join([*OVERRIDES, *LENGTHS])}",
            got=f"settings of {what}",
            remedy="Pass the part of the settings that starts the server.",
        )
    engine = ENGINES[engines.pop()]
    overrides = next((found[name] for name in OVERRIDES if name in found), None) or {}
    if isinstance(overrides, str):
        overrides = _json(overrides, next(name for name in OVERRIDES if name in found))
    if not isinstance(overrides, Mapping):
        raise ArgumentError(
            ARGUMENT,
            expected="a dict as hf_overrides",
            got=type(overrides).__name__,
            remedy="A function cannot be read: pass what it changes.",
        )
    length = next((found[name] for name in LENGTHS if found.get(name) is not None), None)
    folder = next((str(found[name]) for name in MODELS if found.get(name)), model)
    removed = [name for name in ("rope_scaling", "rope_theta") if found.get(name)]
    return [
        _launch(
            engine,
            folder,
            overrides,
            longest=None if length is None else _length(str(length), "the longest text"),
            removed=removed if engine.name == "vLLM" else [],
        )
    ]


def _known(settings: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Settings that matter, also of dicts inside; those of the outermost dicts last."""
    for name, value in settings.items():
        if isinstance(value, Mapping) and name not in OVERRIDES:
            yield from _known(value)
    known = {*OVERRIDES, *LENGTHS, *MODELS, "rope_scaling", "rope_theta"}
    for name, value in settings.items():
        if name in known and not (name in MODELS and isinstance(value, Mapping)):
            yield name, value


def _of_command(text: str) -> StartedServer:
    try:
        words = shlex.split(text.replace("\\\n", " "), comments=True)
    except ValueError as error:
        raise _unknown(f"a command line with an open quote ({error})") from error
    converted: dict[str, str] = {}
    for part in _parts(words):
        environment = dict(word.split("=", 1) for word in part if re.match(r"^[A-Z_]+=", word))
        place, engine = _engine(part)
        if engine is not None:
            return _started(engine, _parsed(part[place:]), environment, converted)
        if any(Path(word).name.startswith("convert_hf_to_gguf") for word in part):
            options = _parsed(part)
            folder = next((word for word in options[""] if Path(word).is_dir()), "")
            converted[(options.get("outfile") or [""])[-1]] = folder
    raise _unknown(f"{shlex.join(words)[:80]!r}, which starts no known server")


def _parts(words: Sequence[str]) -> Iterator[list[str]]:
    """Commands that are joined by ``&&`` or ``;``."""
    part: list[str] = []
    for word in words:
        if word in ("&&", ";", "&"):
            yield part
            part = []
        else:
            part.append(word)
    yield part


def _engine(words: Sequence[str]) -> tuple[int, Engine | None]:
    """The place at which arguments of a server begin, and its engine."""
    for place, word in enumerate(words):
        name, following = PurePath(word).name, words[place + 1] if place + 1 < len(words) else ""
        if name in SERVERS and following in ("serve", "vllm-serve"):
            return place + 2, ENGINES[SERVERS[name]]
        if word in OF_MODULE:
            return place + 1, ENGINES[OF_MODULE[word]]
        if "vllm-openai" in word:
            return place + 1, ENGINES["vLLM"]
        if name.startswith(("llama-server", "llama-cli")):
            return place + 1, ENGINES["llama.cpp"]
    return 0, None


def _parsed(words: Sequence[str]) -> dict[str, list[str]]:
    """Values by option; those without one under ""."""
    options: dict[str, list[str]] = {"": []}
    name = ""
    for word in words:
        if re.match(r"^--?[A-Za-z]", word):
            name, equals, value = word.lstrip("-").partition("=")
            head, dot, rest = name.partition(".")
            name = LONG.get(head.replace("_", "-"), head.replace("_", "-")) + dot + rest
            options.setdefault(name, [])
            if equals:
                options[name].append(value)
                name = ""
        else:
            options[name].append(word)
            name = ""
    return options


def _started(
    engine: Engine,
    options: Mapping[str, list[str]],
    environment: Mapping[str, str],
    converted: Mapping[str, str],
) -> StartedServer:
    named = [*options[""][:1], *options.get("hf-config-path", options.get("model", []))]
    if not named:
        remedy = "Name the folder, or the file, that the server is started with."
        raise ArgumentError(ARGUMENT, expected="a model in the command", got="none", remedy=remedy)
    model = named[-1]
    if engine.name == "llama.cpp":
        return _of_llama(engine, model, options, converted)
    option = {"vLLM": "hf-overrides", "SGLang": "json-model-override-args"}.get(engine.name, "")
    length = {"vLLM": "max-model-len", "SGLang": "context-length"}.get(engine.name, "")
    given = options.get(option)
    overrides = _json(given[-1], f"--{option}") if given else {}
    for name, values in options.items():
        if option and name.startswith(f"{option}.") and values:
            _set(overrides, name.split(".")[1:], values[-1])
    lengths = options.get(length)
    auto = bool(lengths) and lengths is not None and lengths[-1] in ("-1", "auto")
    return _launch(
        engine,
        model,
        overrides,
        longest=None if not lengths or auto else _length(lengths[-1], f"--{length}"),
        removed=[f"--{name}" for name in REMOVED if name in options] if option else [],
        windowed="disable-sliding-window" not in options,
        environment=environment,
        unread=("config",) if "config" in options else (),
    )


def _set(overrides: dict[str, Any], names: Sequence[str], text: str) -> None:
    """Set a field of a dict in dicts, as ``--hf-overrides.rope_parameters.factor 4`` does."""
    *outer, last = names
    for name in outer:
        overrides = overrides.setdefault(name, {})
    try:
        overrides[last] = json.loads(text)
    except ValueError:
        overrides[last] = text


def _length(text: str, name: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kKmMgG]?)", text.strip())
    length = int(float(match[1]) * MULTIPLES.get(match[2], 1)) if match else 0
    if length < 1:
        raise ArgumentError(
            ARGUMENT,
            expected=f"a number of tokens as {name}",
            got=repr(text),
            remedy="Such as 131072, 128K (times 1,024) or 131k (times 1,000).",
        )
    return length


def _launch(
    engine: Engine,
    model: str,
    overrides: Mapping[str, Any],
    *,
    longest: int | None,
    removed: Sequence[str],
    windowed: bool = True,
    environment: Mapping[str, str] | None = None,
    unread: tuple[str, ...] = (),
) -> StartedServer:
    folder = model_folder(model, weights=False)
    config = ModelConfig.of(Fields.read(folder).values)
    refusals = tuple(
        f"does not start: it has no {name} since vLLM 0.11.1"
        if engine.name == "vLLM"
        else f"does not start: it has no {name}"
        for name in removed
    )
    try:
        if overrides:
            config = OVERRIDDEN[engine.option](config, overrides)
    except NotServedError as error:
        refusals += (reason_of(error),)
    made = StartedServer.of(
        engine,
        config,
        longest=longest,
        windowed=windowed,
        refusals=refusals,
        environment=environment,
    )
    return replace(made, unread=unread)


def _of_llama(
    engine: Engine, model: str, options: Mapping[str, list[str]], converted: Mapping[str, str]
) -> StartedServer:
    folder = converted.get(model)
    if folder:
        launch = StartedServer.of(engine, ModelConfig.of(Fields.read(Path(folder)).values))
    else:
        launch = launch_of(Path(model))
    try:
        return with_options(launch, options)
    except ValueError as error:
        raise ArgumentError(
            ARGUMENT,
            expected="numbers as values of llama.cpp's options",
            got=str(error),
            remedy="Such as --rope-scaling yarn --rope-scale 4 --yarn-orig-ctx 32768",
        ) from error
