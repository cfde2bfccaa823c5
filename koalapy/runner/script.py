"""Run a job's script once, on its head node, and the programs that the script starts by ``mpirun`` on all nodes.

The other nodes wait for the end of the script. Each call of ``mpirun`` becomes a step: a program with its own MPI
daemons (``steps.py``). Steps run one after another or at the same time.
"""

from __future__ import annotations

import os
import re
import shlex
import sys

from koalapy.runner.foreign_scripts import HOME, TRANSLATED, systems_of, translate_environment, translated_commands
from koalapy.runner.openmpi import RESEND_INTERVAL, is_open_mpis
from koalapy.runner.output_streams import remove_noise
from koalapy.runner.parameters import MAX_STEPS
from koalapy.runner.plan import Plan, Role, folder_fault
from koalapy.runner.processes import command_of, require_program
from koalapy.runner.rank_processors import distribute_ranks
from koalapy.runner.settings import Failure
from koalapy.runner.steps import Call, Calls, FollowerStep, HeadStep, Order

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from koalapy.runner.plan import Node, RankedBytes

MAX_NAME_BYTES = 200
"""Bytes of the name of a script's file; longer names become ``script``."""
MAX_STEP_NUMBER = 2**31
NETWORK_PARAMETERS = ("btl_tcp_if_include", "btl_tcp_if_exclude", "oob_tcp_if_include", "oob_tcp_if_exclude")
"""Parameters of Open MPI that differ between clusters. koalapy sets them on each node."""
MAX_ENDED = 1000
"""Ended steps whose late messages a node recognizes."""
CLIENT = f"{os.path.dirname(os.path.abspath(__file__))}/mpirun.py"
WRAPPER = """\
#!/bin/sh
[ "${{1-}}" != mpirun ] || {{ shift; exec {mpirun} "$@"; }}
folder={folder}
while [ "${{PATH%%:*}}" = "$folder" ]; do PATH=${{PATH#*:}}; done
command -v koala >/dev/null || {{ echo "koala: only koala mpirun is available on this node" >&2; exit 127; }}
exec koala "$@"
"""


