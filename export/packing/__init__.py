"""Makes a bundle: builds its variants, checks them against their gates, and writes the folder with its model card."""
