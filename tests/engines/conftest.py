"""The servers here break os.fork and more when they are imported: no doctest is looked for there."""

collect_ignore = ["servers"]
