"""Find Open MPI on a node, and build its environment, its parameters and the commands of mpirun and MPI daemons."""

from __future__ import annotations

import json
import os
import re
import shlex

from koalapy.runner.containers import find_container
from koalapy.runner.exec_guard import INPUT_NAME, SCRIPT_VARIABLE, SHELL, write_rank_script
from koalapy.runner.networks import own_addresses
from koalapy.runner.processes import find_program
from koalapy.runner.rank_processors import binding_lines
from koalapy.runner.settings import Failure

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from koalapy.runner.plan import Node, Plan
    from koalapy.runner.relay_links import RelayedLinks

STARTERS = {"prterun": (5, "prted"), "orterun": (4, "orted")}
"""Programs in mpirun's folder that show Open MPI's series (major version) and the name of its MPI daemon."""
MPIRUN_NAMES = {5: ("prterun", "prte"), 4: ("orterun",)}
"""By Open MPI's major version: other names of mpirun, or of the program that it executes."""
NAME_VARIABLES = {"SLURM_JOBID": "0", "SLURM_NODEID": "0", "SLURMD_NODENAME": ""}
"""Variables that give an MPI daemon another name than its host's, as Slurm would."""
NAMING = "ess_slurm"
"""The component of Open MPI that reads them: a file, or a part of the daemons' library."""
LIBRARIES = ("libprrte.so", "libopen-rte.so")
FOLDERS = ("", "openmpi/", "prte/", "*/", "*/openmpi/lib/openmpi*/")
"""Folders below ``lib`` or ``lib64`` that may contain them."""
TAG_SEPARATORS = {5: b" ", 4: b""}
"""By Open MPI's major version: the text between the tag of ``mpirun`` and the line that it tags."""
LAUNCHES_NOTHING = {
    5: {"odls_base_max_threads": "0", "filem": "^raw"},
    4: {
        "hwloc_base_binding_policy": "none",
        "orte_leave_session_attached": "1",
        "filem": "^raw",
        "pmix": "^s1,s2,cray",
    },
}
"""By Open MPI's major version: parameters of every MPI daemon. It launches no others and takes no files from mpirun."""


