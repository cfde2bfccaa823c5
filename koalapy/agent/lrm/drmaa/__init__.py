"""Drive any resource manager that has a DRMAA library, in a worker process for each account.

Start at ``adapter.py``. The library may hang or crash, so ``worker.py`` runs it in a process outside the agent.
"""
