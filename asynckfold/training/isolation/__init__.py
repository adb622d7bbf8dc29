"""Restore what user code changes in its process after each job."""
