"""The home site of a job: requested, that of the login, or that of the owner."""

import pytest

from koalapy.model.errors import ForbiddenError
from koalapy.model.identity import Identity, Role
from koalapy.model.request import ComponentRequest, FixedRequest, FlexibleRequest
from koalapy.model.users import Accounts, Domain, User, Users
from koalapy.validation.permissions import with_home_site
from tests.validation.submissions import make_spec, rejection_of

PEOPLE = {
    "ada": User({"north": "ada", "south": "al"}, home="south"),
    "bob": User({"north": "bob"}),
    "eve": User({"north": "eve", "south": "eve"}),
}
ACCOUNTS = Accounts(Users(PEOPLE, unmapped=["west"]), {"east": Domain("mapped")})


def resolve_home(user: str, requested: str = "", site: str = "", owner: str = "", role: Role = Role.USER) -> str:
    caller = Identity(user, role, "a test", site=site)
    return with_home_site(
        make_spec(FlexibleRequest(2), owner=owner or user, home_site=requested), caller, ACCOUNTS
    ).home_site


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
        # A login at a site where the user may not run jobs sets no home site.
        ("eve", "east", ""),
    ],
)
def test_home_site_defaults_to_login_site_or_owner_home(user: str, site: str, expected: str) -> None:
    assert resolve_home(user, site=site) == expected


def test_home_site_for_another_owner_is_that_of_the_owner() -> None:
    assert resolve_home("otto", site="south", owner="bob", role=Role.OPERATOR) == "north"
    assert resolve_home("otto", site="south", role=Role.OPERATOR) == "south"


@pytest.mark.parametrize(("user", "requested", "site"), [("ada", "north", ""), ("bob", "south", "south")])
def test_home_site_of_the_owner_is_accepted(user: str, requested: str, site: str) -> None:
    assert resolve_home(user, requested, site) == requested


def test_home_site_of_which_owner_is_no_user_is_rejected() -> None:
    with pytest.raises(ForbiddenError) as refused:
        resolve_home("ada", "west")
    assert (refused.value.field, refused.value.value) == ("home_site", "west")
    assert refused.value.message == "home_site is west, and ada is a user of north, south"
    with pytest.raises(ForbiddenError, match=r"zoe is not known to be a user of any cluster$"):
        resolve_home("zoe", "north")
    with pytest.raises(ForbiddenError, match=r"bob is a user of north$"):
        resolve_home("bob", "south")
    assert resolve_home("otto", "west", owner="ada", role=Role.OPERATOR) == "west"


def test_fixed_request_on_cluster_closed_to_its_owner_is_rejected() -> None:
    accounts = Accounts(Users(PEOPLE), {"south": Domain("mapped")})
    spec = make_spec(FixedRequest((ComponentRequest(1, "north"), ComponentRequest(1, "south"))), owner="bob")
    refused = rejection_of(spec, accounts=accounts)
    assert (refused.field, refused.value) == ("request.components[1].cluster", "south")
