"""Results of a sweep: scores, statistics and the report. Read from the store; needs no torch.

::

    outputs ─► scoring ─► Result ─► run.db
                                      │ read
                                  CVResults ─┬─ candidates ── statistics    ranking, intervals
                                             ├─ verdict                     models, LR schedules
                                             ├─ tables                      cv_results_, frames
                                             ├─ out_of_fold                 held-out outputs
                                             ├─ ensemble                    models of the folds
                                             ├─ intervals                   how sure they are
                                             ├─ speedup                     serial against packed
                                             └─ report: summary ─► figures ─► page, charts
"""
