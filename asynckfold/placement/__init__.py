"""Which pending jobs start now, and where: a pure function of what is pending, running and idle.

No clock, no randomness, no input or output: the engines bring the load, the sweep carries out the
placements, and a simulator can drive the very same function.

=========== ==========================================================================
`decision`  `place`, and what it decides by: `Bookings` of what runs, and what is left
`backlog`   the queue of what is pending: `Backlog`, and rows of short jobs
`words`     `Load` of the machine, `Request`, `Placement`; what is placed as one
=========== ==========================================================================
"""

from asynckfold.jobs.placement import Gpu, Load, Placement, Request, fused, units
from asynckfold.placement.backlog import Backlog
from asynckfold.placement.decision import Bookings, place

__all__ = [
    "Backlog",
    "Bookings",
    "Gpu",
    "Load",
    "Placement",
    "Request",
    "fused",
    "place",
    "units",
]
