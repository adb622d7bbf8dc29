"""Cross-validate many PyTorch models at once."""
