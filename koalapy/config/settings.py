"""The settings of the daemon and the agents: a YAML file, overridden by environment variables
(``KOALA_RULES__CLAIM_GRACE``)."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from difflib import get_close_matches
from itertools import count, islice
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationError
from pydantic.fields import FieldInfo
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
)

from koalapy.agent.core.settings import SiteSettings
from koalapy.config.errors import DELIMITER, OF_COMMANDS, OF_JOBS, PREFIX, configuration_error
from koalapy.config.notifications import NotificationSection
from koalapy.config.provider import Provider
from koalapy.config.strict_yaml import read_file
from koalapy.config.types import (
    AbsolutePath,
    ClusterKey,
    HostName,
    LeaseSetting,
    Network,
    Ports,
    Proxy,
    Secret,
    UserName,
    parse_proxy,
)
from koalapy.model.alert import AlertRules
from koalapy.model.cluster import ClusterPair, Link, LinkUse, check_cluster, pair_of
from koalapy.model.disk import DiskLimits
from koalapy.model.errors import UsageError, reject
from koalapy.model.identity import Permission, Role
from koalapy.model.job import DEFAULT_LEASE
from koalapy.model.limits import FairShareSettings, LimitSettings
from koalapy.model.measurement import MeasurementSettings
from koalapy.model.profile import MAX_SETS, ClusterProfile, Mpi, find_largest_sets
from koalapy.model.users import Accounts, Domain, User, Users
from koalapy.model.wording import parse_bandwidth, parse_seconds, suggest_names
from koalapy.scheduler.rules import Rules
from koalapy.simulation.record.settings import Recording

MAX_TEXT_LENGTH = 1024 * 1024
"""Maximum characters of any text. Pydantic rejects text that UTF-8 cannot encode only if its length is limited."""
LogLevel = Literal["debug", "info", "warning", "error", "critical"]
LogFormat = Literal["console", "json"]


@dataclass(frozen=True)
class TokenSection:
    """A token that is valid as long as it is configured."""

    token: Secret = field(repr=False)
    """The token; 16 characters or more."""
    user: UserName
    """User that the token authenticates."""
    role: Role = Role.USER
    """Role of its bearer."""


def _with_a_user(section: object) -> object:
    """Return the section of a token. Raise ``ValueError`` for a plain text, which names no user."""
    if isinstance(section, str):
        raise ValueError("a token needs a user and a role: {token: WORD, user: NAME, role: user, operator or admin}")
    return section


@dataclass(frozen=True)
class UserSection:
    """A user, with accounts on the clusters, role and groups."""

    accounts: dict[str, str] = field(default_factory=dict)
    """Account of the user on each cluster, by cluster."""
    role: Role = Role.USER
    """Role of the user when the login or token gives no role."""
    groups: list[UserName] = field(default_factory=list)
    """Groups of the user, to which limits may apply."""
    home: str = ""
    """Home site of the user. By default the cluster where the user has an account, if it is only one."""


@dataclass(frozen=True)
class MpiSection(Mpi):
    """Open MPI on one cluster: its installation and the networks that it may use between clusters."""

    prefix: str | None = None
    """Installation folder, which contains ``bin/mpirun``. By default the first ``mpirun`` on the ``PATH`` of the
    nodes."""
    interface: Network | None = None
    """Network that the nodes of other clusters can reach, as CIDR (``198.18.0.0/24``) or interface name (``ib0``)."""
    ports: Ports | None = None
    """Ports that the nodes of other clusters can reach, as ``FIRST-LAST``."""
    parameters: dict[str, str] = field(default_factory=dict)
    """Additional MCA parameters of Open MPI (``btl_tcp_links: "2"``)."""


@dataclass(frozen=True)
class ClusterSection(ClusterProfile, SiteSettings):
    """One cluster: settings of the scheduler, of the cluster's agent, and of the daemon.

    ``nodes`` and ``network`` apply to the kind ``local`` only: N nodes on this machine.
    """

    speed: Annotated[float, Field(gt=0)] = 1.0
    """Speed of its nodes relative to those of the other clusters."""
    uplink_bandwidth: Annotated[float, BeforeValidator(parse_bandwidth), Field(gt=0, allow_inf_nan=False)] | None = None
    """Bandwidth of its link to all other clusters together, in bytes per second; also as ``1Gbit`` or ``100MB``. By
    default the daemon uses the measured bandwidth of its links."""
    token: Secret | None = field(default=None, repr=False)
    """Token that authenticates the agent of the cluster."""
    user: UserName | None = None
    """The only user that may have jobs on the cluster. Required with the identity ``own``, and not allowed with
    others."""
    unmapped: bool = False
    """Whether accounts of this cluster that ``users`` does not map may log in, as the user ``ACCOUNT@CLUSTER``."""
    refused_accounts: list[str] = field(default_factory=list)
    """Accounts of this cluster that may not log in, whichever user they belong to."""
    environment: dict[str, str] = field(default_factory=dict)
    """Environment variables of every program there. ``PATH`` entries are prepended."""
    embedded: bool | None = None
    """Whether the daemon starts the agent itself. By default only for the kind ``local``."""
    mpi: MpiSection = MpiSection()
    python: str | None = None
    """Path of Python 3.9 or newer, which executes the runner on the nodes. By default the Python of the agent."""
    runner_address: str | None = None
    """Address of the head node at which the agent listens for its nodes. By default the address of the head node."""
    replica_directories: list[AbsolutePath] = field(default_factory=list)
    """Folders that contain replicas, as the head node sees them. Other sites can read no other files.

    By default, for the kind ``local``, the folder ``replicas`` in the directory of the cluster.
    """
    stage_directory: AbsolutePath | None = None
    """Folder for the files of components, with one subfolder per component. The nodes must see it under this path.

    By default the folder ``stages`` in the directory of the agent.
    """
    transfer_address: str | None = None
    """Address at which the head nodes of other sites connect to pull files. By default the address of the head node."""
    lease: LeaseSetting | None = None
    """Seconds that jobs on this cluster continue while the daemon is silent; then they end there and are retried.
    ``none``: no limit. By default the setting ``lease`` for all clusters."""

    def __post_init__(self) -> None:
        if self.accepts_scripts is None:
            object.__setattr__(self, "accepts_scripts", self.is_embedded)

    @property
    def is_embedded(self) -> bool:
        return self.lrm.on_this_host if self.embedded is None else self.embedded


@dataclass(frozen=True)
class TlsSection:
    """TLS of the daemon. Without a certificate it serves plain HTTP."""

    certificate: AbsolutePath | None = None
    """PEM file with the certificate of the daemon, followed by the intermediate certificates."""
    key: AbsolutePath | None = None
    """File with the private key, which no other account may read."""


@dataclass(frozen=True)
class RelaySection:
    """The daemon's hub of relayed links (``koala relay hub``)."""

    control: AbsolutePath | None = None
    """Control socket of the hub. Without one, jobs use no relayed links."""
    streams: Annotated[int, Field(ge=1, le=100_000)] = 4096
    """Maximum number of streams over the hub for all jobs together. Jobs that may need more wait."""


