"""Values that travel between the rooms: plan, folds, cost, placement, messages, result."""
