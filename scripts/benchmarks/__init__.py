"""The measurements of ``scripts/benchmark``."""
