"""``koala check``: find out on a head node whether an agent could work there, and what is missing."""
