"""Messages between agents and the daemon, as JSON lines over one WebSocket.

Imports ``model``, whose reports the messages carry unchanged. Agents send snapshots, the daemon sends commands with
an id, which the agent acknowledges, and an epoch, below which agents refuse commands. Each field has bounds
(``model/bounds.py``). Start at ``messages.py``; docs/adr/0001 gives the reasons.
"""
