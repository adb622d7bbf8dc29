"""Results of a sweep: scores, statistics and the report. Read from the store; needs no torch.

::

    outputs ─► scoring ─► Result ─► run.db
                                      │ read
                                  CVResults ─┬─ candidates ── statistics    ranking, intervals
                                             ├─ verdict ── factor           models, LR schedules
                                             ├─ tables                      cv_results_, frames
                                             ├─ out_of_fold, confusion      held-out outputs
                                             ├─ trained_jobs, ensemble      models of the folds
                                             ├─ speedup                     serial against packed
                                             └─ report: summary ─► charts ─► page
"""
