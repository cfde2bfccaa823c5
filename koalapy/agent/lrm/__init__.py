"""Adapters of resource managers (LRMs) behind one interface: Slurm, Grid Engine, DRMAA, and the embedded ``local``.

Start at ``port.py``: submit, find by name, cancel, and one batched query for node counts and grid jobs. ``KINDS``
describes each kind; no other code tests for a kind by name. ``tests/agent/lrm/test_port.py`` runs one suite over all.

A submission is repeated only after the settling time, if no job of its name is found. ``rejections.py`` finds the cause
of a rejection by its text. A job of the resource manager is one component; its script starts the runners with ``srun``
or ``qrsh -inherit``. No secret is on a command line or in an environment.
"""
