"""What a server tells of itself: metrics, logs, traces, and the context of each request."""
