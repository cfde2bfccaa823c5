"""Tokens that were asked for: who may have which, for how long, and what ends with them."""

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import replace

import pytest

from koalapy.daemon.auth.identities import DEFAULT_SPAN, PREFIX, RETENTION, Identities, TokenOrder, agent_of
from koalapy.model.errors import ConflictError, ForbiddenError, NotFoundError, StoreUnavailable, TokenRejected
from koalapy.model.identity import Identity, Role, Verified
from koalapy.model.users import User, Users
from koalapy.ports import StoredToken
from koalapy.store.service_tables import SqlTokens
from tests.memory_stores import memory_stores

OWN = "the-daemon's-own-token"
ROOT = Identity("root", Role.ADMIN, "the daemon's own token")
ALICE = TokenOrder("alice", Role.USER)
USERS = Users({"alice": User(groups=("physics",))})


class Clock:
    at = 1000.0

    def __call__(self) -> float:
        return self.at


class Store(SqlTokens):
    fails = False
    written = 0

    def save_tokens(self, tokens: object) -> None:
        if self.fails:
            raise StoreUnavailable("the database does not answer")
        self.written += 1
        super().save_tokens(tokens)  # type: ignore[arg-type]


class Place:
    """What outlives daemons, and the one that there is now."""

    def __init__(self, **more: int) -> None:
        self.clock, self._more = Clock(), more
        self.database = memory_stores().jobs.database
        self.start()

    def start(self) -> None:
        self.store = Store(self.database)
        self.identities = Identities({OWN: ROOT}, self.store, USERS, self.clock, **self._more)

    async def made(self, order: TokenOrder = ALICE, by: Identity = ROOT) -> tuple[StoredToken, str, Identity]:
        token, shown = await self.identities.create_token(order, by)
        identity = self.identities.find_identity(shown)
        assert identity is not None
        return token, shown, identity


@pytest.fixture
def place() -> Place:
    return Place()


@pytest.mark.evidence("T1")
async def test_a_token_says_who_shows_it_and_is_kept_as_a_digest_only(place: Place) -> None:
    token, shown, identity = await place.made(TokenOrder("alice", Role.OPERATOR, 60.0, "for the crontab"))
    assert identity == Identity("alice", Role.OPERATOR, "token 1", ("physics",), 1, 1060.0)
    assert shown.startswith(PREFIX)
    assert len(shown) >= len(PREFIX) + 43
    assert shown not in repr((token, identity, place.store.tokens(), vars(place.identities)))
    assert (token.note, token.created_by) == ("for the crontab", "root")


async def test_no_two_are_alike_and_nothing_near_one_is_one(place: Place) -> None:
    shown = {(await place.made())[1] for _ in range(20)}
    assert len(shown) == 20
    for near in ("", " ", shown.pop()[:-1], "\udcff", PREFIX, "a" * 100_000):
        assert place.identities.find_identity(near) is None


async def test_the_next_daemon_knows_them(place: Place) -> None:
    _, shown, identity = await place.made()
    place.start()
    assert place.identities.find_identity(shown) == identity


@pytest.mark.evidence("C4", "T3")
async def test_a_token_holds_until_it_expires(place: Place) -> None:
    _, shown, _ = await place.made(TokenOrder("alice", Role.USER, 60.0))
    place.clock.at += 59.9
    assert place.identities.find_identity(shown)
    place.clock.at += 0.1
    assert place.identities.find_identity(shown) is None
    place.start()
    assert place.identities.find_identity(shown) is None


async def test_one_that_nobody_said_anything_of_does_not_hold_for_ever(place: Place) -> None:
    assert (await place.made())[0].expires_at == 1000.0 + DEFAULT_SPAN
    assert (await place.made(TokenOrder("alice", Role.USER, None)))[0].expires_at is None


