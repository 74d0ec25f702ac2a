"""`stillroom profile`: models side by side, the papers' table, and speed against an earlier report."""
