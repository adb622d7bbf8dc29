"""What happens inside a worker; the only code, with `models` and `data`, that imports torch."""
