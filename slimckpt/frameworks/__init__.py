"""Checkpoints as their own framework loads them, from a slim checkpoint: ``torch``, ``paddle``,
``mindspore``. A framework is imported only when it is asked for something."""
