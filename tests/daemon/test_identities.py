"""Tokens: permissions, lifetimes, revocation, and the end of their open requests."""

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import replace

import pytest

from koalapy.daemon.auth.identities import DEFAULT_SPAN, PREFIX, RETENTION, Identities, TokenOrder, agent_of
from koalapy.model.errors import ConflictError, ForbiddenError, StoreUnavailable, TokenRejected
from koalapy.model.identity import Identity, Role, Verified
from koalapy.model.users import User, Users
from koalapy.store.records import StoredToken
from koalapy.store.service_tables import TokenStore
from tests.memory_stores import memory_stores

OWN = "the-daemon's-own-token"
ROOT = Identity("root", Role.ADMIN, "the daemon's own token")
ALICE = TokenOrder("alice", Role.USER)
USERS = Users({"alice": User(groups=("physics",))})


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


class Store(TokenStore):
    fails = False
    written = 0

    def save_tokens(self, tokens: object) -> None:
        if self.fails:
            raise StoreUnavailable("the database does not answer")
        self.written += 1
        super().save_tokens(tokens)  # type: ignore[arg-type]


class Place:
    """A database and a clock that outlive daemons, with the identities of the present daemon."""

    def __init__(self, **options: int) -> None:
        self.clock, self._more = Clock(), options
        self.database = memory_stores().jobs.database
        self.open_identities()

    def open_identities(self) -> None:
        self.store = Store(self.database)
        self.identities = Identities({OWN: ROOT}, self.store, USERS, self.clock, **self._more)

    async def create_token(
        self, order: TokenOrder = ALICE, caller: Identity = ROOT
    ) -> tuple[StoredToken, str, Identity]:
        token, token_text = await self.identities.create_token(order, caller)
        identity = self.identities.find_identity(token_text)
        assert identity is not None
        return token, token_text, identity


@pytest.fixture
def place() -> Place:
    return Place()


@pytest.mark.evidence("T1")
async def test_token_identifies_user_and_is_stored_as_digest(place: Place) -> None:
    token, token_text, identity = await place.create_token(TokenOrder("alice", Role.OPERATOR, 60.0, "for the crontab"))
    assert identity == Identity("alice", Role.OPERATOR, "token 1", ("physics",), 1, 1060.0)
    assert token_text.startswith(PREFIX)
    assert len(token_text) >= len(PREFIX) + 43
    assert token_text not in repr((token, identity, place.store.tokens(), vars(place.identities)))
    assert (token.note, token.created_by) == ("for the crontab", "root")


async def test_tokens_are_unique_and_changed_tokens_invalid(place: Place) -> None:
    token_text = {(await place.create_token())[1] for _ in range(20)}
    assert len(token_text) == 20
    for near in ("", " ", token_text.pop()[:-1], "\udcff", PREFIX, "a" * 100_000):
        assert place.identities.find_identity(near) is None


@pytest.mark.evidence("C4", "T3")
async def test_token_is_valid_until_expiry(place: Place) -> None:
    _, token_text, _ = await place.create_token(TokenOrder("alice", Role.USER, 60.0))
    place.clock.now += 59.9
    assert place.identities.find_identity(token_text)
    place.clock.now += 0.1
    assert place.identities.find_identity(token_text) is None
    place.open_identities()
    assert place.identities.find_identity(token_text) is None


async def test_token_without_lifetime_has_default_expiry(place: Place) -> None:
    assert (await place.create_token())[0].expires_at == 1000.0 + DEFAULT_SPAN
    assert (await place.create_token(TokenOrder("alice", Role.USER, None)))[0].expires_at is None


async def test_token_revoked_is_invalid_after_restart(place: Place) -> None:
    _, token_text, _ = await place.create_token()
    _, other_text, _ = await place.create_token()
    await place.identities.revoke_tokens([1], ROOT)
    assert place.identities.find_identity(token_text) is None
    place.open_identities()
    assert place.identities.find_identity(token_text) is None
    assert place.identities.find_identity(other_text)


