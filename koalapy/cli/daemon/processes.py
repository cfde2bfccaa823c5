"""Commands that need no running daemon: processes of the grid, backups and the demo."""

import json
import os
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from koalapy.cli.terminal.arguments import Argument, Group, Option
from koalapy.cli.terminal.options import ABOUT_CA_FILE, DAEMON, Daemon
from koalapy.client.access import DEFAULT_URL, check_showable
from koalapy.client.errors import Exit, GridError, printable
from koalapy.system.local_token import register_start
from koalapy.system.process import VARIABLE_PREFIX, scrub_environment
from koalapy.system.tls import CA_FILE

ABOUT_CONFIG = "configuration file in YAML; default: the installed one"
Config = Annotated[Path | None, Option("--config", help=ABOUT_CONFIG, envvar="KOALA_CONFIG")]
DATA = Path("~/.local/share/koala")
AGENT_TOKEN, AGENT_DIRECTORY = "KOALA_AGENT_TOKEN", "KOALA_AGENT_DIRECTORY"
ABOUT_URLS = "URL of the daemon; several, with commas between, with standby daemons"
ABOUT_DIRECTORY = "directory of the agent, which must survive a restart; default: in the data directory"
Cluster = Annotated[str, Argument(help="name of the cluster in the configuration", completes="clusters")]


@dataclass(frozen=True, slots=True)
class AgentOptions:
    """The locations of an agent's daemon, folder and configuration."""

    url: Annotated[str, Option(envvar="KOALA_URL", help=ABOUT_URLS)] = DEFAULT_URL
    directory: Annotated[Path | None, Option(envvar=AGENT_DIRECTORY, help=ABOUT_DIRECTORY)] = None
    config: Config = None
    ca_file: Annotated[Path | None, Option("--ca-file", envvar=CA_FILE, help=ABOUT_CA_FILE)] = None

    def directory_of(self, cluster: str) -> Path:
        return self.directory or DATA.expanduser() / "clusters" / cluster


AGENT = AgentOptions()


def start_daemon(
    port: Annotated[int, Option(help="port; 0 for any free one", min=0, max=65535)] = 8642,
    host: Annotated[str, Option(help="address to listen on", may_be_empty=True)] = "127.0.0.1",
    data_dir: Annotated[Path, Option(envvar="KOALA_DATA_DIR", help="data directory")] = DATA,
    config: Config = None,
    tls_cert: Annotated[
        Path | None, Option("--tls-cert", help="PEM file of the daemon's certificate, to serve TLS")
    ] = None,
    tls_key: Annotated[
        Path | None, Option("--tls-key", help="PEM file of its key, readable by the daemon's account only")
    ] = None,
    behind_proxy: Annotated[
        str | None, Option("--behind-proxy", help="address of a proxy that terminates TLS; repeatable")
    ] = None,
    standby: Annotated[
        bool, Option("--standby", help="while another daemon serves the database, wait to take over from it")
    ] = False,
) -> None:
    """Run the daemon; without a configuration with the embedded clusters north and south of 4 nodes each."""
    directory = data_dir.expanduser()
    if not host:
        raise GridError("--host is empty", Exit.USAGE, "give 127.0.0.1, or 0.0.0.0 for every address of this machine")
    scrub_environment()
    with ExitStack() as start:
        start.enter_context(register_start(port))  # before the imports, which take seconds on a busy machine
        from koalapy.config.strict_yaml import installed_configuration
        from koalapy.daemon.main import serve as run_daemon
        from koalapy.daemon.web_server import ServerOptions

        installed = None if config else installed_configuration()

        def announce(url: str, active: str = "") -> None:
            start.close()
            configuration = f", configuration {installed}" if installed else ""
            text = f"stands by at {url}; {active} is active" if active else f"serves {url}"
            print(printable(f"koala {text} (data in {directory}{configuration})"), flush=True)

        options = ServerOptions(tls_cert, tls_key, behind_proxy, standby)
        run_daemon(host, port, directory, config or installed, options, announce)


def start_agent(
    cluster: Cluster,
    options: AgentOptions = AGENT,
    embedded: Annotated[bool, Option("--embedded", hidden=True)] = False,
) -> None:
    """Run the agent of a cluster on its head node, with its token in KOALA_AGENT_TOKEN."""
    scrub_environment()
    from koalapy.agent.main import start_agent as run_agent

    directory = options.directory_of(cluster)
    run_agent(cluster, options.url, options.config, directory, _agent_token(), options.ca_file, embedded)


def _agent_token() -> str:
    """Return the agent's token, and remove it from the environment, so that child processes do not inherit it."""
    token = os.environ.pop(AGENT_TOKEN, "")
    return check_showable(token, AGENT_TOKEN) if token else ""


