"""REST routes of the network."""

from types import SimpleNamespace
from typing import Any

from starlette.testclient import TestClient

from koalapy.api.network import network_router
from koalapy.daemon.network.links import LinkState, LinkTable
from koalapy.daemon.network.network import LinkRecord
from koalapy.model.measurement import Measurement, MeasurementKind
from tests.identities import administrators
from tests.serving import TOKEN, URL, Open, bare_application


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


def test_network_shows_bandwidths_of_both_directions() -> None:
    pair = ("north", "south")
    newest = Measurement(*pair, MeasurementKind.PINGPONG, 5.0, latency=1e-3, bandwidth=2e6, back=3e6)
    measured = LinkTable(pair, {}, [newest])[pair]
    record = LinkRecord(pair, LinkState.MEASURED, measured.link, measured, None, is_relayed=False)
    network: Any = SimpleNamespace(list_links=lambda: [record], stale_after=60.0)
    with TestClient(bare_application(administrators(TOKEN), [network_router(network)]), URL) as client:
        answer = client.get("/api/v1/network", headers={"Authorization": f"Bearer {TOKEN}"})
    (link,) = answer.json()["links"]
    shown = link["latency"], link["bandwidth"], link["bandwidth_back"], link["kind"], link["at"]
    assert shown == (1e-3, 2e6, 3e6, "pingpong", "1970-01-01T00:00:05.000Z")
