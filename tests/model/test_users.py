"""Who is who on which cluster, and where their jobs may run."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from koalapy.model.users import Accounts, Domain, User, Users

PEOPLE = {"alice": User({"north": "alice", "east": "asmith"}), "bob": User({"south": "bob"})}
USERS = Users(PEOPLE, unmapped=["north"])
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
def test_an_account_is_somebodys_on_its_own_cluster_only(cluster: str, account: str, user: str | None) -> None:
    assert USERS.user_of(cluster, account) == user


@given(
    cluster=st.sampled_from([*DOMAINS, "nowhere"]),
    account=st.one_of(st.sampled_from(["alice", "bob", "asmith", "root", "alice@north", ""]), st.text(max_size=5)),
)
def test_who_is_known_by_an_account_runs_as_no_other_one_there(cluster: str, account: str) -> None:
    user = USERS.user_of(cluster, account)
    if user is not None:
        assert USERS.account_of(user, cluster) == account


@given(
    user=st.sampled_from(["alice", "bob", "carol", "carol@north", "alice@north", "carol@east", "@north", "a@b@north"])
)
def test_where_somebody_may_not_run_jobs_there_is_a_reason_and_no_account(user: str) -> None:
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
        # Alice's account is hers, and nobody else's under its own name.
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
def test_a_cluster_is_closed_with_a_reason(owner: str, closed: dict[str, str]) -> None:
    assert {name: ACCOUNTS.rejection_reason(owner, name) for name in ACCOUNTS.closed_to(owner)} == closed


def test_a_mapped_cluster_without_any_mapping_is_closed_to_everybody() -> None:
    nobody = Accounts(Users({}), {"north": Domain("mapped"), "mine": Domain("own")})
    for owner in ("alice", "root", "alice@north", ""):
        assert nobody.closed_to(owner) == {"north", "mine"}
        assert nobody.local_user(owner, "north") == ""


def test_where_all_is_one_account_nobody_is_asked_for() -> None:
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
def test_somebodys_home_is_what_is_said_or_the_one_cluster_there_is(user: str, home: str, sites: set[str]) -> None:
    more = {"dora": User({"north": "dora"}, home="east"), "eve": User(home="west")}
    known = Accounts(Users({**PEOPLE, **more}, unmapped=["north"]))
    assert (known.home_of(user), set(known.sites_of(user))) == (home, sites)


def test_where_somebody_may_run_no_jobs_is_not_their_home_by_itself() -> None:
    known = Accounts(Users({"eve": User(home="laptop"), "bob": User(home="laptop")}), DOMAINS)
    assert (known.home_of("eve"), known.home_of("bob")) == ("", "laptop")


def test_few_owners_are_remembered() -> None:
    many = Accounts(USERS, DOMAINS)
    for number in range(20_000):
        assert many.closed_to(f"user-{number}") == {"north", "east", "laptop"}
    assert len(many._closed) <= 10_000
