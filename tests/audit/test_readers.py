"""The readers understand what the store, the agent, the recorder and resource managers really write."""

import gzip
import json
import os
import sqlite3
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from koalapy.agent.core.spool import JournalFolder
from koalapy.agent.lrm.local.jobs import LocalJob, LocalNode
from koalapy.agent.lrm.local.locald import Accounting
from koalapy.audit.facts import Fact, JobRecord, MissingRow, Output, Run, RunKind, Source, Submission
from koalapy.audit.readers import (
    GridFiles,
    _read_qacct,
    parse_token,
    read_accounting,
    read_database,
    read_grid,
    read_instance,
    read_output,
    read_record,
    read_spool,
    token_of,
)
from koalapy.audit.rules import audit_facts, find_violations
from koalapy.model.array import IndexRange, TaskIndices
from koalapy.model.dependency import Dependency, EndCondition
from koalapy.model.errors import UsageError
from koalapy.model.job import ArrayTasks, ComponentState, JobState, TimelineEntry
from koalapy.store.engine import make_engine
from koalapy.store.opening import Stores, open_stores
from koalapy.store.output import OutputStore
from koalapy.store.records import Batch, OutputPiece, Submitted
from tests.audit.history import DATABASE
from tests.needs import find_postgresql
from tests.store.jobs import make_job, make_running_job
from tests.store.postgresql import Server
from tests.store.test_migrations import fill_database

TOKEN = "7.2.1.5eed"
NAME = f"koala-3e322907-{TOKEN}"


@pytest.fixture
def stores(tmp_path: Path) -> Iterator[Stores]:
    stores = open_stores(f"sqlite:///{tmp_path}/koala.db", OutputStore(tmp_path / "output", 1000))
    yield stores
    stores.jobs.close()


def write(stores: Stores, **batch: object) -> None:
    stores.jobs.write(Batch(at=1.0, epoch=stores.jobs.epoch, **batch))


def facts_of(tmp_path: Path, kind: type[Fact]) -> list[Any]:
    return [fact for fact in read_database(f"sqlite:///{tmp_path}/koala.db") if isinstance(fact, kind)]


def test_read_database_with_running_job_yields_its_claims(stores: Stores, tmp_path: Path) -> None:
    write(stores, jobs={7: make_running_job(7)}, submitted=[Submitted("key", 7, "digest")])
    (record,) = facts_of(tmp_path, JobRecord)
    assert (record.job, record.state, record.attempt, record.is_final) == (7, "running", 1, False)
    first, second, third = facts_of(tmp_path, Run)
    assert (first.nodes, first.begin, first.has_ended, first.nonce, first.run_id) == (
        ("127.0.1.1", "127.0.1.2"),
        3.5,
        False,
        "5eed",
        "7",
    )
    assert (second.superseded, second.unknown_since is not None, second.last_moment) == (True, True, None)
    assert (third.begin, third.has_ended) == (None, True)
    assert [(fact.key, fact.job) for fact in facts_of(tmp_path, Submission)] == [("key", 7)]


def test_read_database_with_lost_component_yields_when_its_lease_was_over(stores: Stores, tmp_path: Path) -> None:
    """Whatever the timeline says of it."""
    job = make_running_job(7)
    running, _, placed = job.attempt.components
    ended = replace(running, state=ComponentState.ENDED, ended_at=60.0)
    components = (
        replace(ended, unknown_since=9.0, lost_at=50.0),
        replace(ended, index=1, unknown_since=9.0),
        replace(ended, index=2),
        replace(placed, index=3, state=ComponentState.RUNNING, unknown_since=9.0, lost_at=90.0),
    )
    write(stores, jobs={7: replace(job, attempt=replace(job.attempt, components=components))})
    facts = [(run.has_ended, run.unknown_since, run.lease_over_at) for run in facts_of(tmp_path, Run)]
    assert facts == [(True, 9.0, 50.0), (True, 9.0, None), (True, None, None), (True, 9.0, None)]


def test_read_database_while_the_daemon_writes_sees_one_moment(stores: Stores, tmp_path: Path) -> None:
    write(stores, jobs={7: make_running_job(7)}, submitted=[Submitted("key", 7, "digest")])
    reading = read_database(f"sqlite:///{tmp_path}/koala.db")
    facts = [next(reading)]
    write(stores, jobs={8: make_running_job(8)}, submitted=[Submitted("another", 8, "digest")])
    facts += reading
    assert {fact.job for fact in facts} == {7}
    with sqlite3.connect(tmp_path / "koala.db") as database:  # no reader holds back a checkpoint
        assert database.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0] == 0