class Installation:
    """The Open MPI of the cluster's profile, or of the first mpirun on the path. Raise ``Failure`` without one."""

    def __init__(self, environment: dict[str, str], name: str, plan: Plan) -> None:
        section = f"clusters.{plan.me['cluster']}.mpi"
        prefix = environment.get("KOALA_MPI_PREFIX")
        mpirun = find_program(f"{prefix}/bin/mpirun" if prefix else "mpirun", environment)
        if mpirun is None:
            location = f" below {prefix}" if prefix else ""
            raise Failure(f"mpirun not found on node {name}: install Open MPI{location}, or correct {section}.prefix")
        self.mpirun = mpirun
        folder = os.path.dirname(os.path.realpath(mpirun))
        starter = next((s for s in STARTERS if os.access(f"{folder}/{s}", os.X_OK)), None)
        if starter is None:
            raise Failure(f"{mpirun} on node {name} is not Open MPI's: correct {section}.prefix")
        self.series, daemon = STARTERS[starter]
        self.daemon = f"{folder}/{daemon}"
        self.mpirun_names = (os.path.basename(os.path.realpath(mpirun)), *MPIRUN_NAMES[self.series])
        self.prefix = os.path.dirname(folder)
        expected = environment.get("KOALA_MPI_SERIES", str(self.series))
        if expected != str(self.series):
            raise Failure(
                f"node {name} has Open MPI {self.version()} at {self.prefix}, but {section}.series is {expected}: "
                f"correct it or {section}.prefix"
            )

    def version(self) -> str:
        """Return the version that mpirun prints, or the series (major version) if it prints none."""
        import subprocess

        try:
            answer = subprocess.run([self.mpirun, "--version"], capture_output=True, timeout=5, check=False)
        except (OSError, subprocess.TimeoutExpired):
            return str(self.series)
        match = re.search(r"\d+\.\d+\.\S+", answer.stdout.decode(errors="replace"))
        return match[0] if match else str(self.series)

    def mpirun_options(self, launch_agent: str, nodes: int, *, tags_output: bool = False) -> list[str]:
        """Return options that let mpirun start its MPI daemons through our launch agent, a script.

        ``tags_output``: it writes the rank before each line of output.

        Daemons that stay attached must all be launched at once, which mpirun must be allowed for that many nodes.
        """
        shell = "ssh" if self.series >= 5 else "rsh"
        options = {
            "plm": shell,
            "ras": "^slurm,gridengine",
            f"plm_{shell}_agent": launch_agent,
            f"plm_{shell}_no_tree_spawn": "1",
            f"plm_{shell}_num_concurrent": str(nodes),
        }
        if self.series >= 5:
            # Its launch threads lose track of a process that ends at once, and mpirun then hangs (seen in 5.0.11).
            options["odls_base_max_threads"] = "0"
            attached = ["--leave-session-attached"]
        else:
            attached = ["--mca", "orte_leave_session_attached", "1"]
        always = ["--bind-to", "none", "--stdin", "none"]
        if tags_output:
            always += ["--output", "tag"] if self.series >= 5 else ["--tag-output"]
        return [*self._format_options(options), *attached, *always]

    def relayed_options(self, nodes: int) -> list[str]:
        """Return options of mpirun for relayed links: all daemons connect to it, and no name of a node is resolved."""
        if self.series >= 5:
            options = {"rml_base_radix": str(nodes), "prte_do_not_resolve": "1"}
        else:
            options = {"routed": "radix", "routed_radix": str(nodes), "orte_do_not_resolve": "1"}
        return self._format_options(options)

    def _format_options(self, options: Mapping[str, str]) -> list[str]:
        """Return parameters of the series' launcher as words of a command line."""
        flag = "--prtemca" if self.series >= 5 else "--mca"
        return [word for name, value in options.items() for word in (flag, name, value)]

    def daemon_arguments(self, parameters: Mapping[str, str], rank_script: str, *, is_named: bool) -> list[str]:
        """Return the command line of this node's MPI daemon; ``parameters`` are those that the head node has chosen.

        It starts ranks by the script. ``is_named``: the daemon takes its name from the environment.
        """
        fixed = LAUNCHES_NOTHING[self.series] | ({} if is_named else {"ess": "env"})
        fixed["odls_base_exec_agent" if self.series >= 5 else "orte_fork_agent"] = f"{SHELL} {rank_script}"
        arguments = self._format_options({**parameters, **fixed})
        if self.series < 5:
            return [self.daemon, *arguments]
        root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
        return [self.daemon, "--leave-session-attached", *root, *arguments]

    def daemon_environment(self, environment: Mapping[str, str], name: str = "") -> dict[str, str]:
        """Return the environment of this node's MPI daemon, which is called ``name`` instead of by its host name."""
        prefixes = dict.fromkeys(("PRTE_PREFIX", "PMIX_PREFIX"), self.prefix) if self.series >= 5 else {}
        name_variables = {variable: value or name for variable, value in NAME_VARIABLES.items()} if name else {}
        return {**environment, **prefixes, **name_variables}

    def can_name(self) -> bool:
        """Return whether its MPI daemons can be given names; assume so if its libraries are not found."""
        from glob import glob

        folders = [f"{self.prefix}/lib{suffix}/{folder}" for suffix in ("", "64") for folder in FOLDERS]
        if any(glob(f"{folder}*mca_{NAMING}.so") for folder in folders):
            return True
        libraries = [path for folder in folders for name in LIBRARIES for path in glob(f"{folder}{name}*")]
        for path in libraries:
            with open(path, "rb") as file:
                if NAMING.encode() in file.read():
                    return True
        return not libraries


DAEMON = re.compile(r"(?:^|(?<=[\s;]))(?:[^\s;]*/)?(?:prted|orted)(?=\s|$)")
OPTIONS = ("--prtemca", "-prtemca", "--mca", "-mca")
MAX_DAEMONS = 1_000_000
MAX_LENGTH = 64 * 1024
"""Maximum length of a value in characters. The node list of a large job is the longest value."""
_NUMBER = r"\d{1,10}"
_JOB = r"[A-Za-z0-9_][A-Za-z0-9_.@-]{0,199}"
_ADDRESSES = r"(?:;tcp6?://[0-9A-Za-z\[\]:.,%-]{1,8000}){1,4}"
REQUIRED = {
    5: {
        "ess_base_nspace": _JOB,
        "ess_base_vpid": _NUMBER,
        "ess_base_num_procs": _NUMBER,
        "prte_hnp_uri": rf"{_JOB}\.{_NUMBER}{_ADDRESSES}",
    },
    4: {
        "ess_base_jobid": _NUMBER,
        "ess_base_vpid": _NUMBER,
        "ess_base_num_procs": _NUMBER,
        "orte_hnp_uri": rf"{_NUMBER}\.{_NUMBER}{_ADDRESSES}",
        "orte_node_regex": r"[A-Za-z0-9_][A-Za-z0-9_.:,@()\[\]-]{0,65535}",
    },
}
"""Required parameters by Open MPI's major version: job, number and count of daemons, and addresses of ``mpirun``."""
HNP_URIS = ("prte_hnp_uri", "orte_hnp_uri")
MPIRUN_ADDRESS = re.compile(r"tcp://[0-9.,]+:")
SHARED = {
    5: {"rml_base_radix": _NUMBER, "routed_radix": _NUMBER},
    4: {"routed": "binomial|debruijn|direct|radix", "routed_radix": _NUMBER},
}
"""Parameters by Open MPI's major version that all daemons of a job have in common: the routing of messages."""


