"""Read the configuration: one typed tree of sections from a YAML file and ``KOALA_`` variables.

May import whatever defines a section (``agent.core.settings``, ``scheduler.rules``, ``record.settings``, ``model``) and
``system``; only the daemon and what starts it import this package. Start reading in ``settings.py``; ``types`` has the
texts' constraints, ``errors`` words what is wrong, ``strict_yaml`` loads YAML for the command line, too; ``logs``
writes the log as the settings say.
"""
