"""How sites share their nodes (semantics 8): where a job may run beside its home site, and in whose queue it waits."""

from collections.abc import Collection, Mapping
from typing import Literal

from koalapy.model.request import ClusterName
from koalapy.model.users import NOWHERE
from koalapy.model.wording import format_list

SharingMode = Literal["ordinary", "independent", "feasible"]


class Sharing:
    """What a job's home site means for it; nothing of that changes while a daemon lives."""

    def __init__(
        self,
        mode: SharingMode = "ordinary",
        speed_threshold: float = 0.0,
        speeds: Mapping[ClusterName, float] | None = None,
    ) -> None:
        """``speeds`` of all clusters of the grid; one slower than ``speed_threshold`` times that of its home site is
        not for a job."""
        self._mode, self._threshold, self._speeds = mode, speed_threshold, dict(speeds or {})
        self._closed = {home: closed for home in self._speeds if (closed := self._closed_at(home))}
        sites = [] if mode == "ordinary" else sorted(self._speeds)
        self._sections = {site: place for place, site in enumerate(sites)}
        self.reclaims = mode == "feasible"
        """Whether a site takes back nodes for its own users."""

    def section_of(self, home: ClusterName) -> int:
        """Which part of a placement queue jobs of a home site wait in: the parts are served in this order, those of
        sites by name, and then that of jobs without one."""
        return self._sections.get(home, len(self._sections))

    def site_of(self, home: ClusterName) -> ClusterName:
        """The site whose queue is that of these jobs; empty where they wait in that of nobody."""
        return home if home in self._sections else ""

    def reclaiming_site(self, home: ClusterName) -> ClusterName:
        """The cluster that may take back nodes for jobs of this home site; empty where none does."""
        return home if self.reclaims and home in self._speeds else ""

    def closed_to(self, home: ClusterName) -> frozenset[ClusterName]:
        """The clusters where jobs of a home site may not run; asked at every try."""
        if not home:
            return NOWHERE
        if self._mode == "independent" and home not in self._speeds:
            return frozenset(self._speeds)
        return self._closed.get(home, NOWHERE)

    def _closed_at(self, home: ClusterName) -> frozenset[ClusterName]:
        if self._mode == "independent":
            return frozenset(self._speeds) - {home}
        least = self._threshold * self._speeds[home]
        return frozenset(name for name, speed in self._speeds.items() if speed < least and name != home)

    def rejection_reason(self, home: ClusterName, cluster: ClusterName) -> str:
        """Why jobs of a home site may not run on a cluster; empty when they may."""
        if cluster not in self.closed_to(home):
            return ""
        if self._mode == "independent":
            return f"its home site is {home}, and sharing is independent"
        least = self._threshold * self._speeds[home]
        return f"its speed is {self._speeds[cluster]:g}, and a job of {home} is to have at least {least:g}"

    def home_rejection_reason(self, clusters: Collection[ClusterName]) -> str:
        """Why a job does not go to these, without a name: jobs that may run on the same ones share what is said."""
        names = sorted(clusters)
        if self._mode == "independent":
            return (
                f"sharing is independent: {format_list(names)} {'is' if len(names) == 1 else 'are'} not its home site"
            )
        return f"{format_list(names)} {'is' if len(names) == 1 else 'are'} too slow beside its home site"
