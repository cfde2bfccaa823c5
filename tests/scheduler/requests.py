"""Short constructors of requests."""

from koalapy.model.request import ComponentRequest, FixedRequest, FlexibleRequest, NonFixedRequest

Split = tuple[tuple[int, ...], ...]


def flexible(total: int, min_size: int = 1, max_components: int | None = None, split: Split = ()) -> FlexibleRequest:
    return FlexibleRequest(total, min_size, max_components, split)


def nonfixed(*sizes: int) -> NonFixedRequest:
    return NonFixedRequest(tuple(ComponentRequest(size) for size in sizes))


def fixed(**sizes: int) -> FixedRequest:
    """Return a request with one component per cluster: ``fixed(north=4, south=2)``."""
    return FixedRequest(tuple(ComponentRequest(size, cluster) for cluster, size in sizes.items()))
