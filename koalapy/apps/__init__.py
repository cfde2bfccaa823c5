"""MPI programs that show what co-allocated jobs do; each prints its result and a check that it is right."""