def test_read_database_tells_which_jobs_were_removed_by_age(stores: Stores, tmp_path: Path) -> None:
    ended = make_job(3, JobState.CANCELLED, ended_at=9.0)
    write(stores, jobs={3: ended, 4: make_job(4)}, submitted=[Submitted("key", 3, "digest")])
    stores.history.remove([3])
    (record,) = facts_of(tmp_path, JobRecord)
    assert (record.job, record.source.removed_to) == (4, 3)
    assert facts_of(tmp_path, Submission) == []


def test_read_database_tells_in_which_order_jobs_were_placed_and_ended(stores: Stores, tmp_path: Path) -> None:
    ended = make_job(3, JobState.SUCCEEDED, ended_at=9.0)
    lines = [(3, "placed", JobState.PLACED), (3, "succeeded", JobState.SUCCEEDED), (4, "placed", JobState.PLACED)]
    lines += [(4, "requeued", JobState.QUEUED), (4, "placed", JobState.PLACED)]
    timeline = [TimelineEntry(job, 1.0, event, state) for job, event, state in lines]
    write(stores, jobs={3: ended, 4: make_running_job(4)}, timeline=timeline)
    first, second = facts_of(tmp_path, JobRecord)
    assert (first.placed_line, first.ended_line, second.placed_line, second.ended_line) == (1, 2, 3, None)


def test_read_grid_with_output_in_transit_reads_it_after_the_database(stores: Stores, tmp_path: Path) -> None:
    write(stores, jobs={7: make_running_job(7)})
    stores.output.append(TOKEN, [OutputPiece(0, b"x" * 9)])
    stored = []
    for fact in read_grid(GridFiles(tmp_path)):
        if isinstance(fact, JobRecord):
            stores.output.append(TOKEN, [OutputPiece(9, b"y" * 3)])
        elif isinstance(fact, Output):
            stored.append(fact.stored)
    assert stored == [12]


def test_read_database_with_array_and_dependency_yields_both(stores: Stores, tmp_path: Path) -> None:
    array = make_job(3, JobState.FAILED, tasks=ArrayTasks(3, (), 0.0, 0, 2, 1, 0), ended_at=9.0)
    indices = TaskIndices((IndexRange(4, 8, 2),))
    array = replace(array, spec=replace(array.spec, array=indices))
    task = make_job(4, JobState.SUCCEEDED, array_job=3, array_index=4, exit_code=0)
    dependent = make_job(9)
    after = ((Dependency(3, EndCondition.ANY), Dependency(4)),)
    dependent = replace(dependent, spec=replace(dependent.spec, after=after))
    write(stores, jobs={job.id: job for job in (array, task, dependent)})
    array_record, task_record, record = facts_of(tmp_path, JobRecord)
    counts = array_record.array
    assert (counts.size, counts.succeeded, counts.failed) == (3, 2, 1)
    assert [index for index in range(10) if counts.has_index(index)] == [4, 6, 8]
    assert (task_record.task_of, task_record.index, task_record.exit_code) == (3, 4, 0)
    assert record.after == (((3, "any"), (4, "ok")),)


@pytest.mark.parametrize("revision", ["0001_schema", "0008_planned_drains"])
def test_read_database_of_earlier_version_yields_its_jobs(revision: str, tmp_path: Path) -> None:
    fill_database(make_engine(f"sqlite:///{tmp_path}/koala.db"), revision)
    assert len(facts_of(tmp_path, JobRecord)) == 14


