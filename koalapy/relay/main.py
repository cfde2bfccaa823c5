"""Start a hub or a head from its configuration file."""

import gc
import os
import signal
import ssl
from pathlib import Path
from typing import Any, TypeVar

import structlog
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from koalapy.config.errors import configuration_error
from koalapy.config.logs import configure_logging
from koalapy.config.settings import LogFormat, LogLevel
from koalapy.config.strict_yaml import read_file
from koalapy.model.errors import UsageError
from koalapy.relay.attempts import Limits, files_needed
from koalapy.relay.control import ControlServer
from koalapy.relay.head import Head, HubAddress
from koalapy.relay.hub import Hub
from koalapy.runner.connections import Loop
from koalapy.system.certificate_files import load_certificate, read_stamps
from koalapy.system.process import ServiceManager, drop_own_variables, forbid_dumps, raise_file_limit
from koalapy.system.tls import Trust

log = structlog.get_logger()

MAX_OPEN_FILES = 1_048_576
"""More than any hard limit: a relay opens as many files as the system permits."""
DEFAULT_LIMITS = Limits()
Address = str
Configuration = TypeVar("Configuration", bound="RelayConfiguration")


class TlsFiles(BaseModel):
    """The PEM files of a relay's certificate and its key."""

    model_config = ConfigDict(extra="forbid")
    certificate: Path
    key: Path


class LimitSection(BaseModel):
    """Limits of a relay; see ``Limits``."""

    model_config = ConfigDict(extra="forbid")
    streams: int = Field(DEFAULT_LIMITS.streams, ge=1, le=100_000)
    attempt_streams: int = Field(DEFAULT_LIMITS.attempt_streams, ge=1, le=100_000)
    stream_rate: float = Field(DEFAULT_LIMITS.stream_rate, ge=1, le=1e6)
    stream_burst: float = Field(DEFAULT_LIMITS.stream_burst, ge=1, le=1e6)


class RelayConfiguration(BaseModel):
    """The settings of a hub or head."""

    model_config = ConfigDict(extra="forbid")
    listen: Address
    """Address and port for heads (hub) or nodes (head)."""
    control: Path
    """The Unix socket for the daemon or the agent."""
    limits: LimitSection = LimitSection()
    log_level: LogLevel = "info"
    log_format: LogFormat = "console"


class HubConfiguration(RelayConfiguration):
    """The settings of a hub."""

    tls: TlsFiles | None = None
    without_tls: bool = False
    """Whether to serve without TLS, on a private network."""

    @model_validator(mode="after")
    def _require_tls(self) -> "HubConfiguration":
        if self.tls is None and not self.without_tls:
            raise ValueError("tls is missing: give certificate and key, or set without_tls on a private network")
        return self


class HeadConfiguration(RelayConfiguration):
    """The settings of a head."""

    cluster: str
    hub: Address
    ca_file: Path | None = None
    """Authorities for the hub's certificate. By default the authorities that this machine trusts."""
    pinned: Path | None = None
    """The certificate of the hub, whatever its issuer, host name and validity."""
    tls: TlsFiles | None = None
    """The certificate of this head for the heads of other clusters."""
    without_tls: bool = False
    """Whether hub and heads do without TLS."""
    listen_for_heads: Address | None = None
    """Address and port for heads of other clusters that can reach this one."""

    @model_validator(mode="after")
    def _require_tls(self) -> "HeadConfiguration":
        if self.tls is None and (self.listen_for_heads is not None or not self.without_tls):
            raise ValueError("tls is missing: give certificate and key, which may be self-signed")
        return self


class ServerContext:
    """The TLS context of a server, which loads renewed files by itself."""

    def __init__(self, files: TlsFiles) -> None:
        """Load the files. Raise ``UsageError``."""
        self._files = files
        try:
            self._stamps = self._read_stamps()
            self._loaded = load_certificate(files.certificate, files.key)
        except UsageError as error:
            raise UsageError(
                f"cannot load the certificate {files.certificate} with its key {files.key}: {error.message}",
                field="tls",
                value=str(files.certificate),
                hint=error.hint,
            ) from error

    @property
    def certificate(self) -> str:
        """Return the server's own certificate (PEM).

        Others pin it, and would trust all that an authority after it in the file has signed.
        """
        return self._loaded.pem

    def __call__(self) -> ssl.SSLContext:
        """Return the context of the next connection."""
        stamps = self._read_stamps()
        if stamps != self._stamps:
            try:
                self._loaded, self._stamps = load_certificate(self._files.certificate, self._files.key), stamps
            except UsageError as error:
                log.warning(
                    "cannot load the renewed certificate", action="relay-certificate-refused", reason=error.message
                )
        return self._loaded.context

    def _read_stamps(self) -> list[tuple[int, ...]]:
        return read_stamps(self._files.certificate, self._files.key)


