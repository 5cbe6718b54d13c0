"""Sebulba: threads step environments on the host and act on some cores, one thread learns on the others."""
