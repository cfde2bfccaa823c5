"""REST routes of the network."""

from tests.serving import Open


async def test_network_lists_every_link_with_state(open_api: Open) -> None:
    api = await open_api()
    network = (await api.get("/api/v1/network")).json()
    nothing = {"kind": None, "at": None, "tried_at": None, "error": "", "under_way": None, "relayed": False}
    nothing |= {"relayed_since": None, "relayed_reason": "", "direct_retry_at": None}
    assert network == {
        "clusters": ["north", "south"],
        "links": [
            {
                "one": "north",
                "other": "north",
                "state": "configured",
                "latency": 2e-5,
                "bandwidth": 1e9,
                "bandwidth_back": 1e9,
                **nothing,
            },
            {
                "one": "north",
                "other": "south",
                "state": "configured",
                "latency": 5e-4,
                "bandwidth": None,
                "bandwidth_back": None,
                **nothing,
            },
            {
                "one": "south",
                "other": "south",
                "state": "unmeasured",
                "latency": None,
                "bandwidth": None,
                "bandwidth_back": None,
                **nothing,
            },
        ],
        "stale_after": 7 * 86400.0,
    }


async def test_measure_unreachable_clusters_reports_reason(open_api: Open) -> None:
    api = await open_api()
    answer = await api.post("/api/v1/network/measure", json={"pairs": [["south", "north"]]})
    assert answer.status_code == 202
    (rejected,) = answer.json()["links"]
    assert (rejected["one"], rejected["other"], rejected["job"]) == ("north", "south", None)
    assert rejected["reason"] == "north is unreachable: its agent has not connected yet"
    assert answer.json()["since"].endswith("Z")
    for order in (None, {}, {"clusters": None, "pairs": None}):
        all_links = (await api.post("/api/v1/network/measure", json=order)).json()["links"]
        assert [(link["one"], link["other"]) for link in all_links] == [
            ("north", "north"),
            ("north", "south"),
            ("south", "south"),
        ]
    assert (await api.get("/api/v1/network/south/north/history")).json() == {
        "one": "north",
        "other": "south",
        "measurements": [],
    }
