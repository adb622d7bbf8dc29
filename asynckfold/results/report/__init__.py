"""The report of a run: numbers (`summary`), `sentences`, figures (`charts`), and the `page`."""
