"""Modules that a server imports before it works, to fail in ways that no test can wait for."""
