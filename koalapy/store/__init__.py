"""The SQL store: tables, one transaction a batch, the lease, listings, and migrations.

Imports ``model`` and ``ports``. Start at ``sql.py``. Each transaction that writes checks the lease's epoch and batch
number, so that one daemon writes at a time and a commit is stored once. A page of jobs is found by indices alone
(``listing.py``); days of history add up in the transaction in which a job ends (``days.py``).
"""
