"""The pages: for each the dataclass that it shows, and the function that loads it."""
