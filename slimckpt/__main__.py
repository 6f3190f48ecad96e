"""``python -m slimckpt``."""

from slimckpt.cli import main

main()
