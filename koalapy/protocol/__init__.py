"""Messages between agents and the daemon, as JSON lines over one WebSocket.

Imports ``model``: the messages carry its reports unchanged. Agents send snapshots, the daemon sends commands with
an id, which the agent acknowledges, and an epoch, the number of the daemon run. Agents refuse commands of an earlier
one. Each field has bounds (``model/bounds.py``). Start at ``messages.py``; docs/adr/0001 gives the reasons.
"""
