"""koalapy: a live co-allocating meta-scheduler. ``koalapy.connect()`` returns a grid to which Python submits jobs."""

__version__ = "0.1.0"

TYPE_CHECKING = False
if TYPE_CHECKING:
    from koalapy.client.errors import Exit, GridError
    from koalapy.client.grid import Grid, connect
    from koalapy.client.jobs import Array, Job

__all__ = ["Array", "Exit", "Grid", "GridError", "Job", "connect"]


def __getattr__(name: str) -> object:
    """Import a name of the Python client on first use, since other processes do not need it."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from koalapy.client import grid

    return getattr(grid, name)
