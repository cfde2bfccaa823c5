"""Stages, replicas and results: files that components need and leave.

Start at ``stages.py``. Input files go between agents by rsync through a tunnel of TLS (``tunnel.py``), never through
the daemon; checksums are verified on arrival. Paths stay below the configured roots, with links resolved
(``roots.py``).
"""
