"""What a user calls: `AsyncKFold` and `fit`, from their arguments to their results."""
