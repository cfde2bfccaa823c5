"""Login at an OpenID provider, which is simulated for the browser and the daemon."""

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
    """A provider that authenticates every browser as ``subject``."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.subject, self.claims = "5f1c", dict[str, Any]()
        self.login_queries: dict[str, dict[str, str]] = {}
        self.token_requests: list[dict[str, str]] = []

    def id_token(self, nonce: str) -> str:
        now = int(time.time())
        claims = {"iss": self.url, "aud": "koala", "iat": now, "exp": now + 300, "sub": self.subject, "nonce": nonce}
        return jwt.encode({"alg": "ES256", "kid": KEY.kid}, claims | self.claims, KEY)


class Handler(BaseHTTPRequestHandler):
    server: Provider

    def do_GET(self) -> None:
        """Authenticate the browser at once, and redirect it."""
        query = dict(parse_qsl(urlsplit(self.path).query))
        code = f"code-{len(self.server.login_queries)}"
        self.server.login_queries[code] = query
        self.send_response(302)
        self.send_header("Location", f"{query['redirect_uri']}?{urlencode({'state': query['state'], 'code': code})}")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def do_POST(self) -> None:
        """Answer a token request of the daemon."""
        form = {n: v[0] for n, v in parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode()).items()}
        self.server.token_requests.append(form | {"authorization": self.headers.get("Authorization", "")})
        login_query = self.server.login_queries.pop(form["code"], None)
        challenge = base64.urlsafe_b64encode(hashlib.sha256(form["code_verifier"].encode()).digest()).rstrip(b"=")
        if (
            login_query is None
            or login_query["code_challenge"] != challenge.decode()
            or login_query["redirect_uri"] != form["redirect_uri"]
        ):
            self._answer(400, {"error": "invalid_grant"})
        else:
            self._answer(200, {"id_token": self.server.id_token(login_query["nonce"]), "token_type": "Bearer"})

    def _answer(self, status: int, content: dict[str, Any]) -> None:
        body = json.dumps(content).encode()
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
    """A daemon with a configured provider."""
    folder = tmp_path_factory.mktemp("provider")
    keys = Path(folder, "keys.json")
    keys.write_text(json.dumps({"keys": [KEY.as_dict(private=False)]}))
    oidc_settings = {
        "issuer": provider.url,
        "audience": "koala",
        "jwks_file": str(keys),
        "users": {"5f1c": "alice"},
        "authorization_endpoint": f"{provider.url}/authorize",
        "token_endpoint": f"{provider.url}/token",
        "client_secret": "between-us-alone",
    }
    running = EmbeddedGrid(folder / "koala", KOALA_OIDC=json.dumps(oidc_settings)).start()
    yield running
    close_grid(running)


@pytest.fixture
def client(grid: EmbeddedGrid) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=grid.url, headers={"Accept": "text/html"}, timeout=60.0) as client:
        yield client


def log_in_at_provider(person: httpx2.Client, then: str = "/") -> str:
    """Log in at the provider and return the callback address."""
    response = person.get("/login/provider", params={"next": then})
    assert response.status_code == 303
    callback = httpx2.get(response.headers["location"], timeout=60.0)
    return str(callback.headers["location"])


def test_login_at_provider_shows_page(browser: Any, grid: EmbeddedGrid) -> None:
    from tests.dashboard.browser import Visitor

    visitor = Visitor(browser, grid.url, "")
    visitor.page.goto("/now.json")
    visitor.page.get_by_role("link", name="Log in at your organisation").click()
    visitor.page.wait_for_url("**/now.json")
    visitor.open("/")
    assert "alice" in visitor.page.locator(".who").inner_text()
    visitor.close()


def test_token_request_authenticates_daemon(client: httpx2.Client, provider: Provider) -> None:
    assert client.get(log_in_at_provider(client)).status_code == 200
    secret = base64.b64encode(b"koala:between-us-alone").decode()
    assert provider.token_requests[-1]["authorization"] == f"Basic {secret}"
    assert client.get("/").status_code == 200


@pytest.mark.evidence("O3")
def test_login_callback_is_valid_once(client: httpx2.Client, grid: EmbeddedGrid) -> None:
    back = log_in_at_provider(client)
    assert client.get(back).status_code == 200
    with httpx2.Client(
        base_url=grid.url, headers={"Accept": "text/html"}, cookies=client.cookies, timeout=60.0
    ) as again:
        assert again.get(back).status_code == 401


@pytest.mark.evidence("O3")
def test_login_callback_of_other_browser_is_rejected(client: httpx2.Client, grid: EmbeddedGrid) -> None:
    back = log_in_at_provider(client)
    with httpx2.Client(base_url=grid.url, headers={"Accept": "text/html"}, timeout=60.0) as victim:
        answer = victim.get(back)
        assert (answer.status_code, "koala_" in answer.headers.get("set-cookie", "")) == (401, False)


@pytest.mark.evidence("O3")
@pytest.mark.parametrize("claims", [{"nonce": "another"}, {"aud": "others"}, {"sub": "nobody"}, {"exp": 1}])
def test_login_with_wrong_id_token_is_rejected(
    client: httpx2.Client, provider: Provider, claims: dict[str, Any]
) -> None:
    provider.claims = claims
    try:
        answer = client.get(log_in_at_provider(client))
    finally:
        provider.claims = {}
    assert (answer.status_code, "set-cookie" in answer.headers) == (401, False)


def test_login_error_of_provider_is_shown_escaped(client: httpx2.Client) -> None:
    answer = client.get("/login/callback", params={"error": "<script>no</script>", "state": "x"})
    assert answer.status_code == 401
    assert "&lt;script&gt;no" in answer.text


def test_login_code_of_terminal_is_valid_once(client: httpx2.Client, grid: EmbeddedGrid) -> None:
    address = grid.run_koala("dashboard").stdout.strip()
    assert address.startswith(f"{grid.url}/login?code=")
    page = client.get(address)
    assert "Log in as" in page.text
    code = parse_qs(urlsplit(address).query)["code"][0]
    headers = {"Origin": grid.url}
    assert client.post("/login", data={"code": code, "next": "/"}, headers=headers).status_code == 303
    assert client.get("/").status_code == 200
    assert client.post("/login", data={"code": code}, headers=headers).status_code == 401
    assert client.get(address).status_code == 401
