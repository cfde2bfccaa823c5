"""Find violations of what the grid promises, in what each side wrote by itself.

``readers.py`` turns each source into the neutral facts of ``facts.py``: ``read_database(url)``,
``read_output(folder)``, ``read_record(folder)``, ``read_spool(folder)`` and ``read_accounting(file)``. ``rules.py``
judges facts: ``find_violations(facts)`` returns the findings, ``audit_facts(facts)`` a report that also says which
rules it could not prove for lack of evidence.

A harness calls ``find_violations([*read_database(url), *read_spool(folder, cluster), *runs])``, where ``runs`` are
``Run`` facts of its resource manager: kind ``HELD`` for the nodes that it gave to a job, ``PROGRAM`` for a program that
ran, with one ``Source`` for each cluster and clock. ``token_of(name)`` splits the name of a job in a resource manager.

The package imports nothing of the scheduler, the daemon, the agent or the store: it reads rows and JSON.
"""
