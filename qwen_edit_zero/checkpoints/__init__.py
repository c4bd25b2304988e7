"""The flat-range checkpoint format: writing, reading, retention and consolidation."""
