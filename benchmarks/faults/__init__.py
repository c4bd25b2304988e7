"""A training over three nodes that goes wrong in every way, again and again."""
