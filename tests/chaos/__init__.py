"""Random faults under load, checked against the records of the programs: ``python -m tests.chaos --help``."""
