"""Text of sites in recorded answers of commands: each line that is not understood costs at most itself."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from koalapy.agent.lrm.commands import CommandResult, Commands
from koalapy.agent.lrm.sge.answers import read_accounting, read_hosts, read_listing
from koalapy.agent.lrm.slurm.answers import read_columns, read_nodes
from koalapy.agent.lrm.slurm.commands import _HINTS, _TRANSIENT
from koalapy.agent.lrm.slurm.limits import read_account_limit, read_reservations
from koalapy.agent.lrm.slurm.offer import read_partitions
from koalapy.model.errors import SiteRejected, SiteUnavailable

from .slurm.conftest import recorded_queue
from .slurm.test_offer import PARTITIONS, RESERVATIONS

ANSWERS = Path(__file__).parent
FOREIGN = st.sampled_from(
    [
        "Welcome!",
        "*** maintenance {today} ***",
        "warning: <none>",
        "17 users",
        "a|b",
        "error: cannot, [1-",
        "x=1",
        "--",
        "",
    ]
)


def read_answer(kind: str, name: str) -> str:
    return (ANSWERS / kind / "answers" / name).read_text()


def insert_line(text: str, position: int, line: str) -> str:
    lines = text.splitlines(keepends=True)
    return "".join([*lines[: position % (len(lines) + 1)], f"{line}\n", *lines[position % (len(lines) + 1) :]])


@given(st.integers(0, 3), st.sampled_from(["x", "1500", ""]))
def test_broken_line_of_squeue_costs_one_job(position: int, replacement: str) -> None:
    lines = recorded_queue().splitlines(keepends=True)
    lines[position] = lines[position].replace("16", replacement, 1)[:9000].rstrip("\n") + "\n"
    jobs, unreadable = read_columns("".join(lines).encode(), "koala-", {1500, 1501})
    assert len(jobs) + len(unreadable) >= len(lines) - 1


@pytest.mark.parametrize("release", ["21.08", "22.05", "23.02", "23.11", "24.11"])
@given(st.sampled_from(["before", "after", "both"]), FOREIGN)
def test_text_around_sinfo_is_skipped(release: str, place: str, line: str) -> None:
    text = read_answer("slurm", f"sinfo-{release}.json")
    names = ["main", "batch", "debug"]
    before, after = (f"{line}\n" if place != other else "" for other in ("after", "before"))
    assert read_nodes(f"{before}{text}\n{after}".encode(), names) == read_nodes(text.encode(), names)


@given(st.integers(0, 200), FOREIGN, st.sampled_from(["busy.xml", "idle.xml", "troubled.xml", "deleting.xml"]))
def test_foreign_line_in_qstat_costs_nothing(position: int, line: str, name: str) -> None:
    text, expected = read_answer("sge", name), read_listing(read_answer("sge", name).encode())
    listing = read_listing(insert_line(text, position, line).encode())
    assert (listing.instances, listing.jobs) == (expected.instances, expected.jobs)


@given(st.integers(0, 200), FOREIGN)
def test_foreign_line_in_lines_of_fields_costs_nothing(position: int, line: str) -> None:
    for read, text in (
        (read_accounting, read_answer("sge", "qacct.txt")),
        (read_reservations, RESERVATIONS),
        (read_hosts_of_text, HOSTS),
    ):
        assert read(insert_line(text, position, line)) == read(text)  # type: ignore[operator]
    partitions = read_partitions(PARTITIONS)
    assert read_partitions(insert_line(PARTITIONS, position, line)).items() >= partitions.items()


HOSTS = """<?xml version='1.0'?>
<qhost>
 <host name='n1'>
   <hostvalue name='num_proc'>2</hostvalue>
   <hostvalue name='mem_total'>1.0G</hostvalue>
 </host>
