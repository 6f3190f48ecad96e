"""From a tree of files to a catalog, and from that to what is replicated and what it would save."""