def select_parameters(series: int, command: str) -> dict[str, str]:
    """Return the parameters for another node's daemon, from the shell command that ``mpirun`` runs there.

    Omit all others, since each node sets them itself. Raise ``Failure`` if the command starts no MPI daemon.
    """
    daemon = DAEMON.search(command)
    if daemon is None:
        raise Failure(f"mpirun asks to run a command that does not start its daemon (orted or prted): {command[:200]}")
    try:
        arguments = shlex.split(command[daemon.end() :])
    except ValueError as error:
        raise Failure(f"mpirun's command for its daemon cannot be read ({error}): {command[:200]}") from error
    allowed = REQUIRED[series].keys() | SHARED[series].keys()
    chosen = {
        n: value
        for option, n, value in zip(arguments, arguments[1:], arguments[2:])
        if option in OPTIONS and n in allowed
    }
    return {name: value.replace("\\", "") for name, value in chosen.items()}


def check_parameters(series: int, parameters: object, section: str) -> Mapping[str, str]:
    """Return the parameters of a launch request from another node if each is allowed and has a valid value.

    ``section`` is the setting in which this site configures parameters. Raise ``Failure`` naming the
    parameter otherwise.
    """
    if not isinstance(parameters, dict):
        raise Failure("the job's head node sent a launch request without parameters: it needs the same koalapy")
    patterns = {**REQUIRED[series], **SHARED[series]}
    for name, value in parameters.items():
        if name not in patterns:
            raise Failure(
                f"the job's head node may not set the parameter {_shorten_value(name)} of this node's MPI daemon: "
                f"leave it out there, or set it here in {section}.parameters"
            )
        if not isinstance(value, str) or len(value) > MAX_LENGTH or not re.fullmatch(patterns[name], value, re.ASCII):
            raise Failure(
                f"the job's head node sent {_shorten_value(value)} as the parameter {name}, which is not a value of it"
            )
    for name in REQUIRED[series]:
        if name not in parameters:
            raise Failure(f"the job's head node sent no parameter {name} for this node's MPI daemon")
    if not 0 < int(parameters["ess_base_vpid"]) < int(parameters["ess_base_num_procs"]) <= MAX_DAEMONS:
        raise Failure(
            f"the job's head node numbers this node's MPI daemon {parameters['ess_base_vpid']} "
            f"of {parameters['ess_base_num_procs']}, which cannot be"
        )
    return parameters


def localize_parameters(parameters: Mapping[str, str], plan: Plan) -> Mapping[str, str]:
    """Return a daemon's parameters with this node's address for mpirun's, if its relay listens there for mpirun."""
    clusters = plan.me["cluster"], plan.head["cluster"]
    if plan.relayed is None or clusters[0] == clusters[1] or not plan.relayed.joins(*clusters):
        return parameters
    host = plan.me["host"]
    return {n: MPIRUN_ADDRESS.sub(f"tcp://{host}:", v) if n in HNP_URIS else v for n, v in parameters.items()}


def _shorten_value(value: object) -> str:
    return ascii(value)[:100]


MISLEADING = ("SLURM", "PMI_", "PMI2_", "PMIX_", "PE_HOSTFILE")
"""Prefixes of variables from which Open MPI would conclude that the resource manager has started it."""
OF_PRRTE = (
    "errmgr",
    "ess",
    "filem",
    "grpcomm",
    "iof",
    "odls",
    "oob",
    "plm",
    "prte",
    "ras",
    "rmaps",
    "rml",
    "routed",
    "rtc",
    "schizo",
    "state",
)
"""Name prefixes of PRRTE's parameters in Open MPI 5. Those in ``OF_PMIX`` belong to PMIx, all others to Open MPI."""
PREFER_ROMIO = {"OMPI_MCA_io_ompio_priority": "1"}
"""Select ROMIO for MPI-IO. The other implementation, ompio, hangs if some ranks can open a file and others cannot, as
on clusters without a common file system. With ROMIO all ranks fail."""
REFUSE_MPICH = {"PMI_PORT": "127.0.0.1:1", "PMI_ID": "0"}
"""Variables that make MPICH and its derivatives (MVAPICH, Intel MPI) look for a process manager and fail. Without them
each rank would run as a program of one rank, and succeed. Open MPI ignores them."""
OF_PMIX = ("gds", "pmdl", "pmix", "pnet", "psec", "ptl")
CONTROL_PORTS_PARAMETER = "oob_tcp_dynamic_ipv4_ports"
CONTROL_PORTS = 64
MAX_STEPS = 16
"""Programs of one script that run at the same time; further ones wait."""