</qhost>
"""


def read_hosts_of_text(text: str) -> object:
    return read_hosts(text.encode())


def limit_line(account: str, user: str, group: str, parent: str = "", per_job: str = "") -> str:
    name = f"{user}(1500)" if user else ""
    return (
        f"ClusterName=west Account={account} UserName={name} Partition= Priority=0 ParentAccount={parent} DefAssoc=Yes"
        f" GrpTRES=cpu=N(0),node={group},pages=N(0) GrpTRESMins=cpu=N(0),node=N(0) MaxTRESPJ={per_job} Comment=(null)\n"
    )


@pytest.mark.parametrize(
    ("lines", "most", "free"),
    [
        (limit_line("grid", "koala", "N(0)"), None, None),
        (limit_line("grid", "koala", "2(1)"), 2, 1),
        (limit_line("grid", "koala", "N(0)", per_job="node=3") + limit_line("grid", "", "4(4)", "root(1)"), 3, 0),
        (
            limit_line("grid", "koala", "N(0)")
            + limit_line("grid", "", "N(0)", "top(1)")
            + limit_line("top", "", "5(0)"),
            5,
            5,
        ),
        (limit_line("grid", "alice", "2(1)") + limit_line("other", "", "1(1)"), None, None),
        ("QOS=long(3) GrpTRES=node=1(0) MaxTRESPJ=node=2 \nQOS=grid(2) GrpTRES=cpu=N(0),node=9(2) MaxTRESPJ= ", 9, 7),
        ("Current Association Manager state\n\nNo users currently cached in Slurm.\n", None, None),
    ],
)
def test_account_limit_is_the_lowest_of_all_that_apply(lines: str, most: int | None, free: int | None) -> None:
    limit = read_account_limit(lines, "koala", qos=["grid"])
    assert (limit.max_job_nodes, limit.free_nodes) == (most or 1_000_000, 1_000_000 if free is None else free)


@pytest.mark.parametrize(
    ("text", "fault", "hint"),
    [
        (
            "info: charged to the default account: all\n"
            "Batch job submission failed: Requested time limit is invalid (missing or exceeds some limit)",
            "unsuitable",
            "ask for a shorter walltime",
        ),
        (
            "Batch job submission failed: Time limit specification required, but not provided",
            "unsuitable",
            "give --walltime",
        ),
        (
            "A node count is needed: use -N\nA walltime is needed: use -t\n"
            "Batch job submission failed: Unspecified error",
            "unknown",
            "give --walltime",
        ),
        (
            "Batch job submission failed: Job violates accounting/QOS policy "
            "(job submit limit, user's size and/or time limits)",
            "limit",
            "",
        ),
        ("partition of your quota is json; Batch job submission failed: Unspecified error", "unknown", ""),
        ("unrecognized option '--json'", "site", "upgrade Slurm"),
    ],
)
def test_hint_follows_from_phrase_that_decides_fault(text: str, fault: str, hint: str) -> None:
    errors = "".join(f"sbatch: error: {line}\n" for line in text.splitlines())
    commands = Commands(None, {}, _TRANSIENT, _HINTS)  # type: ignore[arg-type]
    error = commands.error("sbatch", CommandResult(1, b"", errors))
    assert isinstance(error, SiteRejected)
    assert (error.fault, error.hint.startswith(hint) if hint else error.hint == "") == (fault, True)


@pytest.mark.parametrize(
    ("text", "is_outage"),
    [
        ("Message receive failure", True),
        ("Header lengths are longer than data received", True),
        ("Unable to create job record, try again", True),
        ("Required partition not available (inactive or drain)", False),
        ("lua: no account given, set one with -A and try again", False),
    ],
)
def test_lost_reply_is_an_outage_and_words_of_the_site_are_not(text: str, is_outage: bool) -> None:
    commands = Commands(None, {}, _TRANSIENT, _HINTS)  # type: ignore[arg-type]
    error = commands.error("sbatch", CommandResult(1, b"", f"sbatch: error: Batch job submission failed: {text}\n"))
    assert isinstance(error, SiteUnavailable) is is_outage
