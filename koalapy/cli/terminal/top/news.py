"""What the threads that ask the daemon say to the pages."""

from textual.message import Message


class News(Message, bubble=False):
    """Something was found, or cannot be."""
