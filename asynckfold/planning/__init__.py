"""Decides before a sweep starts, by pure functions: threads, fusion groups, memory format."""
