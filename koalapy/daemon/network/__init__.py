"""Measured links between clusters."""
