"""Requests that are rejected: tables of all forms, driven through daemons that none of them changes."""

import re
import time
from datetime import UTC, datetime
from typing import Any

import httpx2
import pytest

from koalapy.model.errors import SiteFault, SiteRejected
from tests.daemon.sites import Sites
from tests.serving import Open

Json = dict[str, Any]
HUGE = "9" * 30
SIGNALS = "TERM, INT, HUP, QUIT, USR1, USR2, ALRM, XCPU, CONT, URG, WINCH"


def fixed_request(**component: object) -> Json:
    return {"request": {"type": "fixed", "components": [component]}}


IN_AN_HOUR = datetime.fromtimestamp(time.time() + 3600, UTC).isoformat(timespec="seconds")
"""The same second in all forms of a submission."""
OWN = {"type": "nonfixed", "components": [{"size": 1, "inputs": [{"flie": "m"}]}]}
WRONG_FIELDS: list[tuple[Any, ...]] = [
    ({"siez": 1}, "siez", "unknown field"),
    ({"request": {"type": "flexible", "total_size": 6, "total": 1}}, "request.total", "unknown field"),
    ({"request": {"type": "flexible"}}, "request.total_size", "required"),
    ({"request": {"type": "big"}}, "request.type", "big"),
    ({"request": {"total_size": 6}}, "request.type", ""),
    (fixed_request(size="x", cluster="north"), "request.components[0].size", "integer"),
    ({"policy": "worst-fitt"}, "policy", "worst-fitt"),
    ({"policy": "worst-fit"}, "policy", "flexible"),
    ({"walltime": "soon"}, "walltime", ""),
    ({"priority": "urgent"}, "priority", ""),
    ({"coallocation": "sometimes"}, "coallocation", "sometimes"),
    ({"coallocation": True}, "coallocation", "True"),
    ({"coallocation": 1.5}, "coallocation", "1.5"),
    ({"memory": "16G"}, "memory", "not an amount of memory"),
    ({"memory": True}, "memory", "not an amount of memory"),
    ({"memory": "64"}, "memory", "memory is '64', which has no unit"),
    ({"memory": 64}, "memory", "memory is 64, which has no unit"),
    (fixed_request(size=1, cluster="north", memory=64), "request.components[0].memory", "which has no unit"),
    ({"memory": 2**54}, "memory", "18014398509481984"),
    ({"per_node_bandwidth": "fast"}, "per_node_bandwidth", "not a bandwidth"),
    ({"per_node_bandwidth": -1}, "per_node_bandwidth", "-1"),
    ({"per_node_bandwidth": 1e16}, "per_node_bandwidth", "1e+16"),
    ({"claiming": "eager"}, "claiming", "eager"),
    ({"claim_threshold": True}, "claim_threshold", "True"),
    ({"speed_ratio_min": "x"}, "speed_ratio_min", "x"),
    ({"retry_on_exit": ["x"]}, "retry_on_exit[0]", "x"),
    ({"policy_options": {"metric": 1}}, "policy_options.metric", "1"),
    ({"policy_options": {"colour": "red"}}, "policy_options.colour", "options"),
    ({"policy_options": ["metric"]}, "policy_options", ""),
    ({"request": {"type": "flexible", "total_size": 9}}, "request.total_size", "8 nodes"),
    (fixed_request(size=1, cluster="nroth"), "request.components[0].cluster", "nroth"),
    ({"retry_on_exit": [75, 0]}, "retry_on_exit[1]", "0"),
]
MISSPELT: list[tuple[Any, ...]] = [
    ({"type": "nonfixed", "components": [{"siez": 1}]}, "request.components[0].siez", "did you mean size?"),
    (
        {"type": "nonfixed", "components": [{"size": 1, "cluster": "north"}]},
        "request.components[0].cluster",
        "make the request fixed",
    ),
    ({"type": "flexible", "total_szie": 6}, "request.total_szie", "did you mean total_size?"),
    ({"type": "flexibel", "total_size": 6}, "request.type", "fixed, nonfixed or flexible"),
]
WRONG_FILES: list[tuple[Any, ...]] = [
    ({"inputs": [{"file": "mash"}]}, "inputs[0].file", "did you mean mesh? known: f, m, mesh; add it with koala"),
    ({"inputs": [{"file": "m", "as_": "x"}]}, "inputs[0].as_", "did you mean as?"),
    ({"inputs": [{"file": "f", "part": "a"}]}, "inputs[0].part", "known: as, distribution, file"),
    ({"inputs": [{"file": "f", "distribution": "half"}]}, "inputs[0].distribution", "'whole' or 'partitioned'"),
    ({"inputs": [{"file": ""}]}, "inputs[0].file", "at least 1 characters"),
    ({"inputs": ["m"]}, "inputs[0]", "give fields and values"),
    ({"request": OWN}, "request.components[0].inputs[0].flie", "did you mean file?"),
    ({"bundle": "a" * 64}, "bundle", "koala submit --stage"),
    ({"bundle": "../../etc/passwd"}, "bundle", "koala submit --stage"),
    ({"collect": ["/etc/*"]}, "collect[0]", "below the folder"),
    ({"collect": ["ok", "a/../../b"]}, "collect[1]", "below the folder"),
    ({"collect": [""]}, "collect[0]", "below the folder"),
    ({"collect": "out"}, "collect", "give a list"),
    ({"communication": 1.5}, "communication", "from 0 to 1"),
    ({"communication": -0.1}, "communication", "from 0 to 1"),
    ({"communication": "much"}, "communication", "give a number"),
    ({"application": "x" * 201}, "application", "at most 200 characters"),
    ({"application": "a\nb"}, "application", "leave them out"),
]
WRONG_CONDITIONS: list[tuple[Any, ...]] = [
    ({"after": [9]}, "", "after names job 9, which does not exist", "koala queue or koala history"),
    ({"after": ["1"]}, "", "after can never hold: job 1 was cancelled, and it had to succeed", "JOB:any"),
    ({"after": ["1?1"]}, "", "after can never hold: job 1 was cancelled", "JOB:any"),
    ({"after": ["afterok:1"]}, "", "after[0] is 'afterok:1', not a dependency", "JOB:failed"),
    ({"after": [0]}, "", "after[0] is 0, not a dependency", "JOB:failed"),
    ({"after": [True]}, "", "after[0] is True, not a dependency", "JOB:failed"),
    ({"after": "1"}, "", "after is '1', not a list", "give a list"),
    ({"after": ["2"] * 1001}, "", "after has 1001 entries", "at most 1000"),
    ({"after": ["2?2:any"] * 501}, "", "after has 1002 dependencies", "wait for fewer jobs"),
    ({"begin": 90}, "", "begin is 90, a number alone", "now+90m or now+90s"),
    ({"begin": "90"}, "", "begin is '90', a number alone", "now+90m or now+90s"),
    ({"begin": "soon"}, "", "begin is 'soon', not a point in time", "now+90m"),
    ({"begin": "2300-01-01"}, "", "begin is '2300-01-01', not between", "in the next years"),
    ({"deadline": "2020-01-01"}, "", "deadline is 2020-01-01 00:00:00 UTC, which has passed", "in the future"),
    ({"begin": "2200-01-02", "deadline": "2200-01-01"}, "", "is 2200-01-01 00:00:00 UTC, which is not after", "later"),
    ({"walltime": "2h", "deadline": IN_AN_HOUR}, "", "which leaves less than its walltime of 2:00:00", "shorter"),
]
WRONG_ARRAYS: list[tuple[Any, ...]] = [
    ({"array": "5-1"}, "", "array has the range 5-1, which ends before it begins", "give indices"),
    ({"array": "1-9,3"}, "", "array has 1-9 and 3, which overlap", "each index once"),
    ({"array": ""}, "", "array is empty", "give indices"),
    ({"array": "%4"}, "", "array is %4, without indices", "give indices"),
    ({"array": "0-999999999"}, "", "array is 0-999999999, with 1000000000 tasks, more than max", "fewer indices"),
    ({"array": "9999999999"}, "", "array has the index 9999999999, and the highest", "give indices"),
    ({"array": 7}, "", "array is 7, not a text", "in quotes"),
    ({"array_fail": "stop"}, "", "array_fail is stop, but the job is no array", "add array"),
    ({"array": "0-2", "each_line": ["a", "b"]}, "", "array is 0-2, but each_line has the lines 1 to 2", "lines"),
    ({"array": "1-3", "each_line": ["a", "b"]}, "", "array is 1-3, but each_line has the lines 1 to 2", "lines"),
    ({"each_line": ["a" * 300_000]}, "", "each_line", "characters"),
    ({"array": "1", "environment": {"KOALA_ARRAY_INDEX": "9"}}, "", "is set by koalapy", "another name"),
]
WRONG_WARNINGS: list[tuple[Any, ...]] = [
    ("KILL@30", "warning", "warning is 'KILL@30', with no signal that a program can catch", SIGNALS),
    ("STOP@30", "warning", "with no signal that a program can catch", SIGNALS),
    ("9@30", "warning", "with no signal that a program can catch", SIGNALS),
    ("0@30", "warning", "with no signal that a program can catch", SIGNALS),
    ("999999999999999999999@30", "warning", "with no signal that a program can catch", SIGNALS),
    ("", "warning", "with no signal that a program can catch", SIGNALS),
    ("@30", "warning", "with no signal that a program can catch", SIGNALS),
    ("B:TERM@30", "warning", "with a colon", "leave out the prefix: all processes"),
    ("TERM@", "warning", "with no duration after its @", "TERM@30"),
    ("TERM@soon", "warning", "with no duration after its @", "TERM@30"),
    (f"TERM@{'1' * 400}:00", "warning", "with no duration after its @", "TERM@30"),
    ("TERM@30@40", "warning", "with no duration after its @", "TERM@30"),
    ("TERM@0", "warning.grace", "warning.grace is 0", "give more than 0"),
    ("TERM@-3", "warning.grace", "warning.grace is -3", "give more than 0"),
    ("TERM@nan", "warning", "with no duration after its @", "TERM@30"),
    ("TERM@inf", "warning", "with no duration after its @", "TERM@30"),
    ("TERM@601", "warning", "no job may have more than 600 s between its warning and its stop", "at most TERM@600"),
    (30, "warning", "not a text", "in quotes"),
]
SUBMISSIONS = {
    "fields": [*WRONG_FIELDS, *(({"request": request}, *row) for request, *row in MISSPELT)],
    "files": WRONG_FILES,
    "conditions": WRONG_CONDITIONS,
    "arrays": [*WRONG_ARRAYS, *(({"warning": warning}, *row) for warning, *row in WRONG_WARNINGS)],
}
"""Changes that make a submission invalid, with the field of the problem and parts of its detail and hint.

The field is empty where the change names it.
"""