def check_host(
    cluster: Cluster,
    options: AgentOptions = AGENT,
    user: Annotated[str, Option(help="account of a trial job, for identity mapped")] = "",
    as_json: Annotated[bool, Option("--json", help="print JSON")] = False,
) -> int:
    """Check this host for the agent of a cluster; exit code 1 if anything is missing."""
    from koalapy.agent.main import check_host as run_checks

    directory = options.directory_of(cluster)
    findings = run_checks(cluster, options.url, options.config, directory, _agent_token(), options.ca_file, user)
    is_ok = all(finding.ok for finding in findings)
    if as_json:
        entries = [{"what": f.subject, "ok": f.ok, "found": f.result, "hint": f.hint} for f in findings]
        print(json.dumps({"cluster": cluster, "ok": is_ok, "findings": entries}, indent=2))
    else:
        for finding in findings:
            print(f"{'ok  ' if finding.ok else 'FAIL'}  {printable(f'{finding.subject}: {finding.result}')}")
            if finding.hint:
                print(f"      {printable(finding.hint)}")
    return Exit.OK if is_ok else Exit.FAILED


def local_run(
    cluster: Annotated[str, Argument(help="an embedded cluster", completes="clusters")],
    nodes: Annotated[int, Argument(help="number of nodes")],
    command: Annotated[list[str], Argument(help="the program and its arguments", takes_rest=True)],
    user: Annotated[str | None, Option(help="name of the local user; default: you")] = None,
    daemon: Daemon = DAEMON,
) -> int:
    """Run a command on an embedded cluster as a local user, outside the scheduler."""
    import getpass

    from koalapy.agent.lrm.local.cluster import LocalCluster, run_as_local_user

    answer = daemon.client().cluster(cluster)
    directory = answer["details"].get("directory")
    if directory is None:
        raise GridError(f"cluster {cluster} is not embedded", Exit.USAGE, "use its own sbatch or qsub")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(VARIABLE_PREFIX)}
    local = LocalCluster(Path(directory), cluster, answer["total"])
    return run_as_local_user(local, nodes, command, user or getpass.getuser(), environment, Path.cwd())


def show_demo(
    keep: Annotated[bool, Option("--keep", help="keep the daemon running and print its address")] = False,
) -> int:
    """Run one MPI program as a single job on two embedded clusters, from beginning to end."""
    from koalapy.cli.daemon.demo import run_demo

    return run_demo(keep)


DataDir = Annotated[Path, Option("--data-dir", envvar="KOALA_DATA_DIR", help="data directory of the daemon")]


def back_up(
    directory: Annotated[Path, Argument(help="new or empty directory")],
    data_dir: DataDir = DATA,
    config: Config = None,
    files_only: Annotated[bool, Option("--files-only", help="without the database, for PostgreSQL")] = False,
) -> None:
    """Back up a daemon's database, files and configuration, also while it runs: koala backup DIR

    The backup contains tokens and is readable by this account only.
    """
    from koalapy.daemon.backup import make_backup

    summary = make_backup(directory, data_dir.expanduser(), config, files_only=files_only)
    database = f"database of {summary.database_size:,} bytes" if summary.database == "sqlite" else "no database"
    configuration = summary.configuration or "no configuration"
    files = f"{summary.files} files of {summary.files_size:,} bytes"
    print(printable(f"backup in {directory}: {database}, {files}, {configuration}"))


def restore_data(
    directory: Annotated[Path, Argument(help="backup directory")],
    data_dir: DataDir = DATA,
    config: Config = None,
    replace: Annotated[
        bool, Option("--replace", help="replace existing data, which is moved to a directory next to it")
    ] = False,
) -> None:
    """Restore a backup while no daemon runs: koala restore DIR

    Tokens revoked since the backup are valid again: use koala token revoke --all in doubt.
    """
    from koalapy.daemon.backup import restore_backup

    destination = data_dir.expanduser()
    summary, displaced = restore_backup(directory, destination, config, replace=replace)
    backup_time = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(summary.made_at))
    print(printable(f"restored {summary.files} files of {backup_time} to {destination}"))
    if summary.database != "sqlite":
        print("the database is not in the backup: put its dump back with pg_restore before the daemon starts")
    if displaced is not None:
        print(printable(f"what was there is in {displaced}: remove it when it is not needed any more"))
    if summary.configuration:
        print(printable(f"the configuration of that day is {directory / 'koala.yaml'}"))


RelayConfig = Annotated[Path, Option("--config", help="configuration file in YAML")]


def start_hub(config: RelayConfig) -> None:
    """Run the daemon's hub of relayed links."""
    from koalapy.relay.main import run_hub

    run_hub(config)


def start_head(config: RelayConfig) -> None:
    """Run the relay of a cluster's agent."""
    from koalapy.relay.main import run_head

    run_head(config)


relay_group = Group(
    "Relay MPI traffic between clusters whose nodes cannot reach each other.", {"hub": start_hub, "head": start_head}
)
