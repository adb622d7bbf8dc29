"""Who executes placements: one contract, and an engine in this process or in worker processes."""
