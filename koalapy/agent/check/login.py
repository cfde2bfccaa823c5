"""Whether users of this host will find the agent, and get their logins from it."""

import os
from pathlib import Path

from koalapy.agent.core.settings import AgentSettings
from koalapy.agent.lrm.port import Finding
from koalapy.system.login_socket import DIRECTORY, open_folder


def check_logins(settings: AgentSettings) -> list[Finding]:
    """Nobody has to: an agent whose users log in elsewhere is as good."""
    problems = []
    for place, path in enumerate(settings.login_sockets):
        if problem := _problem(path.parent):
            problems.append(problem)
            continue
        if place == 0 or settings.identity == "own":
            return [Finding("logins", True, f"users of this host find the agent at {path}")]
        return [Finding("logins", True, f"only this account finds the agent, at {path}: {'; '.join(problems)}", _HINT)]
    return [Finding("logins", True, f"nobody can log in here: {'; '.join(problems)}", _HINT)] if problems else []


_HINT = f"make {DIRECTORY} for the agent's account (RuntimeDirectory=koala in its unit), or set login_socket"


def _problem(folder: Path) -> str:
    """Why no socket can be made there; a folder that root or the agent would make is well."""
    try:
        opened, owner = open_folder(folder)
        os.close(opened)
    except FileNotFoundError:
        return "" if os.access(folder.parent, os.W_OK) else f"there is no {folder}"
    except (OSError, ValueError) as error:
        return f"{folder}: {error.strerror}" if isinstance(error, OSError) else str(error)
    if owner not in (0, os.geteuid()):
        return f"{folder} belongs to another account (uid {owner})"
    return "" if os.access(folder, os.W_OK) else f"{folder} may not be written"
