"""serve-local: the key, and which Host and Origin headers are taken."""

import json

import openai
import pytest
from serving_client import Scripted, complete, get, post, serving

from twellctl.errors import UsageError
from twellctl.serve_local import access_of, serve_local
from twellctl.serving.access import Access

KEY = "sk-geheim"
ASK = json.dumps({"model": "model", "prompt": "x", "max_tokens": 1}).encode()


@pytest.fixture
def serve_with(tokenizer):
    """`with serve_with(access) as client`."""
    return lambda access: serving(tokenizer, Scripted([5]), access=access, api_key=KEY)


def test_a_key_lets_in_and_nothing_else_does(serve_with):
    with serve_with(Access(KEY)) as client:
        assert complete(client).choices[0].text
        assert client.models.list().data
        for key in ("wrong", KEY + "x", KEY[:-1], "é"):
            headers = {"Authorization": f"Bearer {key}"}
            status, answer = post(client, ASK, **headers)
            assert (status, answer["error"]["code"]) == (401, "invalid_api_key"), key
        for header in ("", KEY, f"Basic {KEY}", "Bearer"):
            status, answer = post(client, ASK, Authorization=header)
            assert (status, answer["error"]["type"]) == (401, "invalid_request_error"), header
        with pytest.raises(openai.AuthenticationError, match="not this server's"):
            complete(client.with_options(api_key="wrong"))


def test_what_needs_the_key(serve_with):
    with serve_with(Access(KEY)) as client:
        for path in ("/v1/models", "/v1/models/model", "/metrics", "/unknown"):
            answer = get(client, path)
            assert (answer.status, answer.headers["WWW-Authenticate"]) == (401, "Bearer"), path
        for path in ("/", "/health"):
            assert get(client, path).status == 200, path
        assert get(client, "/metrics", Authorization=f"bearer {KEY}").status == 200


@pytest.mark.parametrize(
    ("access", "host", "origin", "status"),
    [
        (Access(), "localhost:8000", None, 200),
        (Access(), "LOCALHOST", "http://127.0.0.1:3000", 200),
        (Access(), "192.168.1.5:8000", None, 403),
        (Access(), "evil.example", None, 403),
        (Access(), "127.0.0.1.evil.example:8000", None, 403),
        (Access(), "", None, 403),
        (Access(), "[::1", None, 403),
        (Access(), "localhost", "http://evil.example", 403),
        (Access(), "localhost", "null", 403),
        (Access(), "127.0.0.1/evil", None, 403),
        (Access(), "localhost#evil.com", None, 403),
        (Access(), "evil.com@localhost", None, 403),
        (Access(), "evil.com\\@localhost", None, 403),
        (Access(), "localhost:8000:1", None, 403),
        (Access(), "localhost", "http://evil.com@127.0.0.1", 403),
        (Access(), "localhost", "http://localhost/x", 403),
        (Access(), "localhost", "tauri://localhost", 200),
        (Access(), "localhost:1", "http://[::1]:3000", 200),
        (Access(hosts=frozenset({"box.lan"})), "box.lan:8000", "https://box.lan", 200),
        (Access(hosts=frozenset({"box.lan"})), "evil.box.lan", None, 403),
        (Access(None, frozenset(), True), "192.168.1.5:8000", "http://192.168.1.5:8000", 200),
        (Access(None, frozenset(), True), "[fd00::5]:8000", "http://[fd00::5]:8000", 200),
        (Access(None, frozenset(), True), "192.168.1.5:8000", "http://192.168.1.6:8000", 403),
        (Access(None, frozenset(), True), "192.168.1.5:8000", "http://evil.example", 403),
        # a name that was made to point here, with a page of its own
        (Access(None, frozenset(), True), "evil.example:8000", "http://evil.example:8000", 403),
        (Access(None, frozenset({"box.lan"}), True), "box.lan", "http://box.lan", 200),
    ],
)
def test_hosts_and_origins(serve_with, access, host, origin, status):
    headers = {"Host": host} | ({"Origin": origin} if origin else {})
    with serve_with(access) as client:
        assert post(client, ASK, **headers)[0] == status