@pytest.mark.processes
@pytest.mark.skipif(find_postgresql() is None, reason="PostgreSQL is not installed")
def test_read_database_of_postgresql_yields_the_same_facts(stores: Stores, tmp_path: Path) -> None:
    server = Server(find_postgresql())
    server.start()
    try:
        url = server.new_database()
        copy = open_stores(url, OutputStore(tmp_path / "output", 1000))
        for each in (stores, copy):
            entry = TimelineEntry(7, 50.0, "output-missing", JobState.RUNNING, "its lease is over", 1, 0, "north", "")
            write(each, jobs={7: make_running_job(7)}, timeline=[entry], submitted=[Submitted("key", 7, "digest")])
        copy.jobs.close()
        facts = {replace(fact, source=DATABASE) for fact in read_database(url)}
        assert len(facts) == 12
        assert facts == {replace(fact, source=DATABASE) for fact in read_database(f"sqlite:///{tmp_path}/koala.db")}
        lines = {fact.missing for fact in facts if isinstance(fact, MissingRow)}
        assert lines == {
            f"{event} in the timeline" for event in ("submitted", "placed", "claiming", "claimed", "started", "running")
        }
        assert len(read_instance(url)) == 8
    finally:
        server.remove()


def test_read_output_yields_stored_sizes(stores: Stores, tmp_path: Path) -> None:
    stores.output.append(TOKEN, [OutputPiece(0, b"x" * 900), OutputPiece(900, b"y" * 900)])
    assert [(o.job, o.attempt, o.part, o.stored) for o in read_output(tmp_path / "output")] == [(7, 2, "1", 1800)]


STEPS = [
    {"koala_record": 1, "version": "0", "life": "1795961620340", "part": 1},
    {"begin": {}},
    {"n": 1, "at": 100.0, "done": [[], [], [["SubmitComponent", "south", TOKEN]]]},
    {"n": 2, "at": 101.0, "events": [["Reported", "south", "ComponentStatus", {"token": TOKEN, "state": "waiting"}]]},
    {"n": 3, "at": 102.0, "events": [["Reported", "south", "ClusterReport", {"total": 4, "holding": [TOKEN]}]]},
    {"n": 4, "at": 103.0, "done": [[], [], [["OpenBarrier", "south", TOKEN]]]},
    {
        "n": 5,
        "at": 104.0,
        "events": [["Reported", "south", "ComponentStatus", {"token": TOKEN, "state": "running", "lrm_job": "17"}]],
    },
]
OTHER_TOKEN = TOKEN.replace(".1.", ".0.")
OVER = {"token": TOKEN, "state": "running", "program_exit": 3, "over": True, "hosts": ["127.0.2.1"]}
ENDED = OVER | {"state": "ended"}


def reported(at: float, status: dict[str, object]) -> dict[str, object]:
    return {"n": 9, "at": at, "events": [["Reported", "south", "ComponentStatus", status]]}


def write_record(
    folder: Path, began: int, lines: list[Any], *, packed: bool = False, until: float = 1000.0, part: int = 1
) -> None:
    path = folder / f"{began:013d}-{part:06d}.jsonl{'.gz' if packed else ''}"
    text = "".join(f"{json.dumps(line)}\n" for line in lines).encode()
    path.write_bytes(gzip.compress(text) if packed else text)
    os.utime(path, (until, until))


@pytest.mark.parametrize("packed", [True, False])
def test_read_record_with_ended_program_yields_its_interval(tmp_path: Path, packed: bool) -> None:
    free = {"n": 8, "at": 109.0, "events": [["Reported", "south", "ClusterReport", {"total": 4}]]}
    write_record(tmp_path, 99_000, [*STEPS, reported(107.0, OVER), reported(108.0, ENDED), free], packed=packed)
    (run,) = read_record(tmp_path)
    assert (run.kind, run.job, run.attempt, run.part, run.cluster) == (RunKind.PROGRAM, 7, 2, "1", "south")
    assert (run.begin, run.end, run.exit_code, run.nodes, run.run_id) == (104.0, 107.0, 3, ("127.0.2.1",), "17")
    assert (run.source.since, run.source.read_at) == (99.0, 109.0), "the file was written later"


