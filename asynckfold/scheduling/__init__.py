"""Which pending jobs start now, and where: pure functions, and their simulator."""
