"""What forward and backward passes cost, of the transformer and of the frozen models."""
