"""The trainers of jobs that run on several processes."""
