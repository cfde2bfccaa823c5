"""The placement policies that there are on this host."""

from importlib.metadata import entry_points

from koalapy.policies.registry import Registry, builtin


def policies() -> Registry:
    """The built-in policies and those that installed packages add under ``koalapy.policies``."""
    registry = builtin()
    for point in entry_points(group="koalapy.policies"):
        registry.register(point.load()())
    return registry
