"""Hypothesis state machine of the scheduler: users, nodes, agents, network and operators."""
