"""``posenc generate``: sample text from a trained model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from posenc.cli.console import OUT, print_json
from posenc.cli.options import Json, option
from posenc.errors import ArgumentError


def generate(
    model: Annotated[
        Path, typer.Argument(help="Folder of a trained run (OUT/runs/…) or a saved Decoder.")
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

    Examples:

        posenc generate posenc-demo/runs/rope/seed-0

        posenc generate demo/runs/alibi/seed-1 --prompt "import " --temperature 0
    """
    import torch

    from posenc.models import Decoder, Greedy, Sample
    from posenc.models import generate as continue_tokens

    if not prompt:
        raise ArgumentError(
            "--prompt", expected="at least one byte", got="nothing", remedy="Try --prompt 'def '."
        )
    folder = model / "model" if (model / "model").is_dir() else model
    decoder = Decoder.load(folder)
    if decoder.config.vocabulary < 256:
        raise ArgumentError(
            "model",
            expected="a model of bytes, with a vocabulary of 256",
            got=f"a vocabulary of {decoder.config.vocabulary}",
            remedy="Choose a run of the language task.",
        )
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
