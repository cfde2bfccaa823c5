"""What routes, pages and duties call."""

from dataclasses import dataclass

from koalapy.service.advisor import Advisor
from koalapy.service.alerts import Alerts
from koalapy.service.bundles import Bundles
from koalapy.service.files import Files
from koalapy.service.forecasts import Forecasts
from koalapy.service.health import HealthMonitor
from koalapy.service.history import History
from koalapy.service.jobs import Jobs
from koalapy.service.limits import LimitsInUse
from koalapy.service.network import Network
from koalapy.service.results import Results
from koalapy.service.retention import Retention
from koalapy.service.sharing import Sharing
from koalapy.service.track_record import TrackRecord
from koalapy.service.workload_reports import WorkloadReports


@dataclass(frozen=True, slots=True)
class Services:
    """One of each."""

    jobs: Jobs
    bundles: Bundles
    files: Files
    results: Results
    network: Network
    advisor: Advisor
    health: HealthMonitor
    retention: Retention
    limits: LimitsInUse
    alerts: Alerts
    history: History
    workloads: WorkloadReports
    sharing: Sharing
    forecasts: Forecasts
    track_record: TrackRecord
