"""Which way to run a recipe, and what a change of cluster or size would do."""
