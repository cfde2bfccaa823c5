"""Run a program under Open MPI: mpirun on the head node, and an MPI daemon on each other node."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections.abc import Callable

from koalapy.runner.connections import Loop
from koalapy.runner.containers import SeriesCheck, find_container
from koalapy.runner.exec_guard import SCRIPT_VARIABLE, ExecGuard
from koalapy.runner.networks import own_networks
from koalapy.runner.output_streams import OutputFilter, TagReader
from koalapy.runner.parameters import (
    CONTROL_PORTS_PARAMETER,
    NAMING,
    TAG_SEPARATORS,
    Installation,
    check_parameters,
    localize_parameters,
    make_ready,
    rank_environment,
    refit,
    select_parameters,
)
from koalapy.runner.plan import Plan, Role
from koalapy.runner.preflight import MAX_CONCURRENT_PROBES, MAX_PEERS, READY_TIMEOUT, Preflight, Prober
from koalapy.runner.processes import command_of, descendants, raise_file_limit, require_program
from koalapy.runner.settings import Failure

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence
    from typing import Any

    from koalapy.runner.plan import Node, RankedBytes

LAUNCH_SHELL, LAUNCH_SCRIPT = "/bin/sh", "koala-launch"
LAUNCH_AGENT = """\
trap 'exit 0' TERM
host=$1; shift; folder=${0%/*}
{ printf '%s\\n' "$*" > "$folder/$host.command" && echo "$host" > "$folder/requests"; } 2>/dev/null || exit 1
{ read -r code message < "$folder/$host.answer"; } 2>/dev/null || exit 1
[ "$code" = 0 ] || echo "$message" >&2
exit "$code"
"""


class LaunchRequests:
    """The pipes by which launch agents pass (host, command) to the runner and wait for the result.

    mpirun starts a launch agent for each node, all at once. So an agent is a shell script without children, which, like
    ssh, runs until the MPI daemon of its host has ended.
    """

    def __init__(self, loop: Loop, folder: str, hosts: list[str], handle_request: Callable[[str, str], None]) -> None:
        self._loop, self._folder, self._handle_request = loop, folder, handle_request
        with open(f"{folder}/{LAUNCH_SCRIPT}", "w", encoding="ascii") as file:
            file.write(LAUNCH_AGENT)
        self._requests = self._open_pipe("requests")
        self._answers = {host: self._open_pipe(f"{host}.answer") for host in hosts}
        self._partial_line = b""
        loop.watch(self._requests, self._handle_requests)

    @property
    def agent(self) -> str:
        return f"{LAUNCH_SHELL} {self._folder}/{LAUNCH_SCRIPT}"

    def answer(self, host: str, error: str = "") -> None:
        """Let the launch agent of a host end, with an error if its MPI daemon failed or could not be started."""
        os.write(self._answers[host], f"{1 if error else 0} {error[:1000]}\n".encode())

    def close(self) -> None:
        """Let all remaining launch agents end: without an answer mpirun would print advice about firewalls."""
        self._loop.forget(self._requests)
        os.close(self._requests)
        for host, file in self._answers.items():
            self.answer(host)
            os.close(file)

    def _open_pipe(self, name: str) -> int:
        os.mkfifo(f"{self._folder}/{name}", 0o600)
        return os.open(f"{self._folder}/{name}", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)

    def _handle_requests(self, _events: int) -> None:
        *hosts, self._partial_line = (self._partial_line + os.read(self._requests, 65536)).split(b"\n")
        for host in map(os.fsdecode, hosts):
            with open(f"{self._folder}/{host}.command", encoding="utf-8") as file:
                self._handle_request(host, file.read().rstrip("\n"))


RESEND_INTERVAL = 2.0
NOTICE_TIMEOUT = 60.0
"""Seconds in which mpirun must have noticed that one of its daemons has failed."""
CONNECTION_LOST = (0, 205)
"""Exit codes of mpirun that lost a daemon's connection: 0 in Open MPI 5, ORTE_ERR_COMM_FAILURE (-51) in Open MPI 4.

With 0 it has also written one of ``SIGNS_OF_LOSS``, unless it had ordered the lost daemons to end after all ranks."""
RELAY_VERDICT_TIME = 3.0
"""Seconds after an error of mpirun in which the loss of a relay may become known."""
STARTER_NAMES = ("mpirun", "mpiexec", "prterun", "prte", "prted", "orterun", "orted")
MAX_REASON_LENGTH = 1000
OWN_FILES = MAX_CONCURRENT_PROBES + MAX_PEERS + 64
"""Open files that the head node needs besides one for each node: those of the pre-flight, and its own."""


def start_daemon(
    node: Node, plan: Plan, installation: Installation, parameters: Mapping[str, str], namesakes: str
) -> int:
    """Start this node's MPI daemon without a shell and return its process id.

    ``namesakes``: a description of other nodes with this host name, or empty. Open MPI 5 distinguishes nodes by name:
    ranks on nodes of one name would share memory with another node's, or not with their neighbours'. So such a daemon
    is named by its address. Raise ``Failure`` if it cannot be named.
    """
    name = plan.names[plan.index] if namesakes and installation.series >= 5 else ""
    if name and not installation.can_name():
        raise Failure(
            f"{namesakes}: give them others, or install an Open MPI with {NAMING} below {installation.prefix}"
        )
    script = node.environment[SCRIPT_VARIABLE]
    command = installation.daemon_arguments(parameters, script, is_named=bool(name))
    environment = installation.daemon_environment(rank_environment(node.environment, installation), name)
    if plan.relayed is not None:  # those ports are for mpirun
        environment = {k: v for k, v in environment.items() if not k.endswith(f"_MCA_{CONTROL_PORTS_PARAMETER}")}
    return node.spawn(
        command, environment, make_guard(node, plan, [os.path.basename(installation.daemon)], environment)
    )


def make_guard(
    node: Node,
    plan: Plan,
    names: Collection[str],
    environment: Mapping[str, str],
    launch_agents: Collection[Sequence[str]] = (),
) -> ExecGuard | None:
    """Return what holds ``mpirun`` or an MPI daemon of these names to the job's ranks; None for a job of one cluster.

    On all nodes of the others: the daemon of any node may ask ``mpirun`` to start a program on any other node.
    """
    if not plan.spans_clusters:
        return None

    def report_refusal(program: str) -> None:
        node.say(
            f"{ascii(program)[:MAX_REASON_LENGTH]} was not started on {node.settings.name}: "
            "the nodes of a job over several clusters start only the command of the job"
        )

    return ExecGuard(names, node.environment[SCRIPT_VARIABLE], environment, report_refusal, launch_agents)


def is_open_mpis(pid: int) -> bool:
    """Return whether a process belongs to Open MPI: mpirun, an MPI daemon or our launch agent, of any job."""
    name, *arguments = command_of(pid) or [""]
    is_agent = arguments[:1] == [LAUNCH_SHELL] and "".join(arguments[1:2]).endswith(f"/{LAUNCH_SCRIPT}")
    return name in STARTER_NAMES or is_agent


def describe_end(code: int) -> str:
    """Describe an exit code as text; a shell's 128 + n counts as killed by signal n."""
    number = -code if code < 0 else code - 128
    return f"was killed by signal {number}" if 0 < number <= signal.SIGRTMAX else f"ended with {code}"


def is_lost(code: int) -> bool:
    """Return whether an MPI daemon with this exit code was killed or never started."""
    return code < 0 or code > 125


class OpenMpiRole(Role):
    """A node's part in a program of Open MPI, which begins when the container image of its ranks is checked."""

    _image_check: SeriesCheck | None = None

    def start(self) -> None:
        node, plan = self._runner, self._plan
        self._installation, self._folder = make_ready(node, plan)
        container = find_container(plan, node.settings, node.environment) if plan.me["slots"] else None
        if container is None:
            self._begin()
        else:
            ranks = rank_environment(node.environment, self._installation)
            self._image_check = SeriesCheck(node, container, ranks, self._folder)

    def child_ended(self, pid: int, code: int) -> None:
        if self._image_check is not None and pid == self._image_check.pid:
            check, self._image_check = self._image_check, None
            check.finish(self._installation.series, self._installation.version())
            self._begin()

    def close(self) -> None:
        if self._image_check is not None:
            self._image_check.close()
            self._image_check = None

    def _begin(self) -> None:
        """Take part in the program. Raise ``Failure``."""
        raise NotImplementedError


class Follower(OpenMpiRole):
    """A node that runs an MPI daemon for the head node's mpirun, and reports its end to the head node."""

    def __init__(self, runner: Node, plan: Plan) -> None:
        super().__init__(runner, plan)
        self._prober: Prober | None = None
        self._pid: int | None = None

    def _begin(self) -> None:
        self._prober = Prober(self._runner, self._plan, self._installation.series, self._send_to_head)
        self._prober.start()

    @property
    def first_rank(self) -> None:
        return None

    def report_unfit(self, failure: Failure) -> None:
        """Report an error of the user to the head node, whose exit code is the job's, until the job ends."""
        self._send_to_head({"op": "unfit", "code": failure.code, "error": failure.message})
        self._runner.loop.set_alarm("unfit", RESEND_INTERVAL, lambda: self.report_unfit(failure))

    def relayed(self, sender: tuple[str, int], payload: dict[str, Any]) -> None:
        """Carry out an order of the head node, which runs mpirun, and ignore other nodes."""
        head = self._plan.head
        if sender != (head["token"], head["node"]):
            return  # only the head node may give orders
        op = payload["op"]
        if op == "probe" and self._prober is not None and payload["way"] == self._prober.route:
            self._prober.probe(payload["doors"], payload.get("skip", ()))
        elif op == "move" and self._prober is not None and payload["way"] > self._prober.route:
            self._move_addresses(payload["way"], payload["hosts"], payload.get("relayed"))
        elif op == "unreached":
            self._runner.conclude(None, str(payload["error"])[:MAX_REASON_LENGTH], infrastructure=True)
        elif op == "launch" and self._image_check is None:
            self._launch_daemon(payload["parameters"], str(payload["namesakes"])[:MAX_REASON_LENGTH])
        elif op == "noted":
            self._runner.conclude_part()

    def child_ended(self, pid: int, code: int) -> None:
        """Report the end of the MPI daemon to the head node. If it was killed, end this node's part with an error."""
        if pid != self._pid:
            super().child_ended(pid, code)
            return
        self._send_end(code)
        if is_lost(code):
            error = f"the MPI daemon on {self._runner.settings.name} {describe_end(code)}"
            self._runner.conclude(None, error, infrastructure=True)

    def is_starter(self, pid: int) -> bool:
        return pid == self._pid or is_open_mpis(pid)

    def close(self) -> None:
        super().close()
        self._runner.loop.cancel_alarm("daemon-ended")
        self._runner.loop.cancel_alarm("unfit")
        self._leave_preflight()

    def _move_addresses(self, route: int, hosts: list[str], relayed: dict[str, Any] | None) -> None:
        """Repeat the pre-flight, the check of connections between nodes, with other addresses or by relays."""
        links = None
        if relayed is not None:
            from koalapy.runner.relay_links import check_networks, read_links  # few jobs need it

            links = read_links(relayed, self._plan.offer)
            host = hosts[self._plan.index] if self._plan.index < len(hosts) else ""
            own = next((network for network, address in own_networks() if address == host), "")
            check_networks(links, self._plan.me["cluster"], {node["cluster"] for node in self._plan.nodes}, own)
        self._leave_preflight()
        self._plan.move(hosts)
        self._plan.relayed = links
        refit(self._runner, self._plan, self._installation, self._folder)
        self._prober = Prober(self._runner, self._plan, self._installation.series, self._send_to_head, route)
        self._prober.start()

    def _launch_daemon(self, parameters: object, namesakes: str) -> None:
        """Start this node's MPI daemon unless it was started already, and acknowledge the order."""
        self._leave_preflight()
        if self._pid is None:
            self._plan.require_relays()
            plan, section = self._plan, f"clusters.{self._plan.me['cluster']}.mpi"
            checked = localize_parameters(check_parameters(self._installation.series, parameters, section), plan)
            self._pid = start_daemon(self._runner, plan, self._installation, checked, namesakes)
            self._runner.report_running()
        self._send_to_head({"op": "launched"})

    def _leave_preflight(self) -> None:
        if self._prober is not None:
            self._prober.close()
            self._prober = None

    def _send_end(self, code: int) -> None:
        self._send_to_head({"op": "daemon_ended", "code": code})
        self._runner.loop.set_alarm("daemon-ended", RESEND_INTERVAL, lambda: self._send_end(code))

    def _send_to_head(self, payload: dict[str, Any]) -> None:
        head = self._plan.head
        self._runner.relay(head["token"], head["node"], {**payload, "index": self._plan.index})


class Head(OpenMpiRole):
    """The node that runs mpirun, and concludes the program only when the end of every MPI daemon is known.

    It must know them because mpirun may end with 0 when it loses a daemon.
    """

    def __init__(self, runner: Node, plan: Plan, timeout: float = READY_TIMEOUT) -> None:
        """``timeout``: seconds to wait for nodes to get ready, and for each to start its MPI daemon."""
        super().__init__(runner, plan)
        self._timeout = timeout
        self._launch_requests: LaunchRequests | None = None
        self._preflight: Preflight | None = None
        self._namesakes: dict[int, str] = {}
        """Of each node that shares its host name with another, the description of that problem."""
        self._waiting: list[tuple[str, str]] = []
        """(host, shell command) of launch requests that arrived before the end of the pre-flight."""
        self._by_host: dict[str, int] = {}
        self._other_nodes = {i for i in range(len(plan.nodes)) if i != plan.index}
        self._launches: dict[int, tuple[dict[str, str], float]] = {}
        """Parameters and deadline of each launch that its node has not acknowledged."""
        self._started: set[int] = set()
        self._ended: dict[int, int] = {}
        self._local: int | None = None
        self.mpirun = 0
        """Process id of mpirun; 0 before its start."""
        self._code: int | None = None
        self._has_succeeded = False
        """Whether mpirun knows that all ranks have ended with 0: a daemon may lose its connection afterwards."""
        self._refusal = ""
        self._is_separate = plan.separates_streams
        self._tags: dict[bool, TagReader] = {}
        """The readers of the two streams, by whether it is the error stream, if mpirun tags lines with their ranks."""
        self._filter = OutputFilter(runner, plan, self._show_withheld)

    def start(self) -> None:
        """Start mpirun, and the pre-flight that checks the connections between nodes. Raise ``Failure``."""
        environment = self._runner.environment
        program = self._plan.context["command"][0]
        if self._plan.me["slots"] and not self._plan.context.get("container"):
            require_program(os.path.join(self._plan.rank_folder, program) if "/" in program else program, environment)
        if all(name == "lo" for _, name in socket.if_nameindex()):
            raise Failure(
                "Open MPI's own control channel needs a network interface besides loopback; this node has none"
            )
        super().start()

    def _begin(self) -> None:
        if self._plan.needs_ranks:
            separator = TAG_SEPARATORS[self._installation.series]
            self._tags = {
                is_error: TagReader(sum(node["slots"] for node in self._plan.nodes), separator)
                for is_error in (False, True)
            }
        raise_file_limit(len(self._plan.nodes) + OWN_FILES, self._runner.settings.name)
        if self._other_nodes:
            series = self._installation.series
            actions = self._start_launches, self._kill_mpirun
            self._preflight = Preflight(self._runner, self._plan, series, *actions, self._timeout)
        if self._preflight is None or not self._preflight.must_relay:  # else it would be started twice
            self._start_mpirun(self._folder)
        if self._preflight is not None:
            self._preflight.start()
        self._report_when_all_started()

    def _start_mpirun(self, folder: str) -> None:
        """Start mpirun with a launch agent in ``folder``, through which it asks this runner to start MPI daemons."""
        self._by_host = {name: i for i, name in enumerate(self._plan.names)}
        self._launch_requests = LaunchRequests(self._runner.loop, folder, list(self._by_host), self._launch_requested)
        agent, count = self._launch_requests.agent, len(self._plan.nodes)
        options = self._installation.mpirun_options(agent, count, tags_output=bool(self._tags))
        if self._plan.relayed is not None:
            options += self._installation.relayed_options(count)
        agents = [[*agent.split(" "), host] for host in self._by_host]
        names = self._installation.mpirun_names
        guard = make_guard(self._runner, self._plan, names, self._runner.environment, agents)
        command = [self._installation.mpirun, *options, *self._plan.mpirun_contexts()]
        self.mpirun = self._runner.spawn(command, guard=guard)

    def _kill_mpirun(self) -> None:
        """Kill mpirun, which has started nothing yet, since the nodes' addresses change."""
        if not self.mpirun:
            return
        for pid in (self.mpirun, *descendants(self.mpirun)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)  # also launch agents, which no guard would recognize without it
        self.mpirun = 0
        self._waiting.clear()
        if self._launch_requests is not None:
            self._launch_requests.close()
            self._launch_requests = None

    def relayed(self, sender: tuple[str, int], payload: dict[str, Any]) -> None:
        """Handle another node's report: launched, ready, reached, unfit or ended. Raise ``ValueError`` if invalid."""
        sender_index, op = self._plan.index_of(sender), payload["op"]
        if op == "undelivered":
            self._refusal = str(payload["reason"])[:MAX_REASON_LENGTH]
            return
        index = payload.get("index", -1)
        if sender_index is None or index != sender_index:
            return  # a node may report for itself only
        if op == "launched" and index in self._launches:
            self._runner.loop.cancel_alarm(f"launch-{index}")
            del self._launches[index]
            self._started.add(index)
            self._report_when_all_started()
        elif op in ("ready", "reached", "taken"):
            if self._preflight is not None:
                self._preflight.receive(payload)
        elif op == "unfit":
            if not 0 < int(payload["code"]) < 256:
                raise ValueError(f"a node reported the exit code {payload['code']}, which is not in 1..255")
            self._runner.say(str(payload["error"])[:MAX_REASON_LENGTH])
            self._runner.conclude(int(payload["code"]))
        elif op == "daemon_ended":
            if not isinstance(payload["code"], int) or not -128 < payload["code"] < 256:
                raise ValueError(f"{str(payload['code'])[:100]} is not an exit code")
            self._runner.relay(*sender, {"op": "noted"})
            if index not in self._ended:  # a node repeats its report until it is answered
                self._daemon_ended(index, payload["code"])

    def child_ended(self, pid: int, code: int) -> None:
        """Record the end of mpirun or of this node's MPI daemon, and report the program's end if it is the last."""
        if pid == self._local:
            self._daemon_ended(self._plan.index, code)
        elif pid != self.mpirun:
            super().child_ended(pid, code)
        else:
            self._code = code
            self._has_succeeded = code == 0 and self._runner.read_output() and not self._filter.says_loss
            self._runner.loop.set_alarm("daemons", self._runner.settings.agent_timeout, self._conclude_program)
            self._conclude_when_all_ended()

    def is_starter(self, pid: int) -> bool:
        return pid in (self.mpirun, self._local) or is_open_mpis(pid)

    def rank_output(self, output: bytes, *, is_error: bool) -> list[RankedBytes]:
        """Filter the stream in which mpirun reports errors, and read the ranks from the tags of both."""
        if is_error == self._is_separate:
            output = self._filter.apply(output, self.mpirun)
        return self._tags[is_error].read(output) if self._tags else [(None, output)]

    def rest_of_output(self, *, stopped: bool) -> list[tuple[bool, int | None, bytes]]:
        withheld = self._filter.take_withheld(self.mpirun, stopped=stopped)
        if not self._tags:
            return [(True, None, withheld)]
        self._show_withheld(withheld)
        return [(is_error, *output) for is_error, tags in self._tags.items() for output in tags.take_unfinished()]

    def _show_withheld(self, output: bytes) -> None:
        for rank, text in self._tags[self._is_separate].read(output) if self._tags else [(None, output)]:
            self._runner.show(text, rank)

    def close(self) -> None:
        """Cancel alarms and let launch agents end. Kill mpirun if it is giving up by itself."""
        super().close()
        self._filter.close()
        if self._filter.is_giving_up and self._code is None:
            os.kill(self.mpirun, signal.SIGKILL)  # it is giving up already, and Open MPI 4 crashes on SIGTERM
        if self._launch_requests is not None:
            self._launch_requests.close()
            self._launch_requests = None
        if self._preflight is not None:
            self._preflight.close()
        for index in self._launches:
            self._runner.loop.cancel_alarm(f"launch-{index}")
        self._runner.loop.cancel_alarm("daemons")
        self._runner.loop.cancel_alarm("notice")
        self._runner.loop.cancel_alarm("relay-verdict")

    def _start_launches(self) -> None:
        """Launch the MPI daemons that mpirun has requested, now that all nodes reach each other.

        Start mpirun anew if it was killed since the nodes' addresses have changed.
        """
        if self._preflight is not None:
            self._namesakes = self._preflight.namesakes
        self._preflight = None
        self._plan.require_relays()
        if not self.mpirun:
            refit(self._runner, self._plan, self._installation, self._folder)
            folder = f"{self._folder}/moved"
            os.mkdir(folder, 0o700)
            self._start_mpirun(folder)
        for host, command in self._waiting:
            self._launch_requested(host, command)

    def _launch_requested(self, host: str, command: str) -> None:
        """Start the MPI daemon that mpirun requests on a host, here or through that node's runner.

        During the pre-flight, the check of connections between nodes, the request waits. ``command``: the shell command
        that mpirun would run on the host.
        """
        index = self._by_host[host]
        if self._preflight is not None:
            self._waiting.append((host, command))
            return
        try:
            parameters = select_parameters(self._installation.series, command)
            if index != self._plan.index:
                self._launches[index] = (parameters, self._runner.loop.time() + self._timeout)
                self._send_launch(index)
            else:  # mpirun does not always recognize this node as its own host
                namesakes = self._namesakes.get(index, "")
                self._local = start_daemon(self._runner, self._plan, self._installation, parameters, namesakes)
                self._started.add(index)
        except Failure as failure:
            self._runner.conclude(None, failure.message, infrastructure=True)

    def _send_launch(self, index: int) -> None:
        """Ask a node's runner to start its MPI daemon, until it acknowledges: messages between nodes may get lost."""
        parameters, deadline = self._launches[index]
        if self._runner.loop.time() > deadline:
            del self._launches[index]
            self._answer_launch(
                index, f"node {self._plan.nodes[index]['host']} did not start its MPI daemon: {self._refusal}"
            )
            return
        node = self._plan.nodes[index]
        launch = {"op": "launch", "parameters": parameters, "namesakes": self._namesakes.get(index, "")}
        self._runner.relay(node["token"], node["node"], launch)
        self._runner.loop.set_alarm(f"launch-{index}", RESEND_INTERVAL, lambda: self._send_launch(index))

    def _answer_launch(self, index: int, error: str = "") -> None:
        if self._launch_requests is not None:
            self._launch_requests.answer(self._plan.names[index], error)

    def _report_when_all_started(self) -> None:
        if self._other_nodes <= self._started:
            self._runner.report_running()

    def _daemon_ended(self, index: int, code: int) -> None:
        self._answer_launch(index, describe_end(code) if code else "")
        self._ended[index] = code
        if self._code is None and code:
            self._runner.loop.set_alarm("notice", NOTICE_TIMEOUT, self._conclude_program)
        self._conclude_when_all_ended()

    def _conclude_when_all_ended(self) -> None:
        """Conclude a program of which mpirun and all daemons have ended.

        After a success the acknowledgement of a launch may be late: a node that was never reached has no ranks.
        """
        if self._code == 0 and self._launches:
            return
        if self._code is not None and self._started <= self._ended.keys():
            self._conclude_program()

    def _conclude_program(self) -> None:
        """Conclude now; after an error of a program with relayed links later, since a lost relay may be its cause."""
        if self._plan.relayed is not None and (self._code or self._infrastructure_error()):
            self._runner.loop.set_alarm("relay-verdict", RELAY_VERDICT_TIME, self._conclude_now)
        else:
            self._conclude_now()

    def _conclude_now(self) -> None:
        error = self._infrastructure_error()
        self._runner.conclude(None if error else self._code, error, infrastructure=bool(error))

    def _infrastructure_error(self) -> str:
        """Return the failure of the infrastructure; empty if mpirun's exit code is the program's.

        An MPI daemon may end with an error after a failed rank, whose exit code mpirun returns: that is not a failure.
        It is one if mpirun has not ended, or its exit code says that it lost a connection.
        """
        code, hosts = self._code, [node["host"] for node in self._plan.nodes]
        suspicious = (code is None or code in CONNECTION_LOST) and not self._has_succeeded
        bad = [(i, how) for i, how in self._ended.items() if is_lost(how) or (how and suspicious)]
        if code is not None and code < 0:
            return f"mpirun {describe_end(code)}"
        if bad:
            index, how = min(bad, key=lambda end: (not is_lost(end[1]), end[0] == self._plan.index))
            error = f"the MPI daemon on {hosts[index]} {describe_end(how)}"
            if code is None:
                return f"{error}, and mpirun did not notice"
            return error if is_lost(how) else f"{error} as it lost its connection"
        for index in self._started - self._ended.keys():
            return f"the end of the MPI daemon on {hosts[index]} was not reported"
        for index in self._other_nodes - self._started:
            end = describe_end(code or 0)
            return f"mpirun {end} before node {hosts[index]} was reached {self._refusal}".rstrip()
        return ""
