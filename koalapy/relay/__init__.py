"""Carry the streams of MPI programs between clusters if their nodes cannot connect: the hub and the heads.

``main.py`` starts a relay from its configuration. ``hub.py`` and ``head.py`` decide about streams, by the live attempts
in ``attempts.py``, which ``control.py`` receives from the daemon or the agent. ``server.py`` accepts connections, and
``tls_side.py`` encrypts them. Pumps, lines and keys are in ``koalapy.runner``, since nodes use them, too.
"""
