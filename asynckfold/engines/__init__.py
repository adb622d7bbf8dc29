"""Who executes a placement: this process, or worker processes on chosen cores."""
