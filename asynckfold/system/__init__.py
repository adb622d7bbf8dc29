"""The machine: cores, live load, GPUs, processes, files, signals, the terminal."""
