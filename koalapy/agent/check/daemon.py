"""Whether the daemon answers an agent, and whether it would let it in; a connected agent is not disturbed."""

from collections.abc import Iterator
from urllib.parse import urlsplit

import httpx2

from koalapy.agent.core.settings import AgentSettings
from koalapy.agent.lrm.port import Finding
from koalapy.system.tls import refusal

MISASKED = (400, 421)
"""What the daemon answers those who ask in clear where it speaks TLS, or call it by a name that is not its own."""
DAEMON_TIMEOUT = 10.0
"""Seconds that the daemon has to answer."""


async def check_daemon(settings: AgentSettings, *, own_token: bool) -> list[Finding]:
    url = settings.url.rstrip("/")
    try:
        # As the agent itself, which goes by no proxy.
        verified = settings.trust.context()
        async with httpx2.AsyncClient(timeout=DAEMON_TIMEOUT, trust_env=False, verify=verified) as http:
            health = _object(await http.get(f"{url}/healthz"))
            if health.get("status") in MISASKED and "detail" in health:
                return [Finding("daemon", False, f"{url}: {health['detail']}", str(health.get("hint", "")))]
            if "version" not in health:
                hint = "give the daemon's URL with --url"
                return [Finding("daemon", False, f"what answers at {url} is no koala daemon", hint)]
            daemon = Finding("daemon", True, f"koalapy {health['version']} at {url}")
            return [daemon, await _check_token(http, settings, own_token=own_token)]
    except (httpx2.TransportError, httpx2.InvalidURL, OSError, ValueError) as error:
        hint, why = "start it with koala serve, or give its URL with --url", str(error) or type(error).__name__
        if told := next(filter(None, (refusal(cause, _host(url)) for cause in _causes(error))), None):
            why, hint = told
        return [Finding("daemon", False, f"no daemon answers at {url} ({why})", hint)]


def _host(url: str) -> str:
    """Empty for a URL that is none."""
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """An error, and those that it was raised for: a library has its own."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


async def _check_token(http: httpx2.AsyncClient, settings: AgentSettings, *, own_token: bool) -> Finding:
    if not settings.token:
        if own_token:
            return Finding("agent's token", True, "the daemon starts this agent itself")
        hint = f"set it to the value of clusters.{settings.cluster}.token in the daemon's configuration"
        return Finding("agent's token", False, "KOALA_AGENT_TOKEN is not set", hint)
    headers = {"Authorization": f"Bearer {settings.token}"}
    answer = await http.get(settings.endpoint.replace("ws", "http", 1), headers=headers)
    if answer.is_success:
        return Finding("agent's token", True, f"lets an agent of {settings.cluster} in")
    problem = _object(answer)
    message = str(problem.get("detail") or f"HTTP status {answer.status_code}")
    return Finding("agent's token", False, message, str(problem.get("hint") or "see the daemon's configuration"))


def _object(answer: httpx2.Response) -> dict[str, object]:
    """The object that was answered; empty when it was none."""
    try:
        body = answer.json()
    except ValueError:
        return {}
    return body if isinstance(body, dict) else {}
