"""Logins of accounts that agents attest: users, roles and rejections."""

import time
from collections.abc import Collection
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from koalapy.daemon.auth.login import MAX_LOGINS, LoginRejected, LoginRules, Logins
from koalapy.model.errors import StoreUnavailable
from koalapy.model.identity import Identity, Role
from koalapy.model.throttle import Throttle
from koalapy.model.users import Domain, User, Users
from koalapy.protocol.messages import Vouch
from koalapy.store.records import StoredToken

PEOPLE = {
    "alice": User({"north": "alice", "east": "asmith"}, Role.OPERATOR),
    "bob": User({"laptop": "bob"}),
    "boss": User({"north": "root", "south": "boss"}, Role.ADMIN),
}
RULES = LoginRules(
    Users(PEOPLE, ["north"]),
    {"north": Domain("mapped"), "laptop": Domain("own", "bob"), "mine": Domain("own", "carol"), "none": Domain("own")},
    600.0,
    frozenset({"south"}),
    {"north": 1000, "east": 500},
    {"north": ["mallory"]},
)


@dataclass
class Maker:
    """Records issued tokens, as the daemon stores them."""

    tokens: list[StoredToken] = field(default_factory=list)
    fails: bool = False

    async def issue_token(
        self, user: str, role: Role, expires_at: float | None, created_by: str, *, how: str = ""
    ) -> tuple[StoredToken, str]:
        if self.fails:
            raise StoreUnavailable("the database is away")
        ident = len(self.tokens) + 1
        self.tokens.append(StoredToken(ident, f"d{ident}", user, str(role), how, "", 0.0, created_by, expires_at))
        return self.tokens[-1], f"koala_secret-{ident}"

    def list_tokens(self, caller: Identity, user: str | None = None) -> list[StoredToken]:
        assert caller.has_role(Role.ADMIN)
        return [token for token in self.tokens if token.revoked_at is None and user in (None, token.user)]

    async def revoke_tokens(self, tokens: Collection[int], caller: Identity) -> None:
        self.tokens = [replace(t, revoked_at=1.0) if t.id in tokens else t for t in self.tokens]


class Daemon:
    def __init__(self, rules: LoginRules = RULES) -> None:
        self.maker, self.now = Maker(), 0.0
        self.logged: list[str] = []
        self.logins = Logins(rules, self.maker, lambda: 1000.0, lambda: self.now, may_log=self.may_log)

    def may_log(self, cluster: str) -> bool:
        """Allow one log line about each cluster."""
        self.logged.append(cluster)
        return self.logged.count(cluster) == 1

    async def request_login(self, cluster: str, account: str, uid: int = 1234) -> tuple[str, str] | str:
        """Return the user and role of a login, or the reason for its rejection."""
        answer = await self.logins.handle_vouch(cluster, Vouch(ident="i", account=account, uid=uid))
        assert answer.ident == "i"
        assert bool(answer.token) != bool(answer.error)
        assert "secret" not in repr(answer)
        return (answer.user, answer.role) if answer.token else answer.error


@pytest.mark.parametrize(
    ("cluster", "account", "uid", "who"),
    [
        ("north", "alice", 1234, ("alice", "user")),
        ("east", "asmith", 1234, ("alice", "user")),
        ("north", "carol", 1234, ("carol@north", "user")),
        ("north", "asmith", 1234, ("asmith@north", "user")),
        # Root and other system accounts need an explicit user.
        ("north", "root", 0, ("boss", "user")),
        ("south", "boss", 1234, ("boss", "admin")),
        ("laptop", "bob", 1234, ("bob", "user")),
        ("mine", "whatever", 1234, ("carol", "user")),
    ],
)
async def test_login_maps_account_to_user(cluster: str, account: str, uid: int, who: tuple[str, str]) -> None:
    daemon = Daemon()
    assert await daemon.request_login(cluster, account, uid) == who
    (token,) = daemon.maker.tokens
    assert (token.user, token.role, token.how) == (*who, f"{account} on {cluster}")
    assert (token.expires_at, token.created_by) == (1600.0, f"the agent of {cluster}")


