"""The files that components need and leave: stages, replicas and results.

Start at ``stages.py``. Input files move between agents by rsync through a TLS tunnel (``tunnel.py``), never through the
daemon; checksums are verified on arrival. Paths stay below the configured roots, with links resolved (``roots.py``).
"""
