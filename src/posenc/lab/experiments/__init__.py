"""Comparisons: train small models that differ in their encoding, and see which hold up.

A script that compares, writes the report and prints the answer::

    from pathlib import Path

    from posenc.lab.experiments.compare import compare
    from posenc.lab.experiments.report import write_report
    from posenc.lab.experiments.settings import ComparisonSettings
    from posenc.lab.experiments.summary import summarise

    if __name__ == "__main__":  # compare starts processes, which import this script
        comparison = compare(ComparisonSettings(out=Path("out"), encodings=("rope", "alibi")))
        write_report(comparison, Path("out/report"))
        print("\\n".join(summarise(comparison).answer))

Nothing here prints; progress is reported by the events of ``posenc.lab.experiments.progress``.
"""
