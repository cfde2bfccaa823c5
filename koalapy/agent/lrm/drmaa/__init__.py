"""Drive any resource manager that has a DRMAA library, in a worker process for each account.

Start at ``adapter.py``; the library may hang or die, so ``worker.py`` runs it apart from the agent.
"""
