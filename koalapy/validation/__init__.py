"""Check submissions: limits, permissions, clusters and input files.

Pure functions; imports ``model`` and ``policies``. Start at ``submission.py``: ``check`` raises the first violation.
"""
