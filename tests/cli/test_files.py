"""Input files, staged files and results of jobs."""

import io
import json
import os
import resource
import signal
import stat
import tarfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len

from koalapy.cli.jobs import waiting
from koalapy.cli.terminal.screen import Block
from koalapy.client.archive import pack_archive
from koalapy.client.errors import Exit, GridError
from koalapy.client.results import unpack_results
from koalapy.client.submission import inputs_of
from koalapy.model.command_line import command_for
from koalapy.model.job import Attempt, Component, ComponentState, Job, JobState
from koalapy.model.job_spec import JobSpec
from koalapy.model.request import Bundle, ComponentRequest, FlexibleRequest, InputFile, NonFixedRequest
from tests.cli.conftest import FAST, Koala, Server, StandardError
from tests.daemon.archives import archive_of, make_archive, make_special_member, unpack_archive

SIX = ("--flexible", "6")


def test_stage_of_name_that_is_not_utf8_is_rejected(koala: Koala, tmp_path: Path) -> None:
    (tmp_path / os.fsdecode(b"caf\xe9")).touch()
    ended = koala("submit", "--flexible", "2", "--stage", str(tmp_path), "--", "true")
    assert (ended.code, "the name 'caf\\udce9' is not valid UTF-8; rename it" in ended.err) == (2, True), ended.err


# Submitting with files


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        ("m", {"file": "m"}),
        ("climate/mesh.nc:as=mesh", {"file": "climate/mesh.nc", "as": "mesh"}),
        ("f:partitioned", {"file": "f", "distribution": "partitioned"}),
        ("f:partitioned:as=x", {"file": "f", "distribution": "partitioned", "as": "x"}),
        ("f:as=x:whole", {"file": "f", "distribution": "whole", "as": "x"}),
        ("a:b:c", {"file": "a:b:c"}),
        ("-rf:as=a=b", {"file": "-rf", "as": "a=b"}),
    ],
)
def test_input_option_is_parsed(text: str, fields: dict[str, str]) -> None:
    assert inputs_of([text]) == [fields]


def test_submit_with_transferred_files_omits_workdir(koala: Koala, server: Server) -> None:
    for options in (("--input", "m:as=x"), ("--collect", "*.csv", "--collect", "out/**")):
        assert koala("submit", *SIX, *options, "--", "true").code == 0
        assert server.service.records[len(server.service.records)].spec.workdir is None
    koala("submit", *SIX, "--input", "m", "--chdir", "/work", "--", "true")
    koala("submit", *SIX, "--application", "sea", "--communication", "0.25", "--", "true")
    koala("submit", *SIX, "--per-node-bandwidth", "1Gbit/s", "--", "true")
    first, second, third, fourth, fifth = (job.spec for job in server.service.records.values())
    assert first.inputs == (InputFile("m", target="x"),)
    assert second.collect == ("*.csv", "out/**")
    assert third.workdir == "/work"
    assert (fourth.application, fourth.communication, fourth.workdir) == ("sea", 0.25, str(Path.cwd()))
    assert (fifth.memory, fifth.per_node_bandwidth) == (None, 125e6)


