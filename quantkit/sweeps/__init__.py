"""Sweeps: tables of models, recipes, targets and texts, each cell an artifact of the ordinary pipeline."""
