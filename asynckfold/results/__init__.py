"""What comes of a run: results, scores, statistics, comparison, the report."""