def test_job_file_may_list_inputs_and_staged_files(koala: Koala, server: Server, tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text("echo hello")
    (tmp_path / "job.yaml").write_text(
        "request: {type: nonfixed, components: [{size: 1, inputs: [{file: f, part: a}]}]}\n"
        "command: [sh, run.sh]\ninputs: [{file: m, as: x}]\nstage: [run.sh]\ncollect: ['*']\n"
    )
    assert koala("submit", "-f", str(tmp_path / "job.yaml")).code == 0
    spec = server.service.records[1].spec
    assert spec.inputs == (InputFile("m", target="x"),)
    assert spec.inputs_of(0) == (InputFile("f", distribution="partitioned", part="a"),)
    assert spec.bundle is not None
    assert unpack_archive(server.bundles.contents[spec.bundle.id]) == {"run.sh": b"echo hello"}
    (tmp_path / "job.yaml").write_text("request: {type: flexible, total_size: 1}\nstage: run.sh\n")
    assert "stage in the job file is not a list of paths" in koala("submit", "-f", str(tmp_path / "job.yaml")).err


@pytest.fixture
def code_folder(tmp_path: Path) -> Path:
    """Create a folder with an executable script, a file in a subfolder, and a link to a file outside."""
    folder = tmp_path / "code"
    (folder / "sub dir").mkdir(parents=True)
    (folder / "-run.sh").write_text("#!/bin/sh\n")
    (folder / "-run.sh").chmod(0o750)
    (folder / "sub dir" / "ä.py").write_text("print()")
    (tmp_path / "elsewhere").write_text("far")
    (folder / "link").symlink_to(tmp_path / "elsewhere")
    (folder / "empty").mkdir()
    return folder


def test_stage_uploads_equal_files_once(koala: Koala, server: Server, code_folder: Path) -> None:
    for _ in range(2):
        assert koala("submit", *SIX, "--stage", str(code_folder), "--", "code/-run.sh").code == 0
    assert server.bundles.uploads == 1
    spec = server.service.records[2].spec
    assert spec.workdir is None
    assert spec.bundle is not None
    data = server.bundles.contents[spec.bundle.id]
    assert unpack_archive(data) == {
        "code": None,
        "code/-run.sh": b"#!/bin/sh\n",
        "code/empty": None,
        "code/link": b"far",
        "code/sub dir": None,
        "code/sub dir/ä.py": b"print()",
    }
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        executable = [member.name for member in tar if member.isreg() and member.mode & 0o111]
    assert executable == ["code/-run.sh"]


def test_archive_of_current_folder_has_its_contents(code_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(code_folder)
    with pack_archive(["."]) as archived:
        assert sorted(unpack_archive(archived.file.read())) == ["-run.sh", "empty", "link", "sub dir", "sub dir/ä.py"]
        assert archived.files == 3
    monkeypatch.chdir(code_folder / "empty")
    with pack_archive(["../-run.sh", ".."]) as archived:
        assert "-run.sh" in unpack_archive(archived.file.read())


def test_archive_id_changes_with_content_only(code_folder: Path) -> None:
    idents = []
    for text in ("1", "1", "2"):
        (code_folder / "x").write_text(text)
        os.utime(code_folder / "x", (1000, 1000))
        (code_folder / "editing~").touch()
        (code_folder / "editing~").unlink()
        with pack_archive([str(code_folder)]) as archived:
            idents.append(archived.id)
    assert idents[0] == idents[1] != idents[2]


def _invalid_paths(tmp_path: Path) -> Iterator[tuple[list[str], str]]:
    yield [str(tmp_path / "none")], "no such file or directory"
    (tmp_path / "a").mkdir()
    yield [str(tmp_path / "a")], "there are no files"
    yield ["/"], "is the root folder"
    (tmp_path / "a" / "dangling").symlink_to("nowhere")
    yield [str(tmp_path / "a")], "no such file or directory"
    (tmp_path / "a" / "dangling").unlink()
    (tmp_path / "a" / "loop").symlink_to(tmp_path / "a")
    yield [str(tmp_path / "a")], "is a link to one of its parents"
    (tmp_path / "a" / "loop").unlink()
    os.mkfifo(tmp_path / "a" / "pipe")
    yield [str(tmp_path / "a")], "is not a file or folder"
    (tmp_path / "x").touch()
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "x").touch()
    yield [str(tmp_path / "x"), str(tmp_path / "b" / "x")], "would both be x"


def test_stage_of_invalid_path_submits_nothing(koala: Koala, server: Server, tmp_path: Path) -> None:
    for paths, message in _invalid_paths(tmp_path):
        options = [argument for path in paths for argument in ("--stage", path)]
        for dry_run in ((), ("--dry-run",)):
            ended = koala("submit", *SIX, *options, *dry_run, "--", "true")
            assert (ended.code, message in ended.err) == (2, True), ended.err
    assert (server.service.records, server.bundles.uploads) == ({}, 0)


@pytest.mark.parametrize("kind", ["one large file", "many folders"])
def test_archive_on_full_disk_suggests_tmpdir(tmp_path: Path, kind: str) -> None:
    if kind == "many folders":
        for i in range(100):
            (tmp_path / f"{i}").mkdir()
    (tmp_path / "x").write_bytes(b"x" * (50_000 if kind == "one large file" else 1))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, limits[1]))
    try:
        with (
            pytest.raises(GridError, match="cannot be written: file too large") as refused,
            pack_archive([str(tmp_path)]),
        ):
            raise AssertionError("it was written")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert "TMPDIR" in refused.value.hint


