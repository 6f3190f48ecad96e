"""The slim checkpoint on disk. FORMAT.md, beside this file, says what every byte means."""
