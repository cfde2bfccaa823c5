"""Whose site a job counts as a job of: what is said, where it was submitted, or where its owner is at home."""

import pytest

from koalapy.model.errors import ForbiddenError
from koalapy.model.identity import Identity, Role
from koalapy.model.request import FlexibleRequest
from koalapy.model.users import Accounts, Domain, User, Users
from koalapy.validation.permissions import with_home_site
from tests.validation.submissions import spec

PEOPLE = {
    "ada": User({"north": "ada", "south": "al"}, home="south"),
    "bob": User({"north": "bob"}),
    "eve": User({"north": "eve", "south": "eve"}),
}
ACCOUNTS = Accounts(Users(PEOPLE, unmapped=["west"]), {"east": Domain("mapped")})


def home(user: str, said: str = "", site: str = "", owner: str = "", role: Role = Role.USER) -> str:
    by = Identity(user, role, "a test", site=site)
    return with_home_site(spec(FlexibleRequest(2), owner=owner or user, home_site=said), by, ACCOUNTS).home_site


@pytest.mark.parametrize(
    ("user", "site", "expected"),
    [
        ("ada", "", "south"),
        ("ada", "north", "north"),
        ("bob", "", "north"),
        ("eve", "", ""),
        ("eve", "south", "south"),
        ("zoe@west", "", "west"),
        ("zoe", "", ""),
        # Whoever comes from where their jobs may not run is not at home there.
        ("eve", "east", ""),
    ],
)
def test_it_is_by_itself_that_of_the_login_or_else_of_its_owner(user: str, site: str, expected: str) -> None:
    assert home(user, site=site) == expected


def test_an_operator_who_submits_for_another_gives_it_the_other_ones_home() -> None:
    assert home("otto", site="south", owner="bob", role=Role.OPERATOR) == "north"
    assert home("otto", site="south", role=Role.OPERATOR) == "south"


@pytest.mark.parametrize(("user", "said", "site"), [("ada", "north", ""), ("bob", "south", "south")])
def test_home_site_of_the_owner_is_accepted(user: str, said: str, site: str) -> None:
    assert home(user, said, site) == said


def test_nobody_says_that_they_are_of_a_site_where_they_are_not() -> None:
    with pytest.raises(ForbiddenError) as refused:
        home("ada", "west")
    assert (refused.value.field, refused.value.value) == ("home_site", "west")
    assert refused.value.message == "home_site is west, and ada is a user of north, south"
    with pytest.raises(ForbiddenError, match=r"zoe is not known to be a user of any cluster$"):
        home("zoe", "north")
    with pytest.raises(ForbiddenError, match=r"bob is a user of north$"):
        home("bob", "south")
    assert home("otto", "west", owner="ada", role=Role.OPERATOR) == "west"
