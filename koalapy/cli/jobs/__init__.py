"""Commands that submit and manage jobs."""
