"""The address, TLS and HTTP application of a daemon."""

import socket
from dataclasses import dataclass
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import Any

from fastapi import FastAPI

from koalapy.api.agents import agents_router
from koalapy.api.app import create_app
from koalapy.api.clusters import background_router, nodes_router
from koalapy.api.files import agent_files_router, files_router
from koalapy.api.forecasts import advisor_router, forecasts_router
from koalapy.api.guard import AllowedHosts, TokenAuthenticator
from koalapy.api.history import history_router, record_router
from koalapy.api.jobs import changes_router
from koalapy.api.middleware import TrustedProxies
from koalapy.api.monitoring import add_metrics, alerts_router
from koalapy.api.network import network_router
from koalapy.api.reservations import reservations_router
from koalapy.api.terminals import terminals_router
from koalapy.api.tokens import limits_router
from koalapy.config.settings import Settings, TlsSection, parse_proxies
from koalapy.daemon.auth.login import LoginCodes
from koalapy.daemon.auth.pace import Pace
from koalapy.daemon.core import Core
from koalapy.daemon.listener.certificate import Certificate
from koalapy.daemon.services import Services
from koalapy.dashboard.app import build_dashboard
from koalapy.dashboard.login import LoginServices
from koalapy.model.errors import UsageError, reject


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Options of the command line that override settings; None leaves the setting."""

    tls_cert: Path | None = None
    tls_key: Path | None = None
    behind_proxy: str | None = None
    """Addresses and networks of proxies, separated by commas."""
    standby: bool = False
    """Whether to stand by while another daemon holds the lease."""

    def apply_to(self, settings: Settings) -> Settings:
        """Return the settings with these options. Raise ``UsageError`` for an invalid proxy."""
        tls = TlsSection(
            settings.tls.certificate if self.tls_cert is None else str(self.tls_cert.absolute()),
            settings.tls.key if self.tls_key is None else str(self.tls_key.absolute()),
        )
        behind = settings.behind_proxy if self.behind_proxy is None else parse_proxies(self.behind_proxy.split(","))
        return settings.model_copy(update={"tls": tls, "behind_proxy": behind})


def bind_listener(host: str, port: int, settings: Settings) -> socket.socket:
    """Return a bound socket.

    Raise ``UsageError`` if the address cannot be bound, or if it is reached from other machines without TLS.
    """
    # asyncio disables Nagle's algorithm only if the protocol is given, and responses would be delayed by 40 ms.
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except (TypeError, UnicodeError):  # a name that cannot be encoded
        listener.close()
        problem = f"is {host[:60]!r}, which is not a host name"
        reject("--host", host, problem, "give an address of this machine, such as 127.0.0.1")
    except OSError as error:
        listener.close()
        raise UsageError(
            f"cannot listen on {host}:{port}: {error.strerror}",
            field="--port",
            value=port,
            hint="give another --port; 0 takes any free one",
        ) from error
    address = ip_address(listener.getsockname()[0])
    if not (address.is_loopback or settings.tls.certificate or settings.tls.key or settings.behind_proxy):
        listener.close()
        problem = f"is {host}, which other machines reach: without TLS they would send tokens unencrypted"
        hint = "give --tls-cert and --tls-key, or with --behind-proxy the address of the proxy that speaks TLS"
        reject("--host", host, problem, hint)
    return listener


def load_certificate(settings: Settings, data_dir: Path) -> Certificate | None:
    """Return the daemon's certificate, or None without TLS. Raise ``UsageError`` if it is incomplete or invalid."""
    certificate, key = settings.tls.certificate, settings.tls.key
    if certificate is None and key is None:
        return None
    if certificate is None or key is None:
        present, missing = ("--tls-key", "--tls-cert") if certificate is None else ("--tls-cert", "--tls-key")
        raise UsageError(
            f"{present} is given without {missing}",
            field=missing,
            hint="give both, or tls.certificate and tls.key in the configuration",
        )
    return Certificate(Path(certificate), Path(key), data_dir)


def build_application(core: Core, services: Services, host: str, max_requests: int) -> FastAPI:
    """Return the application with the REST API, the connections of agents, metrics, and the dashboard."""
    settings, engine, attempts, tokens = core.settings, core.engine, Pace(), services.agent_tokens
    bundles, results, identities = services.bundles, services.results, services.identities
    hosts, pace, codes = AllowedHosts([host, *settings.allowed_hosts]), Pace(services.limits.limits), LoginCodes()
    provider_logins = None
    if settings.oidc is not None and settings.oidc.authorization_endpoint is not None:
        from koalapy.daemon.auth.oidc import ProviderLogins

        provider_logins = ProviderLogins(settings.oidc, identities.verify_token)
    login_services = LoginServices(
        identities, TokenAuthenticator(identities, pace), codes, provider_logins, settings.login_lifetime
    )
    dashboard = build_dashboard(services, engine, login_services, core.audit)
    routers = [
        agents_router(services.hub, tokens, attempts),
        background_router(services.jobs, services.questions, settings.background_load),
        nodes_router(services.jobs, services.node_lists, core.queries),
        files_router(services.files, bundles, results),
        agent_files_router(bundles, results, services.result_inputs, tokens, core.queries.is_sent_to, attempts),
        network_router(services.network),
        advisor_router(services.advisor),
        limits_router(services.limits),
        reservations_router(services.reservations),
        alerts_router(services.alerts, services.notifications),
        history_router(services.history),
        forecasts_router(services.forecasts, services.jobs),
        changes_router(engine.changes),
        record_router(core.record, core.clock),
        terminals_router(services.streams, services.jobs, services.attendance, core.audit),
        dashboard.router,
    ]
    app = create_app(
        services.jobs,
        services.health,
        identities,
        routers,
        hosts,
        max_requests,
        pace,
        core.audit,
        codes,
        error_page=dashboard.render_problem,
    )
    add_metrics(app, engine, services.health, services.alerts, is_open=settings.open_metrics)
    return app


def trust_proxies(app: Any, settings: Settings, certificate: Certificate | None) -> Any:
    """Return the application such that it takes the client's address from the configured proxies, if any."""
    if not settings.behind_proxy:
        return app
    networks = [ip_network(text, strict=False) for text in settings.behind_proxy]
    return TrustedProxies(app, networks, encrypted=certificate is not None)
