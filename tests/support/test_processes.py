"""Processes of tests: what they inherit."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import os
from tests.support import processes

processes.PRELOADED.clear()
os.environ["OF_A_TEST"] = "set"
with processes.forking().Pool(1) as pool:
    print(pool.apply(os.getenv, ("OF_A_TEST",)), os.getenv("OF_A_TEST"))
"""


def test_later_processes_do_not_inherit_the_environment_of_one_test() -> None:
    """The first test that forks starts the server of all tests after it."""
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True)
    assert done.stdout.split() == ["None", "set"], done.stderr