@pytest.mark.parametrize(
    ("cluster", "account", "uid", "reason"),
    [
        ("east", "alice", 1234, "the account alice of east belongs to no configured user"),
        ("south", "alice", 1234, "the account alice of south belongs to no configured user"),
        ("east", "root", 0, "root of east has uid 0, a system account"),
        ("north", "daemon", 999, "daemon of north has uid 999, a system account"),
        ("north", "nobody", 65534, "nobody of north has uid 65534, a system account"),
        ("north", "alice on east", 1234, "the account name 'alice on east' of north is not a valid user name"),
        ("north", "a\nb", 1234, "the account name 'a\\nb' of north is not a valid user name"),
        ("north", "mallory", 1234, "the configuration denies logins to the account mallory of north"),
        ("north", "", 1234, "the account name '' of north is not a valid user name"),
        ("elsewhere", "alice", 1234, "the account alice of elsewhere belongs to no configured user"),
        ("laptop", "eve", 1234, None),
        ("none", "eve", 1234, "eve of none is not "),
    ],
)
async def test_login_of_unmapped_account_is_rejected(cluster: str, account: str, uid: int, reason: str | None) -> None:
    daemon = Daemon()
    if reason is None:
        rules = replace(RULES, users=Users({**PEOPLE, "eve": User({"laptop": "eve"})}))
        daemon, reason = Daemon(rules), "eve of laptop is not bob"
    assert str(await daemon.request_login(cluster, account, uid)).startswith(reason)
    assert daemon.maker.tokens == []
    assert daemon.logins._by_account._full_at == {}, "nothing is kept of who is refused"


@pytest.mark.evidence("G12")
async def test_rejected_logins_are_logged_within_the_budget_of_the_cluster() -> None:
    daemon = Daemon()
    with capture_logs() as lines:
        for cluster in ("north", "south", "north", "south"):
            await daemon.request_login(cluster, "mallory")
    assert [line["cluster"] for line in lines] == ["north", "south"]


@pytest.mark.evidence("G7", "C2")
@given(
    cluster=st.sampled_from(["north", "east", "south", "laptop", "mine", "none", "?"]),
    account=st.one_of(st.sampled_from(["alice", "asmith", "root", "bob", "boss", "alice@east", "x@north"]), st.text()),
    uid=st.integers(0, 2**31),
)
def test_login_covers_accounts_of_own_cluster_without_role(cluster: str, account: str, uid: int) -> None:
    """An agent can attest only users of its cluster, whatever it claims."""
    try:
        user = RULES.user_of(cluster, account, uid)
    except LoginRejected:
        return
    accounts = {name for name, person in PEOPLE.items() if person.accounts.get(cluster) == account}
    domain = RULES.domains.get(cluster, Domain())
    assert user in accounts or user == f"{account}@{cluster}" or (domain.identity == "own" and user == domain.user)
    assert RULES.role_of(user, cluster) is Role.USER or cluster == "south"


async def test_login_of_shared_job_account_needs_mapping() -> None:
    daemon = Daemon()
    for account, user in (("carol", ""), ("alice", "alice")):
        answer = await daemon.logins.handle_vouch("north", Vouch(ident="i", account=account, uid=1234, runs_jobs=True))
        assert answer.user == user
        assert ("is the account of all jobs there" in answer.error) == (not user)
    assert await daemon.request_login("north", "carol") == ("carol@north", "user")


async def test_login_mapped_to_reserved_name_is_rejected() -> None:
    rules = replace(RULES, reserved={"bob", "boss", "carol@north"})
    daemon = Daemon(rules)
    for cluster, account in (("laptop", "whatever"), ("south", "boss"), ("north", "carol")):
        assert "a name that is reserved for the daemon" in str(await daemon.request_login(cluster, account))
    assert daemon.maker.tokens == []
    login = StoredToken(1, "d", "boss", "admin", "boss on south", "", 0.0, "the agent of south", None)
    daemon.maker.tokens.append(login)
    await daemon.logins.revoke_outdated()
    assert daemon.maker.list_tokens(Identity("", Role.ADMIN, "")) == []


