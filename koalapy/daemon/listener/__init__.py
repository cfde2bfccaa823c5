"""Accept connections: TLS with a certificate that is reloaded when it changes, and limits.

Start at ``connections.py``, which limits connections and closes an idle one if there are too many. Some connections
are reserved for agents.
"""
