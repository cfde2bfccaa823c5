"""The server for the runners of this cluster: authentication, messages, relays, the uplink to the daemon.

Start at ``runners.py``. An unauthenticated peer gets one line, a few seconds and one of a few places. A message of
one runner to another passes within one attempt only, and the daemon accepts it only from the sender's cluster.
"""