def test_dry_run_with_staged_files_uploads_nothing(koala: Koala, server: Server, code_folder: Path) -> None:
    assert koala("submit", *SIX, "--stage", str(code_folder), "--input", "m", "--dry-run", "--", "true").code == 0
    assert server.bundles.uploads == 0
    assert server.service.explained_spec is not None
    assert (server.service.explained_spec.bundle, server.service.explained_spec.workdir) == (None, None)


def test_command_for_job_with_files_has_their_options() -> None:
    inputs = [{"file": "a b"}, {"file": "f", "distribution": "partitioned", "as": "x"}]
    body = {"request": {"type": "nonfixed", "components": [{"size": 1}]}, "command": ["true"], "inputs": inputs}
    command = "koala submit --nonfixed 1 --input 'a b' --input f:partitioned:as=x --collect 'o/*' -- true"
    assert command_for(body | {"collect": ["o/*"]}, "/here") == command
    in_folder = body | {"workdir": "/here", "inputs": []}
    assert command_for(in_folder | {"workdir_optional": True}, "/here") == "koala submit --nonfixed 1 -- true"
    assert command_for(in_folder, "/here") == "koala submit --nonfixed 1 --chdir /here -- true", "--chdir was given"
    command_in_folder = command_for(body | {"workdir": "/here", "application": "sea", "communication": 0.5}, "/here")
    assert command_in_folder is not None
    assert "--application sea --communication 0.5 --chdir /here --input" in command_in_folder
    assert command_for(body | {"bundle": "a" * 64}, "/here") is None, "the files of a bundle are unknown"


# Fetching


def add_results(server: Server, pieces: list[bytes], *clusters: str) -> None:
    components = tuple(Component(index, cluster, 1, ComponentState.ENDED) for index, cluster in enumerate(clusters))
    spec = JobSpec(FlexibleRequest(2), ("true",), collect=("*",))
    job = Job(7, spec, 1000.0, JobState.SUCCEEDED, generation=1, attempt=Attempt(1, components, 1000.0))
    server.service.records[7] = job
    server.results.archives[7] = pieces


FILES = {"0-north": None, "0-north/out/-a b": b"a" * 3000, "0-north/run.sh": b"#!/bin/sh", "1-south": None}
DATA = archive_of(FILES)


def test_fetch_unpacks_results_and_prints_sizes(koala: Koala, server: Server, tmp_path: Path) -> None:
    add_results(server, [DATA[i : i + 100] for i in range(0, len(DATA), 100)], "north", "south")
    to = tmp_path / "new" / "folder"
    ended = koala("fetch", "7", "--to", str(to))
    assert (ended.code, ended.err) == (0, "")
    assert ended.out == f"{to}/0-north: 2 files, 3.01 KB\n{to}/1-south: 0 files, 0 bytes\n"
    assert (to / "0-north/out/-a b").read_bytes() == b"a" * 3000
    assert stat.S_IMODE((to / "0-north/run.sh").stat().st_mode) & 0o111
    assert not stat.S_IMODE((to / "0-north/out/-a b").stat().st_mode) & 0o111
    assert (to / "1-south").is_dir()


