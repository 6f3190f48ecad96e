"""The original tree of a slim checkpoint as a read-only file system."""

from slimckpt.mount.child import mounted

__all__ = ["mounted"]
