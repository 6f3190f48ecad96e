"""Tensors written as files that frameworks load, without any framework."""
