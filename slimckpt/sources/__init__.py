"""Reading bytes: files by position, digests and samples of spans, mapped and read backends."""
