"""GPUs and clusters: what they hold and how fast they are."""
