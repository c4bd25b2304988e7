"""A sample's instruction before it is encoded: made neutral, normalised, filtered, and one of several texts chosen."""