class ScriptHead(Role):
    """The head node of a job with a script: it runs the script, and ``mpirun`` for each of its calls."""

    def __init__(self, runner: Node, plan: Plan) -> None:
        super().__init__(runner, plan)
        self._script = 0
        self._folder = ""
        self._calls: Calls | None = None
        self._number = 0
        self._steps: dict[int, HeadStep] = {}
        self._waiting: list[tuple[Call, Order]] = []
        self._unended: dict[int, set[int]] = {}
        """Nodes that have not confirmed the end of a step, by its number."""

    def start(self) -> None:
        """Start the script. Raise ``Failure``."""
        runner, plan = self._runner, self._plan
        self._folder = runner.make_folder()
        path, bin_folder = self._write_script(), f"{self._folder}/bin"
        os.mkdir(bin_folder)
        client = shlex.join([sys.executable, "-I", "-S", CLIENT, self._folder])
        for name in ("mpirun", "mpiexec"):
            write_program(f"{bin_folder}/{name}", f'#!/bin/sh\nexec {client} "$@"\n')
        mpirun, folder = shlex.quote(f"{bin_folder}/mpirun"), shlex.quote(bin_folder)
        write_program(f"{bin_folder}/koala", WRAPPER.format(mpirun=mpirun, folder=folder))
        if not os.access(f"{bin_folder}/mpirun", os.X_OK):
            raise Failure(
                f"no program in {self._folder} can be executed on {runner.settings.name}: name a folder that allows it "
                f"as TMPDIR in clusters.{plan.me['cluster']}.environment",
                folder_fault(runner),
            )
        with open(f"{self._folder}/folder", "w", encoding="utf-8", errors="surrogateescape") as file:
            file.write(os.getcwd())
        self._calls = Calls(runner.loop, self._folder, self._handle_call)
        environment = {**runner.environment, **self._allocation()}
        environment["PATH"] = f"{bin_folder}:{environment.get('PATH', os.defpath)}"
        environment["KOALA_MPIRUN"] = f"{bin_folder}/mpirun"
        if systems_of(environment):
            nodes = [(node["host"], node["slots"]) for node in plan.nodes]
            environment = translate_environment(environment, plan.context["environment"], nodes, self._folder)
            for name, text in translated_commands(client).items():
                write_program(f"{bin_folder}/{name}", text)
        interpreter = interpreter_of(plan.message["script"])
        if re.search(r"\bbash\b.* (-[a-z]*l|--login)\b", " ".join(interpreter)):
            environment["BASH_ENV"] = self._write_bash_file(bin_folder, environment.get("BASH_ENV"))
        require_program(interpreter[0], environment)
        command = [*interpreter, path, *plan.context["command"][1:]]
        if HOME in environment.get(TRANSLATED, "").split():
            command = ["/bin/sh", "-c", 'cd "${HOME:-/}" && exec "$@"', "sh", *command]
        self._script = runner.spawn(command, environment)
        runner.report_running()

    def _write_script(self) -> str:
        """Write the script under its name into the runner's folder and return its path."""
        name = os.path.basename(self._plan.context["command"][0])
        if name in ("", ".", "..") or len(os.fsencode(name)) > MAX_NAME_BYTES:
            name = "script"
        os.mkdir(f"{self._folder}/script")
        path = f"{self._folder}/script/{name}"
        write_program(path, self._plan.message["script"])
        return path

    def _write_bash_file(self, bin_folder: str, original: str | None) -> str:
        """Write a file that a login shell reads after the profiles, which may replace PATH, and return its path.

        ``original``: the file that the shell would read without this one.
        """
        path, others = f"{self._folder}/bash-env", "unset BASH_ENV\n"
        if original:
            others = f'export BASH_ENV={shlex.quote(original)}\n[ ! -r "$BASH_ENV" ] || . "$BASH_ENV"\n'
        write_program(path, f'{others}PATH={shlex.quote(bin_folder)}:"$PATH"\n')
        return path

    def _allocation(self) -> dict[str, str]:
        """Return the variables that describe the nodes of all components, besides those of every program."""
        nodes, sizes = self._plan.nodes, [len(context["nodes"]) for context in self._plan.contexts]
        clusters = [nodes[context["nodes"][0]]["cluster"] for context in self._plan.contexts]
        host_file = f"{self._folder}/hosts"
        with open(host_file, "w", encoding="utf-8") as file:
            file.writelines(f"{node['host']} slots={node['slots']}\n" for node in nodes)
        return {
            "KOALA_JOB_ID": str(self._plan.message["job"]),
            "KOALA_NODELIST": ",".join(node["host"] for node in nodes),
            "KOALA_HOSTFILE": host_file,
            "KOALA_PPN": str(self._plan.me["slots"]),
            "KOALA_SLOTS": str(sum(node["slots"] for node in nodes)),
            "KOALA_CLUSTER_LIST": ",".join(clusters),
            "KOALA_CLUSTER_NODES": ",".join(map(str, sizes)),
        }

    def child_ended(self, pid: int, code: int) -> None:
        """End the job with the script's exit code, or pass the end of a process to the step that it may belong to."""
        if pid == self._script:
            self._runner.conclude(code if code >= 0 else 128 - code)
            return
        for step in list(self._steps.values()):
            step.child_ended(pid, code)

    def relayed(self, sender: tuple[str, int], payload: dict[str, Any]) -> None:
        """Pass another node's message to its step. Answer one about a step that has ended."""
        op = payload["op"]
        if op == "undelivered":
            for step in list(self._steps.values()):
                step.relayed(sender, payload)
            return
        index, number = self._plan.index_of(sender), int(payload["step"])
        if index is None:
            return
        if op == "ended":
            self._confirm_end(number, index)
        elif op == "step" and number in self._steps:
            self._steps[number].relayed(sender, payload["payload"])
        elif op == "step":
            self._runner.relay(*sender, {"op": "end", "step": number})

    def rank_output(self, output: bytes, *, is_error: bool) -> list[RankedBytes]:
        return [(None, remove_noise(output))]

    def is_starter(self, pid: int) -> bool:
        """Return whether a process starts programs: the script itself, and its calls of ``mpirun``."""
        if pid == self._script or is_open_mpis(pid) or CLIENT in command_of(pid):
            return True
        return any(step.role.is_starter(pid) for step in self._steps.values())

    def close(self) -> None:
        """Cancel the alarms of all steps, and stop answering calls."""
        self._waiting.clear()
        for step in self._steps.values():
            step.close()
        for number in self._unended:
            self._runner.loop.cancel_alarm(f"end-{number}")
        if self._calls is not None:
            self._calls.close()

    def _handle_call(self, call: Call, request: dict[str, Any]) -> None:
        """Start a step for a call of ``mpirun``, or let it wait for others to end."""
        try:
            is_counted = request.get("nodes") and request["hosts"] is None
            chosen = self._choose_nodes(request["nodes"], is_here=bool(call.input_file)) if is_counted else None
            request["indices"] = chosen
            slots = distribute_ranks(self._plan, request)
            environment = {
                **{k: v for k, v in request["parameters"].items() if self._runner.environment.get(k) != v},
                **request["environment"],
            }
            if self._plan.spans_clusters:
                for name in NETWORK_PARAMETERS:
                    if environment.pop(f"OMPI_MCA_{name}", None) is not None:
                        call.say(f"koala: mpirun leaves out {name}: the networks of the job's clusters differ")
            content = {**request, "slots": slots, "environment": environment, "lane": 0}
            order = Order(content, len(self._plan.nodes))
            if call.input_file and not slots[self._plan.index]:
                raise Failure("standard input goes to rank 0, which is on another node: name the file as an argument")
        except Failure as failure:
            call.say(f"koala: {failure.message}")
            call.finish(2)
            return
        self._waiting.append((call, order))
        call.on_gone = lambda: self._waiting.remove((call, order))
        self._start_steps()

    def _choose_nodes(self, count: int, *, is_here: bool) -> list[int]:
        """Return the indices of so many nodes for a step of Slurm: those with the fewest ranks of other steps.

        ``is_here``: include this node.
        """
        busy = [sum(step.slots[index] for step in self._steps.values()) for index in range(len(self._plan.nodes))]
        if is_here:
            busy[self._plan.index] = -1
        return sorted(sorted(range(len(busy)), key=busy.__getitem__)[:count])

    def _start_steps(self) -> None:
        """Start waiting steps as far as others do not occupy all places."""
        while self._waiting and len(self._steps) < MAX_STEPS:
            call, order = self._waiting.pop(0)
            used = {step.lane for step in self._steps.values()}
            order.lane = next(lane for lane in range(MAX_STEPS) if lane not in used)
            self._number += 1
            step = HeadStep(self._runner, self._number, order, self._plan, self._folder, call, self._end_step)
            self._steps[step.number] = step
            call.on_signal = step.interrupt
            call.on_gone = step.cancel
            step.start()

    def _end_step(self, number: int) -> None:
        """Let the other nodes end a step that has ended here, and start a waiting one."""
        step = self._steps.pop(number)
        if step.nodes:
            self._unended[number] = set(step.nodes)
            self._send_end(number)
        self._start_steps()

    def _send_end(self, number: int) -> None:
        """Send the end of a step to the nodes that have not confirmed it, until they do."""
        for index in self._unended[number]:
            node = self._plan.nodes[index]
            self._runner.relay(node["token"], node["node"], {"op": "end", "step": number})
        self._runner.loop.set_alarm(f"end-{number}", RESEND_INTERVAL, lambda: self._send_end(number))

    def _confirm_end(self, number: int, index: int) -> None:
        unended = self._unended.get(number, set())
        unended.discard(index)
        if number in self._unended and not unended:
            del self._unended[number]
            self._runner.loop.cancel_alarm(f"end-{number}")