def run_hub(path: Path) -> None:
    """Run the hub until it is stopped. Raise ``UsageError`` for an invalid configuration."""
    configuration = _load_configuration(path, HubConfiguration)
    context = None if configuration.tls is None else ServerContext(configuration.tls)
    loop, limits = Loop(), _prepare_process(configuration, relay="hub")
    try:
        hub = Hub(loop, parse_address(configuration.listen, "listen"), context, limits)
    except OSError as error:
        raise _listen_error(configuration.listen, error) from error
    _run(loop, hub, configuration.control, f"hub at {configuration.listen}")


def run_head(path: Path) -> None:
    """Run a head until it is stopped. Raise ``UsageError`` for an invalid configuration."""
    configuration = _load_configuration(path, HeadConfiguration)
    trust = Trust(configuration.ca_file, configuration.pinned)
    if not configuration.without_tls:
        trust.check_files()
    hub_address = HubAddress(
        *parse_address(configuration.hub, "hub"), None if configuration.without_tls else trust.create_context
    )
    for_heads = configuration.listen_for_heads
    server = None if configuration.tls is None else ServerContext(configuration.tls)
    # Other heads accept the certificate that their attempts name, whatever its validity, and no renewed one.
    context = None if server is None else server()
    loop, limits = Loop(), _prepare_process(configuration, relay="head", cluster=configuration.cluster)
    try:
        head = Head(
            loop,
            configuration.cluster,
            parse_address(configuration.listen, "listen"),
            hub_address,
            None if for_heads is None else parse_address(for_heads, "listen_for_heads"),
            None if context is None else lambda: context,
            limits,
            (lambda: "") if server is None else lambda: server.certificate,
        )
    except OSError as error:
        raise _listen_error(f"{configuration.listen} or {for_heads}", error) from error
    _run(loop, head, configuration.control, f"head of {configuration.cluster} at {configuration.listen}")


def parse_address(text: str, field: str) -> tuple[str, int]:
    """Return host and port of ``HOST:PORT`` or ``[HOST]:PORT``. Raise ``UsageError``."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 <= int(port) < 65536:
        raise UsageError(
            f"{text} is not an address with a port", field=field, value=text, hint="write it as 192.0.2.1:8643"
        )
    return host.removeprefix("[").removesuffix("]"), int(port)


def _load_configuration(path: Path, kind: type[Configuration]) -> Configuration:
    values: dict[str, Any] = read_file(path)
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise configuration_error(kind, error.errors(), path) from error


def _listen_error(address: str, error: OSError) -> UsageError:
    return UsageError(
        f"cannot listen at {address}: {error.strerror or error}",
        field="listen",
        value=address,
        hint="give an address of this machine and a port that no other process uses",
    )


def _prepare_process(configuration: RelayConfiguration, **fields: str) -> Limits:
    """Configure logging, raise the limit of open files and protect this process. Return the limits of the relay."""
    configure_logging(configuration.log_level, configuration.log_format, **fields)
    forbid_dumps()
    allowed, limits = raise_file_limit(MAX_OPEN_FILES), Limits(**configuration.limits.model_dump())
    needed = files_needed(limits)
    if allowed < needed:
        log.warning(
            "too few open files for the limit of streams: raise LimitNOFILE in the unit, or ulimit -Hn",
            action="relay-files-few",
            allowed=allowed,
            needed=needed,
        )
    return limits


def _run(loop: Loop, relay: Hub | Head, control: Path, status: str) -> None:
    """Serve until SIGTERM or SIGINT, then reset all streams."""
    manager = ServiceManager.from_environment()
    drop_own_variables()
    try:
        server = ControlServer(loop, control, relay)
    except OSError as error:
        raise _listen_error(str(control), error) from error
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)
    must_end = False
    reading, writing = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def end(_events: int) -> None:
        nonlocal must_end
        must_end = True

    signal.set_wakeup_fd(writing)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    loop.watch(reading, end)

    def send_heartbeat() -> None:
        manager.send_heartbeat(f"{status}: {len(relay.streams)} streams")
        loop.set_alarm("watchdog", manager.interval or 60.0, send_heartbeat)

    if manager.interval is not None:
        send_heartbeat()
    manager.notify_ready(status)
    log.info("the relay serves", action="relay-serves", status=status)
    try:
        while not must_end:
            loop.turn()
    finally:
        manager.notify_stopping()
        relay.close()
        server.close()
