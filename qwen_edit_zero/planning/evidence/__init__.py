"""The planner beside what was measured: by others, and by runs of this package."""
