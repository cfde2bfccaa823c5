"""Drive Grid Engine: submit by DRMAA or ``qsub``, and read ``qstat``, ``qhost`` and ``qacct``.

Start at ``adapter.py``.
"""
