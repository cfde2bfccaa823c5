"""An agent's settings, its timeouts, and the environment that it passes to programs."""

import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, StringConstraints, ValidationInfo

import koalapy
from koalapy.agent.lrm.node_classes import NodeClassSettings
from koalapy.agent.lrm.port import KINDS, LrmKind
from koalapy.model.disk import DiskLimits
from koalapy.system.tls import Trust

RUNNER = Path(koalapy.__file__).parent / "runner" / "runner.py"
"""The program that runs on the nodes; a local cluster gets it as its ``preload``."""

NO_SOCKET = "none"
NodeClassName = Annotated[str, StringConstraints(pattern=r"^[\w.+-]{1,100}$")]
PROGRAM_VARIABLES = frozenset(
    {
        "PATH",
        "HOME",
        "USER",
        "LOGNAME",
        "SHELL",
        "LANG",
        "LANGUAGE",
        "TZ",
        "TMPDIR",
        "LD_LIBRARY_PATH",
        "MODULEPATH",
        "MODULESHOME",
    }
)
"""Variables that every program on a cluster inherits, besides ``LC_*``. Set others in the cluster's ``environment``."""
OPEN_MPI_PREFIXES = ("OMPI_MCA_", "PRTE_MCA_", "PMIX_MCA_")
"""Prefixes of Open MPI's parameters, which programs on embedded clusters inherit from the daemon."""
LRM_VARIABLES = frozenset({"PYTHONPATH", "SLURM_CONF", "GLIBC_TUNABLES"})
LRM_PREFIXES = ("DRMAA_", "LSF_", "PBS_", "SGE_")
"""Prefixes of variables that configure the commands and libraries of resource managers."""


def _known_kind(kind: str) -> str:
    if kind not in KINDS:
        *first, last = map(repr, KINDS)
        raise ValueError(f"Input should be {', '.join(first)} or {last}")
    return kind


def _embedded_only(probability: float, info: ValidationInfo) -> float:
    if probability and not ((kind := info.data.get("kind")) in KINDS and KINDS[kind].on_this_host):
        raise ValueError("start_failures is only for clusters of the kind local")
    return probability


def _check_share(share: bool, info: ValidationInfo) -> bool:
    kind, identity = info.data.get("kind"), info.data.get("identity")
    if share and kind not in ("local", "slurm"):
        raise ValueError(f"share is only for clusters of the kinds slurm and local, and not for {kind}")
    if share and kind == "slurm" and identity == "service":
        raise ValueError(
            "share needs the identity mapped or own: with service, the jobs of all users run as one account, and could "
            "reach each other on a node"
        )
    return share


def _loopback_network(network: str) -> str:
    """Return three bytes in their shortest form. Raise ``ValueError`` for anything else."""
    if not re.fullmatch(r"127(\.\d{1,3}){2}", network) or any(int(byte) > 255 for byte in network.split(".")):
        raise ValueError(f"{network!r} is not the first three bytes of a loopback address: give one as 127.0.9")
    return ".".join(str(int(byte)) for byte in network.split("."))


def _absolute_path(path: str) -> str:
    if not path.startswith("/"):
        raise ValueError(f"{path} is not an absolute path: give one")
    return path


def _socket_path(path: str) -> str:
    if path != NO_SOCKET and not path.startswith("/"):
        raise ValueError(f"{path} is not an absolute path: give one, or {NO_SOCKET}")
    return path


