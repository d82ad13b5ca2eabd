"""The chat template of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from posenc.errors import CheckpointError
from posenc.lab.evaluation.deadline import deadline
from posenc.storage import MOST_JSON, read_bytes
from posenc.transformers.checkpoints.folder import SAVE_AGAIN, read_object

FILE = "chat_template.jinja"

SECONDS = 5.0
"""Longest time of a template."""


def read_template(folder: Path) -> Callable[[str], str] | None:
    """A user's message to the text up to the model's answer; None: the folder has no template.

    The template runs in the sandbox of transformers, for ``SECONDS`` at most.

    Raises:
        CheckpointError: if its file is not text.
    """
    fields = read_object(folder / "tokenizer_config.json")
    template, path = fields.get("chat_template"), folder / FILE
    if path.exists():
        template = _text_in(path)
    if isinstance(template, list):  # by name
        named = (item for item in template if isinstance(item, dict))
        template = next((i.get("template") for i in named if i.get("name") == "default"), None)
    if not isinstance(template, str):
        return None
    tokens = {
        name: text_of(fields.get(name)) or ""
        for name in ("bos_token", "eos_token", "unk_token", "pad_token")
    }

    def rendered(message: str) -> str:
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            with deadline(SECONDS):
                texts, _ = render_jinja_template(
                    conversations=[[{"role": "user", "content": message}]],
                    chat_template=template,
                    add_generation_prompt=True,
                    **tokens,
                )
        except Exception as error:  # a template is a program
            raise CheckpointError(
                str(folder),
                expected="a chat template for a message of a user",
                got=f"{type(error).__name__}: {error}",
                remedy="Mend it, or use --style base.",
            ) from error
        return str(texts[0])

    return rendered


def _text_in(path: Path) -> str:
    try:
        return read_bytes(path, most=MOST_JSON).decode()
    except (OSError, ValueError) as error:
        got = error.strerror if isinstance(error, OSError) else "bytes that are not UTF-8"
        raise CheckpointError(
            str(path), expected="a chat template", got=got, remedy=SAVE_AGAIN
        ) from error


def text_of(token: object) -> str | None:
    """A special token as ``tokenizer_config.json`` has it, as text."""
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else None
