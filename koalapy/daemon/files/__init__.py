"""The replica catalogue, bundles of submitted files, archives and collected results.

Start at ``files.py``. The catalogue holds what agents have reported: a change goes to the store, then to memory, then
to the scheduler. ``archives.py`` checks each archive before it is used,
``stored_archives.py`` keeps them within quotas and limits.
"""
