"""The report of a run.

::

    store ─► predictions, attempts, candidate_rows ─► summary ─┬─► page: page_tables, inline (SVG)
                                                      figures ─┴─► charts: PNG files, `plot`
"""
