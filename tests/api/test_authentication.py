"""Authentication by tokens of an OpenID provider, and rate limits of guesses and requests."""

from collections.abc import Callable

import httpx2
import pytest

from koalapy.daemon.auth.identities import Identities
from koalapy.daemon.auth.pace import FAILURES_AT_ONCE, Pace
from koalapy.model.errors import SiteUnavailable, TokenRejected
from koalapy.model.identity import Identity, Role, Verified
from koalapy.model.limits import Limits, LimitSettings, UserLimits
from koalapy.model.users import User, Users
from tests.serving import URL, bare_application

SIGNED = "head.claims.signature"
GUESSABLE, STRONG = "a-word-of-somebody-s", "f" * 64
USERS = Users({"alice": User(role=Role.OPERATOR, groups=("physics",))})
FIXED = {
    STRONG: Identity("root", Role.ADMIN, "the daemon's own token"),
    GUESSABLE: Identity("bob", Role.USER, "tokens[0] of the configuration", guessable=True),
}
Api = Callable[..., httpx2.AsyncClient]


class Provider:
    """An OpenID provider that gives one answer and caches verified tokens."""

    def __init__(self, answer: Verified | Exception) -> None:
        self.answer, self.seen, self.asked = answer, set[str](), 0

    def cached_result(self, token: str) -> Verified | None:
        return self.answer if token in self.seen and isinstance(self.answer, Verified) else None

    async def verify_token(self, token: str) -> Verified:
        self.asked += 1
        if isinstance(self.answer, Exception):
            raise self.answer
        self.seen.add(token)
        return self.answer


def make_client(
    provider: Provider | None = None, limits: LimitSettings | None = None, contact: str = ""
) -> httpx2.AsyncClient:
    identities = Identities(FIXED, None, USERS, lambda: 1000.0, provider)
    pace = Pace(Limits(limits, USERS.groups_of, contact))
    app = bare_application(identities, pace=pace)
    return httpx2.AsyncClient(transport=httpx2.ASGITransport(app, client=("192.0.2.7", 1)), base_url=URL)


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


@pytest.mark.parametrize(
    ("verified", "role"),
    [
        (Verified("alice", None, 2000.0), Role.OPERATOR),
        (Verified("alice", Role.USER, 2000.0), Role.OPERATOR),
        (Verified("alice", Role.ADMIN, 2000.0), Role.ADMIN),
        (Verified("carl", None, 2000.0), Role.USER),
        (Verified("carl", Role.OPERATOR, 2000.0), Role.OPERATOR),
    ],
)
async def test_provider_token_maps_to_configured_role(verified: Verified, role: Role) -> None:
    identities = Identities(FIXED, None, USERS, lambda: 1000.0, Provider(verified))
    assert identities.find_identity(SIGNED) is None
    identity = await identities.verify_token(SIGNED)
    assert identity is not None
    assert (identity.user, identity.role, identity.expires_at) == (verified.user, role, 2000.0)
    assert identity.groups == USERS.groups_of(verified.user)
    assert identities.find_identity(SIGNED) == identity


async def test_provider_token_is_verified_once() -> None:
    provider = Provider(Verified("alice", None, 2000.0))
    async with make_client(provider) as client:
        for _ in range(3):
            assert (await client.get("/api/v1/whoami", headers=bearer(SIGNED))).status_code == 200
    assert provider.asked == 1


async def test_rejected_provider_token_reports_reason() -> None:
    async with make_client(Provider(TokenRejected("The token is expired"))) as client:
        answer = await client.get("/api/v1/whoami", headers=bearer(SIGNED))
        assert answer.status_code == 401
        assert "The token is expired" in answer.json()["detail"]


@pytest.mark.evidence("O4")
async def test_unreachable_provider_rejects_only_its_tokens() -> None:
    async with make_client(Provider(SiteUnavailable("the keys cannot be had"))) as client:
        answer = await client.get("/api/v1/whoami", headers=bearer(SIGNED))
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "10")
        assert (await client.get("/api/v1/whoami", headers=bearer(STRONG))).status_code == 200


async def test_signed_token_without_provider_returns_401() -> None:
    async with make_client() as client:
        assert (await client.get("/api/v1/whoami", headers=bearer(SIGNED))).status_code == 401


@pytest.mark.evidence("N2", "C14")
async def test_token_guesses_are_rate_limited_except_strong_tokens() -> None:
    provider = Provider(Verified("alice", None, 2000.0))
    async with make_client(provider) as client:
        assert (await client.get("/api/v1/whoami", headers=bearer(GUESSABLE))).status_code == 200
        statuses = [
            (await client.get("/api/v1/whoami", headers=bearer(f"a-guess-{number}"))).status_code
            for number in range(int(FAILURES_AT_ONCE) + 2)
        ]
        assert set(statuses[: int(FAILURES_AT_ONCE)]) == {401}
        assert statuses[-1] == 429
        # The right token is rejected too, or guessing could go on.
        limited = await client.get("/api/v1/whoami", headers=bearer(GUESSABLE))
        assert (limited.status_code, int(limited.headers["retry-after"]) > 0) == (429, True)
        for token in (STRONG, SIGNED):
            assert (await client.get("/api/v1/whoami", headers=bearer(token))).status_code == 200
        assert (await client.get("/api/v1/whoami")).status_code == 401
        assert (await client.get("/livez", headers=bearer("another-guess"))).status_code == 200


@pytest.mark.evidence("U10", "C14", "M5")
async def test_user_request_rate_limit_returns_429_with_retry_after() -> None:
    limits = LimitSettings(users={"bob": UserLimits(requests_per_second=0.2)})
    async with make_client(limits=limits, contact="write to grid@example.org") as client:
        assert (await client.get("/api/v1/whoami", headers=bearer(GUESSABLE))).status_code == 200
        refused = await client.get("/api/v1/whoami", headers=bearer(GUESSABLE))
        problem = refused.json()
        assert (refused.status_code, problem["field"]) == (429, "limits.requests_per_second")
        assert (problem["value"], problem["hint"]) == ({"limit": 0.2}, "write to grid@example.org")
        assert "of bob is 0.2" in problem["detail"]
        assert 1 <= int(refused.headers["retry-after"]) <= 5
        for _ in range(5):
            assert (await client.get("/api/v1/whoami", headers=bearer(STRONG))).status_code == 200
