"""What a run will need, computed from its settings before anything is started: memory, traffic, time. No torch."""
