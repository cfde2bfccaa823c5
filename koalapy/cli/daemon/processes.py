"""The commands that start something here: the daemon, an agent, a local user's load, the demo."""

import json
import os
from pathlib import Path
from typing import Annotated

from koalapy.cli.auth.access import showable
from koalapy.cli.client import Client
from koalapy.cli.errors import CliError, Exit, of_koala, printable
from koalapy.cli.terminal.arguments import Argument, Option
from koalapy.cli.terminal.options import ABOUT_CA_FILE, DEFAULT_URL, Url
from koalapy.system.hardening import OWN_PREFIX, scrub_environment
from koalapy.system.tls import CA_FILE

Config = Annotated[Path | None, Option("--config", help="configuration in YAML", envvar="KOALA_CONFIG")]
ABOUT_CONFIG = "configuration in YAML; default: the installed one"
AgentConfig = Annotated[Path | None, Option("--config", help=ABOUT_CONFIG, envvar="KOALA_CONFIG")]
CaFile = Annotated[Path | None, Option("--ca-file", envvar=CA_FILE, help=ABOUT_CA_FILE)]
DATA = Path("~/.local/share/koala")
AGENT_TOKEN, AGENT_DIRECTORY = "KOALA_AGENT_TOKEN", "KOALA_AGENT_DIRECTORY"
ABOUT_DIRECTORY = "the agent's, which must survive a restart; default: in the data"


def serve(
    port: Annotated[int, Option(help="0: any free one", min=0, max=65535)] = 8642,
    host: Annotated[str, Option(help="address to listen on", may_be_empty=True)] = "127.0.0.1",
    data_dir: Annotated[Path, Option(envvar="KOALA_DATA_DIR", help="database and embedded clusters")] = DATA,
    config: Config = None,
    tls_cert: Annotated[
        Path | None, Option("--tls-cert", help="PEM file of the daemon's certificate: serve TLS")
    ] = None,
    tls_key: Annotated[Path | None, Option("--tls-key", help="PEM file of its key, which nobody else may read")] = None,
    behind_proxy: Annotated[str | None, Option("--behind-proxy", help="proxies that speak TLS instead")] = None,
) -> None:
    """Run the daemon; without a configuration with the embedded clusters north and south, 4 nodes each."""
    directory = data_dir.expanduser()
    if not host:
        raise CliError("--host is empty", Exit.USAGE, "give 127.0.0.1, or 0.0.0.0 for every address of this machine")
    scrub_environment()
    from koalapy.daemon.main import Wire
    from koalapy.daemon.main import serve as run_daemon
    from koalapy.model.errors import KoalaError

    try:
        wire = Wire(tls_cert, tls_key, behind_proxy)
        run_daemon(host, port, directory, config, wire, lambda url: _announce(url, directory))
    except KoalaError as error:
        raise of_koala(error) from error


def _announce(url: str, directory: Path) -> None:
    print(f"koala serves {url} (data in {directory})", flush=True)


def agent(
    cluster: Annotated[str, Argument(help="the cluster, as the configuration names it", completes="clusters")],
    url: Annotated[str, Option(envvar="KOALA_URL", help="where the daemon is")] = DEFAULT_URL,
    directory: Annotated[Path | None, Option(envvar=AGENT_DIRECTORY, help=ABOUT_DIRECTORY)] = None,
    config: AgentConfig = None,
    ca_file: CaFile = None,
    embedded: Annotated[bool, Option("--embedded", hidden=True)] = False,
) -> None:
    """Run the agent of a cluster on its head node; KOALA_AGENT_TOKEN is what it shows to the daemon."""
    scrub_environment()
    from koalapy.agent.main import agent as run_agent
    from koalapy.model.errors import KoalaError

    where = directory or DATA.expanduser() / "clusters" / cluster
    try:
        run_agent(cluster, url, config, where, _agent_token(), ca_file, embedded)
    except KoalaError as error:
        raise of_koala(error) from error


def _agent_token() -> str:
    """What is shown to the daemon; no process that is started from here inherits it."""
    given = os.environ.pop(AGENT_TOKEN, "")
    return showable(given, AGENT_TOKEN) if given else ""


def check(
    cluster: Annotated[str, Argument(help="the cluster, as the configuration names it", completes="clusters")],
    url: Annotated[str, Option(envvar="KOALA_URL", help="where the daemon is")] = DEFAULT_URL,
    directory: Annotated[Path | None, Option(envvar=AGENT_DIRECTORY, help=ABOUT_DIRECTORY)] = None,
    config: AgentConfig = None,
    ca_file: CaFile = None,
    user: Annotated[str, Option(help="an account to try, where jobs run as their owners'")] = "",
    as_json: Annotated[bool, Option("--json", help="the findings, for programs")] = False,
) -> int:
    """Say what the agent of a cluster finds on this host, and what it misses; exit code 1 when it misses anything."""
    from koalapy.agent.main import check as run_checks
    from koalapy.model.errors import KoalaError

    where = directory or DATA.expanduser() / "clusters" / cluster
    try:
        findings = run_checks(cluster, url, config, where, _agent_token(), ca_file, user)
    except KoalaError as error:
        raise of_koala(error) from error
    well = all(finding.ok for finding in findings)
    if as_json:
        told = [{"what": f.what, "ok": f.ok, "found": f.found, "hint": f.hint} for f in findings]
        print(json.dumps({"cluster": cluster, "ok": well, "findings": told}, indent=2))
    else:
        for finding in findings:
            print(f"{'ok  ' if finding.ok else 'FAIL'}  {printable(f'{finding.what}: {finding.found}')}")
            if finding.hint:
                print(f"      {printable(finding.hint)}")
    return Exit.OK if well else Exit.FAILED


def local_run(
    cluster: Annotated[str, Argument(help="an embedded cluster", completes="clusters")],
    nodes: Annotated[int, Argument(help="how many nodes")],
    command: Annotated[list[str], Argument(help="the program and its arguments", rest=True)],
    user: Annotated[str | None, Option(help="who runs it; default: you")] = None,
    url: Url = DEFAULT_URL,
    token: Annotated[str | None, Option(envvar="KOALA_TOKEN")] = None,
) -> int:
    """Run something on an embedded cluster as its local users do, past the scheduler."""
    import getpass

    from koalapy.agent.lrm.local.cluster import LocalCluster
    from koalapy.agent.lrm.local.run import local_run as run
    from koalapy.model.errors import KoalaError

    found = Client(url, token).cluster(cluster)
    directory = found["details"].get("directory")
    if directory is None:
        raise CliError(f"cluster {cluster} is no embedded one", Exit.USAGE, "use its own sbatch or qsub")
    try:
        local = LocalCluster(Path(directory), cluster, found["total"])
        own = {name: value for name, value in os.environ.items() if not name.startswith(OWN_PREFIX)}
        code = run(local, nodes, command, user or getpass.getuser(), own, Path.cwd())
    except KoalaError as error:
        raise of_koala(error) from error
    return code


def demo(keep: Annotated[bool, Option("--keep", help="leave the daemon running, and say where")] = False) -> int:
    """Show one MPI program running as a single job over two clusters, from beginning to end."""
    from koalapy.cli.demo import run_demo

    return run_demo(keep)
