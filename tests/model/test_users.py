"""Accounts of users on clusters, and clusters that are closed to users."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from koalapy.model.users import Accounts, Domain, User, Users

MAPPED_USERS = {"alice": User({"north": "alice", "east": "asmith"}), "bob": User({"south": "bob"})}
USERS = Users(MAPPED_USERS, unmapped=["north"])
DOMAINS = {
    "north": Domain("mapped"),
    "east": Domain("mapped"),
    "south": Domain("service"),
    "laptop": Domain("own", "bob"),
}
ACCOUNTS = Accounts(USERS, DOMAINS)


@pytest.mark.parametrize(
    ("cluster", "account", "user"),
    [
        ("north", "alice", "alice"),
        ("east", "asmith", "alice"),
        ("east", "alice", None),
        ("north", "asmith", "asmith@north"),
        ("south", "asmith", None),
        ("nowhere", "alice", None),
    ],
)
def test_user_of_account_is_specific_to_cluster(cluster: str, account: str, user: str | None) -> None:
    assert USERS.user_of(cluster, account) == user


@given(
    cluster=st.sampled_from([*DOMAINS, "nowhere"]),
    account=st.one_of(st.sampled_from(["alice", "bob", "asmith", "root", "alice@north", ""]), st.text(max_size=5)),
)
def test_account_of_user_is_inverse_of_user_of(cluster: str, account: str) -> None:
    user = USERS.user_of(cluster, account)
    if user is not None:
        assert USERS.account_of(user, cluster) == account


@given(
    user=st.sampled_from(["alice", "bob", "carol", "carol@north", "alice@north", "carol@east", "@north", "a@b@north"])
)
def test_closed_cluster_has_rejection_reason_and_no_account(user: str) -> None:
    for cluster in DOMAINS:
        closed = cluster in ACCOUNTS.closed_to(user)
        assert closed == bool(ACCOUNTS.rejection_reason(user, cluster))
        assert bool(ACCOUNTS.local_user(user, cluster)) == (not closed and DOMAINS[cluster].identity == "mapped")


@pytest.mark.parametrize(
    ("owner", "closed"),
    [
        ("alice", {"laptop": "laptop is bob's own"}),
        ("bob", {"north": "bob has no account on north", "east": "bob has no account on east"}),
        ("carol@north", {"east": "carol@north has no account on east", "laptop": "laptop is bob's own"}),
        # An account that is mapped to alice cannot be used as alice@north.
        (
            "alice@north",
            {
                "north": "alice@north has no account on north",
                "east": "alice@north has no account on east",
                "laptop": "laptop is bob's own",
            },
        ),
    ],
)
def test_closed_to_owner_has_reason_by_cluster(owner: str, closed: dict[str, str]) -> None:
    assert {name: ACCOUNTS.rejection_reason(owner, name) for name in ACCOUNTS.closed_to(owner)} == closed


def test_mapped_cluster_without_mappings_is_closed() -> None:
    accounts = Accounts(Users({}), {"north": Domain("mapped"), "mine": Domain("own")})
    for owner in ("alice", "root", "alice@north", ""):
        assert accounts.closed_to(owner) == {"north", "mine"}
        assert accounts.local_user(owner, "north") == ""


def test_service_cluster_is_open_to_all_users() -> None:
    assert Accounts().closed_to("anybody") == frozenset()
    assert Accounts(USERS, {"north": Domain()}).closed_to("anybody") == frozenset()
    assert Accounts(USERS, {"north": Domain()}).local_user("alice", "north") == ""


@pytest.mark.parametrize(
    ("user", "home", "sites"),
    [
        ("bob", "south", {"south"}),
        ("alice", "", {"north", "east"}),
        ("dora", "east", {"east", "north"}),
        ("eve", "west", {"west"}),
        ("carol@north", "north", {"north"}),
        ("alice@north", "", set()),
        ("carol@east", "", set()),
        ("carol", "", set()),
        ("north", "", set()),
    ],
)
def test_home_of_user_is_configured_or_only_cluster(user: str, home: str, sites: set[str]) -> None:
    new_users = {"dora": User({"north": "dora"}, home="east"), "eve": User(home="west")}
    accounts = Accounts(Users({**MAPPED_USERS, **new_users}, unmapped=["north"]))
    assert (accounts.home_of(user), set(accounts.sites_of(user))) == (home, sites)


def test_home_of_user_without_access_is_empty() -> None:
    accounts = Accounts(Users({"eve": User(home="laptop"), "bob": User(home="laptop")}), DOMAINS)
    assert (accounts.home_of("eve"), accounts.home_of("bob")) == ("", "laptop")


def test_closed_to_cache_is_bounded() -> None:
    accounts = Accounts(USERS, DOMAINS)
    for number in range(20_000):
        assert accounts.closed_to(f"user-{number}") == {"north", "east", "laptop"}
    assert len(accounts._closed) <= 10_000
