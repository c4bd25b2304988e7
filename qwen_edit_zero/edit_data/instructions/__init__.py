"""What a sample's instruction becomes before it is encoded: neutral, normalised, filtered, and which of several texts."""
