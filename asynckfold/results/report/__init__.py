"""The report of a run: numbers (`summary`), sentences (`findings`), figures, and the page."""
