"""REST routes of the network."""

from typing import Any

import pytest

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


@pytest.mark.parametrize(
    ("order", "field", "hint"),
    [
        ({"clusters": ["nroth"]}, "clusters[0]", "did you mean north?"),
        ({"pairs": [["north", "suoth"]]}, "pairs[0][1]", "did you mean south?"),
        ({"pairs": [["north"]]}, "pairs[0]", "give two names"),
        ({"pairs": [["a"] * 3]}, "pairs[0]", "give two names"),
        ({"pairs": ["north"]}, "pairs[0]", "give a list"),
        ({"pairs": [[1, 2]]}, "pairs[0][0]", "write it as a text"),
        ({"pairs": []}, "pairs", "leave it out"),
        ({"clusters": []}, "clusters", "leave it out"),
        ({"clusters": ["north"], "pairs": [["north", "north"]]}, "pairs", "give only one of them"),
        ({"clusters": "north"}, "clusters", "give a list"),
        ({"clutsers": ["north"]}, "clutsers", "did you mean clusters?"),
        ({"clusters": [""]}, "clusters[0]", "known: north"),
        ([], "body", "send JSON"),
    ],
)
async def test_measure_with_invalid_order_returns_422(open_api: Open, order: Any, field: str, hint: str) -> None:
    answer = await (await open_api()).post("/api/v1/network/measure", json=order)
    assert (answer.status_code, answer.json()["field"]) == (422, field), answer.text
    assert answer.json()["hint"].startswith(hint)
