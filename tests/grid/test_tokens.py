"""A real daemon with people of its own: tokens that are made and revoked, those of a provider, and limits."""

import json
import subprocess
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from joserfc import jwt
from joserfc.jwk import ECKey

from tests.grid.embedded import Embedded, close

pytestmark = [pytest.mark.processes, pytest.mark.grid]
KEY = ECKey.generate_key("P-256", {"kid": "k1"})
ISSUER = "https://sso.example.org"
LIMITS = {"default": {"nodes": 3, "node_hours_per_day": 100}}


def signed(**claims: object) -> str:
    told = {"iss": ISSUER, "aud": "koala", "sub": "1", "preferred_username": "carl", "exp": int(time.time()) + 3600}
    return jwt.encode({"alg": "ES256", "kid": "k1"}, told | claims, KEY, algorithms=["ES256"])


class Keys(BaseHTTPRequestHandler):
    """A provider's keys."""

    def do_GET(self) -> None:
        body = json.dumps({"keys": [KEY.as_dict(private=False)]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Nothing is said."""


@pytest.fixture(scope="module")
def grid(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Embedded]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Keys) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        oidc = {
            "issuer": ISSUER,
            "audience": "koala",
            "jwks_uri": f"http://127.0.0.1:{server.server_port}/jwks",
            "claim": "preferred_username",
            "pattern": "(.+)",
        }
        more = {"KOALA_OIDC": json.dumps(oidc), "KOALA_LIMITS": json.dumps(LIMITS), "KOALA_LIMITS_CONTACT": "ask ada"}
        grid = Embedded(tmp_path_factory.mktemp("tokens") / "data", **more).start()
        yield grid
        close(grid)
        server.shutdown()


def koala(grid: Embedded, *words: str, token: str = "") -> "subprocess.CompletedProcess[str]":
    """A command, by default of the daemon's own account."""
    shown = {"KOALA_TOKEN": token} if token else {}
    environment = grid.environment | {"KOALA_URL": grid.url} | shown
    return subprocess.run([*grid.koala, *words], env=environment, capture_output=True, text=True, timeout=60)


def made(grid: Embedded, user: str) -> str:
    done = koala(grid, "token", "create", "--user", user, "--expires", "8h", "-q")
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_what_is_followed_ends_with_its_token_and_the_job_does_not(grid: Embedded) -> None:
    alice = made(grid, "alice")
    program = ("sh", "-c", "echo so far; sleep 600")
    done = koala(
        grid,
        "submit",
        "-q",
        "--flexible",
        "1",
        "--launcher",
        "processes",
        "--walltime",
        "1h",
        "--",
        *program,
        token=alice,
    )
    job = done.stdout.strip()
    assert job.isdecimal(), done.stderr
    environment = grid.environment | {"KOALA_URL": grid.url, "KOALA_TOKEN": alice}
    following = subprocess.Popen(
        [*grid.koala, "logs", "-f", job], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert following.stdout is not None
    assert following.stdout.readline() == "so far\n"
    (number,) = [
        one["id"] for one in json.loads(koala(grid, "token", "list", "--user", "alice", "--json").stdout)["tokens"]
    ]
    assert koala(grid, "token", "revoke", str(number)).returncode == 0
    _, said = following.communicate(timeout=60)
    assert (following.returncode, "no valid token" in said) == (4, True), said
    shown = json.loads(koala(grid, "show", job, "--json").stdout)
    assert (shown["state"], shown["owner"]) == ("running", "alice")
    assert koala(grid, "cancel", job).returncode == 0


def test_a_provider_s_token_lets_in_and_another_does_not(grid: Embedded) -> None:
    carl = signed()
    shown = json.loads(koala(grid, "limits", "--json", token=carl).stdout)
    assert shown["user"] == "carl"
    for bad in (signed(aud="another"), signed(exp=int(time.time()) - 60), f"{carl[:-4]}AAAA"):
        assert koala(grid, "queue", token=bad).returncode == 4


def test_who_has_as_much_as_may_be_waits_and_is_told_also_after_a_restart(grid: Embedded) -> None:
    bob = made(grid, "bob")
    options = ("submit", "-q", "--flexible", "2", "--launcher", "processes", "--walltime", "1h", "--", "sleep", "600")
    jobs = [koala(grid, *options, token=bob).stdout.strip() for _ in range(2)]
    reason = "the limit nodes of bob is 3: 2 are in use and 2 more asked for; ask ada"
    assert reason in koala(grid, "explain", jobs[1], token=bob).stdout
    refused = koala(grid, "submit", "--flexible", "4", "--", "true", token=bob)
    assert (refused.returncode, "the limit nodes of bob is 3" in refused.stderr) == (4, True)
    grid.kill()
    grid.start()
    assert reason in koala(grid, "explain", jobs[1], token=bob).stdout
    assert koala(grid, "cancel", *jobs, token=bob).returncode == 0
