"""The connections of agents: sessions, their messages, questions between agents, embedded agents.

Start at ``hub.py``. An agent that is silent for ``unreachable_after`` is disconnected. ``agent_messages.py``
accepts states, output, results and relays of a cluster only for components that are on it. A ``Probe`` asks a cluster
for a fresh report before a deadline may end anything; the agent answers ``Confirmed`` (docs/adr/0008).
"""
