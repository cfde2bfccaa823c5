"""Commands for files: the catalogue of input files, and the results of jobs."""

from pathlib import Path
from typing import Annotated

from koalapy.cli.files import unpacking
from koalapy.cli.terminal.arguments import Argument, Group, Option
from koalapy.cli.terminal.options import DAEMON, AsJson, Daemon, Job, show_json
from koalapy.cli.terminal.progress import Progress, Transfer, waiting_for
from koalapy.cli.terminal.tables import format_table
from koalapy.client.answers import Json
from koalapy.client.client import FINAL, MAX_PAGE_SIZE, Client
from koalapy.client.errors import CliError, Exit, printable
from koalapy.model.wording import format_bytes, format_list

Name = Annotated[str, Argument(help="the logical file", completes="replicas")]
OptionalName = Annotated[str | None, Argument(help="the logical file; default: all", completes="replicas")]
Cluster = Annotated[str | None, Option("--cluster", help="only on this cluster", completes="clusters")]
Place = Annotated[str, Argument(metavar="CLUSTER:PATH", help="absolute path of a file or folder on a cluster")]


def add_replica(name: Name, place: Place, as_json: AsJson = False, daemon: Daemon = DAEMON) -> None:
    """Add a file or folder on a cluster to the catalogue: koala replicas add climate/2026.nc north:/data/2026.nc"""
    cluster, colon, path = place.partition(":")
    if not colon or not cluster or not path:
        raise CliError(f"{place!r} is not CLUSTER:PATH", Exit.USAGE, f"write it as north:/data/{name}")
    order = {"name": name, "cluster": cluster, "path": path}
    with waiting_for(f"{cluster} reads {path}"):
        replica = daemon.client().post("/api/v1/replicas", order, patient=True)
    if as_json:
        show_json(replica)
        return
    count = replica["parts"]
    entries = "" if count is None else f", a folder of {count} {'entry' if count == 1 else 'entries'}"
    message = f"{cluster} has {name}: {format_bytes(replica['size'])}{entries}, SHA-256 {replica['checksum']}"
    print(printable(message))


def list_replicas(name: OptionalName = None, as_json: AsJson = False, daemon: Daemon = DAEMON) -> None:
    """List the catalogue by name and cluster."""
    replicas = _request_replicas(daemon.client(), name)
    if as_json:
        show_json({"replicas": replicas})
    else:
        print(_format_replicas(replicas))


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
    if as_json:
        show_json(answer)
    else:
        print(_format_replicas(answer["replicas"]))
    replicas = answer["replicas"]
    if bad := [replica for replica in replicas if replica["problem"] or replica["state"] != "good"]:
        bad_names = format_list([f"{replica['name']} on {replica['cluster']}" for replica in bad])
        raise CliError(
            f"some replicas are not good: {bad_names}", Exit.FAILED, "see the reasons above" if not as_json else ""
        )


def remove_replica(name: Name, cluster: Cluster = None, as_json: AsJson = False, daemon: Daemon = DAEMON) -> None:
    """Remove a logical file from the catalogue; the files on the clusters stay."""
    answer = daemon.client().delete("/api/v1/replicas", name=name, cluster=cluster)
    if as_json:
        show_json(answer)
        return
    for replica in answer["replicas"]:
        message = f"{name} on {replica['cluster']} is forgotten; nothing was done to the file itself, {replica['path']}"
        print(printable(message))


def _format_replicas(replicas: list[Json]) -> str:
    """Return a table of replicas, each with the reason why it is not good, if any."""
    rows = [
        [
            *(r["name"], r["cluster"], r["state"], format_bytes(r["size"]), "-" if r["parts"] is None else r["parts"]),
            *(r["checksum"][:8], r["path"], r.get("problem") or r["reason"] or "-"),
        ]
        for r in replicas
    ]
    return format_table(["NAME", "CLUSTER", "STATE", "SIZE", "PARTS", "SHA-256", "PATH", "REASON"], rows)


def fetch_results(
    job: Job,
    to: Annotated[Path | None, Option(help="folder for the files; default: job-JOB")] = None,
    force: Annotated[bool, Option("--force", help="overwrite existing files")] = False,
    as_json: AsJson = False,
    daemon: Daemon = DAEMON,
) -> None:
    """Download the collected results of a job (koala submit --collect)."""
    folder = to or Path(f"job-{job}")
    if not force and _is_taken(folder):
        raise CliError(
            f"{folder} exists already", Exit.USAGE, "--force overwrites its files; --to takes another folder"
        )
    client = daemon.client()
    number = job.find_number(client)
    answer = client.job(number)
    try:
        transfer = Transfer(f"fetches into {folder}")
        with Progress(lambda: str(transfer)):
            counts = unpacking.unpack_results(transfer.count_bytes(client.stream_results(number)), folder, force=force)
    except KeyboardInterrupt:
        hint = f"get the rest with koala fetch {job} --force" + (f" --to {to}" if to else "")
        raise CliError(f"{folder} is incomplete", Exit.INTERRUPTED, hint) from None
    parts = {f"{rank}-{component['cluster']}" for rank, component in enumerate(answer["components"])}
    missing = sorted(parts - counts.keys())
    if as_json:
        components = {name: {"files": count.files, "size": count.size} for name, count in counts.items()}
        show_json({"to": str(folder), "components": components, "missing": missing})
    else:
        for name, count in counts.items():
            files = f"{count.files} file{'' if count.files == 1 else 's'}"
            print(printable(f"{folder / name}: {files}, {format_bytes(count.size)}"))
    if missing:
        advice = "the job is not over" if answer["state"] not in FINAL else f"see koala show {job}"
        raise CliError(f"there are no results of {', '.join(missing)}", Exit.FAILED, advice)


def _is_taken(folder: Path) -> bool:
    """Return whether the folder has entries that could be overwritten."""
    try:
        return folder.exists() and (not folder.is_dir() or any(folder.iterdir()))
    except OSError as error:
        raise CliError(f"cannot read {folder}: {error.strerror}", Exit.USAGE, "give another --to") from error


replicas_group = Group(
    "List and change the catalogue of input files.",
    {"add": add_replica, "list": list_replicas, "verify": verify_replicas, "remove": remove_replica},
)