@dataclass(frozen=True)
class LinkSection:
    """Configured properties of the network between two clusters, or within one (``between: [north, north]``)."""

    between: tuple[str, str]
    """The two clusters; twice the same for the network within a cluster."""
    latency: Annotated[float, BeforeValidator(parse_seconds), Field(gt=0, allow_inf_nan=False)] | None = None
    """Latency in seconds; also as ``0.5ms``."""
    bandwidth: Annotated[float, BeforeValidator(parse_bandwidth), Field(gt=0, allow_inf_nan=False)] | None = None
    """Bandwidth in bytes per second; also as ``1Gbit`` or ``100MB``."""
    mpi: LinkUse = LinkUse.ANY
    """Path of MPI messages over this link: ``direct``, ``relayed``, or ``any``: relayed if the nodes do not reach each
    other."""


class EnvironmentSource(EnvSettingsSource):
    """A source of environment variables that also reads lists and objects, as JSON, in sections that are plain
    dataclasses."""

    def next_field(
        self, field: FieldInfo | Any | None, key: str, case_sensitive: bool | None = None
    ) -> FieldInfo | None:
        """Return the field that a key of a section names, also in plain dataclasses; None if there is none."""
        kind = field.annotation if isinstance(field, FieldInfo) else field
        if not is_dataclass(kind):
            return super().next_field(field, key, case_sensitive)
        types: dict[str, Any] = {attribute.name: attribute.type for attribute in fields(kind)}
        return FieldInfo.from_annotation(types[key]) if key in types else None