def test_read_record_while_daemon_compresses_and_removes_parts(tmp_path: Path) -> None:
    def change_parts(change: Callable[[Path], None]) -> list[Run]:
        """Return the runs that are read if all but the first part change after the first run is read."""
        write_record(tmp_path, 99_000, [*STEPS, reported(108.0, ENDED), *STEPS], until=200.0)
        write_record(tmp_path, 99_000, [reported(109.0, ENDED)], part=2, until=300.0)
        write_record(tmp_path, 150_000, [{"n": 1, "at": 151.0}, *STEPS, reported(152.0, ENDED)], until=400.0)
        (tmp_path / "0000000150000-000001.jsonl.incoming").write_bytes(b"half")
        runs = read_record(tmp_path)
        first = next(runs)
        for path in tmp_path.glob("*"):
            if path.name != "0000000099000-000001.jsonl":
                change(path)
        return [first, *runs]

    def compress(path: Path) -> None:
        if path.suffix != ".incoming":
            write = path.stat().st_mtime
            path.with_name(f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes()))
            os.utime(path.with_name(f"{path.name}.gz"), (write, write))
        path.unlink()

    programs = [run for run in change_parts(compress) if run.kind is RunKind.PROGRAM]
    assert [(run.end, run.source.since, run.source.read_at) for run in programs] == [
        (108.0, 99.0, 109.0),
        (109.0, 99.0, 109.0),
        (152.0, 150.0, 152.0),
    ]
    with pytest.raises(UsageError, match=r"000002\.jsonl.* cannot be read") as error:
        change_parts(Path.unlink)
    assert "repeat the audit" in error.value.hint


def test_read_record_with_repeated_end_yields_program_once(tmp_path: Path) -> None:
    write_record(tmp_path, 99_000, [*STEPS, reported(108.0, ENDED), reported(120.0, ENDED)])
    runs = list(read_record(tmp_path))
    assert [run.kind for run in runs] == [RunKind.PROGRAM, RunKind.HELD]
    assert (runs[1].has_ended, runs[1].source.read_at) == (False, 102.0)  # the last report of the cluster


def test_read_record_over_two_daemon_runs_leaves_end_unknown(tmp_path: Path) -> None:
    write_record(tmp_path, 99_000, STEPS, packed=True, until=105.0)
    inventory = {"cluster": "south", "inventory": {"components": [ENDED]}}
    write_record(tmp_path, 150_000, [{"n": 1, "at": 151.0, "events": [["InventoryReceived", inventory]]}])
    run, _ = read_record(tmp_path)
    assert (run.begin, run.end, run.has_ended, run.exit_code) == (104.0, None, True, 3)
    assert (run.source.since, run.source.read_at) == (150.0, 151.0)


def test_read_record_without_its_first_part_knows_nothing_of_before(tmp_path: Path) -> None:
    write_record(tmp_path, 99_000, STEPS, part=2, until=105.0)
    write_record(tmp_path, 99_000, [reported(108.0, ENDED)], part=3)
    run, _ = read_record(tmp_path)
    assert (run.end, run.source.since, run.source.read_at) == (108.0, 105.0, 108.0)


@pytest.mark.parametrize(
    ("last_step", "state", "exit_code", "gap"),
    [
        ({"at": 107.5}, "succeeded", 0, "gang-whole"),
        (reported(108.0, OVER | {"token": OTHER_TOKEN, "program_exit": 0}), "succeeded", 0, ""),
        ({"at": 107.5}, "failed", 3, "result-produced"),
    ],
)
def test_program_whose_end_a_killed_daemon_did_not_record_is_no_finding(
    tmp_path: Path, last_step: dict[str, object], state: str, exit_code: int, gap: str
) -> None:
    """The other component frees its nodes at 108 and ends with its job at 109; the daemon is killed at 110."""
    write_record(tmp_path, 99_000, [*STEPS, reported(107.0, ENDED | {"program_exit": 0}), last_step], until=110.0)
    write_record(tmp_path, 150_000, [{"at": 151.0}])
    database = Source("database")
    record = JobRecord(database, 7, state, 2, exit_code, ended_at=109.0, has_one_code=False)
    claims = [
        Run(database, RunKind.CLAIM, 7, 2, part, "south", 101.0, end) for part, end in (("0", 108.0), ("1", 107.0))
    ]
    report = audit_facts([record, *claims, *read_record(tmp_path)])
    rules = {rule for rule, _ in report.missing}
    assert (report.findings, rules - {"nothing-left"}) == ([], {gap} - {""})


def test_read_record_with_start_in_a_later_daemon_run_yields_both(tmp_path: Path) -> None:
    write_record(tmp_path, 99_000, [*STEPS, reported(108.0, ENDED | {"lrm_job": "17"})], until=120.0)
    again = OVER | {"lrm_job": "18"}
    write_record(tmp_path, 150_000, [reported(160.0, again), reported(170.0, again | {"state": "ended"})])
    runs = [run for run in read_record(tmp_path) if run.kind is RunKind.PROGRAM]
    assert [(run.begin, run.end, run.run_id) for run in runs] == [(104.0, 108.0, "17"), (160.0, 160.0, "18")]
    assert [finding.rule for finding in find_violations(runs)] == ["attempt-once"]


