"""A client of servers that speak OpenAI's protocol: vLLM, SGLang, llama.cpp, transformers, others.

No host but the given one is called: redirects are not followed, and proxies not used.
"""

from __future__ import annotations

import http.client
import json
import os
import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import SplitResult, urlsplit

from posenc.errors import ArgumentError

KEY = "OPENAI_API_KEY"
"""Environment variable of the key, the only place that it is read from."""

RETRIED = (429, 500, 502, 503, 504)
"""Statuses after which a request is sent again."""

PAUSES = (1.0, 2.0, 4.0, 8.0, 16.0)
"""Seconds before each further try, where the server does not say how many."""

LONGEST_PAUSE = 300.0
"""Seconds that a server may ask for before a further try."""

MOST_BYTES = 1 << 28
"""Size of an answer, at most: log-probabilities of a prompt take some hundred bytes a token."""

LIMIT, NEWER_LIMIT = "max_tokens", "max_completion_tokens"
"""Names of the largest number of new tokens; some servers take messages by the newer alone."""

QUOTED = 300
"""Characters of an answer that are quoted, at most."""


class EndpointError(ArgumentError):
    """A server that cannot be reached, refuses a request, or answers outside the protocol.

    Args:
        argument: the option that is at fault.
        expected, got, remedy: see ``PosencError``.
        status: of the refusal; 0: there was no answer.
    """

    def __init__(
        self, argument: str, *, expected: str, got: object, remedy: str, status: int = 0
    ) -> None:
        super().__init__(argument, expected=expected, got=got, remedy=remedy)
        self.status = status


