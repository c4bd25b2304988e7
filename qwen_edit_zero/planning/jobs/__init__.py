"""What is to be planned: the model, its samples, the settings, the ranks."""