def test_fetch_overwrites_files_only_with_force(
    koala: Koala, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    add_results(server, [DATA], "north", "south")
    assert koala("fetch", "7").code == 0
    (tmp_path / "job-7/0-north/run.sh").write_text("mine")
    again = koala("fetch", "7")
    assert (again.code, "--force" in again.err) == (2, True)
    assert (tmp_path / "job-7/0-north/run.sh").read_text() == "mine"
    assert koala("fetch", "7", "--force", "--json").code == 0
    assert (tmp_path / "job-7/0-north/run.sh").read_text() == "#!/bin/sh"


def test_fetch_names_component_without_results(koala: Koala, server: Server, tmp_path: Path) -> None:
    add_results(server, [archive_of({"0-north/a": b"1"})], "north", "south")
    ended = koala("fetch", "7", "--to", str(tmp_path / "x"))
    assert (ended.code, ended.err) == (1, "koala: there are no results of 1-south; see koala show 7\n")
    assert (tmp_path / "x/0-north/a").read_bytes() == b"1"


def test_fetch_without_results_creates_no_folder(koala: Koala, server: Server, tmp_path: Path) -> None:
    add_results(server, [], "north")
    del server.results.archives[7]
    ended = koala("fetch", "7", "--to", str(tmp_path / "x"))
    assert (ended.code, ended.err) == (3, "koala: nothing is collected of job 7; koala submit --collect PATTERN\n")
    assert not (tmp_path / "x").exists()
    assert koala("fetch", "8").code == 3


@pytest.mark.parametrize(
    "data",
    [
        archive_of({"../x": b"1"}),
        archive_of({"/x": b"1"}),
        archive_of({"a/../../x": b"1"}),
        archive_of({"a//b": b""}),
        make_archive(make_special_member("0-north/a", tarfile.SYMTYPE, "/etc/passwd")),
        make_archive(make_special_member("a", tarfile.FIFOTYPE)),
        make_archive(make_special_member("a", tarfile.LNKTYPE, "/etc/passwd")),
        DATA[:2000],
        b"",
    ],
)
def test_unpack_of_hostile_archive_writes_nothing_outside(data: bytes, tmp_path: Path) -> None:
    with pytest.raises(GridError):
        unpack_results(iter([data]), tmp_path / "to", force=True)
    assert not (tmp_path / "x").exists()
    assert not any(path.is_symlink() for path in tmp_path.rglob("*"))


@pytest.mark.parametrize("facts", [{"path": "0-north/a\0b"}, {"mtime": "1e300"}, {"mtime": "nan"}])
def test_unpack_of_invalid_member_is_rejected(facts: dict[str, str], tmp_path: Path) -> None:
    member = tarfile.TarInfo("0-north/a")
    member.pax_headers = facts
    with pytest.raises(GridError, match="the archive is invalid"):
        unpack_results(iter([make_archive((member, b""))]), tmp_path / "to", force=True)
    assert not [path for path in (tmp_path / "to").rglob("*") if path.is_file()]


def test_unpack_of_file_that_exists_is_rejected_without_force(tmp_path: Path) -> None:
    twice = make_archive(*[(tarfile.TarInfo("0-north/a"), text) for text in (b"first", b"again")])
    with pytest.raises(GridError, match="exists already"):
        unpack_results(iter([twice]), tmp_path, force=False)
    assert (tmp_path / "0-north/a").read_bytes() == b"first"


class BreakingStream(list[bytes]):
    """Pieces of an archive, followed by an error of the daemon."""

    def __iter__(self) -> Iterator[bytes]:
        yield from super().__iter__()
        raise OSError(5, "Input/output error")


def test_fetch_with_broken_stream_reports_broken_connection(koala: Koala, server: Server, tmp_path: Path) -> None:
    add_results(server, BreakingStream([DATA[:4000]]), "north", "south")
    ended = koala("fetch", "7", "--to", str(tmp_path / "x"))
    assert (ended.code, ended.out) == (5, "")
    assert ended.err.startswith(f"koala: the daemon at {server.url} broke off (")
    assert not [path for path in (tmp_path / "x").rglob("*") if path.is_file()]


class CutStream(list[bytes]):
    """Pieces of an archive, of which each download gets one more before its connection breaks off."""

    downloads = 0

    def __iter__(self) -> Iterator[bytes]:
        self.downloads += 1
        for index, piece in enumerate(super().__iter__()):
            if index == self.downloads:
                raise OSError(5, "Input/output error")
            yield piece


def test_fetch_continues_broken_downloads_where_they_ended(koala: Koala, server: Server, tmp_path: Path) -> None:
    stream = CutStream([DATA[:700], DATA[700:4000], DATA[4000:]])
    add_results(server, stream, "north", "south")
    ended = koala("fetch", "7", "--to", str(tmp_path / "x"))
    assert (ended.code, stream.downloads) == (0, 3), ended.err
    assert "broke off (" in ended.err
    assert (tmp_path / "x" / "0-north" / "out" / "-a b").read_bytes() == b"a" * 3000


@pytest.mark.parametrize(
    "end", [KeyboardInterrupt, OSError(28, "No space left on device"), GridError("away", Exit.UNREACHABLE)]
)
def test_fetch_removes_incomplete_file(
    koala: Koala, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: BaseException
) -> None:
    add_results(server, [DATA], "north", "south")

    def breaks(content: object, file: io.BufferedWriter, _: int) -> None:
        if file.write(b"some") and "run.sh" in os.readlink(f"/proc/self/fd/{file.fileno()}"):
            raise end

    monkeypatch.setattr("koalapy.client.results.shutil.copyfileobj", breaks)
    ended = koala("fetch", "7", "--to", str(tmp_path / "x"))
    assert [path.name for path in (tmp_path / "x").rglob("*") if path.is_file()] == ["-a b"]
    assert (ended.code, ended.out) == ({KeyboardInterrupt: 130}.get(end, getattr(end, "code", 1)), "")  # type: ignore[call-overload]
    assert {130: "get the rest with koala fetch 7 --force --to", 1: "No space left", 5: "away"}[ended.code] in ended.err


def test_unpack_does_not_follow_links(tmp_path: Path) -> None:
    (tmp_path / "away").mkdir()
    (tmp_path / "file").write_text("mine")
    to = tmp_path / "to"
    to.mkdir()
    (to / "0-north").symlink_to(tmp_path / "away")
    with pytest.raises(GridError, match="is not a folder"):
        unpack_results(iter([DATA]), to, force=True)
    (to / "0-north").unlink()
    (to / "0-north").mkdir()
    (to / "0-north" / "run.sh").symlink_to(tmp_path / "file")
    unpack_results(iter([DATA]), to, force=True)
    assert (tmp_path / "file").read_text() == "mine"
    assert not (to / "0-north" / "run.sh").is_symlink()
    assert list((tmp_path / "away").iterdir()) == []


# Transfer progress


def make_component(**changes: Any) -> dict[str, Any]:
    component = {
        "index": 0,
        "cluster": "north",
        "sources": ["south", "north"],
        "stage_size": 0,
        "staging_since": "1970-01-01T00:16:40.000Z",
        "staged": 0,
        "staged_at": None,
    }
    return component | changes


@pytest.mark.parametrize(
    ("component", "expected"),
    [
        (make_component(), ["0 north  waits for its files from south"]),
        (
            make_component(stage_size=200_000_000, staged=120_000_000),
            ["0 north  [############........] 120 of 200 MB from south, 60 MB/s"],
        ),
        (
            make_component(stage_size=2_000_000_000, staged=120_000_000),
            ["0 north  [#...................] 120 MB of 2 GB from south, 60 MB/s"],
        ),
        (
            make_component(stage_size=200, staged=200, staged_at="1970-01-01T00:16:44.000Z"),
            ["0 north  200 bytes from south in 4 s, 50 bytes/s"],
        ),
        (
            make_component(stage_size=7, staged=7, sources=[], staged_at="1970-01-01T00:16:44.000Z"),
            ["0 north  7 bytes in 4 s, 1.75 bytes/s"],
        ),
        (make_component(sources=["north"], staged_at="1970-01-01T00:16:44.000Z"), []),
        (make_component(staging_since=None), []),
    ],
)
def test_transfer_lines_show_progress_of_component(component: dict[str, Any], expected: list[str]) -> None:
    job = {
        "components": [component],
        "placed_at": "1970-01-01T00:16:40.000Z",
        "submitted_at": "",
        "timeline": [],
        "generation": 1,
        "ended_at": "1970-01-01T00:16:42.000Z",
    }
    assert waiting.transfer_lines(job, unicode=False) == expected


def test_show_prints_transfer_progress(koala: Koala, server: Server) -> None:
    component = Component(
        0,
        "north",
        2,
        ComponentState.WAITING,
        sources=("south",),
        staging_since=1000.0,
        stage_size=10**9,
        staged=5 * 10**8,
    )
    request = NonFixedRequest((ComponentRequest(2, inputs=(InputFile("m", 10**9, ("south",)),)),))
    spec = JobSpec(request, ("true",), bundle=Bundle("a" * 64, 1, 1))
    attempt = Attempt(1, (component,), 1000.0)
    job = Job(1, spec, 1000.0, JobState.CLAIMING, generation=1, attempt=attempt, placed_at=1000.0)
    server.service.records[1] = job
    assert "500 MB of 1 GB from south" in koala("show", "1").out
    assert json.loads(koala("show", "1", "--json").out)["components"][0]["staged"] == 5 * 10**8
    staged = replace(component, staged=10**9, staged_at=1004.0)
    server.service.records[1] = replace(job, attempt=replace(attempt, components=(staged,)))
    followed = koala("show", "1", "--follow")
    assert followed.code == 0
    assert followed.err == "0 north  1 GB from south in 4 s, 250 MB/s\n"


def test_follow_transfers_fits_lines_to_terminal(standard_error: StandardError) -> None:
    many = [make_component(cluster="南" * 10, stage_size=2 * 10**8, staged=10**8, index=i) for i in range(9)]
    job = {
        "state": "queued",
        "reason": "no replica of m is good",
        "request": {"type": "flexible"},
        "inputs": [{"file": "m"}],
        "result_inputs": [],
        "bundle": None,
        "components": [],
        "ended_at": "1970-01-01T00:16:42.000Z",
    }
    client = FakeClient(
        job,
        job | {"state": "claiming", "components": many},
        job | {"state": "claiming", "components": [c | {"staged_at": "1970-01-01T00:16:44.000Z"} for c in many]},
    )
    stream = standard_error(columns=41, lines=7)
    waiting.follow_transfers(client, 1)  # type: ignore[arg-type]
    waits, under_way, finished = stream.getvalue().split("\x1b[J")
    assert waits == "queued: no replica of m is good\r"
    assert under_way.endswith("and 4 more lines\r\x1b[5A")
    assert finished.endswith("and 4 more lines\n")
    for page in (under_way, finished):
        lines = page.rstrip("\n").split("\n")
        assert len(lines) == 6
        assert all(cell_len(line.split("\r")[0]) <= 40 for line in lines)


class FakeClient:
    """A client that returns the given states of a job in turn."""

    timeouts = FAST

    def __init__(self, *jobs: dict[str, Any]) -> None:
        self._jobs = iter(jobs)

    def job(self, job: int) -> dict[str, Any]:
        return next(self._jobs)


def test_report_is_printed_above_drawn_lines(standard_error: StandardError) -> None:
    stream = standard_error(columns=41, lines=7)
    with Block() as block:
        block.draw(["one", "two"])
        Block.report("koala: something")
        block.draw(["one", "2"])
    assert stream.getvalue() == "one\ntwo\r\x1b[1A\x1b[Jkoala: something\none\n2\r\x1b[1A\x1b[J"


@pytest.mark.parametrize("terminal", [True, False])
def test_follow_transfers_ends_when_files_are_complete(standard_error: StandardError, terminal: bool) -> None:
    job = {
        "state": "queued",
        "request": {"type": "flexible"},
        "inputs": [{"file": "m"}],
        "result_inputs": [],
        "bundle": None,
        "components": [],
        "placed_at": "1970-01-01T00:16:40.000Z",
        "timeline": [],
        "generation": 1,
        "ended_at": "1970-01-01T00:16:42.000Z",
        "reason": "0 are idle",
    }
    halfway = make_component(stage_size=200_000_000, staged=120_000_000)
    finished = make_component(stage_size=200_000_000, staged=200_000_000, staged_at="1970-01-01T00:16:44.000Z")
    client = FakeClient(
        job,
        job | {"state": "placed", "components": [make_component()]},
        job | {"state": "claiming", "components": [halfway]},
        job | {"state": "claiming", "components": [halfway]},
        job | {"state": "claiming", "components": [finished]},
    )
    stream = standard_error(terminal, columns=80)
    waiting.follow_transfers(client, 1)  # type: ignore[arg-type]
    lines = ["queued: 0 are idle"] if terminal else []
    lines += [
        "0 north  waits for its files from south",
        "0 north  [############........] 120 of 200 MB from south, 60 MB/s",
        "0 north  200 MB from south in 4 s, 50 MB/s",
    ]
    assert stream.getvalue() == ("\r\x1b[J" if terminal else "\n").join(lines) + "\n"
