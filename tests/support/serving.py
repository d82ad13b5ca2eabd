"""A server of OpenAI's protocol on the loopback, and a model behind it that reads so far."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Reply = tuple[int, dict[str, str], bytes]
Answer = Callable[[str, dict[str, Any]], Reply]
"""The reply to a path and a JSON body."""


@dataclass
class LoopbackServer:
    """A running server.

    Args:
        url: base of its paths.
        requests: path, body and headers of each, in their order.
    """

    url: str
    requests: list[tuple[str, dict[str, Any], dict[str, str]]] = field(default_factory=list)


def reply(value: object, status: int = 200, **headers: str) -> Reply:
    """A reply of JSON; underscores in the names of headers are hyphens."""
    named = {name.replace("_", "-"): text for name, text in headers.items()}
    return status, named, json.dumps(value).encode()


@contextmanager
def serving(answer: Answer) -> Iterator[LoopbackServer]:
    """A server on a free port, until the block ends."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            content = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            body = json.loads(content) if content else {}
            path = self.path.removeprefix("/v1/")
            server.requests.append((path, body, dict(self.headers)))
            status, headers, content = answer(path, body)
            if not status:  # hang up
                return
            self.send_response(status)
            for name, text in (headers | {"Content-Length": str(len(content))}).items():
                self.send_header(name, text)
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST  # noqa: N815

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            """Nothing is logged."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        http.daemon_threads = True
        server = LoopbackServer(f"http://127.0.0.1:{http.server_address[1]}/v1")
        thread = threading.Thread(target=http.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            http.shutdown()
            thread.join()


NEEDLE = r"secret number of {key} is (\d+)"


PATTERN = " ?[A-Za-z]{1,4}|[^A-Za-z]"
"""A token: up to four letters, or another character."""


def tokens_of(text: str) -> list[str]:
    """The tokens of a text."""
    return re.findall(PATTERN, text)


@dataclass
class Finder:
    """Answers what the number of a key is from the last ``sight`` tokens of its prompt.

    Args:
        sight: how far it reads.
        limit: longest context that the server takes.
        chat, echo, counts: what the server gives: messages, log-probabilities of prompts, usage.
        shifted: the log-probabilities are those of the next token.
        thought: tokens of a thought before each answer to a message.
        apart: field of the thought; "": it stands in the text, "template": without its first mark.
        name: of the model.
        described: fields of its description.
    """

    sight: int
    limit: int = 1 << 30
    chat: bool = False
    echo: bool = False
    counts: bool = True
    shifted: bool = False
    thought: int = 0
    apart: str = ""
    name: str = "finder"
    described: dict[str, Any] = field(default_factory=dict)

    def __call__(self, path: str, body: dict[str, Any]) -> Reply:
        if path == "models":
            return reply({"data": [{"id": self.name} | self.described]})
        if path == "chat/completions" and not self.chat:
            return reply({"detail": "no chat template"}, 400)
        if body["model"] != self.name:
            return reply({"error": {"message": f"no model {body['model']}"}}, 404)
        messages = body.get("messages", [{}])
        prompt = body.get("prompt", messages[0].get("content"))
        tokens = ["<s>", *tokens_of(prompt)]
        if len(tokens) + body["max_tokens"] > self.limit:
            got = {"message": f"maximum context length is {self.limit}", "type": "BadRequest"}
            return reply({"error": got}, 400)
        usage = {"usage": {"prompt_tokens": len(tokens)}} if self.counts else {}
        choice = self._echoed(tokens) if self.echo and body.get("echo") else self._written(tokens)
        if self.chat and path == "chat/completions":
            choice = self._message(choice["text"], body["max_tokens"])
        return reply({"choices": [choice]} | usage)

    def _number(self, tokens: list[str]) -> str:
        seen, _, question = "".join(tokens[-self.sight :]).rpartition("Question:")
        asked = re.search(r"secret number of ([a-z0-9-]+)\?", question)
        found = asked and re.search(NEEDLE.format(key=asked[1]), seen)
        return found[1] if found else "unknown"

    def _written(self, tokens: list[str]) -> dict[str, Any]:
        return {"text": f" {self._number(tokens)}."}

    def _message(self, text: str, most: int) -> dict[str, Any]:
        """A message of so many tokens at most, the thought's and its marks' among them."""
        inline = self.apart in ("", "template") and self.thought > 0
        begin = "<think>" if inline and not self.apart else ""
        end = "</think>" if inline else ""
        thought = tokens_of(begin) + [" hmm"] * self.thought + tokens_of(end)
        answer = tokens_of(text)[: max(0, most - len(thought))]
        thinks = "".join(thought[:most])
        written = {"role": "assistant", "content": "".join(answer)}
        if inline:
            written["content"] = thinks + written["content"]
        elif thought:
            written |= {self.apart: thinks, "content": written["content"] or None}
        cut = len(answer) < len(tokens_of(text))
        return {"message": written, "finish_reason": "length" if cut else "stop"}

    def _echoed(self, tokens: list[str]) -> dict[str, Any]:
        """Every token after the question is the likeliest as far as the number is its own."""
        number = self._number(tokens)
        right = "".join(tokens).endswith((f" {number}", f" {number}."))
        best = [False] * (len(tokens) - 8) + [right] * 8
        values: list[float | None] = [None, *(-1.0 if each else -9.0 for each in best[1:])]
        tops: list[Any] = [None, *({"other": -2.0} for _ in best[1:])]
        if self.shifted:
            values = [None, *values[2:], -9.0]
        given = {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops}
        return {"text": "".join(tokens), "logprobs": given}
