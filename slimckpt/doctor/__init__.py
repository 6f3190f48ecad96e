"""What this machine, its libraries and a file system can do for slimckpt."""

from slimckpt.doctor.examination import Examination, Finding, examine

__all__ = ["Examination", "Finding", "examine"]