@dataclass(frozen=True, kw_only=True)
class SiteSettings:
    """The settings under ``clusters.NAME`` that an agent uses unchanged."""

    kind: Annotated[str, AfterValidator(_known_kind)] = "local"
    """Its resource manager: ``slurm``, ``sge``, ``drmaa``, or ``local`` for nodes on this machine."""
    nodes: Annotated[int, Field(ge=1, le=254)] = 4
    """Number of nodes, for the kinds ``local`` and ``drmaa``; the other resource managers report it."""
    network: Annotated[str, AfterValidator(_loopback_network)] | None = None
    """First three bytes of the nodes' loopback addresses, unique to the cluster. The default is 127.0.K for the K-th
    cluster, or the first that is free."""
    start_failures: Annotated[float, Field(ge=0, le=1), AfterValidator(_embedded_only)] = 0.0
    """Probability that the start of a component fails, to test fault tolerance on the kind ``local``.

    A number in the file ``lrm/start-failures`` of the cluster's directory takes precedence.
    """

    identity: Literal["own", "service", "mapped"] = "service"
    """Accounts that jobs run as: ``own`` is the single user's account, ``service`` one account for all, ``mapped`` the
    account of each job's owner."""
    interactive: Literal["owner", "administrators", "none"] = "owner"
    """Users that may open terminals on its nodes (``koala shell``): the ``owner`` of a job on that job's nodes,
    ``administrators`` of the grid as well, or ``none``."""
    min_uid: Annotated[int, Field(ge=1)] = 1000
    """Lowest user id that gets jobs with the identity ``mapped``."""

    # How to ask its resource manager
    partition: str | None = None
    """Slurm: the partition, or several separated by commas. The default is Slurm's."""
    account: str | None = None
    """Account to charge. The default is the user's own."""
    allowed_account: list[str] = field(default_factory=list)
    """Accounts (Grid Engine: projects) that jobs may choose with ``--account``. With the identity ``mapped``, jobs may
    choose any that the resource manager permits to their owner."""
    allowed_qos: list[str] = field(default_factory=list)
    """Slurm: qualities of service that jobs may choose with ``--qos``, likewise."""
    queue: str | None = None
    """Grid Engine: the queue. The default is any queue that the parallel environment may use."""
    parallel_environment: str = "koala"
    """Grid Engine: a parallel environment that allocates whole nodes, with ``control_slaves TRUE``."""
    library: str | None = None
    """Grid Engine and the kind ``drmaa``: path of the DRMAA library. The default is that of the resource manager."""
    native_specification: str = ""
    """Further options for every job, as sbatch, qsub or the DRMAA library accept them.

    For the kind ``drmaa``, ``{nodes}`` and ``{walltime}`` are replaced by a job's values: the walltime in seconds, or
    in Slurm's form if its ``srun`` starts the runners.
    """
    fanout: Literal["srun", "qrsh", "none"] | None = None
    """Program that starts the runner on each allocated node. The default depends on the kind."""
    poll_interval: Annotated[float, Field(ge=1.0)] = 5.0
    """Seconds between two polls of a resource manager that does not report changes itself."""

    modules: list[str] = field(default_factory=list)
    """Environment modules to load before every program."""
    login_socket: Annotated[str, AfterValidator(_socket_path)] | None = None
    """Socket for users of the head node (``koala login``), or ``none``. The default is ``/run/koala/CLUSTER.sock`` if
    the agent may listen there, else ``login.sock`` in its directory. An embedded agent has none by default."""
    transfer_port: Annotated[int, Field(ge=1, le=65535)] | None = None
    """Port on which other sites' head nodes reach this one to pull files. The default is any free port."""
    transfer_limit: Annotated[int, Field(ge=1, le=64)] = 4
    """Number of files and folders pulled from other sites at once; further ones wait."""
    node_classes: dict[NodeClassName, NodeClassSettings] = field(default_factory=dict)
    """Groups of equal nodes and their properties, if the resource manager does not report them."""
    share: Annotated[bool, AfterValidator(_check_share)] = False
    """Whether jobs that ask for it (``--share``) get parts of nodes, and share these with other jobs.

    For Slurm with ``select/cons_tres``, and the kind ``local``. Only nodes with known cores are shared. Slurm needs a
    partition that shares nodes (no ``OverSubscribe=EXCLUSIVE``).
    """
    accepts_scripts: bool | None = None
    """Whether a script that runs at another site may choose the programs of its job on this cluster. By default only on
    embedded clusters. Scripts of jobs on this cluster alone are always accepted."""
    relay: Annotated[str, AfterValidator(_absolute_path)] | None = None
    """Control socket of the agent's relay (``koala relay head``). Without one, the nodes of this cluster use
    no relayed links. Embedded clusters have none, since their nodes are on one machine."""
    relayed_only: bool = False
    """Whether MPI messages between this cluster and others are always relayed, and so encrypted between the sites."""
    forget_after: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 14 * 86400.0
    """Seconds of silence after which the agent removes a daemon's stages and ended components, if it has met another
    daemon since, as after the database was wiped."""

    @property
    def lrm(self) -> LrmKind:
        return KINDS[self.kind]


