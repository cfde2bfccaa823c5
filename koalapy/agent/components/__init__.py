"""One component of a job on this cluster: its folders, submission, barrier, output and end.

Start at ``component.py``. The output of a component is one stream of bytes (``outputlog.py``), of which the first and
last parts are kept within ``output_limit``; a skipped part is announced with its size. Where jobs run under accounts
of their users, ``job_places.py`` and ``job_folders.py`` hand folders over and take results back.
"""