@dataclass(frozen=True)
class Endpoint:
    """A model behind a server.

    Args:
        url: base of the paths, ``http://localhost:8000/v1``.
        model: its name there.
        timeout: seconds without a byte after which a request has failed.
        limits: the names of ``most`` that were tried for messages, the one in use last.
        key: sent as a bearer token; "": none.
        sleep: waits for so many seconds.

    Raises:
        ArgumentError: if the URL or the key cannot be used; neither is quoted.
    """

    url: str
    model: str
    timeout: float = 600.0
    key: str = field(default_factory=lambda: os.environ.get(KEY, ""), repr=False)
    sleep: Callable[[float], None] = field(default=time.sleep, repr=False)
    limits: list[str] = field(default_factory=lambda: [LIMIT], init=False, repr=False)

    def __post_init__(self) -> None:
        _parsed(self.url)
        if not all("!" <= character <= "~" for character in self.key):
            raise ArgumentError(
                KEY,
                expected="printable ASCII characters without spaces",
                got="others",
                remedy="Set it again, without a line break at its end.",
            )

    def complete(
        self, prompt: str, most: int, *, echo: bool = False, tries: int | None = None
    ) -> dict[str, Any]:
        """The greedy continuation of a text.

        Args:
            prompt: the text.
            most: of the new tokens.
            echo: ask for the log-probabilities of the text's tokens too.
            tries: see ``request``.

        Returns:
            The whole answer, with one choice at least.

        Raises:
            EndpointError: if the server does not give it.
        """
        asked = {"prompt": prompt} | ({"echo": True, "logprobs": 1} if echo else {})
        return self._choices("completions", asked, most, tries)

    def chat(self, message: str, most: int, *, tries: int | None = None) -> dict[str, Any]:
        """The answer to a user's message, as ``complete``."""
        messages = [{"role": "user", "content": message}]
        return self._choices("chat/completions", {"messages": messages}, most, tries)

    def models(self) -> dict[str, dict[str, Any]]:
        """The descriptions of the models that the server names; empty where it lists none."""
        try:
            listed = self.request("GET", "models", tries=1).get("data")
        except EndpointError:
            return {}
        listed = listed if isinstance(listed, list) else []
        return {str(one.get("id")): one for one in listed if isinstance(one, dict)}

    def _choices(
        self, path: str, asked: Mapping[str, Any], most: int, tries: int | None
    ) -> dict[str, Any]:
        body = {"model": self.model, **asked, "temperature": 0}
        limit = self.limits[-1] if "messages" in asked else LIMIT
        try:
            answer = self.request("POST", path, body | {limit: most}, tries=tries)
        except EndpointError as refusal:
            named = any(name in refusal.got for name in (LIMIT, NEWER_LIMIT))
            if limit != LIMIT or "messages" not in asked or not named:
                raise
            try:
                answer = self.request("POST", path, body | {NEWER_LIMIT: most}, tries=tries)
            except EndpointError:
                raise refusal from None
            self.limits.append(NEWER_LIMIT)
        choices = answer.get("choices")
        if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
            raise self._odd(path, "an answer without choices", answer)
        return answer

    def request(
        self, method: str, path: str, body: object = None, *, tries: int | None = None
    ) -> dict[str, Any]:
        """The JSON object that the server answers with.

        After a status of ``RETRIED``, or a connection that breaks, the request is sent again, once
        the time has passed that the server asks for (``Retry-After``), or that of ``PAUSES``.

        Args:
            method, path: below ``url``.
            body: as JSON; None: there is none.
            tries: requests that are sent at most; by default one and another for each pause.

        Raises:
            EndpointError: if there is no such answer.
        """
        pauses = PAUSES[: len(PAUSES) if tries is None else tries - 1]
        for pause in (*pauses, None):
            try:
                status, headers, content = self._sent(method, path, body)
            except (ConnectionResetError, BrokenPipeError, http.client.HTTPException) as error:
                if pause is None:
                    got = f"a connection that breaks ({type(error).__name__})"
                    raise self._error("an answer", got, "Is it still running?") from error
                self.sleep(pause)
                continue
            if status not in RETRIED or pause is None:
                break
            wait = _asked_pause(headers.get("Retry-After"))
            if wait is not None and wait > LONGEST_PAUSE:
                break
            self.sleep(pause if wait is None else wait)
        if status != 200:
            raise self._refusal(path, status, headers, content)
        try:
            answer = json.loads(content)
        except (ValueError, RecursionError):
            raise self._odd(path, "no JSON", content.decode(errors="replace")) from None
        if not isinstance(answer, dict):
            raise self._odd(path, "no JSON object", answer)
        return answer

    def _sent(
        self, method: str, path: str, body: object
    ) -> tuple[int, http.client.HTTPMessage, bytes]:
        """Status, headers and content of one answer."""
        parts = _parsed(self.url)
        secure = parts.scheme == "https"
        kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        assert parts.hostname is not None  # as ``_parsed`` requires
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        headers |= {"Authorization": f"Bearer {self.key}"} if self.key else {}
        connection = kind(parts.hostname, parts.port, timeout=self.timeout)
        try:
            content = None if body is None else json.dumps(body)
            connection.request(method, f"{parts.path.rstrip('/')}/{path}", content, headers)
            response = connection.getresponse()
            received = response.read(MOST_BYTES + 1)
        except (ConnectionResetError, BrokenPipeError):
            raise
        except TimeoutError as error:
            raise self._error(
                "an answer in time", f"none for {self.timeout:g} s", "Give a longer --timeout."
            ) from error
        except ssl.SSLError as error:
            remedy = "Is it a server of https, with a certificate that this machine trusts?"
            raise self._error("an encrypted connection", _brief(error), remedy) from error
        except (OSError, UnicodeError) as error:
            remedy = "Start the server, or correct the address."
            raise self._error("a server that answers", _brief(error), remedy) from error
        finally:
            connection.close()
        if len(received) > MOST_BYTES:
            raise self._odd(path, f"more than {MOST_BYTES:,} bytes", "")
        return response.status, response.headers, received

    def _refusal(
        self, path: str, status: int, headers: http.client.HTTPMessage, content: bytes
    ) -> EndpointError:
        """The error of a status other than 200."""
        said = self._quoted(_message(content))
        got = f"{status} {http.client.responses.get(status, '')}".strip() + f" for /{path}"
        got += f": {said}" if said else ""
        if 300 <= status < 400:
            got = f"{status}, a redirect, which is not followed"
            return self._error("an answer", got, "Give the address that it leads to.", status)
        if status in (401, 403):
            remedy = f"Set {KEY} to a key of this server."
            return self._error("a key that the server takes", got, remedy, status)
        if status == 404 and path != "models":
            known, argument = self.models(), "endpoint"
            remedy = "Does its address end in /v1?"
            if known and self.model not in known:
                argument, remedy = "model", f"It names {self._quoted(', '.join(known))}."
            expected = f"a model and a path that {self.url} serves"
            return EndpointError(argument, expected=expected, got=got, remedy=remedy, status=404)
        remedy = "The words after the number are the server's."
        if status in RETRIED:
            remedy = f"It was asked {len(PAUSES) + 1} times; try again later, or --concurrency 1."
            wait = _asked_pause(headers.get("Retry-After"))
            if wait is not None and wait > LONGEST_PAUSE:
                remedy = f"It asks to wait for {wait:.0f} s."
        return self._error("an answer", got, remedy, status)

    def _odd(self, path: str, got: str, answer: object) -> EndpointError:
        said = self._quoted(answer if isinstance(answer, str) else json.dumps(answer))
        return self._error(
            f"an answer of OpenAI's protocol to /{path}",
            got + (f": {said}" if said else ""),
            "Is it the address of such a server, up to /v1?",
            200,
        )

    def _quoted(self, text: str) -> str:
        """The beginning of what a server says, in one line and without the key."""
        plain = text.replace(self.key, "…") if self.key else text
        line = " ".join("".join(c if c.isprintable() else " " for c in plain).split())
        return line.rstrip(".") if len(line) <= QUOTED else f"{line[:QUOTED]} …"

    def _error(self, expected: str, got: str, remedy: str, status: int = 0) -> EndpointError:
        where = f"{expected} from {self.url}"
        return EndpointError("endpoint", expected=where, got=got, remedy=remedy, status=status)