def test_read_record_with_lost_agent_leaves_end_unknown(tmp_path: Path) -> None:
    lost = {"n": 6, "at": 105.0, "events": [["AgentDisconnected", {"cluster": "south"}]]}
    write_record(tmp_path, 99_000, [*STEPS, lost, reported(200.0, ENDED)])
    run, _ = read_record(tmp_path)
    assert (run.begin, run.end) == (104.0, None)


@pytest.mark.parametrize(
    "spoil", [lambda line: line[:-20], lambda line: bytes(len(line)), lambda line: b"\0" * 3 + line]
)
@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_read_record_with_spoiled_line_yields_what_is_before(
    tmp_path: Path, suffix: str, spoil: Callable[[bytes], bytes]
) -> None:
    write_record(tmp_path, 99_000, [*STEPS, reported(108.0, ENDED)])
    path = next(tmp_path.iterdir())
    lines = path.read_bytes().splitlines(keepends=True)
    content = b"".join([*lines[:-1], spoil(lines[-1])])
    path.unlink()
    path.with_name(path.name + suffix).write_bytes(gzip.compress(content)[:-9] if suffix else content)
    run, _ = read_record(tmp_path)
    assert (run.begin, run.end, run.exit_code) == (104.0, None, None)


def make_journal(tmp_path: Path) -> JournalFolder:
    folder = tmp_path / "clusters" / "south" / "spool" / "3e322907" / TOKEN
    folder.mkdir(parents=True)
    return JournalFolder(folder)


def test_read_spool_with_ended_component_yields_its_result(tmp_path: Path) -> None:
    journal = make_journal(tmp_path)
    journal.write_entry(submit={"size": 1})
    journal.write_entry(lrm="17")
    journal.write_entry(open={"launcher": "processes"}, lives=[])
    journal.write_entry(**{"result.0": {"code": 3, "name": "south-2", "host": "127.0.2.2"}})
    (journal.path / "result.0.json").write_bytes(b"0" * 64 + b"\n" + json.dumps({"code": 3, "output": 12}).encode())
    journal.write_entry(end={"exit_code": 3, "hosts": ["127.0.2.2"]})
    held, program, output = read_spool(tmp_path / "clusters" / "south" / "spool")
    assert (held.kind, held.cluster, held.has_ended, held.run_id) == (RunKind.HELD, "south", True, "17")
    assert (program.kind, program.exit_code, program.nodes) == (RunKind.PROGRAM, 3, ("south-2",))
    assert isinstance(output, Output)
    assert output.written == 12
    assert list(read_spool(tmp_path / "clusters" / "south" / "spool", instance="another")) == []


def test_read_spool_with_live_component_yields_open_interval(tmp_path: Path) -> None:
    journal = make_journal(tmp_path)
    journal.write_entry(submit={"size": 2})
    journal.write_entry(lrm="17")
    (held,) = read_spool(tmp_path / "clusters" / "south" / "spool")
    assert (held.has_ended, held.size) == (False, 2)
    with (journal.path / "journal").open("ab") as file:
        file.write(b'{"open": {')  # cut while it was written
    assert len(list(read_spool(tmp_path / "clusters" / "south" / "spool"))) == 1


SACCT = f"""JobIDRaw|JobName|State|ExitCode|Start|End|NodeList
17|{NAME}|COMPLETED|0:0|2026-11-29T14:00:00|2026-11-29T14:00:30|south[1-2],big
18|{NAME}|RUNNING|0:0|1795961620|Unknown|south3
19|somebody|COMPLETED|0:0|2026-11-29T14:00:00|2026-11-29T14:00:30|south4
20|{NAME}|CANCELLED|0:0|Unknown|2026-11-29T14:00:30|None assigned
"""
QACCT = f"""==============================================================
qname        all.q
hostname     south1
owner        koala
jobname      {NAME}
jobnumber    17
start_time   Sun Nov 29 14:00:00 2026
end_time     Sun Nov 29 14:00:30 2026
exit_status  0
==============================================================
hostname     south2
jobname      {NAME}
jobnumber    17
start_time   11/29/2026 14:00:00.000
end_time     11/29/2026 14:00:30.000
==============================================================
hostname     south3
jobname      somebody
jobnumber    18
start_time   Sun Nov 29 14:00:00 2026
end_time     Sun Nov 29 14:00:30 2026
Total System Usage
    WALLCLOCK         UTIME
"""
BEGIN = 1795960800.0


