"""Larger-first (huang-2007 6): few clusters for a flexible request, those with most free nodes."""

from koalapy.placement.cluster_minimization import ClusterMinimization


class LargerFirst(ClusterMinimization):
    """Clusters by decreasing idle nodes, filled in turn, one alone where it suffices: as cluster-minimization."""

    # The first in this order has the most idle nodes: if any cluster suffices alone, it does.
    name = "larger-first"
