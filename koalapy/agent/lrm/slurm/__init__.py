"""Drive Slurm 21.08 to 26.05 by its commands.

Start at ``adapter.py``.
"""
