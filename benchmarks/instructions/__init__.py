"""What the word filter finds and what it stops wrongly, and what preparing instructions costs."""