@dataclass(frozen=True)
class AgentSettings(SiteSettings):
    """The settings of one agent: how it reaches its daemon, and what its runners need."""

    cluster: str
    url: str
    """URL of the daemon, ``http://host:port`` or ``https://``."""
    token: str
    directory: Path
    """State that must survive a restart; best on a file system that the nodes share."""
    runner_host: str = "127.0.0.1"
    """Address on which to listen for runners."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables added to the environment of every runner and program."""
    python: str = sys.executable
    replica_directories: Sequence[Path] = ()
    """Folders below which replicas may lie."""
    stage_directory: Path | None = None
    """Folder of the components' stages, which the nodes must see. The default is next to ``directory``."""
    transfer_address: str = "127.0.0.1"
    """Address on which other sites' agents reach this one to pull files."""
    disks: DiskLimits = field(default_factory=DiskLimits)
    login_sockets: Sequence[Path] = ()
    """Sockets for users of this host. The agent listens on the first that it may create."""
    other_urls: Sequence[str] = ()
    """URLs of standby daemons."""
    trust: Trust = field(default_factory=Trust)
    """How the daemon's certificate is verified, if it uses TLS."""

    @property
    def stages(self) -> Path:
        """Folder in which stages are prepared, and also used unless jobs run as several accounts."""
        shared = None if self.identity == "mapped" else self.stage_directory
        return shared or self.directory.with_name(f"{self.directory.name}-stages")

    @property
    def accounts_directory(self) -> Path | None:
        """Folder of the accounts' job folders; None if all jobs run as the agent's account."""
        return self.stage_directory if self.identity == "mapped" else None

    @property
    def address_file(self) -> Path:
        """File from which runners read their agent's address."""
        return (self.accounts_directory or self.directory) / "agent.json"

    @property
    def urls(self) -> Sequence[str]:
        return (self.url, *self.other_urls)

    def endpoint_of(self, url: str) -> str:
        """Return where the agent connects to the daemon at a URL."""
        scheme, _, address = url.rstrip("/").partition("://")
        return f"{scheme.replace('http', 'ws', 1)}://{address}/api/v1/agents/{self.cluster}/connect"


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentTimeouts:
    """The durations of an agent that tests with real processes shorten. All values are in seconds."""

    # Resource manager
    lrm_silence_s: float = 5.0
    """Duration of a poll after which the resource manager is reported as not answering."""
    report_interval_s: float = 10.0
    """Time between two reports of an unchanged cluster, and to a service manager without a watchdog."""
    submit_pause_s: float = 0.2
    """Base of the pauses between two attempts to submit a job; each pause doubles."""
    runner_connect_s: float = 60.0
    """Time that runners have to connect once the resource manager reports them as running."""
    expiry_check_s: float = 3600.0
    """Time between two searches for remains of expired daemons."""
    retry_s: float = 2.0
    """Time between two retries of what could not be written or sent."""

    # Files
    disk_check_s: float = 5.0
    """Time between two checks of the free space."""
    transfer_retry_s: float = 0.5
    """First pause after a transfer was cut; each further pause doubles."""
    max_transfer_retry_s: float = 16.0
    """Longest pause between two attempts of a transfer."""
    transfer_login_s: float = 30.0
    """Time that a puller has to connect and to present its ticket."""
    account_stall_s: float = 30.0
    """Time without a byte or work after which a process that handles another account's files counts as stuck."""
    sweep_interval_s: float = 60.0
    """Time between two searches for folders of killed runners."""

    # Check of a head node
    trial_node_s: float = 30.0
    """Time for a node to become free and to run the trial job."""
    trial_output_s: float = 3.0
    """Time after the trial job's end for its output to appear on a shared file system."""
    trial_poll_s: float = 0.5
    """Pause between two checks of the trial job."""


DEFAULT_TIMEOUTS = AgentTimeouts()


def inherited_environment(names: Iterable[str] = (), prefixes: tuple[str, ...] = ()) -> dict[str, str]:
    """Return the variables that programs inherit, and those with the given names or prefixes."""
    allowed, allowed_prefixes = PROGRAM_VARIABLES.union(names), ("LC_", *prefixes)
    return {name: value for name, value in os.environ.items() if name in allowed or name.startswith(allowed_prefixes)}


def agent_environment() -> dict[str, str]:
    """Return the environment of an agent that the daemon starts."""
    return inherited_environment(LRM_VARIABLES, (*OPEN_MPI_PREFIXES, *LRM_PREFIXES))
