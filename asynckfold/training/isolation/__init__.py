"""What user code changes in its process is put back after each job."""
