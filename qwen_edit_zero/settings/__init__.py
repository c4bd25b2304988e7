"""What a run is told: typed sections, YAML recipes, overrides, DeepSpeed JSON. Imports no torch."""
