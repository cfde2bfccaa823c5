"""Sharing of nodes between sites (semantics 8): where a job may run, and in which queue section it waits."""

from collections.abc import Collection, Mapping
from typing import Literal

from koalapy.model.request import ClusterName
from koalapy.model.users import NOWHERE
from koalapy.model.wording import format_list

SharingMode = Literal["ordinary", "independent", "feasible"]


class Sharing:
    """The sharing rules by home site; they do not change while a daemon runs."""

    def __init__(
        self,
        mode: SharingMode = "ordinary",
        speed_threshold: float = 0.0,
        speeds: Mapping[ClusterName, float] | None = None,
    ) -> None:
        """``speeds``: of all clusters; a job may not use one slower than ``speed_threshold`` times its home site."""
        self._mode, self._threshold, self._speeds = mode, speed_threshold, dict(speeds or {})
        self._closed = {home: closed for home in self._speeds if (closed := self._closed_at(home))}
        sites = [] if mode == "ordinary" else sorted(self._speeds)
        self._sections = {site: place for place, site in enumerate(sites)}
        self.reclaims = mode == "feasible"
        """Whether sites reclaim nodes for their own users."""

    def section_of(self, home: ClusterName) -> int:
        """Return the section of the placement queue for jobs of a home site.

        Sections are served in order: those of the sites by name, then that of jobs without a home site.
        """
        return self._sections.get(home, len(self._sections))

    def site_of(self, home: ClusterName) -> ClusterName:
        """Return the home site if it has a section of the placement queue; otherwise an empty text."""
        return home if home in self._sections else ""

    def reclaiming_site(self, home: ClusterName) -> ClusterName:
        """Return the cluster that may reclaim nodes for jobs of a home site; empty if there is none."""
        return home if self.reclaims and home in self._speeds else ""

    def closed_to(self, home: ClusterName) -> frozenset[ClusterName]:
        """Return the clusters where jobs of a home site may not run. Called at every placement try."""
        if not home:
            return NOWHERE
        if self._mode == "independent" and home not in self._speeds:
            return frozenset(self._speeds)
        return self._closed.get(home, NOWHERE)

    def _closed_at(self, home: ClusterName) -> frozenset[ClusterName]:
        """Return the clusters on which jobs of a home site may not run: all others, or too slow ones."""
        if self._mode == "independent":
            return frozenset(self._speeds) - {home}
        minimum = self._threshold * self._speeds[home]
        return frozenset(name for name, speed in self._speeds.items() if speed < minimum and name != home)

    def rejection_reason(self, home: ClusterName, cluster: ClusterName) -> str:
        """Return why jobs of a home site may not run on a cluster; empty if they may."""
        if cluster not in self.closed_to(home):
            return ""
        if self._mode == "independent":
            return f"its home site is {home}, and sharing is independent"
        minimum = self._threshold * self._speeds[home]
        return f"its speed is {self._speeds[cluster]:g}, and a job of {home} is to have at least {minimum:g}"

    def home_rejection_reason(self, clusters: Collection[ClusterName]) -> str:
        """Return why a job may not run on these clusters.

        The text does not name the home site, so that it is the same for many jobs.
        """
        names = sorted(clusters)
        if self._mode == "independent":
            return (
                f"sharing is independent: {format_list(names)} {'is' if len(names) == 1 else 'are'} not its home site"
            )
        return f"{format_list(names)} {'is' if len(names) == 1 else 'are'} too slow beside its home site"
