"""The pages: for each page its dataclass and the function that loads it."""