@pytest.mark.evidence("A12")
async def test_login_rate_is_limited_by_account() -> None:
    daemon = Daemon()
    answers = [await daemon.request_login("north", "alice") for _ in range(13)]
    assert answers[:12] == [("alice", "user")] * 12
    assert answers[12] == "too many logins of alice on north"
    assert await daemon.request_login("north", "carol") == ("carol@north", "user")
    daemon.now += 5.0
    assert await daemon.request_login("north", "alice") == ("alice", "user")
    assert await daemon.request_login("north", "alice") == "too many logins of alice on north"
    for number in range(1000):
        await daemon.request_login("north", f"user-{number}")
    assert await daemon.request_login("north", "dave") == "too many logins from north"
    assert await daemon.request_login("east", "asmith") == ("alice", "user")


@pytest.mark.evidence("G8")
async def test_login_beyond_limit_revokes_oldest() -> None:
    daemon = Daemon()
    for _ in range(MAX_LOGINS + 5):
        daemon.now += 60.0
        await daemon.request_login("north", "alice")
    await daemon.request_login("east", "asmith")
    valid_ids = [token.id for token in daemon.maker.tokens if token.revoked_at is None]
    assert valid_ids == list(range(6, MAX_LOGINS + 7))


async def test_login_without_database_is_rejected() -> None:
    daemon = Daemon()
    daemon.maker.fails = True
    assert await daemon.request_login("north", "alice") == "the database is away"


async def test_login_outdated_by_configuration_is_revoked() -> None:
    daemon = Daemon()
    for cluster, account in [("north", "alice"), ("east", "asmith"), ("north", "carol"), ("south", "boss")]:
        await daemon.request_login(cluster, account)
    await daemon.request_login("mine", "x")
    await daemon.maker.issue_token("alice", Role.USER, None, "alice", how="")
    await daemon.maker.issue_token("alice", Role.USER, None, "mallory", how="mallory on nowhere")
    await Daemon().logins.revoke_outdated()
    await daemon.logins.revoke_outdated()
    assert all(token.revoked_at is None for token in daemon.maker.tokens)
    people = {"alice": User({"north": "alice"}), "boss": User({"south": "boss"}, Role.OPERATOR)}
    refused = replace(RULES, refused={"north": ["carol"]})
    await Logins(refused, daemon.maker, time.time, may_log=daemon.may_log).revoke_outdated()
    assert [t.user for t in daemon.maker.tokens if t.revoked_at is not None] == ["carol@north"]
    rules = replace(RULES, users=Users(people), domains={"mine": Domain("own", "dave")})
    await Logins(rules, daemon.maker, time.time, may_log=daemon.may_log).revoke_outdated()
    assert [t.user for t in daemon.maker.tokens if t.revoked_at is None] == ["alice", "alice", "alice"]


@given(st.lists(st.tuples(st.sampled_from("abc"), st.floats(0.0, 3.0)), max_size=60))
def test_throttle_limits_each_key_separately(steps: list[tuple[str, float]]) -> None:
    pace, now, allowed = Throttle(burst=3, interval=1.0), 0.0, dict[str, list[float]](a=[], b=[], c=[])
    for who, pause in steps:
        now += pause
        wait = pace.count_if_allowed(who, now)
        if wait == 0.0:
            allowed[who].append(now)
        else:
            assert 0 < wait <= 1.0 + 1e-6
            assert len([time for time in allowed[who] if time > now - 3.0]) >= 1
    for times in allowed.values():
        for index in range(3, len(times)):
            assert times[index] - times[index - 3] >= 1.0 - 1e-6
