"""Who this process is among all ranks, how they meet, and how they end together."""
