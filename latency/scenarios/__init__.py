"""How a model is used: as a server under a rate, and over numbers of threads and processes."""
