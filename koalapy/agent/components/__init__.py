"""One component of a job on this cluster: folders, start, output, end."""
