"""``posenc generate``: sample text from a trained model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from posenc.cli.console import OUT, print_json
from posenc.cli.options import Json, option
from posenc.errors import ArgumentError

if TYPE_CHECKING:
    from posenc.models import Decoder

BYTES = 256
"""Vocabulary of models of bytes, without a mask."""


def generate(
    model: Annotated[
        Path, typer.Argument(help="Folder of a trained run (OUT/runs/…), or of its model.")
    ],
    prompt: Annotated[str, option("Text to continue.")] = "def ",
    max_new: Annotated[int, option("Number of bytes to generate.")] = 200,
    temperature: Annotated[float, option("Sampling temperature; 0 is greedy.")] = 0.8,
    top_k: Annotated[int | None, option("Sample from the k most likely bytes.", "all")] = None,
    top_p: Annotated[float, option("Sample from the top probability mass.")] = 1.0,
    seed: Annotated[int, option("Random seed.")] = 0,
    json: Json = False,
) -> None:
    """Continue a text with a byte-level model trained by posenc compare.

    A checkpoint of such a model that posenc extend has written is read too.

    Examples:

        posenc generate posenc-demo/runs/rope/seed-0

        posenc generate demo/runs/alibi/seed-1 --prompt "import " --temperature 0
    """
    import torch

    from posenc.models import Greedy, Sample
    from posenc.models import generate as continue_tokens

    if not prompt:
        raise ArgumentError(
            "--prompt", expected="at least one byte", got="nothing", remedy="Try --prompt 'def '."
        )
    decoder = _decoder(model / "model" if (model / "model").is_dir() else model)
    generator = torch.Generator().manual_seed(seed)
    sampling = (
        Sample(temperature=temperature, top_k=top_k, top_p=top_p, generator=generator)
        if temperature
        else Greedy()
    )
    tokens = torch.tensor([list(prompt.encode())])
    done = continue_tokens(decoder, tokens, max_new_tokens=max_new, sampling=sampling)[0]
    text = bytes(token for token in done.tolist() if token < 256).decode(errors="replace")
    continued = text[len(prompt) :]
    if json:
        print_json(
            {"prompt": prompt, "continuation": continued, "encoding": decoder.config.encoding}
        )
    else:
        OUT.print(prompt, style="dim", end="", markup=False)
        OUT.print(continued, markup=False)


def _decoder(folder: Path) -> Decoder:
    """The model of bytes in a folder, as posenc or transformers writes it."""
    from posenc.integrations.transformers.checkpoint import load_described
    from posenc.integrations.transformers.config import Fields
    from posenc.models import Decoder, load

    fields = Fields.read(folder)
    saved = load(folder) if "kind" in fields.values else load_described(fields)
    vocabulary = saved.config.vocabulary if isinstance(saved, Decoder) else None
    if not isinstance(saved, Decoder) or vocabulary not in (BYTES, BYTES + 1):
        kind = f"a vocabulary of {vocabulary}" if vocabulary else f"a {type(saved).__name__}"
        raise ArgumentError(
            "model",
            expected=f"a model of the next byte, with a vocabulary of {BYTES}",
            got=kind,
            remedy="Choose a run of posenc compare --task language.",
        )
    return saved
