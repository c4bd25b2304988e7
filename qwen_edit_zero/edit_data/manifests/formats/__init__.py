"""The formats that manifests are read from; each reader gives rows under our keys."""
