"""What the frozen encoders made of each sample, kept by content."""