@pytest.mark.evidence("T4")
async def test_token_revoked_without_database_is_invalid_and_reported(place: Place) -> None:
    _, token_text, _ = await place.create_token()
    place.store.fails = True
    with pytest.raises(StoreUnavailable):
        await place.identities.revoke_tokens([1], ROOT)
    assert place.identities.find_identity(token_text) is None
    place.store.fails = False
    await place.identities.revoke_tokens([1], ROOT)
    place.open_identities()
    assert place.identities.find_identity(token_text) is None


async def test_create_token_without_database_is_rejected(place: Place) -> None:
    place.store.fails = True
    with pytest.raises(StoreUnavailable):
        await place.identities.create_token(ALICE, ROOT)
    assert place.identities.list_tokens(ROOT, every=True) == []


# Permissions


@pytest.mark.evidence("U11", "T2")
@pytest.mark.parametrize(
    "order", [TokenOrder("bob", Role.USER), TokenOrder("alice", Role.OPERATOR), TokenOrder("alice", Role.ADMIN)]
)
@pytest.mark.parametrize("role", [Role.USER, Role.OPERATOR])
async def test_create_token_beyond_permission_is_rejected(place: Place, order: TokenOrder, role: Role) -> None:
    alice = Identity("alice", role, "alice on north")
    if order.user == "alice" and alice.has_role(order.role):
        await place.identities.create_token(order, alice)
        return
    with pytest.raises(ForbiddenError):
        await place.identities.create_token(order, alice)
    assert place.identities.list_tokens(ROOT) == []


@pytest.mark.evidence("U11", "T2")
async def test_create_token_by_user_expires_with_own_token(place: Place) -> None:
    alice = Identity("alice", Role.USER, "alice on north", expires_at=1600.0)
    for lifetime, got in ((None, 1600.0), (9000.0, 1600.0), (60.0, 1060.0)):
        assert (await place.identities.create_token(TokenOrder("alice", Role.USER, lifetime), alice))[
            0
        ].expires_at == got


async def test_token_of_login_names_its_site(place: Place) -> None:
    _, login = await place.identities.issue_token("ada", Role.USER, None, agent_of("north"), how="ada on north")
    _, elsewhere = await place.identities.issue_token("ada", Role.USER, None, agent_of("south"), how="ada on north")
    _, token_text, _ = await place.create_token(caller=Identity("alice", Role.USER, "alice on north"))
    for _ in range(2):
        assert [who and who.site for who in map(place.identities.find_identity, (login, elsewhere, token_text))] == [
            "north",
            "",
            "",
        ]
        place.open_identities()


@pytest.mark.evidence("U15", "T4")
async def test_revoke_tokens_includes_derived_tokens(place: Place) -> None:
    _, first, alice = await place.create_token()
    _, second, again = await place.create_token(caller=alice)
    _, third, _ = await place.create_token(caller=again)
    _, other_text, _ = await place.create_token()
    assert [token.id for token in await place.identities.revoke_tokens([1], ROOT)] == [1, 2, 3]
    assert [
        place.identities.find_identity(token_text) is None for token_text in (first, second, third, other_text)
    ] == [True, True, True, False]


async def test_create_token_by_token_being_revoked_is_rejected(place: Place) -> None:
    _, _, alice = await place.create_token()
    async with place.identities._changing:
        making = asyncio.ensure_future(place.identities.create_token(ALICE, alice))
        revoking = asyncio.ensure_future(place.identities.revoke_tokens([1], ROOT))
        await asyncio.sleep(0)
    with pytest.raises(ForbiddenError):
        await making
    await revoking


