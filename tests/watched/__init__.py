"""A run under the eyes of the campaign: what its processes import, and what they train."""
