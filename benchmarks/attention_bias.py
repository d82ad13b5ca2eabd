"""Attention with an encoding against attention without, in one run.

    python benchmarks/attention_bias.py [--length 2048] [--rounds 15]

Each encoding is timed beside plain ``scaled_dot_product_attention`` (causal beside causal), and
beside what one would write without posenc: the same kernel with the bias written out. Gradients
are those of q, k and v. The largest single tensor shows whether a Q×K bias was made.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from measuring import LargestTensor, interleaved, ratio, write_results
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import posenc
from posenc import Grid, Layout, attend, explain

LIMIT = 1.15
"""What a table without gradient may cost, forward and forward + backward."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    shape = (1, options.heads, options.length, options.head_dim)
    q, k, v = (torch.randn(shape, device=options.device, requires_grad=True) for _ in range(3))
    rows = []
    for causal in (False, True):
        rows += measure(q, k, v, causal=causal, rounds=options.rounds)
    show(rows, options.length)
    name = f"attention_bias_{options.device}"
    print(write_results(name, rows, length=options.length, rounds=options.rounds).name)


def measure(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, rounds: int
) -> list[dict[str, object]]:
    """A row of ratios for each encoding."""
    heads, length, width = q.shape[1:]
    device = str(q.device)
    grid = Grid.of(Layout.sequence(length, device=q.device), causal=causal)
    encodings = {
        "no encoding": posenc.create("nope"),
        "rope": posenc.create("rope", head_dim=width),
        "alibi": posenc.create("alibi", heads=heads),
        "t5, no gradient": posenc.create("t5", heads=heads, causal=causal),
    }
    for encoding in encodings.values():
        encoding.to(q.device).requires_grad_(False)
    bias = encodings["alibi"].score(q, k, grid, scale=1.0).detach()
    if causal:
        bias = bias.masked_fill(~grid.visible, -torch.inf)
    contenders: dict[str, Callable[[], Tensor]] = {
        "plain": lambda: scaled_dot_product_attention(q, k, v, is_causal=causal),
        "bias written out": lambda: scaled_dot_product_attention(q, k, v, attn_mask=bias),
    }
    for name, encoding in encodings.items():
        contenders[name] = lambda encoding=encoding: attend(q, k, v, grid, encoding)
    weight = torch.randn_like(q)

    def forward(run: Callable[[], Tensor]) -> Callable[[], object]:
        def timed() -> None:
            with torch.no_grad():
                run()

        return timed

    def both(run: Callable[[], Tensor]) -> Callable[[], object]:
        return lambda: torch.autograd.grad(run(), (q, k, v), weight)

    ahead = interleaved(
        {n: forward(r) for n, r in contenders.items()}, rounds=rounds, device=device
    )
    through = interleaved({n: both(r) for n, r in contenders.items()}, rounds=rounds, device=device)
    rows: list[dict[str, object]] = []
    for name, run in contenders.items():
        with LargestTensor() as memory:
            both(run)()
        backend = ""
        if name in encodings:
            backend = explain(q, k, v, grid, encodings[name]).backend
        rows.append(
            {
                "causal": causal,
                "encoding": name,
                "backend": backend,
                "forward": round(ratio(ahead, name, "plain"), 3),
                "forward_backward": round(ratio(through, name, "plain"), 3),
                "largest_tensor_mib": round(memory.most / 2**20, 1),
                "limit": LIMIT if name in ("alibi", "t5, no gradient") and not causal else None,
            }
        )
    bias_mib = heads * length**2 * q.element_size() / 2**20
    for row in rows:
        row["bias_mib"] = round(bias_mib, 1)
    return rows


def show(rows: list[dict[str, object]], length: int) -> None:
    """The rows as a table."""
    print(f"{length} tokens, times plain SDPA of the same causality (median of rounds)")
    print(f"{'':26}{'forward':>9}{'fwd+bwd':>9}{'largest tensor':>16}  limit")
    for row in rows:
        kind = "causal" if row["causal"] else "both ways"
        verdict = ""
        if row["limit"]:
            met = row["forward"] <= row["limit"] and row["forward_backward"] <= row["limit"]  # type: ignore[operator]
            verdict = f"{row['limit']} {'met' if met else 'NOT MET'}"
        print(
            f"{row['encoding']:17}{kind:9}{row['forward']:9.2f}{row['forward_backward']:9.2f}"
            f"{row['largest_tensor_mib']:12.1f} MiB  {verdict}"
        )
    print(f"(a Q×K bias for all heads would be {rows[0]['bias_mib']} MiB)")


if __name__ == "__main__":
    main()
