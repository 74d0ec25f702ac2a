"""Access: API keys with their limits, paths that need no key, and web pages of other origins (CORS)."""
