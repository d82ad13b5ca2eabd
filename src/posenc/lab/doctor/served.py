"""Running servers: the model, options and lengths that they tell."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import urlsplit

from posenc.errors import ArgumentError
from posenc.lab.evaluation.endpoint import Endpoint, EndpointError
from posenc.transformers.served import StartedServer
from posenc.transformers.served.settings import launches

TIMEOUT = 30.0
"""Seconds without an answer."""

OVERRIDES_UNREAD = "hf_overrides, which vLLM does not tell"


def is_address(text: str) -> bool:
    """True for the address of a server."""
    return text.startswith(("http://", "https://"))


def launch_at(url: str) -> StartedServer:
    """A running server of vLLM, SGLang or llama.cpp, read by what it tells of itself.

    A key is read from OPENAI_API_KEY. vLLM names folder and longest text, SGLang all its options,
    llama.cpp file and context, but no options of RoPE.

    Args:
        url: such as ``http://localhost:8000/v1``.

    Raises:
        ArgumentError: if it cannot be reached, or is of another engine.
        CheckpointError: if its folder or file is not on this machine.
    """
    root = url.rstrip("/").removesuffix("/v1")
    at_root, at_v1 = (Endpoint(address, "", timeout=TIMEOUT) for address in (root, f"{root}/v1"))
    models = at_v1.request("GET", "models", tries=1).get("data")
    first = models[0] if isinstance(models, list) and models else {}
    first = first if isinstance(first, dict) else {}
    owner = first.get("owned_by")
    if owner == "vllm" and first.get("root"):
        settings = {"model": first["root"], "max_model_len": first.get("max_model_len")}
        [launch] = launches({"hf_overrides": {}, **settings})
        return replace(launch, unread=(OVERRIDES_UNREAD,))
    info = _told(at_root, "get_server_info", "server_info")
    if info.get("model_path"):
        names = ("model_path", "json_model_override_args", "context_length")
        given = {name: info.get(name) for name in names}
        [launch] = launches({"json_model_override_args": {}, **_present(given)})
        return launch
    props = _told(at_root, "props")
    if props.get("model_path"):
        context = (props.get("default_generation_settings") or {}).get("n_ctx")
        [launch] = launches(Path(str(props["model_path"])))
        unread = ("options of RoPE, which llama.cpp does not tell",)
        longest = context or launch.longest
        ropes = {kind: replace(rope, served=longest) for kind, rope in launch.ropes.items()}
        return replace(launch, longest=longest, ropes=ropes, unread=unread)
    raise ArgumentError(
        "settings",
        expected="a server of vLLM, SGLang or llama.cpp",
        got=f"one that tells neither folder nor file at {_shown(url)}",
        remedy="Pass the command that started it instead.",
    )


def _present(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _told(endpoint: Endpoint, *paths: str) -> dict[str, Any]:
    """The answer of the first of some paths that gives one; empty if none does."""
    for path in paths:
        try:
            return endpoint.request("GET", path, tries=1)
        except EndpointError:
            continue
    return {}


def _shown(url: str) -> str:
    """An address without what may be secret in it."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.hostname}{PurePosixPath(parts.path or '/')}"
