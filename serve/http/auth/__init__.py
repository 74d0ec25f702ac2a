"""Who may ask: API keys with their limits, open paths, and pages of other origins (CORS)."""