def _parsed(url: str) -> SplitResult:
    """The parts of a base URL, which holds neither a user, a query nor a fragment."""
    got = "another text"
    try:
        parts = urlsplit(url)
        known = parts.scheme in ("http", "https") and parts.hostname
        if parts.username is not None or parts.query or parts.fragment:
            got = "one with a user, a query or a fragment, which a report would show"
        elif known and all("!" <= character <= "~" for character in url):
            got = "a port that is none"
            _ = parts.port  # raises where it is none
            return parts
    except ValueError:
        pass  # its words may quote what is secret
    raise ArgumentError(
        "endpoint",
        expected="an address such as http://localhost:8000/v1",
        got=got,
        remedy=f"A key is read from {KEY} alone.",
    )


def _message(content: bytes) -> str:
    """The words of an error: OpenAI's ``error.message``, or others' ``message`` or ``detail``."""
    text = content.decode(errors="replace")
    try:
        answer = json.loads(text)
    except (ValueError, RecursionError):
        return text
    inner = answer.get("error", answer) if isinstance(answer, dict) else answer
    if isinstance(inner, dict):
        inner = inner.get("message") or inner.get("detail") or inner
    return inner if isinstance(inner, str) else json.dumps(inner)


def _brief(error: Exception) -> str:
    """An error of a connection in a phrase."""
    reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or str(error)
    return str(reason) or type(error).__name__


def _asked_pause(header: str | None) -> float | None:
    """Seconds of a ``Retry-After``: a number or a date; None: neither."""
    if header is None:
        return None
    if header.strip().isdecimal():
        return float(header)
    try:
        date = parsedate_to_datetime(header)
    except (ValueError, TypeError, OverflowError):
        return None
    date = date if date.tzinfo else date.replace(tzinfo=UTC)
    return max(0.0, (date - datetime.now(UTC)).total_seconds())
