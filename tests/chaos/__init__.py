"""Random kills under load, judged by what the programs themselves saw: ``python -m tests.chaos --help``."""
