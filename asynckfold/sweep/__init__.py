"""Drives an engine until no job is pending: the loop, the dry run, the probe."""
