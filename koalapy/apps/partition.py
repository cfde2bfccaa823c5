"""Sharing rows or numbers among ranks as evenly as can be."""


def block(total: int, rank: int, ranks: int) -> tuple[int, int]:
    """The half-open range of ``range(total)`` that is this rank's."""
    share, rest = divmod(total, ranks)
    start = rank * share + min(rank, rest)
    return start, start + share + (1 if rank < rest else 0)
