"""The servers here break os.fork when they are imported: no doctest is looked for there."""

collect_ignore = ["servers"]
