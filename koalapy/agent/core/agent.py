"""The agent of one cluster: carries out the daemon's commands and reports runners and resource manager."""

import asyncio
import os
import re
import socket
import tempfile
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from typing import Any

import structlog

import koalapy
from koalapy.agent.components.barrier import Barrier, RejectedRunners
from koalapy.agent.components.component import Component, Grace
from koalapy.agent.components.job_folders import JobFolders
from koalapy.agent.components.outputlog import DEFAULT_OUTPUT_LIMIT
from koalapy.agent.components.relays import RelayedLinks
from koalapy.agent.components.streams import Streams
from koalapy.agent.core.background import Background
from koalapy.agent.core.daemons import Daemons, ExpiredDaemons
from koalapy.agent.core.leases import Leases
from koalapy.agent.core.lrm_jobs import LrmJobs, sleep_awake
from koalapy.agent.core.lrm_monitor import LrmMonitor
from koalapy.agent.core.reporter import RECORD_LOST, DiskWatch, Reporter
from koalapy.agent.core.reservations import Reservations
from koalapy.agent.core.settings import DEFAULT_TIMEOUTS, RUNNER, AgentSettings, AgentTimeouts
from koalapy.agent.core.spool import RUNNER_LOG, Spool, format_write_error, has_failed_disk
from koalapy.agent.login import LoginServer
from koalapy.agent.lrm.port import RESERVATION_NAME, Lrm, LrmSnapshot, LrmSubmission
from koalapy.agent.lrm.script import OpenMpi, open_mpi_here
from koalapy.agent.runners.runners import RunnerSecrets, RunnerServer
from koalapy.agent.runners.uplink import Handler, Questions, Uplink
from koalapy.agent.transfers.exports import Exports
from koalapy.agent.transfers.stages import ComponentFiles
from koalapy.model.errors import SiteError, SiteUnavailable
from koalapy.model.job import ComponentState, is_token, parse_token
from koalapy.model.node_requirement import NO_REQUIREMENT
from koalapy.model.reports import ComponentStatus, Versions
from koalapy.protocol import messages as wire
from koalapy.runner.folders import remove_stale_folders
from koalapy.system.clock import SYSTEM_CLOCK, Clock
from koalapy.system.event_loop import BackgroundTasks
from koalapy.system.process import ServiceManager

log = structlog.get_logger()

INSTANCE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}", re.ASCII)
"""Allowed instance names of a daemon, which are also folder names."""
FIRST_SNAPSHOT_TIMEOUT = 10.0
"""Seconds to wait for the first snapshot before the inventory is sent without one. Without an inventory the daemon
would count the components as lost, though their runners are connected."""
VERSIONS_INTERVAL, VERSIONS_RETRY_INTERVAL = 3600.0, 60.0
"""Seconds between two checks of the installed versions; the second if the resource manager's is unknown."""
MAX_THREADS = 64
"""Threads for blocking calls. A daemon or file system that hangs must not delay the resource manager."""


FindOpenMpi = Callable[[AgentSettings, str | None], Awaitable[OpenMpi]]
"""Return the Open MPI of this host, below a prefix if one is given. Raise ``SiteError`` if it cannot be run."""


async def run_agent(
    settings: AgentSettings,
    lrm: Lrm,
    folders: JobFolders | None = None,
    manager: ServiceManager | None = None,
    *,
    timeouts: AgentTimeouts = DEFAULT_TIMEOUTS,
    clock: Clock = SYSTEM_CLOCK,
    find_open_mpi: FindOpenMpi = open_mpi_here,
) -> None:
    """Serve one cluster until cancelled. Jobs continue without the agent; the next agent finds them again."""
    folders = folders or JobFolders.from_settings(settings, timeouts)
    agent = Agent(settings, lrm, folders, timeouts, clock, find_open_mpi)
    await agent.run(manager or ServiceManager())


