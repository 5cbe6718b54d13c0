"""MuZero: an agent that searches, for both architectures. Not written yet."""
