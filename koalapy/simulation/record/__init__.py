"""Record a scheduler's inputs and effects as lines of JSON, and replay them.

Imports ``scheduler`` and ``model``. Start at ``recorder.py``, a scheduler that records, and ``replay.py``, which
repeats a record and compares every effect.
"""
