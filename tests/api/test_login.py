"""REST routes of whoami and logout."""

from tests.api.test_tokens import bearer
from tests.serving import Open


async def test_whoami_returns_user_and_role(open_api: Open) -> None:
    api = await open_api()
    expected = {"user": "ada", "role": "admin", "how": "a token of the test", "groups": [], "expires_at": None}
    assert (await api.get("/api/v1/whoami")).json() == expected
    token = (await api.post("/api/v1/tokens", json={"user": "alice", "role": "user", "expires": 3600})).json()
    identity = (await api.get("/api/v1/whoami", headers=bearer(token["token"]))).json()
    assert identity == {
        "user": "alice",
        "role": "user",
        "how": "token 1",
        "groups": [],
        "expires_at": token["expires_at"],
    }
    assert (await api.get("/api/v1/whoami", headers=bearer("koala_of-nobody-at-all"))).status_code == 401


async def test_logout_revokes_only_its_own_token(open_api: Open) -> None:
    api = await open_api()
    first, second = [(await api.post("/api/v1/tokens", json={"user": "alice", "role": "user"})).json() for _ in "ab"]
    assert (await api.post("/api/v1/logout", headers=bearer(first["token"]))).json() == {"user": "alice"}
    assert (await api.post("/api/v1/logout", headers=bearer(first["token"]))).status_code == 401
    assert (await api.get("/api/v1/whoami", headers=bearer(second["token"]))).status_code == 200
    answer = await api.post("/api/v1/logout")
    assert (answer.status_code, answer.json()["detail"]) == (409, "a token of the test cannot log out")
