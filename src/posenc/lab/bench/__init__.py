"""Time of attention with encodings, relative to attention without, in one run.

Each round runs all passes in turn, so that the load of the machine affects all of them; reported
are medians over rounds of the ratio to plain SDPA in the same round.

    from posenc.lab.bench.run import Settings, bench

    report = bench(Settings(encodings=["t5", "alibi"], lengths=[1024]))
"""
