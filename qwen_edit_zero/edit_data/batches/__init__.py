"""Which samples each optimizer step trains on, and their micro-batches."""