def test_a_refusal_names_the_remedy(serve_with):
    with serve_with(Access(KEY)) as client:
        for header in ({"Host": "host.docker.internal:8913"}, {"Origin": "http://box.lan:80"}):
            (name,) = header.values()
            _, answer = post(client, ASK, **header)
            host = name.removeprefix("http://").split(":")[0]
            remedy = f"start serve-local with --allow-host {host}"
            assert answer["error"]["message"].endswith(remedy)


def test_a_key_does_not_excuse_a_foreign_origin(serve_with):
    with serve_with(Access(KEY, frozenset(), True)) as client:
        headers = {"Authorization": f"Bearer {KEY}", "Origin": "http://evil.example"}
        status, answer = post(client, ASK, **headers)
        assert (status, answer["error"]["code"]) == (403, "forbidden_origin")


def test_a_public_bind_needs_a_key_and_names_are_allowed():
    for host in ("0.0.0.0", "192.168.1.1", "example.org", "::"):
        with pytest.raises(UsageError, match=f"got {host}: .*--api-key or TWELL_API_KEY"):
            access_of(host, None, ())
        assert access_of(host, KEY, ["Box.lan"]) == Access(KEY, frozenset({host, "box.lan"}), True)
    assert access_of("127.0.0.1", None, ()) == Access()
    allowed = access_of("127.0.0.1", None, ["::1", "Box.lan", "10.0.0.1"]).hosts
    assert allowed == {"::1", "box.lan", "10.0.0.1"}


@pytest.mark.parametrize("key", ["", "a b", "é", "a\n"])
def test_a_key_that_no_header_can_bear_is_refused(relu_llama, key):
    with pytest.raises(UsageError, match="key must be"):
        serve_local(relu_llama, api_key=key)


def test_allowed_hosts_are_names(relu_llama):
    for name in ("http://box.lan", "box lan", "", "box.lan:8443", "bücher.de"):
        with pytest.raises(UsageError, match="is a name"):
            serve_local(relu_llama, allow_hosts=[name])


def test_the_key_of_the_environment(refusal, monkeypatch, relu_llama):
    monkeypatch.setenv("TWELL_API_KEY", "a b")
    said = refusal("serve-local", relu_llama, code=2)
    assert "the key must be" in said
    assert "a b" not in said


ASKS_FIRST = {
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type,x-stainless-os",
}


@pytest.mark.parametrize("origin", ["http://localhost:3000", "https://chat.example"])
def test_pages_of_friendly_origins_may_ask_and_read(serve_with, origin):
    with serve_with(Access(KEY, frozenset({"chat.example"}))) as client:
        path = "/v1/chat/completions"
        asked = get(client, path, "OPTIONS", Origin=origin, **ASKS_FIRST)  # browsers send no key
        assert asked.status == 204
        assert asked.headers["Access-Control-Allow-Origin"] == origin
        assert asked.headers["Access-Control-Allow-Methods"] == "GET, POST"
        assert "x-stainless-os" in asked.headers["Access-Control-Allow-Headers"]
        for key, status in ((KEY, 200), ("wrong", 401)):
            found = get(client, "/v1/models", Origin=origin, Authorization=f"Bearer {key}")
            assert found.status == status
            assert found.headers["Access-Control-Allow-Origin"] == origin
            assert found.headers["Vary"] == "Origin"


def test_other_pages_may_neither(serve_with):
    with serve_with(Access()) as client:
        evil = {"Origin": "http://evil.example"}
        for answer in (
            get(client, "/v1/chat/completions", "OPTIONS", **evil, **ASKS_FIRST),
            get(client, "/v1/models", **evil),
        ):
            assert answer.status == 403
            assert "Access-Control-Allow-Origin" not in answer.headers
        assert "Access-Control-Allow-Origin" not in get(client, "/v1/models").headers
