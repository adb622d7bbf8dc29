"""The processes of one job: forked ranks, shared memory, sums."""