class Settings(BaseSettings):
    """The settings of the daemon and of the agents."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX, env_nested_delimiter=DELIMITER, extra="forbid", frozen=True, str_max_length=MAX_TEXT_LENGTH
    )

    database: str | None = None
    """Database URL. By default SQLite in the data directory."""
    tokens: list[Annotated[TokenSection, BeforeValidator(_with_a_user)]] = []
    """Additional tokens with a fixed text. Do not list issued tokens, or the daemon's own token, which commands of its
    account find by themselves."""
    users: dict[UserName, UserSection] = {}
    """Users by name, with their accounts on the clusters."""
    login_lifetime: float = Field(default=8 * 3600.0, ge=60, le=30 * 86400)
    """Validity in seconds of a login that an agent attests."""
    trusted_logins: list[str] = []
    """Clusters from which operators and administrators log in with their configured role. Logins from other clusters
    have the role user."""
    public_url: str | None = None
    """URL at which users reach the daemon, reported to clients at login. By default the URL for agents."""
    oidc: Provider | None = None
    """OpenID provider that issues bearer tokens, in addition to the tokens of the daemon."""
    limits: LimitSettings = LimitSettings()
    """Limits of users and groups."""
    fair_share: FairShareSettings = FairShareSettings()
    """Weights of users and groups, for ``rules.queue_order: fair-share``."""
    limits_contact: str = ""
    """Text that tells users where to request higher limits; it is the hint of errors about limits."""
    allowed_hosts: list[HostName] = []
    """Host names at which the daemon accepts requests, besides IP addresses, ``localhost`` and the names of this
    machine."""
    tls: TlsSection = TlsSection()
    behind_proxy: list[Proxy] = []
    """Addresses and networks of proxies that terminate TLS for the daemon. The daemon trusts the client address and
    scheme that they report."""
    lease: LeaseSetting = DEFAULT_LEASE
    """Seconds that jobs on a cluster continue while the daemon is silent; then they end there and are retried.
    ``none``: they continue until the agent, the walltime or an operator ends them."""
    output_limit: int = Field(default=64 * 1024 * 1024, ge=0, le=2**53)
    """Maximum stored bytes of output per component. Of longer output, the first and the last half of the limit are
    stored; a job may name a file for its complete output (``--output``)."""
    bundle_limit: int = Field(default=1024**3, ge=0)
    """Maximum bytes of the archive that a user uploads with a job (``--stage``)."""
    collect_limit: int = Field(default=1024**3, ge=0)
    """Maximum bytes of the archive of result files of a component (``--collect``)."""
    bundles_quota: int = Field(default=50 * 1024**3, ge=0)
    """Maximum bytes of all uploaded archives together. Archives that no job needs are deleted first."""
    results_quota: int = Field(default=200 * 1024**3, ge=0)
    """Maximum bytes of all result archives together. Those of the jobs that ended first are deleted first."""
    results_keep: float | None = Field(default=None, gt=0)
    """Seconds for which result archives are stored after the end of their job. By default until ``results_quota`` is
    reached."""
    jobs_keep: float | None = Field(default=365 * 86400.0, ge=3600, allow_inf_nan=False)
    """Seconds for which a job is stored after its end, with its output, results and history. null: forever."""
    first_job_number: int = Field(default=1, ge=1, le=10**17)
    """Lowest number of new jobs. Raise it if the daemon rejects an agent that knows higher numbers, of jobs that its
    restored database lacks."""
    internal_jobs_keep: float = Field(default=7 * 86400.0, ge=3600, allow_inf_nan=False)
    """Seconds for which the daemon's own jobs, which measure the network, are stored after their end. The measurements
    are stored separately."""
    high_priority: Permission = Permission()
    """Users that may submit high-priority jobs, which preempt others. By default only operators."""
    reservations: Permission = Permission()
    """Users that may reserve nodes (``koala reserve``). By default only operators."""
    forecast_interval: float | None = Field(default=600.0, ge=1, le=30 * 86400.0, allow_inf_nan=False)
    """Seconds between predictions of start times that the daemon makes by itself while jobs wait, for its pages.
    null: predictions on request only."""
    audit_keep: float | None = Field(default=365 * 86400.0, ge=86400, allow_inf_nan=False)
    """Seconds for which audit entries are stored. null: forever."""
    open_metrics: bool = False
    """Whether ``/metrics`` also answers requests without a token."""
    background_load: bool = False
    """Whether experiments may start background load on clusters, which bypasses the scheduler as local users do."""
    log_level: LogLevel = "info"
    """Lowest level that is logged. Agents that the daemon starts log ``warning`` and above, unless this is
    ``debug``."""
    log_format: LogFormat = "console"
    """Format of a log line: text, or one JSON object."""
    rules: Rules = Rules()
    links: list[LinkSection] = []
    relay: RelaySection = RelaySection()
    network: MeasurementSettings = MeasurementSettings()
    disks: DiskLimits = DiskLimits()
    record: Recording = Recording()
    alerts: AlertRules = AlertRules()
    notifications: NotificationSection = NotificationSection()
    clusters: dict[ClusterKey, ClusterSection] = {
        "north": ClusterSection(network="127.0.1"),
        "south": ClusterSection(network="127.0.2"),
    }

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Return the sources by precedence: environment variables, then arguments."""
        return EnvironmentSource(settings_cls), init_settings

    def known_users(self) -> Users:
        """Return the configured users.

        Raise ``UsageError`` for an unknown cluster, and for an account that two users have.
        """
        for name, section in self.users.items():
            for cluster in section.accounts.keys() - self.clusters.keys():
                raise UsageError(
                    f"users.{name}.accounts: there is no cluster {cluster}",
                    field=f"users.{name}.accounts",
                    value=cluster,
                    hint=suggest_names(cluster, self.clusters),
                )
            if section.home:
                check_cluster(section.home, self.clusters, f"users.{name}.home")
        users = {name: User(own.accounts, own.role, tuple(own.groups), own.home) for name, own in self.users.items()}
        try:
            return Users(users, [name for name, section in self.clusters.items() if section.unmapped])
        except ValueError as error:
            raise UsageError(f"users: {error}", field="users", hint="give each account to one person") from error

    def known_accounts(self) -> Accounts:
        """Return the accounts as which jobs of each owner may run.

        Raise ``UsageError`` like ``known_users`` and ``known_domains``.
        """
        return Accounts(self.known_users(), self.known_domains())

    def known_domains(self) -> dict[str, Domain]:
        """Return the account under which jobs run on each cluster, by cluster.

        Raise ``UsageError`` for a cluster with the identity ``own`` and no ``user``, or a ``user`` and another
        identity.
        """
        domains = {}
        for name, section in self.clusters.items():
            field = f"clusters.{name}.user"
            if section.identity == "own" and section.user is None:
                reject(field, None, "is missing: of the identity own it says whose jobs run there", "name one")
            if section.identity != "own" and section.user is not None:
                hint = "leave it out, or make the identity own"
                reject(field, section.user, "is for the identity own only", hint)
            domains[name] = Domain(section.identity, section.user or "")
        return domains

    def check_people(self) -> None:
        """Raise ``UsageError`` for an error in users, accounts, identities, trusted logins or weights."""
        self.known_accounts()
        shares = self.fair_share
        for kind in ("users", "groups"):
            if getattr(shares, kind) and self.rules.queue_order != "fair-share":
                problem = f"has weights, but rules.queue_order is {self.rules.queue_order}"
                reject(f"fair_share.{kind}", "", problem, "set rules.queue_order to fair-share, or remove the weights")
        for index, name in enumerate(self.trusted_logins):
            check_cluster(name, self.clusters, f"trusted_logins[{index}]")

    def check_coallocation(self) -> None:
        """Check ``coallocate_with`` of all clusters.

        Raise ``UsageError`` for an unknown cluster, or too many sets of clusters that may share a job.
        """
        for name, section in self.clusters.items():
            for index, partner in enumerate(section.coallocate_with or ()):
                check_cluster(partner, self.clusters, f"clusters.{name}.coallocate_with[{index}]")
        for one_series in (False, True):
            if len(list(islice(find_largest_sets(self.clusters, one_series=one_series), MAX_SETS + 1))) > MAX_SETS:
                raise UsageError(
                    f"coallocate_with makes more than {MAX_SETS} sets of clusters that may share a job",
                    field="clusters",
                    hint="let clusters that allow almost the same ones allow the same ones",
                )

    def check_relays(self) -> None:
        """Raise ``UsageError`` for an embedded cluster with a relay: its nodes are all on this machine."""
        for name, section in self.clusters.items():
            setting = "relay" if section.relay is not None else "relayed_only" if section.relayed_only else ""
            if section.is_embedded and setting:
                problem = "is not for embedded clusters: their nodes are on the daemon's machine and use no relays"
                reject(f"clusters.{name}.{setting}", None, problem, "leave it out")

    def local_networks(self) -> dict[str, str]:
        """Return the networks of the clusters on this machine, by cluster.

        The K-th cluster by name has the default 127.0.K, or else the first free network. Raise ``UsageError`` if two
        clusters have the same network, since their nodes would be the same.
        """
        local = sorted(name for name, section in self.clusters.items() if section.lrm.on_this_host)
        networks: dict[str, str] = {}
        owners: dict[str, str] = {}
        for name in local:
            if network := self.clusters[name].network:
                owner = owners.setdefault(network, name)
                if owner != name:
                    field = f"clusters.{name}.network"
                    raise UsageError(
                        f"{field}: {network} is also the network of cluster {owner}",
                        field=field,
                        value=network,
                        hint="give each cluster a network of its own, or leave it out",
                    )
                networks[name] = network
        free = (network for number in count(1) if (network := _default_network(number)) not in owners)
        for number, name in enumerate(sorted(self.clusters), 1):
            if name in local and name not in networks:
                default = _default_network(number)
                networks[name] = default if default not in owners else next(free)
                owners[networks[name]] = name
        return networks

    def link_uses(self) -> dict[ClusterPair, LinkUse]:
        """Return the path of MPI messages by pair of clusters, for links with the setting."""
        return {pair_of(*section.between): section.mpi for section in self.links if section.mpi is not LinkUse.ANY}

    def known_links(self) -> dict[ClusterPair, Link]:
        """Return the configured links, by their two clusters in alphabetical order.

        Raise ``UsageError`` for an unknown cluster, a duplicate link, and a link without any property.
        """
        links: dict[ClusterPair, Link] = {}
        pairs: set[ClusterPair] = set()
        for index, section in enumerate(self.links):
            field = f"links[{index}]"
            for place, name in enumerate(section.between):
                if name not in self.clusters:
                    raise UsageError(
                        f"{field}.between[{place}]: there is no cluster {name}",
                        field=f"{field}.between[{place}]",
                        value=name,
                        hint=suggest_names(name, self.clusters),
                    )
            first, second = pair = pair_of(*section.between)
            if pair in pairs:
                raise UsageError(
                    f"{field}.between: the link between {first} and {second} was given before",
                    field=f"{field}.between",
                    value=list(section.between),
                    hint="leave one out",
                )
            if section.latency is None and section.bandwidth is None and section.mpi is LinkUse.ANY:
                raise UsageError(f"{field}: neither latency nor bandwidth is given", field=field, hint="give either")
            pairs.add(pair)
            if (link := Link(section.latency, section.bandwidth)) != Link():
                links[pair] = link
        return links


