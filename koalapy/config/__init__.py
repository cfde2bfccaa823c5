"""Read the configuration: one typed tree of sections, from a YAML file and ``KOALA_`` variables.

Imports the modules that define a section (``agent.core.settings``, ``scheduler.rules``, ``simulation.record.settings``,
``model``) and ``system``. Only the daemon and the commands that start it import this package. Start at ``settings.py``.
``types`` holds constrained text types, ``errors`` formats errors, ``strict_yaml`` loads YAML (also for the command
line), and ``logs`` configures logging.
"""
