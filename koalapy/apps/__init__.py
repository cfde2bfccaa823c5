"""MPI programs that demonstrate co-allocated jobs. Each prints its result and a check that the result is correct."""
