"""Requests in few words."""

from koalapy.model.request import ComponentRequest, FixedRequest, FlexibleRequest, NonFixedRequest

Split = tuple[tuple[int, ...], ...]


def flexible(total: int, least: int = 1, most: int | None = None, split: Split = ()) -> FlexibleRequest:
    return FlexibleRequest(total, least, most, split)


def nonfixed(*sizes: int) -> NonFixedRequest:
    return NonFixedRequest(tuple(ComponentRequest(size) for size in sizes))


def fixed(**sizes: int) -> FixedRequest:
    """One component per cluster: ``fixed(north=4, south=2)``."""
    return FixedRequest(tuple(ComponentRequest(size, cluster) for cluster, size in sizes.items()))
