"""``posenc generate``: sample text from a trained model."""

from __future__ import annotations

from pathlib import PurePath
from typing import Annotated

from cyclopts import Parameter

from posenc.arguments import Interval, check
from posenc.errors import ArgumentError
from posenc.lab.cli.console import OUT, print_json
from posenc.lab.cli.options import PLACE, Json
from posenc.lab.stores import local_folder


def generate(
    model: Annotated[
        PurePath,
        PLACE,
        Parameter(
            help="Folder of a trained run (OUT/runs/…) or of transformers, or org/name@revision."
        ),
    ],
    /,
    *,
    prompt: Annotated[str, Parameter(help="Text to continue.", allow_leading_hyphen=True)] = "def ",
    max_new: Annotated[int, Parameter(help="Number of tokens (bytes) to generate.")] = 200,
    temperature: Annotated[float, Parameter(help="Sampling temperature; 0 is greedy.")] = 0.8,
    top_k: Annotated[
        int | None, Parameter(help="Sample from the k most likely tokens.", show_default="all")
    ] = None,
    top_p: Annotated[float, Parameter(help="Sample from the top probability mass.")] = 1.0,
    seed: Annotated[int, Parameter(help="Random seed.")] = 0,
    json: Json = False,
) -> None:
    """Continue a text with a language model.

    Takes a run of posenc compare --task language, and any folder of a causal language model that
    transformers loads: also one that posenc extend has written, stretched as it says.

    Examples:

        posenc generate posenc-demo/runs/rope/seed-0

        posenc generate demo/runs/alibi/seed-1 --prompt "import " --temperature 0

        posenc generate longer --prompt "Once upon a time" --max-new 50
    """
    import torch

    from posenc.lab.evaluation.checkpoint import CAUSAL, Checkpoint
    from posenc.models import Decoder, Greedy, Sample
    from posenc.models import generate as continue_tokens

    if not prompt:
        raise ArgumentError(
            "--prompt", expected="at least one byte", got="nothing", remedy="Try --prompt 'def '."
        )
    domain = Annotated[float, Interval(0, below=True, remedy="0 is greedy.")]
    temperature = check("--temperature", domain, temperature)
    with local_folder(model) as folder:
        opened = Checkpoint.open(folder)
    if not isinstance(opened.model, CAUSAL):
        raise ArgumentError(
            "model",
            expected="a model of the next token",
            got=f"a {opened.family}",
            remedy="Choose a causal language model, or a run of posenc compare --task language.",
        )
    tokenizer = opened.tokenizer()
    encoded = prompt.encode() if tokenizer.encode is None else tokenizer.encode(prompt)
    tokens = torch.tensor([[*tokenizer.special.begin, *encoded]])
    generator = torch.Generator().manual_seed(seed)
    sampling = (
        Sample(temperature=temperature, top_k=top_k, top_p=top_p, generator=generator)
        if temperature
        else Greedy()
    )
    if isinstance(opened.model, Decoder):
        done = continue_tokens(opened.model, tokens, max_new_tokens=max_new, sampling=sampling)
    else:
        done = opened.model.generate(tokens, max_new, sampling)
    continued = tokenizer.decode(done[0, tokens.shape[1] :].tolist())
    if json:
        print_json({"prompt": prompt, "continuation": continued, "model": opened.family})
    else:
        OUT.print(prompt, style="dim", end="", markup=False)
        OUT.print(continued, markup=False)
