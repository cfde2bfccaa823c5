"""Adapters of resource managers behind one interface: Slurm, Grid Engine, DRMAA, and the embedded ``local`` one.

Start at ``port.py``: submit, find by name, cancel, and one batched query that returns node counts and our jobs.
``KINDS`` there says what each kind can do; nothing else asks for a kind by name.
``tests/agent/lrm/test_port.py`` is one suite for all of them. A submission is repeated only after the resource
manager had time to settle and was asked for the job's name. ``rejections.py`` decides by the resource manager's words
who is to blame for a refusal. A job of the resource manager is one component; its script starts the runners with
``srun`` or ``qrsh -inherit``, and no secret is on a command line or in an environment.
"""