async def open_prepared(open_api: Open, body: Json) -> httpx2.AsyncClient:
    """Return a daemon with a cancelled, a waiting and an array job, and three replicas."""
    sites = Sites(
        {(cluster, "/m"): b"mesh" for cluster in ("north", "south")} | {("north", "/f"): {"a": b"1", "b": b"22"}}
    )
    sites.content |= {
        ("north", "/etc/shadow"): SiteRejected("/etc/shadow is not below a replica directory", fault=SiteFault.OUTSIDE),
        ("south", "/other"): b"other",
        ("north", "m"): b"mesh",
    }
    api: httpx2.AsyncClient = await open_api(sites=sites)
    for name, path in (("m", "/m"), ("f", "/f"), ("mesh", "/m")):
        order = {"name": name, "cluster": "north", "path": path}
        assert (await api.post("/api/v1/replicas", json=order)).status_code == 201
    for change in ({}, {}, {"array": "1-5"}):
        assert (await api.post("/api/v1/jobs", json=body | change)).status_code == 201
    assert (await api.post("/api/v1/jobs/1/cancel")).status_code == 200
    return api


@pytest.mark.parametrize("table", SUBMISSIONS)
async def test_wrong_submission_is_rejected_alike_in_every_form(open_api: Open, body: Json, table: str) -> None:
    api = await open_prepared(open_api, body)
    for change, field, *texts in SUBMISSIONS[table]:
        answer = await api.post("/api/v1/jobs", json=body | change)
        problem = answer.json()
        assert (answer.status_code, answer.headers["content-type"]) == (422, "application/problem+json"), change
        assert problem["field"] == field or (not field and re.split(r"[.\[]", problem["field"])[0] in change), problem
        assert all(text in f"{problem['detail']}; {problem['hint']}" for text in texts), str(problem)
        explained = (await api.post("/api/v1/explain", json=body | change)).json()
        assert explained | {"value": None} == problem | {"value": None}, change  # a time of the present differs
        in_batch = (await api.post("/api/v1/jobs:batch", json={"jobs": [body, body | change, body]})).json()
        assert (in_batch["status"], in_batch["field"]) == (422, f"jobs[1].{problem['field']}"), change
        assert (re.sub(r"jobs\[1\](\.|: )", "", in_batch["detail"]), in_batch["hint"]) == (
            problem["detail"],
            problem["hint"],
        )
    assert [job["id"] for job in (await api.get("/api/v1/jobs")).json()["jobs"]] == [3, 2, 1]


