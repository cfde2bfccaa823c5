"""Run work under the accounts of local users, where a cluster's ``identity`` is ``mapped``.

``accounts.py`` decides which account a job may use and makes a command run as it (``setpriv`` or ``sudo -n``),
``account_process.py`` talks to a process of that account that reads and writes its files.
"""