def _default_network(number: int) -> str:
    return f"127.{number // 256}.{number % 256}"


def parse_proxies(texts: Sequence[str]) -> list[str]:
    """Check the proxies of the command line. Raise ``UsageError`` for one that is not an address or network."""
    try:
        return [parse_proxy(text.strip()) for text in texts]
    except ValueError as error:
        raise UsageError(
            f"--behind-proxy: {error}",
            field="--behind-proxy",
            value=",".join(texts),
            hint="give the addresses from which the proxies ask, with commas between",
        ) from error


OF_LOCAL_KIND = {"nodes", "network", "start_failures"}
"""Settings that imply the kind ``local`` for a cluster without ``kind``."""
OF_OTHER_KINDS = {
    "account",
    "fanout",
    "library",
    "native_specification",
    "parallel_environment",
    "partition",
    "poll_interval",
    "queue",
}
"""Settings that are meaningless for the kind ``local``."""
MIN_LIKENESS = 0.8
"""Similarity, from 0 to 1, above which a variable is treated as a misspelt setting."""


def load_settings(path: Path | None) -> Settings:
    """Load the settings from a file and the environment.

    Raise ``UsageError``, which names the field, for an invalid value.
    """
    values = {} if path is None else read_file(path)
    _refuse_misspelt_variables()
    try:
        settings = Settings(**values)
        _check_kinds(values, path)
        return settings
    except SettingsError as error:
        raise UsageError(
            f"{error}: give lists and objects in environment variables as JSON", field="environment"
        ) from error
    except ValidationError as error:
        raise configuration_error(Settings, error.errors(), path) from error


