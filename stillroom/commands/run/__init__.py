"""`stillroom run`: from a teacher to a bundle, stage by stage."""