async def test_one_that_is_revoked_holds_no_longer_for_the_next_daemon_either(place: Place) -> None:
    _, shown, _ = await place.made()
    _, other, _ = await place.made()
    await place.identities.revoke_tokens([1], ROOT)
    assert place.identities.find_identity(shown) is None
    place.start()
    assert place.identities.find_identity(shown) is None
    assert place.identities.find_identity(other)


@pytest.mark.evidence("T4")
async def test_it_holds_no_longer_though_the_database_is_away_and_whoever_said_so_is_told(place: Place) -> None:
    _, shown, _ = await place.made()
    place.store.fails = True
    with pytest.raises(StoreUnavailable):
        await place.identities.revoke_tokens([1], ROOT)
    assert place.identities.find_identity(shown) is None
    place.store.fails = False
    await place.identities.revoke_tokens([1], ROOT)
    place.start()
    assert place.identities.find_identity(shown) is None


async def test_none_is_given_out_that_is_not_stored(place: Place) -> None:
    place.store.fails = True
    with pytest.raises(StoreUnavailable):
        await place.identities.create_token(ALICE, ROOT)
    assert place.identities.list_tokens(ROOT) == []


# Who may have which


async def test_administrators_make_any(place: Place) -> None:
    for order in (ALICE, TokenOrder("bob", Role.ADMIN, None), TokenOrder("alice@north", Role.OPERATOR)):
        assert (await place.made(order))[0].user == order.user


@pytest.mark.evidence("U11", "T2")
@pytest.mark.parametrize(
    "order", [TokenOrder("bob", Role.USER), TokenOrder("alice", Role.OPERATOR), TokenOrder("alice", Role.ADMIN)]
)
@pytest.mark.parametrize("role", [Role.USER, Role.OPERATOR])
async def test_others_make_none_for_others_nor_one_that_can_do_more(
    place: Place, order: TokenOrder, role: Role
) -> None:
    alice = Identity("alice", role, "alice on north")
    if order.user == "alice" and alice.has_role(order.role):
        await place.identities.create_token(order, alice)
        return
    with pytest.raises(ForbiddenError):
        await place.identities.create_token(order, alice)
    assert place.identities.list_tokens(ROOT) == []


@pytest.mark.evidence("U11", "T2")
async def test_nor_one_that_lasts_longer_than_what_they_show(place: Place) -> None:
    alice = Identity("alice", Role.USER, "alice on north", expires_at=1600.0)
    for wanted, got in ((None, 1600.0), (9000.0, 1600.0), (60.0, 1060.0)):
        assert (await place.identities.create_token(TokenOrder("alice", Role.USER, wanted), alice))[0].expires_at == got


async def test_a_login_says_which_site_it_came_from_and_no_other_token_does(place: Place) -> None:
    _, login = await place.identities.issue_token("ada", Role.USER, None, agent_of("north"), how="ada on north")
    _, elsewhere = await place.identities.issue_token("ada", Role.USER, None, agent_of("south"), how="ada on north")
    _, made, _ = await place.made(by=Identity("alice", Role.USER, "alice on north"))
    for _ in range(2):
        assert [who and who.site for who in map(place.identities.find_identity, (login, elsewhere, made))] == [
            "north",
            "",
            "",
        ]
        place.start()


@pytest.mark.evidence("U15", "T4")
async def test_what_a_token_has_made_is_revoked_with_it_and_so_is_what_that_has_made(place: Place) -> None:
    _, first, alice = await place.made()
    _, second, again = await place.made(by=alice)
    _, third, _ = await place.made(by=again)
    _, other, _ = await place.made()
    assert [token.id for token in await place.identities.revoke_tokens([1], ROOT)] == [1, 2, 3]
    assert [place.identities.find_identity(shown) is None for shown in (first, second, third, other)] == [
        True,
        True,
        True,
        False,
    ]


async def test_a_token_that_is_revoked_while_it_makes_another_makes_none(place: Place) -> None:
    _, _, alice = await place.made()
    async with place.identities._changing:
        making = asyncio.ensure_future(place.identities.create_token(ALICE, alice))
        revoking = asyncio.ensure_future(place.identities.revoke_tokens([1], ROOT))
        await asyncio.sleep(0)
    with pytest.raises(ForbiddenError):
        await making
    await revoking


