"""The parts of one component on this cluster: its folders, submission, barrier, output and end.

Start at ``component.py``. The output of a component is one stream of bytes (``outputlog.py``). Its first and last parts
are stored within ``output_limit``; a skipped part is reported with its size. If jobs run as accounts of their users,
``job_folders.py`` copies folders to an account and results back.
"""
