"""Write the tables of pages from the results that they show.

python -m benchmarks.pages          (make pages)
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks import evidence, kernels_static, tasks
from benchmarks.attention.page import chosen, tables
from benchmarks.engine_rules import page as engine_page
from benchmarks.evidence import read
from benchmarks.measuring import RESULTS, filled

ROOT = Path(__file__).parent.parent

README = {
    "nope": "none",
    "rope": "RoPE",
    "alibi": "ALiBi",
    "t5": "T5, learned",
    "shaw@scores": "Shaw, keys",
    "deberta@buckets=256": "DeBERTa, 256 buckets",
}
"""Encodings of the README's table: python -m benchmarks.attention --what calls rows --alone
--dtypes float32 --lengths 128 512 2048 --encodings …"""


def pages() -> dict[Path, str]:
    """Every page that shows results, as it follows from them."""
    attention, others = read("attention_amd"), read("attention_amd_others")
    by_amx = read("attention_intel")
    compared = tables(others["readings"])["other contenders"]
    short = chosen(read("attention_cascadelake")["readings"], README)
    parts = {
        RESULTS / "README.md": {
            "measured": about(attention),
            **tables(attention["readings"]),
            "other contenders": compared,
            "measured by AMX": about(by_amx),
            "times by AMX": tables(by_amx["readings"], "amx")["times in bfloat16"],
        },
        ROOT / "README.md": {"attention": short, "demo": evidence.text()},
        ROOT / "docs/results/language.md": {"demo": evidence.language()},
        ROOT / "docs/results/real.md": evidence.real(),
        ROOT / "docs/results/engines.md": {"engines": engine_page.page()},
        ROOT / "docs/choose/index.md": evidence.choosing(),
        ROOT / "docs/guides/accelerate.md": {
            "families": evidence.families(),
            "engines": evidence.engines(),
            "windows": evidence.windows(),
        },
        **tasks.parts(),
    }
    found = {page: filled(page.read_text(), texts) for page, texts in parts.items()}
    return found | {RESULTS / "kernels_static.md": kernels_static.page(kernels_static.kept())}


def about(results: dict[str, Any]) -> str:
    """Machine, date and settings of a bench of attention, in a line."""
    rounds, versions = results["settings"]["rounds"], results["versions"]
    return (
        f"{results['device']}, {results['machine']['threads']} threads, PyTorch "
        f"{versions['torch']}, {results['date']}; 8 heads of 64, medians of {rounds} rounds.\n"
    )


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text)
        print(f"Written: {path}")
