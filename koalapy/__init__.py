"""koalapy: a live co-allocating meta-scheduler."""

__version__ = "0.1.0"
