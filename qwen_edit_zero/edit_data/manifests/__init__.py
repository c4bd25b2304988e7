"""Manifests of edit samples: the formats that are read, and their rows."""
