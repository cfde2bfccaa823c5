"""What routes, pages and duties call."""

from dataclasses import dataclass

from koalapy.daemon.alerts.alerts import Alerts
from koalapy.daemon.alerts.health import HealthMonitor
from koalapy.daemon.files.bundles import Bundles
from koalapy.daemon.files.files import Files
from koalapy.daemon.files.results import Results
from koalapy.daemon.forecast.forecasts import Forecasts
from koalapy.daemon.forecast.sharing import Sharing
from koalapy.daemon.forecast.track_record import TrackRecord
from koalapy.daemon.jobs.advisor import Advisor
from koalapy.daemon.jobs.history import History
from koalapy.daemon.jobs.jobs import Jobs
from koalapy.daemon.jobs.limits import LimitsInUse
from koalapy.daemon.jobs.retention import Retention
from koalapy.daemon.network.network import Network


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
    sharing: Sharing
    forecasts: Forecasts
    track_record: TrackRecord