class Agent:
    """The agent's parts, and the handlers of the daemon's messages."""

    def __init__(
        self,
        settings: AgentSettings,
        lrm: Lrm,
        folders: JobFolders,
        timeouts: AgentTimeouts = DEFAULT_TIMEOUTS,
        clock: Clock = SYSTEM_CLOCK,
        find_open_mpi: FindOpenMpi = open_mpi_here,
    ) -> None:
        self._settings, self._lrm, self._folders = settings, lrm, folders
        self._timeouts, self._clock, self._find_open_mpi = timeouts, clock, find_open_mpi
        self._accounts = folders.run_as.accounts
        self._secrets = RunnerSecrets(lrm, settings.cluster, settings.token)
        self._spool = Spool(settings.directory, self._secrets.secret_of_token)
        self._address_file = settings.address_file
        disk_synced, hello = self._spool.disk_sync.wait_synced, self._make_hello
        endpoint, *other_endpoints = map(settings.endpoint_of, settings.urls)
        self._uplink = Uplink(endpoint, settings.token, hello, disk_synced, settings.trust, clock, other_endpoints)
        live: dict[str, Component] = {}
        self._monitor = LrmMonitor(lrm, live, settings.poll_interval, timeouts, clock)
        self._reporter = Reporter(self._uplink, self._monitor, live, clock, Versions(agent=koalapy.__version__))
        self._runners = RunnerServer(settings.runner_host, self._address_file, is_public=folders.is_mapped)
        exports = Exports.from_settings(settings, timeouts)
        background = Background(
            lrm, settings.kind, settings.directory / "background", refused=self._accounts.acts_as_root, clock=clock
        )
        reservations = Reservations(lrm, self._monitor, self._accounts, clock)
        handlers: dict[str, Handler] = {
            "stat": exports.replicas.stat_replica,
            "export": exports.export_replica,
            "unexport": exports.revoke_ticket,
            "background": background.start_job,
            "background-stop": background.stop_jobs,
            "nodes": self._reporter.list_nodes,
            "reserve": reservations.reserve_nodes,
            "unreserve": reservations.release_reservation,
            "reservations": reservations.list_reservations,
        }
        self._questions = Questions(self._uplink, handlers, clock)
        self._files = ComponentFiles(
            settings, exports, self._questions, self._reporter, self._spool.disk_sync, folders, timeouts
        )
        self._jobs = LrmJobs(
            lrm,
            self._monitor,
            self._reporter,
            self._make_submission,
            self._files,
            self._runners,
            timeouts=timeouts,
            clock=clock,
        )
        self._impostors = RejectedRunners(self._reporter)
        self._leases = Leases(settings.directory, self._reporter, self._jobs.end_component, clock)
        self._streams = Streams(self._reporter, settings.cluster, settings.interactive, clock)
        self._relays = RelayedLinks(settings, self._reporter, self._secrets)
        self._barrier = Barrier(
            self._reporter,
            self._jobs,
            self._monitor,
            self._secrets,
            self._impostors,
            self._leases,
            self._streams,
            self._relays,
        )
        self._logins = LoginServer(settings, self._uplink, clock)
        silence = settings.forget_after, timeouts.expiry_check_s
        self._expired = ExpiredDaemons(self._spool, self._reporter, self._jobs, self._files, *silence)
        watched = {"spool": settings.directory, "stages": settings.stages}
        self._disks = DiskWatch(self._reporter, watched, settings.disks, self._monitor.request_poll, timeouts)
        self._undone: list[wire.Command] = []
        self._daemons = Daemons(settings.directory)
        self._epoch, self._life = 0, ""
        self._welcomed = False
        """Whether the daemon on this connection has sent its welcome."""
        self._output_limit = DEFAULT_OUTPUT_LIMIT
        self._greeting: asyncio.Task[None] | None = None
        self._confirming = BackgroundTasks()

    async def run(self, manager: ServiceManager) -> None:
        """Serve the cluster until cancelled: load components, run all regular tasks, then close everything."""
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(MAX_THREADS, "agent"))
        self._load_components()
        await self._runners.listen(self._barrier)
        await self._logins.listen()
        if self._accounts.own_uid == 0 and not self._accounts.is_mapped:
            hint = "run the agent as an account of its own, or set identity: mapped"
            log.warning("all jobs run as root", action="jobs-as-root", cluster=self._settings.cluster, hint=hint)
        log.info(
            "agent started", action="agent-serves", cluster=self._settings.cluster, components=len(self._reporter.live)
        )
        manager.notify_ready(f"serving {self._settings.cluster}")
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._tell_status(manager))
                group.create_task(self._jobs.watch_lrm())
                group.create_task(self._files.remove_leftovers())
                group.create_task(self._leases.watch_leases())
                group.create_task(self._relays.run())
                group.create_task(self._retry_regularly())
                group.create_task(self._sweep())
                group.create_task(self._disks.watch_disks())
                group.create_task(self._watch_versions())
                group.create_task(self._expired.watch_daemons())
                group.create_task(self._uplink.keep_connected(self._handle_message, self._on_disconnect))
        finally:
            manager.notify_stopping()
            self._logins.close()
            await self._questions.stop_answering()
            await self._files.close()
            self._runners.close()
            await self._lrm.close()
            log.info("agent stopped", action="agent-ends", cluster=self._settings.cluster)

    def _load_components(self) -> None:
        """Restore the components and stages of an earlier agent from the disk, and resume each where it stopped.

        Raise ``SiteUnavailable`` if the disk fails: without its record, a component would be ended.
        """
        self._folders.prepare_base()
        for path in self._spool.remove_leftovers():
            log.info("removed remains of a component", action="folders-swept", folder=str(path))
        for instance, token, folder in self._spool.load_folders():
            try:
                component = Component.load_journal(instance, token, folder, self._clock)
            except Exception as error:
                if has_failed_disk(error):
                    raise SiteUnavailable(
                        f"cannot read the component's record in {folder.path}: {error}",
                        hint="the next start tries again; move this folder away to give up the component",
                    ) from error
                # A damaged folder must not affect the others. Its job is found and ended without a record.
                log.error("unreadable record", action="record-unreadable", token=token, exc_info=error)
                self._reporter.lost_records.record_loss(token, str(error))
                folder.set_damaged_aside()
                continue
            if component.size == 0 and component.stop is None:
                folder.remove_folder()  # The agent ended before the command was recorded; the daemon sends it again.
                continue
            component.submitted_at = self._clock.monotonic()
            self._reporter.add_component(component)
            if component.ended:
                self._files.on_component_ended(component)
                continue
            self._relays.restore_component(component)
            if component.lrm_job is None:
                self._jobs.submit_component(component, unsure=True)
            elif component.stop is not None:
                self._jobs.end_component(component)
            if component.plan is not None and (component.lrm_job is None or component.stop is None):
                self._files.fetch_early(component)
                self._barrier.await_return(component)
        self._files.stages.load_stages()

    async def _tell_status(self, manager: ServiceManager) -> None:
        """Report the agent's status to the service manager (systemd). It receives nothing while this loop hangs."""
        while True:
            away = "" if self._welcomed else "the daemon is not reachable"
            manager.send_heartbeat(
                "; ".join(filter(None, (away, self._monitor.problem))) or f"serving {self._settings.cluster}"
            )
            await asyncio.sleep(manager.interval or self._timeouts.report_interval_s)

    async def _retry_regularly(self) -> None:
        """Repeat regularly what failed because a disk was full or a message was lost."""
        while True:
            await sleep_awake(self._timeouts.retry_s)  # after a stop, read first what has arrived
            self._barrier.retry_output()
            self._reporter.resend_output()
            for component in list(self._reporter.components.values()):
                component.folder.write_late_entries()
            undone, self._undone = self._undone, []
            for message in undone:
                self._handle_command(message)
            self._runners.write_address()
            self._runners.check_open_files()

    async def _sweep(self) -> None:
        """Remove folders of killed runners on this machine, which is also a node of embedded clusters."""
        directories = {self._settings.environment.get("TMPDIR", "/tmp")}
        while True:
            with suppress(OSError):  # raised while all temporary folders are full
                directories.add(tempfile.gettempdir())
            for base in directories:
                if swept := await asyncio.to_thread(remove_stale_folders, base):
                    log.info("removed left folders", action="folders-swept", below=base, folders=swept)
            await asyncio.sleep(self._timeouts.sweep_interval_s)

    async def _watch_versions(self) -> None:
        """Report the installed versions, which may change while the agent runs."""
        while True:
            lrm = await self._jobs.fetch_version()
            try:
                open_mpi = await self._find_open_mpi(self._settings, self._settings.environment.get("KOALA_MPI_PREFIX"))
            except SiteError as error:
                log.info("the version of Open MPI is not known", action="version-unknown", reason=error.message)
                open_mpi = OpenMpi()
            self._reporter.versions = Versions(koalapy.__version__, lrm, open_mpi.version)
            self._monitor.request_poll()
            await asyncio.sleep(VERSIONS_INTERVAL if lrm else VERSIONS_RETRY_INTERVAL)

    def _make_hello(self) -> wire.Hello:
        """Return the first message of a connection: this agent, its host, and the daemons that it has served."""
        return wire.Hello(
            cluster=self._settings.cluster,
            version=koalapy.__version__,
            lrm=self._settings.kind,
            host=socket.gethostname(),
            pid=os.getpid(),
            identity=self._settings.identity,
            interactive=self._settings.interactive,
            accepts_scripts=bool(self._settings.accepts_scripts),
            container_runtime=self._settings.environment.get("KOALA_CONTAINER_RUNTIME", ""),
            joins_opens=True,
            reserves=True,
            known=self._daemons.known_daemons(),
        )

    def _make_submission(self, component: Component) -> LrmSubmission:
        """Return the job that starts a component's runners. Raise ``SiteRejected`` if its account may not run jobs."""
        self._accounts.admit(component.user)
        work, stage = self._files.work_path(component), self._files.stage_path(component)
        environment = {
            **self._settings.environment,
            **({"KOALA_STAGE": str(stage)} if stage else {}),
            "KOALA_AGENT_FILE": str(self._address_file),
            "KOALA_COMPONENT_TOKEN": component.token,
            "KOALA_COMPONENT_NAME": component.name,
            "KOALA_LEASE": "none" if component.lease is None else f"{component.lease:g}",
            "KOALA_SPOOL": str(work),
        }
        return LrmSubmission(
            name=component.name,
            nodes=component.size,
            argv=(self._settings.python, "-I", "-S", str(RUNNER), "node"),
            environment=environment,
            workdir=work,
            output=work / RUNNER_LOG,
            walltime=component.walltime,
            modules=self._settings.modules,
            user=component.user,
            node_class=component.node_class,
            requirement=component.requirement or NO_REQUIREMENT,
            reservation=component.reservation,
            secrets=self._secrets.hex_secrets(component.name, component.size),
        )

    # Messages of the daemon

    def _on_disconnect(self) -> None:
        """Reset everything that depends on the daemon's connection. Components continue."""
        self._welcomed = False
        self._leases.on_disconnect()
        self._reporter.on_disconnect()
        self._logins.lost()
        self._streams.on_daemon_lost()
        self._monitor.set_nodes_awaited(awaited=False)
        if self._greeting is not None:
            self._greeting.cancel()
        self._confirming.cancel()

    def _handle_message(self, message: wire.FromDaemon) -> None:
        """Pass a message of the daemon to its handler. Raise ``ValueError`` if the first one is no welcome."""
        if not self._welcomed and not isinstance(message, wire.Welcome):
            raise ValueError(
                f"the daemon's first message is {message.type!r} instead of 'welcome': "
                "check that --url leads to a koala daemon of the same version"
            )
        match message:
            case wire.Open():
                for order in message.split():
                    self._handle_command(order)
            case wire.Command():
                self._handle_command(message)
            case wire.Welcome():
                self._handle_welcome(message)
            case wire.Ask():
                self._questions.answer_question(message)
            case wire.Answer():
                self._questions.receive_answer(message)
            case wire.Vouched():
                self._logins.vouched(message)
            case wire.Probe():
                self._probe(message)
            case wire.LeaseRenewed():
                self._leases.on_renewed(message)
            case wire.OutputAck():
                if component := self._reporter.find_component(message.token):
                    self._reporter.on_output_acknowledged(component, message.offset)
            case wire.Relay():
                self._barrier.deliver_relay(message)
            case wire.RelayFailed():
                self._barrier.report_undelivered(message)
            case wire.RelayLost():
                self._relays.on_lost_elsewhere(message)
            case _:
                self._streams.receive_from_daemon(message)

    def _handle_welcome(self, message: wire.Welcome) -> None:
        """Accept a daemon and begin to report to it. Raise ``ValueError`` for an older run of the daemon.

        Each run of a daemon has a higher epoch number than the previous one.
        """
        if not INSTANCE.fullmatch(message.instance):
            raise ValueError(f"{message.instance[:60]!r} is not a valid daemon instance")
        if not self._daemons.accept_epoch(message.instance, message.epoch, message.life):
            raise ValueError(
                f"the daemon's run number {message.epoch} is lower than one that this agent has served: "
                "its database was restored from an older copy, or a second daemon runs"
            )
        self._welcomed = True
        url = self._settings.urls[self._uplink.position]
        if self._settings.other_urls:
            self._files.use_daemon(url)
        self._epoch, self._life = message.epoch, message.life
        self._reporter.instance = message.instance
        self._leases.on_welcome()
        self._relays.on_welcome(is_understood=message.relays)
        self._output_limit = message.output_limit
        self._logins.welcomed(message, url)
        self._expired.record_contact()
        self._greeting = asyncio.create_task(self._report_inventory())

    async def _report_inventory(self) -> None:
        """Send the daemon all components and the cluster's state, at first without a snapshot if it is late."""
        stages = partial(self._files.stages.current_statuses, self._reporter.instance)
        self._reporter.on_welcome()
        try:
            async with asyncio.timeout(FIRST_SNAPSHOT_TIMEOUT):
                snapshot = await self._monitor.latest_snapshot()
        except TimeoutError:
            self._reporter.send_inventory(None, stages)
            snapshot = await self._monitor.latest_snapshot()
        self._end_unrecorded(snapshot)
        self._reporter.send_inventory(snapshot, stages)

    def _end_unrecorded(self, snapshot: LrmSnapshot) -> None:
        """End the daemon's jobs that the resource manager holds although the agent's record of them is lost."""
        for token, job in list(self._reporter.find_strays(snapshot)):
            self._reporter.lost_records.record_loss(token, f"the resource manager has its job {job.id}")
            try:
                component = self._new_component(token)
            except OSError as error:  # the daemon stops it because of its status
                log.error(
                    "cannot create a component's folder", action="command-not-noted", token=token, error=str(error)
                )
                continue
            component.user, component.lrm_job = job.user, job.id
            component.fail(RECORD_LOST)
            component.stop = RECORD_LOST
            component.folder.note_entry(submit={"user": job.user}, lrm=job.id, stop=RECORD_LOST)
            self._reporter.add_component(component)
            self._jobs.end_component(component)

    def _probe(self, message: wire.Probe) -> None:
        """Answer the daemon's probe: at once, or, if it asks to look, when the cluster's state is fresh."""
        self._monitor.set_nodes_awaited(awaited=message.awaited)
        if not message.look:
            self._uplink.send_soon(wire.Confirmed(sequence=message.sequence, clock=self._clock.now()), urgent=True)
            return
        self._confirming.spawn(self._confirm(message.sequence))

    async def _confirm(self, sequence: int) -> None:
        """Confirm a probe after all data of the runners was read, for the agent may have been stopped for a while."""
        await self._barrier.wait_for_returns()
        await self._runners.read_pending()
        await self._monitor.wait_for_new_poll()
        self._uplink.send_soon(wire.Confirmed(sequence=sequence), urgent=True)

    def _handle_command(self, message: wire.Command) -> None:
        """Carry out and acknowledge a command. Reject those of an earlier run of the daemon, by its number (epoch)."""
        # Tokens are folder names: a path must not leave the agent's directory.
        tokens = [message.token, *([message.stage] if isinstance(message, wire.Submit) and message.stage else ())]
        error = next((f"{token[:60]!r} is not a valid token" for token in tokens if not is_token(token)), "")
        if message.epoch < self._epoch:
            error = f"epoch {message.epoch} is older than {self._epoch}"
        if error:
            self._uplink.send_soon(wire.Ack(id=message.id, error=error))
            return
        try:
            if message.epoch > self._epoch:
                self._epoch = message.epoch
                self._daemons.accept_epoch(self._reporter.instance, message.epoch, self._life)
            self._daemons.record_job(self._reporter.instance, parse_token(message.token).job)
            refusal = self._carry_out(message)
        except OSError as failure:
            refusal = self._cannot_write(message, failure)
        if refusal is not None:
            self._uplink.send_soon(wire.Ack(id=message.id, error=refusal))

    def _carry_out(self, message: wire.Command) -> str | None:
        """Carry out a command. Return an error, empty on success, None if it is to be retried. Raise ``OSError`` if the
        journal cannot be written."""
        match message:
            case wire.Submit():
                return self._submit_component(message)
            case wire.Open():
                return self._open_component(message)
            case wire.Stop():
                return self._stop_component(message)
            case wire.Forget():
                return self._forget_component(message)
            case wire.Stage():
                return self._files.stages.start_stage(self._reporter.instance, message)
            case wire.Unstage():
                self._files.stages.discard_stage(self._reporter.instance, message.token)
                return ""
        return f"this agent does not support the command {message.type!r}"

    def _cannot_write(self, message: wire.Command, failure: OSError) -> str | None:
        """Fail the component of a command that cannot be recorded. Return None if the command is to be retried."""
        error = format_write_error(self._settings.directory, failure)
        log.error("a command cannot be recorded", action="command-not-noted", token=message.token, error=error)
        component = self._reporter.find_component(message.token)
        if isinstance(message, wire.Submit) and component is None:
            self._spool.discard_folder(self._reporter.instance, message.token)
            self._monitor.suspend_submission(error)  # reported first, so that no other job is sent here
            lost = ComponentStatus(message.token, ComponentState.ENDED, error=error, infrastructure=True)
            self._uplink.send_soon(lost)
        elif isinstance(message, wire.Open) and component is not None:
            self._barrier.fail_component(component, error)
        else:
            self._undone.append(message)
            return None
        return ""

    def _submit_component(self, message: wire.Submit) -> str:
        """Record a new component and submit its job, or report an existing one once more.

        Return an error, empty on success.
        """
        component_before = self._reporter.find_component(message.token)
        if component_before is not None:
            self._reporter.republish_status(component_before)
            return ""
        if message.reservation and not RESERVATION_NAME.fullmatch(message.reservation):
            return f"{message.reservation[:60]!r} is not a valid name of a reservation"
        component = self._new_component(
            message.token,
            size=message.size,
            walltime=message.walltime,
            stage=message.stage,
            collect=tuple(message.collect),
            user=self._accounts.account_for(message.local_user),
            node_class=message.node_class,
            requirement=message.requirement,
            reservation=message.reservation,
            lease=message.lease,
        )
        component.fetched = not component.user
        component.write_order()
        self._reporter.add_component(component)
        self._jobs.submit_component(component)
        return ""

    def _open_component(self, message: wire.Open) -> str:
        """Start the program of a component on its runners. Return an error, empty on success."""
        component = self._reporter.find_component(message.token)
        if component is None or component.size == 0:
            return f"this agent has no component {message.token}"
        clusters = {node["cluster"] for node in message.nodes}
        if message.is_script and clusters != {self._settings.cluster} and not self._settings.accepts_scripts:
            error = "this site accepts no scripts of other sites: set accepts_scripts for daemon and agent alike"
            self._barrier.fail_component(component, error)
        elif component.plan is None:
            plan = message.runner_message()
            if error := self._relays.find_refusal(plan):
                self._barrier.fail_component(component, error)
            else:
                self._barrier.open_component(component, plan)
        return ""

    def _stop_component(self, message: wire.Stop) -> str | None:
        """Record and begin the stop of a component. Stop an unknown one as well, since its job may appear late.

        Return an empty error, or None if the journal cannot be written and the command is to be retried.
        """
        component = self._reporter.find_component(message.token)
        if component is None:
            component = self._new_component(message.token)
            component.user = self._reporter.stray_users.get(component.name, "")
            component.folder.write_entry(submit={"user": component.user}, stop=message.reason)
            component.stop = message.reason
            self._reporter.add_component(component)
            self._jobs.submit_component(component, unsure=True)
        elif not component.ended and (component.stop is None or (component.remaining_grace_s and not message.signal)):
            component.stop = message.reason
            component.grace = Grace.start_now(message.signal, message.grace) if component.plan is not None else None
            component.folder.note_entry(stop=component.stop, grace=component.grace and asdict(component.grace))
            self._jobs.end_component(component)
        else:
            self._reporter.republish_status(component)
        if not component.folder.write_late_entries():
            self._undone.append(message)
            return None
        return ""

    def _forget_component(self, message: wire.Forget) -> str:
        """Remove a component's record and folders. Return an error if it has not ended, else an empty text."""
        component = self._reporter.find_component(message.token)
        if component is None:
            return ""
        if not component.ended or component.awaits_collection:
            return f"component {message.token} has not ended"
        self._files.forget_component(component)
        return ""

    def _new_component(self, token: str, **order: Any) -> Component:
        """Create a component that is not registered yet.

        If it cannot be recorded, nothing remains of it and the daemon's next command creates it.
        """
        folder = self._spool.make_folder(self._reporter.instance, token)
        return Component(
            self._reporter.instance, token, folder, output_limit=self._output_limit, clock=self._clock, **order
        )
