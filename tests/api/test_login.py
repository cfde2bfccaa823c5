"""Who one is to the daemon, and the end of that."""

from tests.api.test_tokens import shows
from tests.serving import Open


async def test_everybody_is_told_who_they_are(open_api: Open) -> None:
    api = await open_api()
    me = {"user": "ada", "role": "admin", "how": "a token of the test", "groups": [], "expires_at": None}
    assert (await api.get("/api/v1/whoami")).json() == me
    made = (await api.post("/api/v1/tokens", json={"user": "alice", "role": "user", "expires": 3600})).json()
    who = (await api.get("/api/v1/whoami", headers=shows(made["token"]))).json()
    assert who == {"user": "alice", "role": "user", "how": "token 1", "groups": [], "expires_at": made["expires_at"]}
    assert (await api.get("/api/v1/whoami", headers=shows("koala_of-nobody-at-all"))).status_code == 401


async def test_who_logs_out_ends_what_they_show_and_nothing_else(open_api: Open) -> None:
    api = await open_api()
    first, second = [(await api.post("/api/v1/tokens", json={"user": "alice", "role": "user"})).json() for _ in "ab"]
    assert (await api.post("/api/v1/logout", headers=shows(first["token"]))).json() == {"user": "alice"}
    assert (await api.post("/api/v1/logout", headers=shows(first["token"]))).status_code == 401
    assert (await api.get("/api/v1/whoami", headers=shows(second["token"]))).status_code == 200
    refused = await api.post("/api/v1/logout")
    assert (refused.status_code, refused.json()["detail"]) == (409, "a token of the test cannot log out")
