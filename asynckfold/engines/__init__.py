"""Who executes placements: one contract, several engines, and what they know of the machine.

`limits` says which cores and how much memory this process may use at all, `machine` what of them
is idle right now; the engines bring both to `asynckfold.scheduling.place.place` as one `Load`.
"""