def test_read_accounting_of_slurm_yields_jobs_with_nodes(tmp_path: Path) -> None:
    (tmp_path / "sacct").write_text(SACCT)
    first, second = read_accounting(tmp_path / "sacct", "south")
    assert (first.nodes, first.begin, first.end) == (("south1", "south2", "big"), BEGIN, BEGIN + 30)
    assert (first.job, first.attempt, first.part, first.nonce, first.run_id) == (7, 2, "1", "5eed", "17")
    assert (second.nodes, second.begin, second.has_ended) == (("south3",), 1795961620.0, False)
    assert list(read_accounting(tmp_path / "sacct", "south", instance="another")) == []


def test_read_accounting_of_grid_engine_joins_nodes_of_a_job(tmp_path: Path) -> None:
    (tmp_path / "qacct").write_text(QACCT)
    (run,) = read_accounting(tmp_path / "qacct", "south")
    assert (run.nodes, run.begin, run.end, run.has_ended) == (("south1", "south2"), BEGIN, BEGIN + 30, True)


def test_read_accounting_of_grid_engine_reads_only_what_it_needs() -> None:
    """It may have years of jobs."""
    lines = iter(2 * QACCT.splitlines(keepends=True))
    _, run = next(_read_qacct(lines, "south", Source("qacct")))
    assert (run.nodes, len(list(lines))) == (("south1", "south2"), QACCT.count("\n") - 1)


def test_read_accounting_of_embedded_cluster_ends_jobs_of_a_killed_manager(tmp_path: Path) -> None:
    folder = tmp_path / "clusters" / "south" / "lrm"
    folder.mkdir(parents=True)
    nodes = [LocalNode("south-1", "127.0.2.1"), LocalNode("south-2", "127.0.2.2")]
    accounting = Accounting(folder / "accounting")
    jobs = [LocalJob(number, NAME, "grid", 2, nodes=nodes) for number in (17, 18)]
    accounting.note_start(jobs[0])
    accounting.note_end(jobs[0])
    accounting.note_start(jobs[1])
    first, second = read_accounting(folder / "accounting")
    assert (first.cluster, first.nodes, first.has_ended) == ("south", ("south-1", "south-2"), True)
    assert first.begin <= first.end
    assert (second.run_id, second.has_ended) == ("18", False)
    Accounting(folder / "accounting")  # of the next manager
    assert [run.has_ended for run in read_accounting(folder / "accounting")] == [True, True]


def test_read_accounting_after_a_loss_of_power_yields_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "accounting"
    accounting = Accounting(path)
    accounting.note_start(LocalJob(17, NAME, "grid", 1, nodes=[LocalNode("south-1", "127.0.2.1")]))
    content = path.read_bytes()
    beginning = content.index(b"\n")
    path.write_bytes(bytes(beginning) + content[beginning:] + b'{"job": "17", "en')
    Accounting(path)  # of the next manager
    (run,) = read_accounting(path, "south")
    assert (run.run_id, run.has_ended) == ("17", True)


def test_read_accounting_of_unknown_file_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("what is this\n")
    with pytest.raises(UsageError, match="no accounting that koala knows"):
        list(read_accounting(tmp_path / "notes"))
    with pytest.raises(UsageError, match="cannot be read"):
        list(read_accounting(tmp_path / "missing"))


def test_read_grid_without_database_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="does not exist"):
        list(read_grid(GridFiles(tmp_path)))
    with pytest.raises(UsageError, match="cannot be read"):
        list(read_grid(GridFiles(tmp_path, "oracle://host/name")))


def test_tokens_are_found_in_names_of_jobs_of_the_grid_only() -> None:
    assert token_of(NAME) == ("3e322907", TOKEN)
    assert token_of("koala-3e322907-1.1.0") == ("3e322907", "1.1.0")
    assert token_of("koala-reserve") is None
    assert parse_token("1.1.0") == (1, 1, "0", "")
    assert ComponentState.ENDED in ("ended",)