STRANGE_TIMES = [("since", "7"), ("until", "soon"), ("since", "2026-02-30"), ("until", "1" * 41), ("since", "%00")]
QUERIES: list[tuple[Any, ...]] = [
    (f"/jobs/{HUGE}", 422, "job"),
    ("/jobs/abc", 422, "job"),
    ("/jobs/-1", 404, "job"),
    (f"/jobs?before={HUGE}", 422, "before"),
    ("/jobs?before=0", 422, "before"),
    ("/jobs?limit=0", 422, "limit"),
    ("/jobs?limit=1001", 422, "limit"),
    ("/jobs?state=runing", 422, "state[0]"),
    ("/jobs?stat=running", 422, "stat"),
    ("/jobs?owner=a%00", 422, "owner"),
    ("/jobs?name=%1b", 422, "name"),
    ("/jobs?cluster=%00", 422, "cluster"),
    ("/clusters/nor%00th", 422, "name"),
    ("/jobs/1?wait=61", 422, "wait"),
    ("/jobs/1?wait=nan", 422, "wait"),
    ("/jobs/1?timeout=5", 422, "timeout"),
    ("/jobs/1/logs?component=-1", 422, "component"),
    ("/clusters/nroth", 404, "cluster"),
    ("/jobs/", 404, ""),
    ("/network/north/nroth/history", 404, "cluster"),
    (f"/network/north/{HUGE}/history", 404, "cluster"),
    ("/network/north/south/history?limit=1001", 422, "limit"),
    ("/network?cluster=north", 422, "cluster"),
    ("/advisor?application=x", 422, "application"),
    ("/advisor/record?limit=0", 422, "limit"),
    ("/advisor/record?limit=x", 422, "limit"),
    ("/advisor/record?aplication=x", 422, "aplication"),
    ("/replicas?nmae=m", 422, "nmae"),
    ("/replicas?name=", 422, "name"),
    ("/replicas?limit=0", 422, "limit"),
    ("/replicas?limit=1001", 422, "limit"),
    ("DELETE /replicas", 422, "name"),
    ("DELETE /replicas?name=m&all=1", 422, "all"),
    ("/usage?by=colour", 422, "by"),
    ("/usage?step=hour", 422, "step"),
    ("/usage?first=yesterday", 422, "first"),
    ("/usage?first=2026-02-01&last=2026-01-01", 422, "first"),
    ("/usage?format=xlsx", 422, "format"),
    ("/usage?form=csv", 422, "form"),
    *((f"/{path}?{field}={text}", 422, field) for path in ("history", "jobs") for field, text in STRANGE_TIMES),
    ("/history?state=running", 422, "state[0]"),
    ("/history?sort=size", 422, "sort"),
    ("/history?before=x", 422, "before"),
    ("/history?before=1:", 422, "before"),
    (f"/history?before=1:{HUGE}", 422, "before"),
    ("/history?limit=0", 422, "limit"),
    ("/history?limit=1001", 422, "limit"),
    ("/history?since=1h&until=2h", 422, "since"),
    ("/jobs?sort=queue", 422, "sort"),
    ("/jobs?sort=nodes&state=failed&state=queued", 422, "sort"),
    ("/jobs?sort=queue&active=true&offset=-1", 422, "offset"),
    *((f"/record?{query}", 422, query.partition("=")[0]) for query in ("since=0", "until=-1", "since=nan", "from=1")),
    ("/jobs/99/explain", 404, "job"),
]
WRONG_REPLICAS: list[tuple[Any, ...]] = [
    ({"name": "m", "cluster": "north"}, 422, "path"),
    ({"name": "m", "cluster": "north", "path": "/m", "size": 4}, 422, "size"),
    ({"nmae": "m", "cluster": "north", "path": "/m"}, 422, "nmae"),
    ({"name": "..", "cluster": "north", "path": "/m"}, 422, "name"),
    ({"name": "a/.", "cluster": "north", "path": "/m"}, 422, "name"),
    ({"name": "a\nb", "cluster": "north", "path": "/m"}, 422, "name"),
    ({"name": "a\0", "cluster": "north", "path": "/m"}, 422, "name"),
    ({"name": "\x1b[31m", "cluster": "north", "path": "/m"}, 422, "name"),
    ({"name": "x" * 1001, "cluster": "north", "path": "/m"}, 422, "name"),
    ({"name": "", "cluster": "north", "path": "/m"}, 422, "name"),
    ({"name": "/", "cluster": "north", "path": "/m"}, 422, "name"),
    ({"name": " m", "cluster": "north", "path": "/m"}, 422, "name"),
    ({"name": "m/" + "x" * 256, "cluster": "north", "path": "/m"}, 422, "name"),
    ({"name": "m", "cluster": "north", "path": ""}, 422, "path"),
    ({"name": "m", "cluster": "nroth", "path": "/m"}, 422, "cluster"),
    ({"name": "m", "cluster": "north", "path": "m"}, 422, "path"),
    ({"name": "m", "cluster": "north", "path": "/m\0"}, 422, "path"),
    ({"name": "m", "cluster": "north", "path": "/nothing"}, 422, "path"),
    ({"name": "m", "cluster": "north", "path": "/etc/shadow"}, 422, "path"),
    ({"name": "m", "cluster": "south", "path": "/other"}, 409, "path"),
    ([], 422, "body"),
]
WRONG_DRAINS: list[tuple[Any, ...]] = [
    ({"reason": "two\nlines"}, "reason"),
    ({}, "reason"),
    ({"reason": "  "}, "reason"),
    ({"reason": "x", "by": "ops"}, "by"),
    ({"resaon": "x", "reason": "y"}, "resaon"),
    ({"reason": "x" * 1001}, "reason"),
    ([], "body"),
]
WRONG_MEASUREMENTS: list[tuple[Any, ...]] = [
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
]
WRONG_QUESTIONS: list[tuple[Any, ...]] = [
    ({"policy": "no-such"}, "policy"),
    ({"rules": ["queue"]}, "rules"),
    ({"rules": ["claim_factor=7"]}, "rules.claim_factor"),
    ({"rules": ["no_such=7"]}, "rules.no_such"),
    ({"rules": ["queue=[1"]}, "rules"),
    ({"rules": ["queue=2026-01-01"]}, "rules.queue"),
    ({"rules": ["queue=2026-99-99"]}, "rules"),
    ({"rules": ["queue=!!binary aGk="]}, "rules.queue"),
    ({"rules": ["queue=!!set {a}"]}, "rules.queue"),
    ({"rules": ["queue=!!bool x"]}, "rules"),
    ({"rules": ["queue=!!timestamp 5"]}, "rules"),
    ({"rules": ["queue=!!int ''"]}, "rules"),
    ({"rules": ["queue=" + "[" * 250]}, "rules"),
    ({"rules": [f"queue={'1:' * 190}1.0"]}, "rules"),
    ({"rules": ["queue=[&a [1], *a]"]}, "rules"),
    ({"rules": ["claim_grace=.nan"]}, "rules.claim_grace"),
    ({"rules": ["step_budget=.inf"]}, "rules.step_budget"),
    ({"rules": ["claim_grace=-.inf"]}, "rules.claim_grace"),
    ({"rules": ["queue=never"]}, "rules.queue"),
    ({"drain": ["nowhere"]}, "drain"),
    ({"add": ["west=0"]}, "add"),
    ({"add": ["west=x"]}, "add"),
    ({"add": ["north=4"]}, "add"),
    ({"add": ["west=4", "west=8"]}, "add"),
    ({"rules": ["queue=fcfs", "queue=scan"]}, "rules"),
    ({"walltimes": ["1=60", "1=90"]}, "walltimes"),
    ({"drain": ["north"], "resume": ["north"]}, "resume"),
    ({"first": 77}, "first"),
    ({"walltimes": ["77=90m"]}, "walltimes"),
    ({"walltimes": ["1=never"]}, "walltimes"),
    ({"walltimes": [f"1={'9' * 390}:00"]}, "walltimes"),
    ({"polcy": "auto"}, "polcy"),
    ({"horizon": 59}, "horizon"),
    ({"horizon": "31d"}, "horizon"),
    ({"horizon": "soon"}, "horizon"),
    ({"horizon": True}, "horizon"),
    ({"horizon": "-1s"}, "horizon", "horizon is '-1s', not a duration", "or as 1:30:00"),
]
WRONG_TOKENS: list[tuple[Any, ...]] = [
    *(
        (order, next(iter(order)))
        for order in [
            {"user": ""},
            {"user": "a b"},
            {"user": "a\nb"},
            {"expires": 0},
            {"expires": -1},
            {"role": "root"},
            {"x": 1},
        ]
    ),
    ({"user": "älice"}, "user", "with characters that are not allowed"),
    ({"user": "alice\n"}, "user", "with characters that are not allowed"),
    ({"user": "a\0"}, "user", "with a NUL character"),
]
WRONG_JOB_LISTS: list[tuple[Any, ...]] = [
    *(({"jobs": jobs}, "jobs") for jobs in ([], list(range(1001)), None, "1")),
    *(({"jobs": jobs}, "jobs[1]") for jobs in ([1, "2"], [1, 2**53 + 1], [1, True])),
    ({"jobs": [1], "reson": "x"}, "reson", "did you mean reason? known: jobs, reason, warn"),
]
WRONG_CHANGES: list[tuple[Any, ...]] = [
    ({"request": {"total_size": 9}}, "request.total_size"),
    ({"request": {"total_size": 0}}, "request.total_size"),
    ({"request": {"total_size": None}}, "request.total_size"),
    ({"request": {"min_component_size": 7}}, "request.min_component_size"),
    ({"request": {"components": [{"size": 1}]}}, "request.components"),
    ({"request": {"type": "fixed"}}, "request.components"),
    ({"request": {"type": "fixed", "components": []}}, "request.components"),
    ({"request": {"type": "fixed", "components": [{"size": 1, "cluster": "west"}]}}, "request.components[0].cluster"),
    ({"request": {"type": "nonfixed", "total_size": 2, "components": [{"size": 1}]}}, "request.total_size"),
    ({"policy": "worst-fit"}, "policy"),
    ({"speed_ratio_min": 2}, "speed_ratio_min"),
    ({"command": ["other"]}, "command"),
    ({"request": {"components": [{"size": 1, "command": ["x"]}]}}, "request.components[0].command"),
]
WRONG_TASKS: list[tuple[Any, ...]] = [
    ("0", 422, "array 3 has no task 0; its indices are 1-5"),
    ("x", 422, "tasks has the part 'x'"),
    ("1-5:0", 422, "with the step 0"),
]
REQUESTS: dict[str, list[tuple[Any, ...]]] = {
    "queries": [(path if " " in path else f"GET {path}", None, *row) for path, *row in QUERIES],
    "replicas": [
        *(("POST /replicas", *row) for row in WRONG_REPLICAS),
        ("POST /replicas/verify", {"name": "x"}, 404, "name"),
        ("POST /replicas/verify", {"name": "m", "cluster": "south"}, 404, "cluster"),
        ("POST /replicas/verify", {"name": "m", "cluster": "w"}, 422, "cluster"),
        ("DELETE /replicas?name=x", None, 404, "name"),
        ("DELETE /replicas?name=m&cluster=south", None, 404, "cluster"),
        ("DELETE /replicas?name=m&cluster=w", None, 422, "cluster"),
    ],
    "drains": [
        *(("POST /clusters/north/drain", order, 422, *row) for order, *row in WRONG_DRAINS),
        ("POST /clusters/nroth/drain", {"reason": "x"}, 404, "cluster", "did you mean north?"),
        ("POST /clusters/nroth/resume", None, 404, "cluster", "did you mean north?"),
        ("POST /clusters/nroth/clear", None, 404, "cluster", "did you mean north?"),
    ],
    "network": [("POST /network/measure", order, 422, *row) for order, *row in WRONG_MEASUREMENTS],
    "what-if": [("POST /what-if", order, 422, *row) for order, *row in WRONG_QUESTIONS],
    "tokens": [("POST /tokens", order, 422, *row) for order, *row in WRONG_TOKENS],
    "jobs": [
        *(("POST /jobs/cancel", order, 422, *row) for order, *row in WRONG_JOB_LISTS),
        *(("POST /jobs:batch", {"jobs": jobs}, 422, "jobs") for jobs in ([], None, {}, "x")),
        *(("POST /jobs:batch", {"jobs": jobs}, 422, "jobs[0]") for jobs in ([1], [None])),
        *(("POST /jobs/3/cancel", {"tasks": indices}, status, "tasks", text) for indices, status, text in WRONG_TASKS),
        ("GET /jobs/3/logs", None, 409, "job", "name a task, as in koala logs '3[1]'"),
        ("GET /jobs/3/results", None, 409, "job", "job 3 is an array", "as in koala fetch '3[1]'"),
        ("GET /jobs/9/events", None, 404, "job"),
        *(("PATCH /jobs/2", order, 422, *row) for order, *row in WRONG_CHANGES),
        *(("POST /jobs/2/explain", order, 422, *row) for order, *row in WRONG_CHANGES),
    ],
}
"""Method and path, body, status, and the field of the problem, then parts of its detail and hint."""


@pytest.mark.parametrize("table", REQUESTS)
async def test_wrong_request_is_rejected_with_its_field_and_a_hint(open_api: Open, body: Json, table: str) -> None:
    api = await open_prepared(open_api, body)

    async def read_state() -> list[Any]:
        paths = ("jobs", "jobs/2", "jobs/3", "replicas", "tokens", "clusters")
        return [(await api.get(f"/api/v1/{path}")).json() for path in paths]

    before = await read_state()
    for request, order, status, field, *texts in REQUESTS[table]:
        method, path = request.split(" ")
        answer = await api.request(method, f"/api/v1{path}", **({} if order is None else {"json": order}))
        problem = answer.json()
        assert (answer.status_code, problem.get("field")) == (status, field), (request, order, problem)
        assert answer.headers["content-type"] == "application/problem+json"
        assert problem["hint"] or table not in ("queries", "replicas", "drains", "network"), (request, order)
        assert all(text in f"{problem['detail']}; {problem['hint']}" for text in texts), str(problem)
    assert await read_state() == before