class ScriptFollower(Role):
    """Another node of a job with a script: it starts MPI daemons as the head node asks, until the job ends."""

    def __init__(self, runner: Node, plan: Plan) -> None:
        super().__init__(runner, plan)
        self._folder = ""
        self._steps: dict[int, FollowerStep] = {}
        self._ended: list[int] = []

    @property
    def first_rank(self) -> None:
        return None

    def start(self) -> None:
        self._folder = self._runner.make_folder()
        self._runner.report_running()

    def relayed(self, sender: tuple[str, int], payload: dict[str, Any]) -> None:
        """Carry out an order of the head node, and ignore other nodes."""
        head = self._plan.head
        if sender != (head["token"], head["node"]):
            return
        op, number = payload["op"], int(payload["step"])
        if op == "begin" and number not in self._steps and number not in self._ended:
            self._begin_step(number, payload)
        elif op == "step" and number in self._steps:
            self._steps[number].relayed(sender, payload["payload"])
        elif op == "end":
            self._end_step(number)
            self._runner.relay(*sender, {"op": "ended", "step": number})

    def child_ended(self, pid: int, code: int) -> None:
        for step in list(self._steps.values()):
            step.child_ended(pid, code)

    def is_starter(self, pid: int) -> bool:
        return is_open_mpis(pid) or any(step.role.is_starter(pid) for step in self._steps.values())

    def close(self) -> None:
        for step in self._steps.values():
            step.forget_error()
            step.close()

    def _begin_step(self, number: int, payload: dict[str, Any]) -> None:
        """Prepare this node for a step. Raise ``ValueError`` if the head node may not begin it."""
        if len(self._steps) >= MAX_ENDED or not 0 < number <= MAX_STEP_NUMBER:
            raise ValueError("the head node begins more programs than it may")
        order = Order(payload, len(self._plan.nodes))
        if not order.slots[self._plan.index]:
            raise ValueError("the head node begins a program that has no ranks here")
        for other, step in self._steps.items():
            if step.lane == order.lane:
                # The ports of a lane are for one program. The head node repeats its order, so that it may begin later.
                raise ValueError(f"program {number} of the script needs lane {order.lane}, which program {other} uses")
        self._steps[number] = FollowerStep(self._runner, number, order, self._plan, self._folder)
        self._steps[number].start()

    def _end_step(self, number: int) -> None:
        if step := self._steps.pop(number, None):
            step.forget_error()
            step.end()
        if number not in self._ended:
            self._ended = [*self._ended, number][-MAX_ENDED:]


def write_program(path: str, text: str) -> None:
    """Write a file that only this account can read and execute."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o700)
    with open(file, "w", encoding="utf-8", newline="") as opened:
        opened.write(text)


def interpreter_of(script: str) -> list[str]:
    """Return the interpreter that a script's first line names, with its argument, as the kernel reads it.

    The runner executes it, since the folder of the script may not allow to execute files.
    """
    words = script.partition("\n")[0][2:].strip().split(None, 1)
    if not script.startswith("#!") or not words:
        raise Failure("the script does not begin with #! and its interpreter: begin it with #!/bin/bash", 126)
    return words
