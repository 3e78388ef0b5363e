"""Triton backends that lychee brings along."""
