"""The pages, one file each: what a page tells, as one dataclass, and what makes it."""
