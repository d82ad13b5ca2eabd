"""Inspection of a model in a process of its own, which time and memory limit."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import warnings
from contextlib import redirect_stdout
from importlib.util import find_spec
from pathlib import Path
from textwrap import shorten

from posenc.transformers.doctor.facts import LayerReading

SECONDS, BYTES = 120.0, 12 * 2**30
"""Limits of the process."""


class NotRunError(Exception):
    """The model could not be run; the message is the reason."""


def read_by_running(folder: Path, *, seconds: float = SECONDS, memory: int = BYTES) -> LayerReading:
    """The layers of a model folder, whose code is run in another process.

    Args:
        folder: with ``config.json``.
        seconds: after which the process is ended.
        memory: bytes that the process may allocate (on Linux).

    Raises:
        NotRunError: if it could not be run, with the reason.
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    environment |= {"HF_HUB_OFFLINE": "1"}
    # Without stored weights all products are small: more threads wait for one another.
    environment |= {"OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(
            [sys.executable, "-c", f"import {__name__} as p; p.serve()", str(folder), str(memory)],
            env=environment,
            capture_output=True,
            timeout=seconds,
        )
    except subprocess.TimeoutExpired:
        raise NotRunError(f"it took more than {seconds:.0f} s") from None
    if done.returncode:
        last = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise NotRunError(f"its process ended with {done.returncode}: {last[:200]}")
    answer: LayerReading | str = pickle.loads(done.stdout)
    if isinstance(answer, str):
        raise NotRunError(answer)
    return answer


def serve() -> None:
    """Inspect the folder in ``sys.argv``; answer with the reading, or the reason for none."""
    folder, memory = sys.argv[1:]
    _limit(int(memory))
    warnings.simplefilter("ignore")
    with redirect_stdout(sys.stderr):  # of code that prints
        answer = _inspected(Path(folder))
    sys.stdout.buffer.write(pickle.dumps(answer))


def _inspected(folder: Path) -> LayerReading | str:
    if find_spec("transformers") is None:
        return "transformers is not installed"
    import transformers

    from posenc.transformers.doctor.inspection import inspect

    transformers.logging.set_verbosity_error()
    try:
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
        return inspect(config)
    except Exception as error:  # whatever transformers raises
        return shorten(str(error), 240, placeholder=" …")


def _limit(memory: int) -> None:
    try:
        import resource
    except ImportError:  # Windows
        return
    if sys.platform == "linux":
        resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