async def test_nor_does_one_that_is_revoked_while_the_other_is_written(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, _, alice = await place.made()
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
    place.start()
    assert place.identities.list_tokens(ROOT) == []


async def test_one_that_cannot_be_written_is_none(place: Place) -> None:
    place.store.fails = True
    with pytest.raises(StoreUnavailable):
        await place.made()
    assert place.identities.list_tokens(ROOT, every=True) == []


async def test_nobody_has_any_number_of_them() -> None:
    place = Place(max_tokens=2)
    await place.made()
    await place.made(TokenOrder("alice", Role.USER, 10.0))
    with pytest.raises(ConflictError, match="alice has 2 tokens already"):
        await place.identities.create_token(ALICE, ROOT)
    await place.made(TokenOrder("bob", Role.USER))
    place.clock.at += 10
    await place.made()


# Who sees and ends which


@pytest.mark.evidence("T6")
async def test_others_than_administrators_see_and_end_their_own_only(place: Place) -> None:
    _, _, alice = await place.made()
    _, bobs, bob = await place.made(TokenOrder("bob", Role.OPERATOR))
    listed = place.identities.list_tokens
    assert [token.id for token in listed(alice)] == [1]
    assert [token.id for token in listed(alice, "bob")] == []
    assert [token.id for token in listed(ROOT)] == [1, 2]
    assert [token.id for token in listed(ROOT, "bob")] == [2]
    for wanted in ([2], [1, 2], [3]):
        with pytest.raises(NotFoundError):
            await place.identities.revoke_tokens(wanted, alice)
    assert place.identities.find_identity(bobs)
    assert [token.id for token in await place.identities.revoke_tokens([2], bob)] == [2]


async def test_all_that_were_asked_for_can_be_revoked_and_the_daemon_s_own_stays(place: Place) -> None:
    shown = [(await place.made())[1] for _ in range(3)]
    assert len(await place.identities.revoke_all()) == 3
    assert [place.identities.find_identity(one) for one in shown] == [None] * 3
    assert place.identities.find_identity(OWN) == ROOT


# What is open


async def test_what_is_open_ends_with_its_token_and_nothing_else(place: Place) -> None:
    ended: list[str] = []
    _, _, alice = await place.made()
    _, _, bob = await place.made(TokenOrder("bob", Role.USER))
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
    assert not place.identities._open


async def test_what_is_open_ends_when_its_token_expires(place: Place) -> None:
    ended = asyncio.Event()
    _, _, alice = await place.made(TokenOrder("alice", Role.USER, 0.01))
    with place.identities.end_on_expiry(alice, ended.set):
        await asyncio.wait_for(ended.wait(), 30)


# When they were used


async def test_when_a_token_was_used_is_known_at_once_and_stored_once_in_a_while(place: Place) -> None:
    _, shown, _ = await place.made()
    place.clock.at += 5
    written = place.store.written
    for _ in range(100):
        place.identities.find_identity(shown)
    assert place.identities.list_tokens(ROOT)[0].last_used_at == 1005.0
    assert place.store.written == written
    await place.identities.store_last_uses()
    await place.identities.store_last_uses()
    assert place.store.written == written + 1
    place.start()
    assert place.identities.list_tokens(ROOT)[0].last_used_at == 1005.0


async def test_a_use_that_is_stored_undoes_no_revocation(place: Place) -> None:
    _, shown, _ = await place.made()
    async with place.identities._changing:
        storing = asyncio.ensure_future(place.identities.store_last_uses())
        revoking = asyncio.ensure_future(place.identities.revoke_tokens([1], ROOT))
        await asyncio.sleep(0)
    await asyncio.gather(storing, revoking)
    place.start()
    assert place.identities.find_identity(shown) is None


async def test_a_database_that_is_away_keeps_no_use_from_being_told_later(place: Place) -> None:
    await place.made()
    place.store.fails = True
    await place.identities.store_last_uses()
    assert place.identities.list_tokens(ROOT)[0].last_used_at == 1000.0


# What has ended


async def test_those_that_have_ended_are_listed_for_a_while_and_their_numbers_are_not_given_again(place: Place) -> None:
    await place.made(TokenOrder("alice", Role.USER, 10.0))
    await place.made()
    await place.made(TokenOrder("alice", Role.USER, 10.0))
    await place.identities.revoke_tokens([2], ROOT)
    place.clock.at += 10
    assert place.identities.list_tokens(ROOT) == []
    assert [token.id for token in place.identities.list_tokens(ROOT, every=True)] == [1, 2, 3]
    assert await place.identities.remove_expired() == 0
    place.clock.at += RETENTION + 1
    assert await place.identities.remove_expired() == 2
    place.start()
    assert [token.id for token in place.identities.list_tokens(ROOT, every=True)] == [3]
    assert (await place.made())[0].id == 4


async def test_what_was_made_is_found_by_what_made_it_however_long_ago_one_between_has_ended(place: Place) -> None:
    _, _, stolen = await place.made(TokenOrder("root", Role.ADMIN, None))
    _, _, between = await place.made(TokenOrder("root", Role.ADMIN, 10.0), stolen)
    _, _, again = await place.made(TokenOrder("root", Role.ADMIN, 10.0), between)
    _, left, _ = await place.made(TokenOrder("root", Role.ADMIN, None), again)
    await place.made(TokenOrder("alice", Role.USER, 10.0), between)
    await place.made()
    place.clock.at += RETENTION + 11
    assert await place.identities.remove_expired() == 1
    place.start()
    assert [token.id for token in await place.identities.revoke_tokens([1], ROOT)] == [1, 2, 3, 4]
    assert place.identities.find_identity(left) is None
    place.clock.at += RETENTION + 1
    assert await place.identities.remove_expired() == 4


async def test_a_token_whose_role_a_later_version_knows_is_no_token(place: Place) -> None:
    _, shown, _ = await place.made()
    [stored] = place.store.tokens()
    place.store.save_tokens([replace(stored, role="god")])
    place.start()
    assert place.identities.find_identity(shown) is None


# Roles by all sources, and names of the daemon's own


class Provider:
    """An OpenID provider that gives carol the role of an administrator."""

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


async def test_role_of_user_is_the_highest_of_all_sources(place: Place) -> None:
    await place.made(TokenOrder("grace", Role.OPERATOR, 60.0))
    await place.made(TokenOrder("grace", Role.ADMIN, 30.0))
    identities = from_all_sources(place, Provider())
    for user in ("root", "carol", "dave", "erin", "koala", "grace", "dave@north", "koala@north"):
        assert identities.role_of(user) is Role.ADMIN, user
    for user in ("frank", "heidi", "games@north", ""):
        assert identities.role_of(user) is Role.USER, user
    place.clock.at += 30.0
    assert identities.role_of("grace") is Role.OPERATOR
    await identities.revoke_tokens([1], ROOT)
    assert identities.role_of("grace") is Role.USER


async def test_provider_token_of_name_of_daemon_is_refused(place: Place) -> None:
    identities = from_all_sources(place, Provider("koala"))
    with pytest.raises(TokenRejected, match=r"the user koala is the daemon's own; .* oidc\.users"):
        await identities.verify_token("a.b.c")
    assert identities.find_identity("a.b.c") is None


async def test_create_token_for_name_of_daemon_by_another_administrator_is_refused(place: Place) -> None:
    identities = from_all_sources(place, Provider())
    with pytest.raises(ForbiddenError) as refusal:
        await identities.create_token(TokenOrder("koala", Role.USER), ROOT)
    assert refusal.value.field == "user"
    await identities.create_token(
        TokenOrder("koala", Role.ADMIN), Identity("koala", Role.ADMIN, "the daemon's own token")
    )
