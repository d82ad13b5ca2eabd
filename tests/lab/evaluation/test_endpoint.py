"""The client of served models: what it sends, tries again and refuses, and where a key goes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any

import pytest

from posenc.errors import ArgumentError
from posenc.lab.evaluation.endpoint import KEY, PAUSES, Endpoint, EndpointError, _asked_pause
from tests.support.serving import Reply, reply, serving

GIVEN = reply({"choices": [{"text": " b"}], "usage": {"prompt_tokens": 1}})

SECRET = "sk-it-is-never-shown-0123456789"


def replying(*replies: Reply) -> Callable[[str, dict[str, Any]], Reply]:
    """The replies one after the other, the last again and again."""
    left = iter(replies)
    last = [replies[-1]]

    def answer(path: str, body: dict[str, Any]) -> Reply:
        return next(left, last[0])

    return answer


@pytest.fixture(autouse=True)
def _no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KEY, raising=False)


@pytest.fixture
def slept() -> list[float]:
    return []


def refused(*replies: Reply, key: str = "", sleep: Any = None) -> EndpointError:
    with serving(replying(*replies)) as server:
        endpoint = Endpoint(server.url, "m", key=key, sleep=sleep or (lambda seconds: None))
        with pytest.raises(EndpointError) as caught:
            endpoint.complete("a", 1)
    return caught.value


def test_what_is_sent_is_openais_protocol(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY, SECRET)
    with serving(replying(GIVEN)) as server:
        endpoint = Endpoint(server.url + "/", "m")
        assert endpoint.complete("a", 3)["choices"][0]["text"] == " b"
        endpoint.complete("a", 1, echo=True)
        endpoint.chat("hello", 2)
    (plain, echoed, message) = server.requests
    assert plain[:2] == (
        "completions",
        {"model": "m", "prompt": "a", "max_tokens": 3, "temperature": 0},
    )
    assert (echoed[1]["echo"], echoed[1]["logprobs"]) == (True, 1)
    assert message[:2] == (
        "chat/completions",
        {"model": "m", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
        | {"temperature": 0},
    )
    assert {headers["Authorization"] for _, _, headers in server.requests} == {f"Bearer {SECRET}"}


def test_no_key_no_header() -> None:
    with serving(replying(GIVEN)) as server:
        Endpoint(server.url, "m").complete("a", 1)
    assert "Authorization" not in server.requests[0][2]


def test_a_busy_server_is_asked_again_after_the_time_it_asks_for(slept: list[float]) -> None:
    soon = format_datetime(datetime.now(UTC) + timedelta(seconds=90), usegmt=True)
    busy = (reply({}, 503), reply({}, 429, Retry_After="7"), reply({}, 429, Retry_After=soon))
    with serving(replying(*busy, reply({}, 502, Retry_After="odd"), GIVEN)) as server:
        Endpoint(server.url, "m", sleep=slept.append).complete("a", 1)
    first, asked, dated, odd = slept
    assert (first, asked, odd) == (PAUSES[0], 7.0, PAUSES[3])
    assert 30 < dated < 91
    assert len(server.requests) == 5


@pytest.mark.parametrize("header", ["-1", "", "nan", "Mon, 99 Foo 2020", "0 0 0", "٣٫٥"])
def test_an_odd_time_to_wait_is_not_taken(header: str) -> None:
    assert _asked_pause(header) is None


def test_it_gives_up_after_the_last_pause(slept: list[float]) -> None:
    error = refused(reply({"error": {"message": "full"}}, 503), sleep=slept.append)
    assert slept == list(PAUSES)
    assert error.status == 503
    assert "503 Service Unavailable for /completions: full" in str(error)


def test_a_pause_of_hours_is_not_waited_for(slept: list[float]) -> None:
    error = refused(reply({}, 429, Retry_After="7200"), sleep=slept.append)
    assert slept == []
    assert "7200 s" in str(error)


def test_what_is_wrong_is_not_sent_again(slept: list[float]) -> None:
    assert refused(reply({}, 400), sleep=slept.append).status == 400
    assert slept == []


def test_a_connection_that_breaks_is_tried_again(slept: list[float]) -> None:
    hang_up: Reply = (0, {}, b"")
    with serving(replying(hang_up, hang_up, GIVEN)) as server:
        Endpoint(server.url, "m", sleep=slept.append).complete("a", 1)
    assert slept == list(PAUSES[:2])
    assert "a connection that breaks" in str(refused(hang_up))


def test_a_server_that_does_not_answer_in_time() -> None:
    done = threading.Event()

    def answer(path: str, body: dict[str, Any]) -> Reply:
        done.wait(60)
        return GIVEN

    with serving(answer) as server:
        with pytest.raises(EndpointError) as caught:
            Endpoint(server.url, "m", timeout=0.05).complete("a", 1)
        done.set()
    assert "none for 0.05 s" in str(caught.value)
    assert "--timeout" in str(caught.value)


def test_a_redirect_is_not_followed() -> None:
    with serving(replying(GIVEN)) as other:
        for status in (301, 302, 307, 308):
            moved = reply({}, status, Location=f"{other.url}/completions")
            error = refused(moved, key=SECRET)
            assert f"got {status}, a redirect, which is not followed" in str(error)
    assert other.requests == []


def test_a_proxy_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(replying(GIVEN)) as proxy, serving(replying(GIVEN)) as server:
        for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY"):
            monkeypatch.setenv(name, proxy.url.removesuffix("/v1"))
        monkeypatch.setenv("no_proxy", "")
        Endpoint(server.url, "m").complete("a", 1)
    assert (len(proxy.requests), len(server.requests)) == (0, 1)


def test_no_error_shows_the_key() -> None:
    """Servers quote what they were sent."""
    quoting = {"error": {"message": f"Incorrect API key provided: {SECRET}."}}
    for status in (400, 401, 403, 404, 503):
        assert SECRET not in str(refused(reply(quoting, status), key=SECRET))
    for content in (f"<html>{SECRET}", f'["{SECRET}"]', f'{{"a": "{SECRET}"}}'):
        assert SECRET not in str(refused((200, {}, content.encode()), key=SECRET))
    named = reply({"data": [{"id": SECRET}]})
    assert SECRET not in str(refused(reply({}, 404), named, key=SECRET))


def test_neither_a_key_nor_an_address_is_shown_that_cannot_be_used() -> None:
    assert SECRET not in repr(Endpoint("http://a/v1", "m", key=SECRET))
    for key in (f"{SECRET}\n", f"{SECRET} ", f"{SECRET}é"):
        with pytest.raises(ArgumentError) as refusal:
            Endpoint("http://a/v1", "m", key=key)
        assert SECRET not in f"{refusal.value}{refusal.value.__cause__}"
        assert KEY in str(refusal.value)
    for url in (f"http://me:{SECRET}@a/v1", f"http://a/v1?key={SECRET}", f"http://a/v1#{SECRET}"):
        with pytest.raises(ArgumentError) as refusal:
            Endpoint(url, "m")
        assert SECRET not in str(refusal.value)


@pytest.mark.parametrize(
    "url",
    [
        *("", "localhost:8000/v1", "ftp://a/v1", "http:///v1", "http://a:99999/v1"),
        *("http://a:x/v1", "http://a b/v1", "http://[a/v1", "http://a/v1\n", "file:///v1"),
        "http://á/v1",
    ],
)
def test_an_address_that_is_none(url: str) -> None:
    with pytest.raises(ArgumentError, match=r"^endpoint: expected an address such as http"):
        Endpoint(url, "m")


@pytest.fixture
def closed() -> str:
    """The address of a server that is gone."""
    with serving(replying(GIVEN)) as server:
        pass
    return server.url


def test_a_server_that_is_not_there(closed: str) -> None:
    with pytest.raises(EndpointError, match=r"expected a server that answers from http://127"):
        Endpoint(closed, "m").complete("a", 1)
    assert Endpoint(closed, "m").models() == {}


def test_https_of_a_server_without_it() -> None:
    with serving(replying(GIVEN)) as server:
        endpoint = Endpoint(server.url.replace("http:", "https:"), "m", sleep=lambda seconds: None)
        with pytest.raises(EndpointError, match="expected an encrypted connection from https://"):
            endpoint.complete("a", 1)


@pytest.mark.parametrize(
    ("content", "got"),
    [
        (b"<html>hello", "no JSON: <html>hello."),
        (b"", "no JSON."),
        (b"\xff\xfe", "no JSON: "),
        (b"[" * 100_000, "no JSON: [["),
        (b"[1]", r"no JSON object: \[1\]"),
        (b"{}", "an answer without choices: {}"),
        (b'{"choices": []}', "an answer without choices"),
        (b'{"choices": [5]}', "an answer without choices"),
        (b'{"choices": {"a": 1}}', "an answer without choices"),
    ],
)
def test_answers_outside_the_protocol(content: bytes, got: str) -> None:
    error = refused((200, {}, content))
    assert got.replace("\\", "") in str(error)
    assert len(str(error)) < 700


@pytest.mark.parametrize(
    "content",
    [
        b'{"error": {"message": "too long"}}',
        b'{"message": "too long"}',
        b'{"detail": "too long"}',
        b'{"error": "too long"}',
        b'{"detail": [{"msg": "too long"}]}',
        b"too long",
        b'["too long"]',
        b'{"error": "too\\nlong \\ud800\\u001b[31m"}',
    ],
)
def test_the_words_of_a_refusal_are_quoted(content: bytes) -> None:
    said = str(refused((422, {}, content)))
    assert "too long" in said
    assert said.isprintable()


def test_a_model_that_is_not_served_is_told_from_a_path() -> None:
    named = reply({"data": [{"id": "one"}, {"id": "two"}]})
    error = refused(reply({}, 404), named)
    assert error.argument == "model"
    assert "It names one, two." in str(error)
    error = refused(reply({}, 404), reply({"data": [{"id": "m"}]}))
    assert error.argument == "endpoint"
    for odd in ({"data": 5}, {"data": [5]}, {}):
        assert refused(reply({}, 404), reply(odd)).status == 404


class TestLimits:
    """Names of the largest number of new tokens."""

    @staticmethod
    def newer(path: str, body: dict[str, Any]) -> Reply:
        """A server that takes messages with ``max_completion_tokens`` alone."""
        if "max_tokens" in body and "messages" in body:
            words = "Unsupported parameter: 'max_tokens'. Use 'max_completion_tokens' instead."
            return reply({"error": {"message": words}}, 400)
        return reply({"choices": [{"message": {"content": "b"}}]})

    def test_the_newer_name_where_the_older_is_refused(self) -> None:
        with serving(self.newer) as server:
            endpoint = Endpoint(server.url, "m")
            for most in (3, 4):
                assert endpoint.chat("a", most)["choices"][0]["message"]["content"] == "b"
            endpoint.complete("a", 5)
        limits = [
            {name: body[name] for name in body if name.startswith("max_")}
            for _, body, _ in server.requests
        ]
        newer = "max_completion_tokens"
        assert limits == [{"max_tokens": 3}, {newer: 3}, {newer: 4}, {"max_tokens": 5}]

    @pytest.mark.parametrize("status", [400, 422])
    def test_a_refusal_of_both_is_the_first(self, status: int) -> None:
        """As of a context that is too long, whose words name the limit."""
        first = reply({"error": {"message": "max_tokens is too large: 9"}}, status)
        with serving(replying(first, reply({"detail": "other words"}, 400), GIVEN)) as server:
            endpoint = Endpoint(server.url, "m")
            with pytest.raises(EndpointError, match="too large: 9") as caught:
                endpoint.chat("a", 9)
            endpoint.chat("a", 2)
        assert caught.value.status == status
        assert server.requests[-1][1]["max_tokens"] == 2

    def test_other_refusals_are_not_sent_again(self) -> None:
        with serving(replying(reply({"detail": "no chat template"}, 400))) as server:
            with pytest.raises(EndpointError):
                Endpoint(server.url, "m").chat("a", 9)
            with pytest.raises(EndpointError):
                Endpoint(server.url, "m").complete("max_tokens", 9)
        assert len(server.requests) == 2
