"""`stillroom annotate` over many files: parts of them, answered on this machine or by Ray on many."""
