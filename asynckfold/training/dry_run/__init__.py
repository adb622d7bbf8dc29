"""The dry run of a candidate before the sweep: what cannot work is refused here."""
