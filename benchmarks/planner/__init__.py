"""What the planner says, beside what others measured and what the field believes."""
