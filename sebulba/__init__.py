"""Sebulba: threads act on host environments, other cores learn. Not written yet."""
