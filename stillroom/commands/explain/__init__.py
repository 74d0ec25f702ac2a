"""`stillroom explain`: what a student's layers learned, beside its teacher's."""
