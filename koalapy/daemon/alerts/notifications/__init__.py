"""What users and operators are told by mail and webhooks: what it is, and how it gets there."""
