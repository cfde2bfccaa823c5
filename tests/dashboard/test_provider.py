"""A browser that logs in at an OpenID provider, which is played here as far as a browser and the daemon see it."""

import base64
import hashlib
import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, parse_qsl, urlencode, urlsplit

import httpx2
import pytest
from joserfc import jwt
from joserfc.jwk import ECKey

from tests.grid.embedded import EmbeddedGrid, close_grid

KEY = ECKey.generate_key("P-256", {"kid": "ec"})


class Provider(ThreadingHTTPServer):
    """Logs everybody in as ``subject`` who is sent to it."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.subject, self.claims = "5f1c", dict[str, Any]()
        self.begun: dict[str, dict[str, str]] = {}
        self.asked: list[dict[str, str]] = []

    def id_token(self, nonce: str) -> str:
        now = int(time.time())
        told = {"iss": self.url, "aud": "koala", "iat": now, "exp": now + 300, "sub": self.subject, "nonce": nonce}
        return jwt.encode({"alg": "ES256", "kid": KEY.kid}, told | self.claims, KEY)


class Handler(BaseHTTPRequestHandler):
    server: Provider

    def do_GET(self) -> None:
        """The page where a browser logs in: at once."""
        asked = dict(parse_qsl(urlsplit(self.path).query))
        code = f"code-{len(self.server.begun)}"
        self.server.begun[code] = asked
        self.send_response(302)
        self.send_header("Location", f"{asked['redirect_uri']}?{urlencode({'state': asked['state'], 'code': code})}")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def do_POST(self) -> None:
        """The daemon asks for a token."""
        told = {n: v[0] for n, v in parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode()).items()}
        self.server.asked.append(told | {"authorization": self.headers.get("Authorization", "")})
        begun = self.server.begun.pop(told["code"], None)
        challenge = base64.urlsafe_b64encode(hashlib.sha256(told["code_verifier"].encode()).digest()).rstrip(b"=")
        if (
            begun is None
            or begun["code_challenge"] != challenge.decode()
            or begun["redirect_uri"] != told["redirect_uri"]
        ):
            self._answer(400, {"error": "invalid_grant"})
        else:
            self._answer(200, {"id_token": self.server.id_token(begun["nonce"]), "token_type": "Bearer"})

    def _answer(self, status: int, told: dict[str, Any]) -> None:
        body = json.dumps(told).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture(scope="module")
def provider() -> Iterator[Provider]:
    with Provider() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture(scope="module")
def grid(tmp_path_factory: pytest.TempPathFactory, provider: Provider) -> Iterator[EmbeddedGrid]:
    """A daemon that knows the provider."""
    folder = tmp_path_factory.mktemp("provider")
    keys = Path(folder, "keys.json")
    keys.write_text(json.dumps({"keys": [KEY.as_dict(private=False)]}))
    told = {
        "issuer": provider.url,
        "audience": "koala",
        "jwks_file": str(keys),
        "users": {"5f1c": "alice"},
        "authorization_endpoint": f"{provider.url}/authorize",
        "token_endpoint": f"{provider.url}/token",
        "client_secret": "between-us-alone",
    }
    running = EmbeddedGrid(folder / "koala", KOALA_OIDC=json.dumps(told)).start()
    yield running
    close_grid(running)


@pytest.fixture
def person(grid: EmbeddedGrid) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=grid.url, headers={"Accept": "text/html"}, timeout=60.0) as client:
        yield client


def sent_back(person: httpx2.Client, then: str = "/") -> str:
    """To the provider, and where it leads the browser to then."""
    begun = person.get("/login/provider", params={"next": then})
    assert begun.status_code == 303
    back = httpx2.get(begun.headers["location"], timeout=60.0)
    return str(back.headers["location"])


def test_who_logs_in_at_the_provider_is_let_in(browser: Any, grid: EmbeddedGrid) -> None:
    from tests.dashboard.browser import Visitor

    visitor = Visitor(browser, grid.url, "")
    visitor.page.goto("/now.json")
    visitor.page.get_by_role("link", name="Log in at your organisation").click()
    visitor.page.wait_for_url("**/now.json")
    visitor.open("/")
    assert "alice" in visitor.page.locator(".who").inner_text()
    visitor.close()


def test_the_daemon_says_who_it_is_and_that_it_began_this(person: httpx2.Client, provider: Provider) -> None:
    assert person.get(sent_back(person)).status_code == 200
    secret = base64.b64encode(b"koala:between-us-alone").decode()
    assert provider.asked[-1]["authorization"] == f"Basic {secret}"
    assert person.get("/").status_code == 200


@pytest.mark.evidence("O3")
def test_what_comes_back_counts_once(person: httpx2.Client, grid: EmbeddedGrid) -> None:
    back = sent_back(person)
    assert person.get(back).status_code == 200
    with httpx2.Client(
        base_url=grid.url, headers={"Accept": "text/html"}, cookies=person.cookies, timeout=60.0
    ) as again:
        assert again.get(back).status_code == 401


@pytest.mark.evidence("O3")
def test_nobody_is_logged_in_by_a_link_of_somebody_else(person: httpx2.Client, grid: EmbeddedGrid) -> None:
    back = sent_back(person)
    with httpx2.Client(base_url=grid.url, headers={"Accept": "text/html"}, timeout=60.0) as victim:
        answer = victim.get(back)
        assert (answer.status_code, "koala_" in answer.headers.get("set-cookie", "")) == (401, False)


@pytest.mark.evidence("O3")
@pytest.mark.parametrize("claims", [{"nonce": "another"}, {"aud": "others"}, {"sub": "nobody"}, {"exp": 1}])
def test_an_id_token_that_is_not_for_this_login_logs_nobody_in(
    person: httpx2.Client, provider: Provider, claims: dict[str, Any]
) -> None:
    provider.claims = claims
    try:
        answer = person.get(sent_back(person))
    finally:
        provider.claims = {}
    assert (answer.status_code, "set-cookie" in answer.headers) == (401, False)


def test_what_a_provider_has_against_it_is_shown_and_escaped(person: httpx2.Client) -> None:
    answer = person.get("/login/callback", params={"error": "<script>no</script>", "state": "x"})
    assert answer.status_code == 401
    assert "&lt;script&gt;no" in answer.text


def test_a_code_of_the_terminal_logs_a_browser_in_once(person: httpx2.Client, grid: EmbeddedGrid) -> None:
    address = grid.run_koala("dashboard").stdout.strip()
    assert address.startswith(f"{grid.url}/login?code=")
    page = person.get(address)
    assert "Log in as" in page.text
    code = parse_qs(urlsplit(address).query)["code"][0]
    headers = {"Origin": grid.url}
    assert person.post("/login", data={"code": code, "next": "/"}, headers=headers).status_code == 303
    assert person.get("/").status_code == 200
    assert person.post("/login", data={"code": code}, headers=headers).status_code == 401
    assert person.get(address).status_code == 401
