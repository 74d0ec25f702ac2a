"""Where this repository lies."""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
