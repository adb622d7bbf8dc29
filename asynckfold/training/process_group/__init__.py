"""The processes of one job: forked, shared memory, barriers."""
