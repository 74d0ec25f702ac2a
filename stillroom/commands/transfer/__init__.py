"""`stillroom transfer`: which source task makes the student that learns other tasks best, and what that is worth with few labels."""
