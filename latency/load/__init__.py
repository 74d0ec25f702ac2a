"""Load on a running server: arrivals, an open-loop generator, and its HTTP client."""
