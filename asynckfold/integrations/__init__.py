"""Other libraries: one file for each, imported on use."""
