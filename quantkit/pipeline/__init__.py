"""The verbs, each on one screen."""
