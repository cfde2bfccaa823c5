"""Commands for files: the catalogue of input files, and the results of jobs."""

from operator import itemgetter
from pathlib import Path
from typing import Annotated

from koalapy.cli.jobs.jobs import LastJob, find_last_job
from koalapy.cli.terminal.arguments import Argument, Group, Option
from koalapy.cli.terminal.options import DAEMON, AsJson, Daemon, print_answer, show_json
from koalapy.cli.terminal.screen import Progress, Transfer, waiting_for
from koalapy.cli.terminal.tables import format_columns
from koalapy.client.client import FINAL, MAX_PAGE_SIZE, Client
from koalapy.client.errors import Exit, GridError, printable
from koalapy.client.http import Json
from koalapy.client.job_reference import JobReference
from koalapy.client.results import check_folder, missing_results, unpack_results
from koalapy.client.tables import Columns
from koalapy.model.wording import format_bytes, format_list

Name = Annotated[str, Argument(help="the logical file", completes="replicas")]
OptionalName = Annotated[str | None, Argument(help="the logical file; default: all", completes="replicas")]
Cluster = Annotated[str | None, Option("--cluster", help="only on this cluster", completes="clusters")]
Place = Annotated[str, Argument(metavar="CLUSTER:PATH", help="absolute path of a file or folder on a cluster")]


def add_replica(name: Name, place: Place, as_json: AsJson = False, daemon: Daemon = DAEMON) -> None:
    """Add a file or folder on a cluster to the catalogue: koala replicas add climate/2026.nc north:/data/2026.nc"""
    cluster, colon, path = place.partition(":")
    if not colon or not cluster or not path:
        raise GridError(f"{place!r} is not CLUSTER:PATH", Exit.USAGE, f"write it as north:/data/{name}")
    order = {"name": name, "cluster": cluster, "path": path}
    with waiting_for(f"{cluster} reads {path}"):
        replica = daemon.client().post("/api/v1/replicas", order, patient=True)
    count = replica["parts"]
    entries = "" if count is None else f", a folder of {count} {'entry' if count == 1 else 'entries'}"
    message = f"{cluster} has {name}: {format_bytes(replica['size'])}{entries}, SHA-256 {replica['checksum']}"
    print_answer(replica, as_json, lambda _: printable(message))


def list_replicas(name: OptionalName = None, as_json: AsJson = False, daemon: Daemon = DAEMON) -> None:
    """List the catalogue by name and cluster."""
    answer = {"replicas": _request_replicas(daemon.client(), name)}
    print_answer(answer, as_json, _format_replicas)


def _request_replicas(client: Client, name: str | None) -> list[Json]:
    """Return all replicas in the catalogue, or those of the file ``name``, requested page by page."""
    replicas: list[Json] = []
    cursor: Json = {}
    while True:
        page = client.get("/api/v1/replicas", name=name, limit=MAX_PAGE_SIZE, **cursor)
        replicas += page["replicas"]
        if page["next"] is None:
            return replicas
        cursor = {"after": replicas[-1]["name"], "after_cluster": replicas[-1]["cluster"]}


def verify_replicas(
    name: OptionalName = None, cluster: Cluster = None, as_json: AsJson = False, daemon: Daemon = DAEMON
) -> None:
    """Verify replicas at their clusters; only good ones are used."""
    choice = {key: value for key, value in (("name", name), ("cluster", cluster)) if value is not None}
    with waiting_for(f"{cluster or 'every cluster'} reads {name or 'all its files'}"):
        answer = daemon.client().post("/api/v1/replicas/verify", choice, patient=True)
    print_answer(answer, as_json, _format_replicas)
    if bad := [replica for replica in answer["replicas"] if replica["problem"] or replica["state"] != "good"]:
        bad_names = format_list([f"{replica['name']} on {replica['cluster']}" for replica in bad])
        raise GridError(
            f"some replicas are not good: {bad_names}", Exit.FAILED, "see the reasons above" if not as_json else ""
        )


def remove_replica(name: Name, cluster: Cluster = None, as_json: AsJson = False, daemon: Daemon = DAEMON) -> None:
    """Remove a logical file from the catalogue; the files on the clusters stay."""
    answer = daemon.client().delete("/api/v1/replicas", name=name, cluster=cluster)
    messages = [
        f"{name} on {replica['cluster']} is forgotten; nothing was done to the file itself, {replica['path']}"
        for replica in answer["replicas"]
    ]
    print_answer(answer, as_json, lambda _: "\n".join(map(printable, messages)))


REPLICAS: Columns = {
    "NAME": itemgetter("name"),
    "CLUSTER": itemgetter("cluster"),
    "STATE": itemgetter("state"),
    "SIZE": lambda replica: format_bytes(replica["size"]),
    "PARTS": lambda replica: "-" if replica["parts"] is None else replica["parts"],
    "SHA-256": lambda replica: replica["checksum"][:8],
    "PATH": itemgetter("path"),
    "REASON": lambda replica: replica.get("problem") or replica["reason"] or "-",
}


def _format_replicas(answer: Json) -> str:
    return format_columns(REPLICAS, answer["replicas"])


def fetch_results(
    job: LastJob = None,
    to: Annotated[Path | None, Option(help="folder for the files; default: job-JOB")] = None,
    force: Annotated[bool, Option("--force", help="overwrite existing files")] = False,
    as_json: AsJson = False,
    daemon: Daemon = DAEMON,
) -> None:
    """Download the collected results of a job (koala submit --collect)."""
    client = daemon.client()
    job = job or JobReference(find_last_job(client))
    folder = to or Path(f"job-{job}")
    check_folder(folder, force=force)
    number = job.find_number(client)
    answer = client.job(number)
    try:
        transfer = Transfer(f"fetches into {folder}")
        with Progress(lambda: str(transfer)):
            counts = unpack_results(transfer.count_bytes(client.stream_results(number)), folder, force=force)
    except KeyboardInterrupt:
        hint = f"get the rest with koala fetch {job} --force" + (f" --to {to}" if to else "")
        raise GridError(f"{folder} is incomplete", Exit.INTERRUPTED, hint) from None
    missing = missing_results(answer, counts)
    if as_json:
        components = {name: {"files": count.files, "size": count.size} for name, count in counts.items()}
        show_json({"to": str(folder), "components": components, "missing": missing})
    else:
        for name, count in counts.items():
            files = f"{count.files} file{'' if count.files == 1 else 's'}"
            print(printable(f"{folder / name}: {files}, {format_bytes(count.size)}"))
    if missing:
        advice = "the job is not over" if answer["state"] not in FINAL else f"see koala show {job}"
        raise GridError(f"there are no results of {', '.join(missing)}", Exit.FAILED, advice)


replicas_group = Group(
    "List and change the catalogue of input files.",
    {"add": add_replica, "list": list_replicas, "verify": verify_replicas, "remove": remove_replica},
)
