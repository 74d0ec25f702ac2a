"""Load on a running server: arrivals, an open-loop generator, its HTTP client."""
