"""Numbers against independent computations, and uses that once gave wrong ones in silence."""
