"""Tables and documents that people read."""
