"""A worker process: its life, its fork server, and what it reports."""