async def test_create_token_during_revocation_of_maker_is_rejected(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, _, alice = await place.create_token()
    save, writing, go_on = place.store.save_tokens, threading.Event(), threading.Event()

    def slow(tokens: Sequence[StoredToken]) -> None:
        if [token.id for token in tokens] == [2]:
            writing.set()
            assert go_on.wait(30)
        save(tokens)

    monkeypatch.setattr(place.store, "save_tokens", slow)
    making = asyncio.ensure_future(place.identities.create_token(ALICE, alice))
    await asyncio.to_thread(writing.wait, 30)
    revoking = asyncio.ensure_future(place.identities.revoke_tokens([1], ROOT))
    await asyncio.sleep(0)
    go_on.set()
    with pytest.raises(ForbiddenError):
        await making
    assert [token.id for token in await revoking] == [1, 2]
    assert place.identities.list_tokens(ROOT) == []
    place.open_identities()
    assert place.identities.list_tokens(ROOT) == []


async def test_create_token_beyond_limit_is_rejected() -> None:
    place = Place(max_tokens=2)
    await place.create_token()
    await place.create_token(TokenOrder("alice", Role.USER, 10.0))
    with pytest.raises(ConflictError, match="alice has 2 tokens already"):
        await place.identities.create_token(ALICE, ROOT)
    await place.create_token(TokenOrder("bob", Role.USER))
    place.clock.now += 10
    await place.create_token()


# List and revoke


async def test_revoke_all_keeps_token_of_daemon(place: Place) -> None:
    token_text = [(await place.create_token())[1] for _ in range(3)]
    assert len(await place.identities.revoke_all()) == 3
    assert [place.identities.find_identity(text) for text in token_text] == [None] * 3
    assert place.identities.find_identity(OWN) == ROOT


# Open requests


async def test_requests_end_when_token_is_revoked(place: Place) -> None:
    ended: list[str] = []
    _, _, alice = await place.create_token()
    _, _, bob = await place.create_token(TokenOrder("bob", Role.USER))
    with (
        place.identities.end_on_expiry(alice, lambda: ended.append("alice")),
        place.identities.end_on_expiry(alice, lambda: ended.append("alice too")),
        place.identities.end_on_expiry(bob, lambda: ended.append("bob")),
        place.identities.end_on_expiry(ROOT, lambda: ended.append("root")),
    ):
        await place.identities.revoke_tokens([1], ROOT)
        assert sorted(ended) == ["alice", "alice too"]
    await place.identities.revoke_tokens([2], ROOT)
    assert sorted(ended) == ["alice", "alice too"]


# Time of last use


async def test_last_use_is_known_at_once_and_stored_later(place: Place) -> None:
    _, token_text, _ = await place.create_token()
    place.clock.now += 5
    written = place.store.written
    for _ in range(100):
        place.identities.find_identity(token_text)
    assert place.identities.list_tokens(ROOT)[0].last_used_at == 1005.0
    assert place.store.written == written
    await place.identities.store_last_uses()
    await place.identities.store_last_uses()
    assert place.store.written == written + 1
    place.open_identities()
    assert place.identities.list_tokens(ROOT)[0].last_used_at == 1005.0


async def test_store_last_uses_keeps_revocation(place: Place) -> None:
    _, token_text, _ = await place.create_token()
    async with place.identities._changing:
        storing = asyncio.ensure_future(place.identities.store_last_uses())
        revoking = asyncio.ensure_future(place.identities.revoke_tokens([1], ROOT))
        await asyncio.sleep(0)
    await asyncio.gather(storing, revoking)
    place.open_identities()
    assert place.identities.find_identity(token_text) is None


async def test_store_last_uses_without_database_is_retried(place: Place) -> None:
    await place.create_token()
    place.store.fails = True
    await place.identities.store_last_uses()
    assert place.identities.list_tokens(ROOT)[0].last_used_at == 1000.0


# Expired tokens


async def test_expired_tokens_stay_listed_and_keep_numbers(place: Place) -> None:
    await place.create_token(TokenOrder("alice", Role.USER, 10.0))
    await place.create_token()
    await place.create_token(TokenOrder("alice", Role.USER, 10.0))
    await place.identities.revoke_tokens([2], ROOT)
    place.clock.now += 10
    assert place.identities.list_tokens(ROOT) == []
    assert [token.id for token in place.identities.list_tokens(ROOT, every=True)] == [1, 2, 3]
    assert await place.identities.remove_expired() == 0
    place.clock.now += RETENTION + 1
    assert await place.identities.remove_expired() == 2
    place.open_identities()
    assert [token.id for token in place.identities.list_tokens(ROOT, every=True)] == [3]
    assert (await place.create_token())[0].id == 4


async def test_revoke_tokens_follows_expired_makers(place: Place) -> None:
    _, _, stolen = await place.create_token(TokenOrder("root", Role.ADMIN, None))
    _, _, between = await place.create_token(TokenOrder("root", Role.ADMIN, 10.0), stolen)
    _, _, again = await place.create_token(TokenOrder("root", Role.ADMIN, 10.0), between)
    _, survivor, _ = await place.create_token(TokenOrder("root", Role.ADMIN, None), again)
    await place.create_token(TokenOrder("alice", Role.USER, 10.0), between)
    await place.create_token()
    place.clock.now += RETENTION + 11
    assert await place.identities.remove_expired() == 1
    place.open_identities()
    assert [token.id for token in await place.identities.revoke_tokens([1], ROOT)] == [1, 2, 3, 4]
    assert place.identities.find_identity(survivor) is None
    place.clock.now += RETENTION + 1
    assert await place.identities.remove_expired() == 4


async def test_token_with_unknown_role_is_invalid(place: Place) -> None:
    _, token_text, _ = await place.create_token()
    [stored] = place.store.tokens()
    place.store.save_tokens([replace(stored, role="god")])
    place.open_identities()
    assert place.identities.find_identity(token_text) is None


# Roles from all sources, and reserved names


class Provider:
    """An OpenID provider that makes carol an administrator."""

    def cached_result(self, token: str) -> Verified | None:
        return self.verified if token == "a.b.c" else None

    async def verify_token(self, token: str) -> Verified:
        return self.verified

    def role_of(self, user: str) -> Role:
        return Role.ADMIN if user == "carol" else Role.USER

    def __init__(self, user: str = "carol") -> None:
        self.verified = Verified(user, Role.ADMIN, 2000.0)


def from_all_sources(place: Place, provider: Provider) -> Identities:
    fixed = {OWN: ROOT, "the-token-of-dave": Identity("dave", Role.ADMIN, "tokens[0] of the configuration")}
    users = Users({"erin": User(role=Role.ADMIN), "frank": User({"north": "games"})})
    return Identities(fixed, place.store, users, place.clock, provider, {"koala"})


async def test_role_of_user_is_highest_of_all_sources(place: Place) -> None:
    await place.create_token(TokenOrder("grace", Role.OPERATOR, 60.0))
    await place.create_token(TokenOrder("grace", Role.ADMIN, 30.0))
    identities = from_all_sources(place, Provider())
    for user in ("root", "carol", "dave", "erin", "koala", "grace", "dave@north", "koala@north"):
        assert identities.role_of(user) is Role.ADMIN, user
    for user in ("frank", "heidi", "games@north", ""):
        assert identities.role_of(user) is Role.USER, user
    place.clock.now += 30.0
    assert identities.role_of("grace") is Role.OPERATOR
    await identities.revoke_tokens([1], ROOT)
    assert identities.role_of("grace") is Role.USER


async def test_provider_token_with_reserved_name_is_rejected(place: Place) -> None:
    identities = from_all_sources(place, Provider("koala"))
    with pytest.raises(TokenRejected, match=r"the user koala is the daemon's own; .* oidc\.users"):
        await identities.verify_token("a.b.c")
    assert identities.find_identity("a.b.c") is None


async def test_create_token_for_reserved_name_is_rejected(place: Place) -> None:
    identities = from_all_sources(place, Provider())
    with pytest.raises(ForbiddenError) as refusal:
        await identities.create_token(TokenOrder("koala", Role.USER), ROOT)
    assert refusal.value.field == "user"
    await identities.create_token(
        TokenOrder("koala", Role.ADMIN), Identity("koala", Role.ADMIN, "the daemon's own token")
    )
