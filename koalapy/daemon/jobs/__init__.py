"""Jobs as users see them: submission, changes, output, limits, history."""