def lane_ports(first: int, last: int, lane: int) -> tuple[int, int]:
    """Return the first and last port of the control channel for one of several programs that run at once.

    Raise ``Failure`` if there are not enough for this program.
    """
    count = last - first + 1
    lanes = max(1, min(MAX_STEPS, count // 2))  # each program needs two on a node
    if lane >= lanes:
        raise Failure(
            f"this node has ports for {lanes} programs of a script at once: start fewer, or have more ports set in "
            "clusters.NAME.mpi.ports unless the job has relayed links",
            1,
        )
    width = count // lanes
    return first + lane * width, first + (lane + 1) * width - 1


def rank_ports(environment: dict[str, str]) -> tuple[int, int] | None:
    """Return the first and last port at which ranks may listen; None if the cluster has no port range."""
    if not (ports := environment.get("KOALA_MPI_PORTS")):
        return None
    first, last = map(int, ports.split("-"))
    # The first ones are for the control channel, and not many: mpirun opens every port that it gets.
    return first + max(1, min(CONTROL_PORTS, (last - first + 1) // 4)), last


def prepare(environment: dict[str, str], installation: Installation, plan: Plan) -> None:
    """Prepare a node's environment for its Open MPI. Keep the values of derived variables that are set already."""
    for name in [n for n in environment if n.startswith(MISLEADING) and not n.startswith("PMIX_MCA_")]:
        del environment[name]
    for name, value in _derive_parameters(environment, installation.series, plan).items():
        environment.setdefault(name, value)
    if plan.relayed is not None:
        environment |= _relayed_parameters(environment, installation.series, plan, plan.relayed)
    if os.geteuid() == 0:
        environment |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


def _derive_parameters(environment: dict[str, str], series: int, plan: Plan) -> dict[str, str]:
    """Return the variables that set Open MPI's networks, ports and configured parameters on this node."""
    control = "PRTE_MCA_" if series >= 5 else "OMPI_MCA_"
    on_loopback = plan.me["host"].startswith("127.")
    parameters = dict(PREFER_ROMIO) if plan.spans_clusters else {}
    if network := environment.get("KOALA_MPI_INTERFACE") or _way_out(plan):
        parameters |= {"OMPI_MCA_btl_tcp_if_include": network, "OMPI_MCA_btl_tcp_disable_family": "6"}
        if not on_loopback:  # the control channel rejects the loopback interface
            include = "prte_if_include" if series >= 5 else "oob_tcp_if_include"
            parameters |= {control + include: network, f"{control}oob_tcp_disable_ipv6_family": "1"}
    if ports := rank_ports(environment):
        parameters["OMPI_MCA_btl_tcp_port_min_v4"] = str(ports[0])
        parameters["OMPI_MCA_btl_tcp_port_range_v4"] = str(ports[1] - ports[0] + 1)
        if not on_loopback:  # there several daemons would compete for the ports
            first, last = int(environment["KOALA_MPI_PORTS"].partition("-")[0]), ports[0] - 1
            if plan.lane is not None:
                first, last = lane_ports(first, last, plan.lane)
            parameters[control + CONTROL_PORTS_PARAMETER] = f"{first}-{last}"
    return parameters | {
        _variable_name(name, series): value for name, value in _configured_parameters(environment).items()
    }


def _relayed_parameters(environment: dict[str, str], series: int, plan: Plan, links: RelayedLinks) -> dict[str, str]:
    """Return the variables of a node of a job with relayed links, which no setting may replace.

    Ranks reach nodes behind relays by loopback, and all others by another interface. Open MPI never pairs an address of
    a private network with another one, and the private networks are those that this node reaches.
    """
    from koalapy.runner.relay_links import split_ports

    network = environment.get("KOALA_MPI_INTERFACE") or _way_out(plan)
    if network is None or plan.rank_ports is None or plan.offer is None:
        raise Failure(f"relayed links need another interface beside loopback, which node {plan.me['host']} lacks")
    first, last = plan.rank_ports
    values = {
        "pml": "ob1",
        "btl": "self,sm,tcp" if series >= 5 else "self,vader,tcp",
        "btl_tcp_disable_family": "6",
        "btl_tcp_port_min_v4": str(first),
        "btl_tcp_port_range_v4": str(last - first + 1),
        "reachable": "weighted",
    }
    has_relay = links.has_relay(plan.me["cluster"])
    if links.on_loopback:
        values["btl_tcp_if_include"] = "lo"
    else:
        values["btl_tcp_if_include"] = f"{network},lo" if has_relay else network
        values["opal_net_private_ipv4"] = ";".join(links.reachable_networks(plan.me["cluster"]))
    if has_relay:
        values |= {"btl_tcp_bandwidth_lo": "1", "btl_tcp_latency_lo": "1000", "mpi_yield_when_idle": "1"}
    control = "PRTE_MCA_" if series >= 5 else "OMPI_MCA_"
    include = "prte_if_include" if series >= 5 else "oob_tcp_if_include"
    variables = {f"OMPI_MCA_{name}": value for name, value in values.items()}
    variables |= {control + include: network, f"{control}oob_tcp_disable_ipv6_family": "1"}
    if plan.me is plan.head:
        first, last = split_ports(plan.offer.layouts[links.layout][plan.me["number"]])[0]
        if plan.lane is not None:
            first, last = lane_ports(first, last, plan.lane)
        variables[control + CONTROL_PORTS_PARAMETER] = f"{first}-{last}"
    return variables


def _way_out(plan: Plan) -> str | None:
    """Return the interface with the address by which other clusters reach this node; None on loopback or one cluster.

    Without it, Open MPI would also try interfaces that other clusters cannot reach.
    """
    host = plan.me["host"]
    if host.startswith("127.") or not plan.spans_clusters:
        return None
    return next((interface for interface, address in own_addresses() if address == host), None)


def _configured_parameters(environment: dict[str, str]) -> dict[str, str]:
    text = environment.get("KOALA_MPI_PARAMETERS", "{}")
    try:
        return {str(name): str(value) for name, value in json.loads(text).items()}
    except (ValueError, AttributeError) as error:
        raise Failure(f"KOALA_MPI_PARAMETERS must be a JSON object, not {text[:100]}") from error


def _variable_name(parameter: str, series: int) -> str:
    part = parameter.partition("_")[0]
    if series >= 5 and part in OF_PRRTE:
        return f"PRTE_MCA_{parameter}"
    return f"PMIX_MCA_{parameter}" if series >= 5 and part in OF_PMIX else f"OMPI_MCA_{parameter}"


def rank_environment(environment: dict[str, str], installation: Installation) -> dict[str, str]:
    """Return the environment of this node's ranks: that of the node, with the libraries of its Open MPI first."""
    variables = {"PATH": os.defpath, **environment}
    folders = [f"{installation.prefix}/{name}" for name in ("lib", "lib64")] if installation.prefix != "/usr" else []
    libraries = [f for f in folders if os.path.isdir(f)] + [variables.pop("LD_LIBRARY_PATH", "")]
    if path := ":".join(filter(None, libraries)):
        variables["LD_LIBRARY_PATH"] = path
    return variables


def make_ready(node: Node, plan: Plan) -> tuple[Installation, str]:
    """Find this node's Open MPI and prepare its environment; return it with a new folder for its session files.

    Session files of a killed run in a shared folder would disturb later runs.
    """
    installation = Installation(node.environment, node.settings.name, plan)
    folder = node.make_folder()
    if plan.reads_input:
        node.make_input(f"{folder}/{INPUT_NAME}")
    fit_environment(node, plan, installation, folder)
    return installation, folder


def refit(node: Node, plan: Plan, installation: Installation, folder: str) -> None:
    """Recompute the environment after the nodes' addresses have changed."""
    node.environment = plan.environment(node.settings)
    fit_environment(node, plan, installation, folder)


def fit_environment(node: Node, plan: Plan, installation: Installation, folder: str) -> None:
    """Prepare a node's environment for its Open MPI, and write the script that starts its ranks."""
    prepare(node.environment, installation, plan)
    node.environment["TMPDIR"] = folder
    ranks = rank_environment(node.environment, installation)
    container = find_container(plan, node.settings, node.environment)
    if sum(node_plan["slots"] for node_plan in plan.nodes) > 1:
        ranks.update(REFUSE_MPICH)
    command, workdir = plan.context["command"], plan.rank_folder or os.getcwd()
    if container is not None:
        command = container.wrap_command(command, workdir, folder)
    source = f"{folder}/{INPUT_NAME}" if plan.reads_input else plan.input_file
    binding = binding_lines(plan, node.settings)
    script = write_rank_script(folder, command, ranks, installation.prefix, workdir, source, binding)
    node.environment[SCRIPT_VARIABLE] = script
