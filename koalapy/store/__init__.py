"""The SQL store: tables, batches, the lease, listings and migrations.

Start at ``sql.py``; ``records.py`` has the stored records. Every writing transaction checks the lease's epoch,
so only one daemon writes at a time. It also checks the batch number, so a batch is stored once. ``listing.py`` finds a
page of jobs by indices alone. ``ended_jobs.py`` adds a job to the daily figures in the transaction in which it ends.
"""