def unknown_variables() -> list[str]:
    """Return the environment variables with the prefix ``KOALA_`` that nothing reads."""
    names = {*OF_COMMANDS, *OF_JOBS, *map(str.upper, Settings.model_fields)}
    return sorted(
        name
        for name in os.environ
        if name.upper().startswith(PREFIX) and name.upper().removeprefix(PREFIX).partition(DELIMITER)[0] not in names
    )


def _refuse_misspelt_variables() -> None:
    """Raise ``UsageError`` for a variable of the environment that resembles the name of a setting."""
    settings = [name.upper() for name in Settings.model_fields]
    for name in unknown_variables():
        section, delimiter, suffix = name.upper().removeprefix(PREFIX).partition(DELIMITER)
        if near := get_close_matches(section, settings, 1, MIN_LIKENESS):
            raise UsageError(
                f"{name} in the environment is not a setting",
                field=name,
                hint=f"did you mean {PREFIX}{near[0]}{delimiter}{suffix}? Correct it, or unset it",
            )


def _check_kinds(values: Mapping[str, Any], path: Path | None) -> None:
    """Raise ``UsageError`` for a cluster without ``kind`` unless its settings imply the kind ``local``."""
    sources = [source.get("clusters") or {} for source in (values, EnvironmentSource(Settings)())]
    for name in dict.fromkeys(name for source in sources for name in source):
        keys = {key for source in sources for key in source.get(name) or {}}
        if keys and "kind" not in keys and (keys & OF_OTHER_KINDS or not keys & OF_LOCAL_KIND):
            raise UsageError(
                f"{path or 'the environment'}: clusters.{name}.kind is missing",
                field=f"clusters.{name}.kind",
                hint="say which resource manager it has: slurm, sge or drmaa; or local, for nodes of this machine",
            )
