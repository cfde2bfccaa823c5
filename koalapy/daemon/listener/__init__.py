"""Accept connections: TLS with a certificate that is reloaded when it changes, limits, and a stand-in.

Start at ``connections.py``, which limits connections and closes an idle one if there are too many. Some connections
are reserved for agents. The stand-in (``engine/daemon.py``) answers 503 while the event loop hangs.
"""
