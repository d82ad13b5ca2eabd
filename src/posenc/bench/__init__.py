"""Benchmarks of attention with encodings, relative to attention without, in one run.

Each round runs all contenders in turn, so that the load of the machine affects all of them;
reported are medians over rounds of the ratio to plain SDPA in the same round.

    from pathlib import Path

    from posenc.bench.files import write_results
    from posenc.bench.run import bench
    from posenc.bench.settings import Settings

    if __name__ == "__main__":  # memory is measured in a separate process
        report = bench(Settings(encodings=["t5", "alibi"], lengths=[1024]))
        write_results(report, Path("out"))
"""
