"""The agent's side of files as a whole: joins its parts."""

from koalapy.agent.components.component import Component
from koalapy.agent.components.job_folders import JobFolders
from koalapy.agent.core.questions import Questions
from koalapy.agent.core.reporter import Reporter
from koalapy.agent.core.settings import AgentSettings
from koalapy.agent.core.spool import DiskSync
from koalapy.agent.core.timeouts import DEFAULT_TIMEOUTS, AgentTimeouts
from koalapy.agent.transfers.daemon_files import DaemonFiles
from koalapy.agent.transfers.exports import Exports
from koalapy.agent.transfers.pull import Means
from koalapy.agent.transfers.replicas import Replicas
from koalapy.agent.transfers.results import Collector
from koalapy.agent.transfers.stages import Stages


class FileService:
    """Answers what is asked of replicas, brings files to components, and collects their results."""

    def __init__(
        self,
        settings: AgentSettings,
        replicas: Replicas,
        exports: Exports,
        questions: Questions,
        reporter: Reporter,
        disk_sync: DiskSync,
        folders: JobFolders,
        timeouts: AgentTimeouts = DEFAULT_TIMEOUTS,
    ) -> None:
        self._replicas, self._exports, self._reporter = replicas, exports, reporter
        daemon_files = DaemonFiles(settings.url, settings.cluster, settings.token, settings.trust)
        means = Means(
            cluster=settings.cluster,
            replicas=replicas,
            questions=questions,
            daemon_files=daemon_files,
            pulls=settings.transfer_limit,
            disk_sync=disk_sync,
            encrypts=settings.encrypts,
            timeouts=timeouts,
        )
        self.stages = Stages(settings.stages, means, reporter.publish_stage, self._is_in_use, folders)
        self.collector = Collector(daemon_files, self.stages, self._collected, reporter.is_in_reach, folders, timeouts)

    def ended(self, component: Component) -> None:
        """Collect what it has; its stage may go when nobody needs it any more."""
        self.collector.collect(component)
        if component.stage is not None:
            self.stages.release(component.instance, component.stage)

    async def close(self) -> None:
        self._replicas.close()
        await self.collector.close()
        await self.stages.close()
        await self._exports.close()

    def _collected(self, component: Component) -> None:
        self._reporter.publish(component)
        self.ended(component)

    def _is_in_use(self, instance: str, token: str) -> bool:
        return any(
            (component.instance, component.stage) == (instance, token) and (component.collecting or not component.ended)
            for component in self._reporter.components.values()
        )
