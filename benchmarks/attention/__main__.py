"""Measure attention with encodings beside plain SDPA and other implementations.

    python -m benchmarks.attention                      every encoding with a limit, ten minutes
    python -m benchmarks.attention --full --alone       every case with a limit: hours
    python -m benchmarks.attention --what decoding rows
    python -m benchmarks.attention --device cuda

Times are medians of ratios to plain SDPA with the same mask and dtype in the same round. Memory is
the peak beyond the inputs, on the CPU of a separate process. Tables are printed, with values over
their limits in bold; rows and a chart are written to ``attention_<device>`` in the folder.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch
import vl_convert
from benchmarks.attention.chart import draw
from benchmarks.attention.memory import MemoryMeter
from benchmarks.attention.page import tables
from benchmarks.attention.plan import PARTS, Plan
from benchmarks.attention.run import measure
from benchmarks.measuring import RESULTS, record

from posenc.attention.backends.native.variants import unsupported
from posenc.lab.training.machine import cores, require_device


def main() -> None:
    """Run the command line."""
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=plain)
    parser.add_argument("--what", nargs="+", choices=PARTS, dest="parts")
    parser.add_argument("--encodings", nargs="+", help="t5 t5@frozen shaw@scores rope+alibi")
    parser.add_argument("--lengths", nargs="+", type=int, help="of calls and layers")
    parser.add_argument("--backends", nargs="+", default=["auto"])
    parser.add_argument("--causal", action=argparse.BooleanOptionalAction)
    parser.add_argument("--dtypes", nargs="+")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--full", action="store_true", help="every case with a limit")
    parser.add_argument("--alone", action="store_true", help="posenc and plain SDPA only")
    parser.add_argument("--threads", type=int, default=cores())
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = vars(parser.parse_args())
    out, threads = options.pop("out"), options.pop("threads")
    require_device(options["device"], kinds=("cpu", "cuda"))
    torch.set_num_threads(threads)
    plan, rows = Plan(**options), []
    jobs = plan.jobs()
    with MemoryMeter(plan.device) as meter:
        for number, job in enumerate(jobs):
            print(f"[{number} of {len(jobs)}] {job.case}", file=sys.stderr, flush=True)
            rows += measure(job, meter)
    limited = "amx" if plan.kind == "cpu" and unsupported("amx") is None else plan.kind
    for name, text in tables(rows, limited).items():
        print(f"\n{name}\n\n{text}")
    results = record(plan.device, readings=rows, settings=options)
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"attention_{plan.kind}.json"
    path.write_text(json.dumps(results, indent=1) + "\n")
    spec = draw(rows, f"{results['device']}; {', '.join(dict.fromkeys(r['dtype'] for r in rows))}")
    if spec is not None:
        path.with_suffix(".svg").write_text(vl_convert.vegalite_to_svg(spec))
    print(f"Written: {path}")


if __name__ == "__main__":
    main()
