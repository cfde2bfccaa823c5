"""Where a daemon listens, and how what is said there is kept from others: by TLS of its own, or a proxy's."""

import socket
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import Any

from koalapy.api.middleware import BehindProxies
from koalapy.config.settings import Settings
from koalapy.daemon.listener.certificate import Certificate
from koalapy.model.errors import UsageError


def listen(host: str, port: int, settings: Settings) -> socket.socket:
    """A socket that is bound; ``UsageError`` when it cannot be, or when tokens would go to it in clear."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except (TypeError, UnicodeError) as error:  # by a name that cannot be encoded
        listener.close()
        raise UsageError(
            f"--host is {host[:60]!r}, which is no host's name",
            field="--host",
            value=host,
            hint="give an address of this machine, as 127.0.0.1",
        ) from error
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
        raise UsageError(
            f"other machines reach {host}, and without TLS all tokens would go there in clear",
            field="--host",
            value=host,
            hint="give --tls-cert and --tls-key, or with --behind-proxy the address of the proxy that speaks TLS",
        )
    return listener


def certificate_of(settings: Settings, data_dir: Path) -> Certificate | None:
    """The daemon's, where it speaks TLS; ``UsageError`` for one that is of no use."""
    certificate, key = settings.tls.certificate, settings.tls.key
    if certificate is None and key is None:
        return None
    if certificate is None or key is None:
        given, missing = ("--tls-key", "--tls-cert") if certificate is None else ("--tls-cert", "--tls-key")
        raise UsageError(
            f"{given} is given without {missing}",
            field=missing,
            hint="give both, or tls.certificate and tls.key in the configuration",
        )
    return Certificate(Path(certificate), Path(key), data_dir)


def behind_proxies(app: Any, settings: Settings, certificate: Certificate | None) -> Any:
    """The application, which is told by the proxies who asks."""
    if not settings.behind_proxy:
        return app
    networks = [ip_network(text, strict=False) for text in settings.behind_proxy]
    return BehindProxies(app, networks, encrypted=certificate is not None)


def addresses(listener: socket.socket) -> list[tuple[str, int]]:
    """Where on this machine it can be reached."""
    host, port = listener.getsockname()[:2]
    loopback = {"0.0.0.0": ["127.0.0.1"], "::": ["127.0.0.1", "::1"]}
    if host == "::" and listener.getsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY):
        loopback["::"] = ["::1"]  # at the other one anybody may listen
    return [(each, port) for each in (host, *loopback.get(host, ()))]
