"""Makes a bundle: builds its variants, holds them against their gates, and writes it with its card."""
