"""A cache of huggingface_hub as it lays one out, and a hub on this machine."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

COMMIT = "0123456789abcdef0123456789abcdef01234567"
REFUSED = "http://127.0.0.1:1"
"""An address that nobody listens at."""


def cached(cache: Path, repo: str, source: Path, *, revision: str = "main") -> Path:
    """Put the files of a folder into a cache; answers the folder of the snapshot."""
    kept = cache / f"models--{repo.replace('/', '--')}"
    snapshot = kept / "snapshots" / COMMIT
    for folder in (kept / "blobs", kept / "refs", snapshot):
        folder.mkdir(parents=True, exist_ok=True)
    (kept / "refs" / revision).write_text(COMMIT)
    for file in source.iterdir():
        blob = kept / "blobs" / hashlib.sha256(file.read_bytes()).hexdigest()
        blob.write_bytes(file.read_bytes())
        (snapshot / file.name).symlink_to(Path("../../blobs") / blob.name)
    return snapshot


@contextmanager
def served(repo: str, source: Path) -> Iterator[tuple[str, list[str]]]:
    """A hub with one model: its address, and the files that were asked for, as they come."""
    asked: list[str] = []
    found = (file for file in source.rglob("*") if file.is_file())
    files = {file.relative_to(source).as_posix(): file.read_bytes() for file in found}

    class Hub(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            if path == f"/api/models/{repo}/revision/main":
                self.answer(json.dumps({"id": repo, "sha": COMMIT, "siblings": []}).encode())
            elif path == f"/api/models/{repo}/tree/{COMMIT}":
                listed = [
                    {"type": "file", "path": name, "size": len(data), "oid": _oid(data)}
                    for name, data in files.items()
                ]
                self.answer(json.dumps(listed).encode())
            elif path.startswith(f"/{repo}/resolve/{COMMIT}/"):
                name = path.removeprefix(f"/{repo}/resolve/{COMMIT}/")
                asked.append(name)
                self.answer(files[name])
            else:
                self.send_response(404)
                self.send_header("X-Error-Code", "RepoNotFound")
                self.send_header("Content-Length", "0")
                self.end_headers()

        do_HEAD = do_GET  # noqa: N815

        def answer(self, data: bytes) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.send_header("ETag", f'"{_oid(data)}"')
            self.send_header("X-Repo-Commit", COMMIT)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _oid(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()
