"""The placement policies that are installed on this host."""

from importlib.metadata import entry_points

from koalapy.policies.registry import Registry, builtin_policies


def load_policies() -> Registry:
    """Return a registry of the built-in policies and the entry points of group ``koalapy.policies``."""
    registry = builtin_policies()
    for point in entry_points(group="koalapy.policies"):
        registry.register(point.load()())
    return registry
