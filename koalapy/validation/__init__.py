"""Checks of a submission: limits, permissions, clusters, input files.

Pure; imports ``model`` and ``policies``. Start at ``submission.py``, whose ``check`` raises the first violation.
"""
