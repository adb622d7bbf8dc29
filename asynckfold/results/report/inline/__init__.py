"""The figures of the page as inline SVG, without matplotlib, whose import takes a second."""
